//! Errors of a request's place in a sequence: its id and flags, slots, queues.

use rows::tensor::{DataType, Dims};
use sequences::SequenceId;
use sequences::scheduler::IdleRule;

use super::codes::memory_code;
use super::reason::Reason;
use crate::memory::MemoryError;
use crate::triton::Code;

/// Why a request gets no place in a sequence.
#[derive(Debug, thiserror::Error)]
pub enum AdmissionError {
    /// A request continues a sequence that is not there.
    #[error(
        "sequence {id} is not live: its START was refused or failed, it was idle for longer than {idle_limit_ms} ms, \
         or it was ended; start it again"
    )]
    Unknown { id: SequenceId, idle_limit_ms: u128 },
    /// Two sequences have the id of a request.
    #[error(
        "sequence {id} has ended: another sequence started with its id, and their requests cannot be told apart; \
         start again with another id, or when the model has been idle for {wait_ms} ms; to prevent this, wait for the \
         answer to END or START before the next START of an id"
    )]
    Ambiguous { id: SequenceId, wait_ms: u128 },
    /// No slot is free for a new sequence.
    #[error(
        "no free slot for sequence {id}: all {capacity} that the model may have ({reason}) hold a sequence; try again \
         later, or raise max_candidate_sequences or max_candidate_sequence_use_ratio"
    )]
    PoolFull { id: SequenceId, capacity: usize, reason: String },
    /// No memory for another slab of slots.
    #[error("no memory for the state of sequence {id}: {source}; live sequences go on, try again later")]
    PoolMemory { id: SequenceId, source: MemoryError },
    /// Core sent two requests of a sequence at once, which it promises not to; or another instance has used the
    /// sequence's slot for long.
    #[error("another request of sequence {0} is running, or its slot is still being copied; try again later")]
    Busy(SequenceId),
    /// The model is fed the sequence id as a number, but it is a string.
    #[error(
        "sequence id {id} is a string, but the model's control input takes it as {data_type}: use an unsigned number"
    )]
    IdType { id: SequenceId, data_type: DataType },
    /// The model is fed the sequence id as a number of 32 bits, which can't hold it.
    #[error(
        "sequence id {id} is too large for the model's control input, which takes it as {data_type}: use at most {most}"
    )]
    IdTooLarge { id: u64, data_type: DataType, most: u64 },
    /// A request of a sequence that is not live. This error and those down to [`Self::Parked`] occur only if this backend
    /// schedules the sequences.
    #[error(
        "SEQUENCE_MISSING: Sequence with provided ID does not exist: {0} was not started, has ended, or was idle for \
         too long; start it again"
    )]
    Missing(SequenceId),
    /// A START of a live id.
    #[error(
        "SEQUENCE_ALREADY_EXISTS: Sequence with provided ID already exists: {id}; it goes on. End it first, or set \
         parameter 'on_duplicate_start' to 'restart'; {}",
        without_end(*idle)
    )]
    Exists { id: SequenceId, idle: IdleRule },
    /// Neither an id nor START.
    #[error(
        "SEQUENCE_ID_NOT_PROVIDED: Sequence ID has not been provided in request inputs: give 'sequence_id' as a request \
         parameter or as an input; only a START may leave it out, and tritonclient sends no START with id 0"
    )]
    IdNotProvided,
    /// A value of the control input that isn't 0, 1 or 2.
    #[error(
        "INVALID_SEQUENCE_CONTROL_INPUT: Unexpected value of sequence control input: {0}; 0 (go on), 1 (START) or 2 \
         (END) is expected"
    )]
    Control(u32),
    /// A special input that doesn't have one element for each row.
    #[error("SEQUENCE_ID_BAD_TYPE: Required shape for {name} is: (1); it has {}", Dims(came))]
    TensorShape { name: &'static str, came: Vec<i64> },
    /// The request parameters and the special inputs differ.
    #[error(
        "SEQUENCE_ID_CONFLICT: the request parameters say {parameter}, and input '{what}' says {input}: send one of \
         them, or the same value in both"
    )]
    IdConflict { what: &'static str, parameter: String, input: String },
    /// A START while every place is taken.
    #[error(
        "MAX_SEQUENCE_NUMBER_REACHED: Max sequence number has been reached. Could not create new sequence{}: \
         max_sequence_number is {max}; try again later; {}",
        named(id.as_ref()),
        without_end(*idle)
    )]
    TooMany { id: Option<SequenceId>, max: usize, idle: IdleRule },
    /// A START while every place is taken and `max` STARTs wait already.
    #[error(
        "SEQUENCE_QUEUE_FULL: {max} STARTs wait for a place already (max_queue_size). Could not create new sequence{}; \
         try again later; {}",
        named(id.as_ref()),
        without_end(*idle)
    )]
    QueueFull { id: Option<SequenceId>, max: usize, idle: IdleRule },
    /// Already `max` requests of the sequence wait.
    #[error(
        "MAX_QUEUED_REQUESTS_REACHED: {max} requests of sequence {id} wait already (max_queued_requests_per_sequence); \
         this one has had no effect, and the sequence goes on: wait for an answer, and send it again"
    )]
    TooManyQueued { id: SequenceId, max: usize },
    /// A request that has waited for its longest time.
    #[error(
        "SEQUENCE_QUEUE_TIMEOUT: the request of sequence {0} waited longer than its 'timeout', or than \
         queue_timeout_ms for a place; it has not run"
    )]
    Late(SequenceId),
    /// A START that resumes a sequence that is not parked.
    #[error(
        "SEQUENCE_NOT_PARKED: there is no parked sequence {0} ('resume'): it was not parked (park_ms), was parked for too \
         long, or made room for others (max_parked_sequences); start it without 'resume'"
    )]
    NotParked(SequenceId),
    /// A START that resumes a sequence which is live.
    #[error("SEQUENCE_ALREADY_EXISTS: sequence {0} is live and not parked: go on without sequence_start and 'resume'")]
    Live(SequenceId),
    /// Not a START, and the sequence is parked.
    #[error(
        "SEQUENCE_MISSING: sequence {0} is parked: send START with 'resume' to continue it, or without 'resume' to \
         begin anew"
    )]
    Parked(SequenceId),
    /// The sequence that a START clones is not there.
    #[error(
        "SEQUENCE_MISSING: no live sequence {0} to clone ('clone_of'); with 'sequence_batching', another instance may \
         have it: configure one instance"
    )]
    CloneSource(SequenceId),
}

impl AdmissionError {
    pub(super) const fn class(&self) -> (Reason, Code) {
        match self {
            Self::Unknown { .. }
            | Self::Ambiguous { .. }
            | Self::Missing(_)
            | Self::NotParked(_)
            | Self::Parked(_)
            | Self::CloneSource(_) => (Reason::SequenceNotFound, Code::NotFound),
            Self::Exists { .. } | Self::Live(_) => (Reason::SequenceExists, Code::AlreadyExists),
            Self::IdType { .. }
            | Self::IdTooLarge { .. }
            | Self::IdNotProvided
            | Self::Control(_)
            | Self::TensorShape { .. }
            | Self::IdConflict { .. } => (Reason::SequenceId, Code::InvalidArg),
            Self::Busy(_) => (Reason::SequenceBusy, Code::Unavailable),
            Self::PoolFull { .. } | Self::TooMany { .. } | Self::QueueFull { .. } => {
                (Reason::NoSlot, Code::Unavailable)
            }
            Self::PoolMemory { source, .. } => (Reason::NoMemory, memory_code(source)),
            Self::TooManyQueued { .. } => (Reason::QueueFull, Code::Unavailable),
            Self::Late(_) => (Reason::QueueTimeout, Code::Unavailable),
        }
    }
}

fn named(id: Option<&SequenceId>) -> String {
    id.map_or(String::new(), |id| format!(" {id}"))
}

/// When a sequence ends whose client is gone, and which parameter says so.
fn without_end(idle: IdleRule) -> String {
    match idle {
        IdleRule::Never => {
            "a sequence lives until its END (idle_sequence_cleanup, sequence_cleaner_poll_wait_minutes)".to_owned()
        }
        IdleRule::After(limit) => {
            format!("a sequence ends {limit:?} after its last successful request (sequence_idle_timeout_ms)")
        }
        IdleRule::TwoScans(period) => format!(
            "a sequence ends {period:?} to {:?} after its last successful request \
             (sequence_cleaner_poll_wait_minutes)",
            2 * period
        ),
    }
}

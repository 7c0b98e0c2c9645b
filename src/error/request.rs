//! Errors of requests.

use std::num::NonZeroUsize;

use gpu_rows::DeviceError;
use rows::NoMemory;
use rows::tensor::{DataType, Dims};
use sequences::SequenceId;
use sequences::scheduler::{IdleRule, Refused};

use super::{device_code, memory_code, session_code};
use crate::memory::{MemoryError, NoRoom};
use crate::panic::Panic;
use crate::session::SessionError;
use crate::triton::{self, Code, NotCopied};

/// Why bytes are not a snapshot of a sequence of this model.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error("is damaged: {0}")]
    Damaged(&'static str),
    #[error("has format {came}, and this server reads format {known}")]
    Version { came: u32, known: u32 },
    #[error("is of another model: {0}")]
    Foreign(String),
    #[error("cannot be read: {0}")]
    Memory(#[from] MemoryError),
}

/// Why a request fails. Where a text does not say otherwise, the state of its sequence is as it was before.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// A call to Triton failed.
    #[error(transparent)]
    Triton(#[from] triton::Error),
    /// A run of ONNX Runtime failed.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// A run of ONNX Runtime failed for this request alone, while others of the same moment ran.
    #[error(
        "{0}; other requests of the same payload ran, so this request is probably at fault: check its values and lengths"
    )]
    AtFault(SessionError),
    /// No memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The code of this library is wrong; the server lives on.
    #[error(transparent)]
    Panic(#[from] Panic),
    /// The client no longer wants the answer.
    #[error("the request was cancelled before it ran; the state of its sequence is as it was before")]
    Cancelled,

    /// A request continues a sequence that is not there.
    #[error(
        "sequence {id} is not live: its START was refused or failed, it was idle for longer than {idle_limit_ms} ms, \
         or it was ended; start it again"
    )]
    UnknownSequence { id: SequenceId, idle_limit_ms: u128 },
    /// Two sequences have the id of a request.
    #[error(
        "sequence {id} has ended: two sequences had its id, and their requests cannot be told apart; wait for the answer \
         to END or START before the next START of an id, and start again with another id, or when the model has been idle \
         for {wait_ms} ms"
    )]
    AmbiguousSequence { id: SequenceId, wait_ms: u128 },
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
    SequenceBusy(SequenceId),
    /// The model is fed the sequence id as a number, but it is a string.
    #[error(
        "sequence id {id} is a string, but the model's control input takes it as {data_type}: use an unsigned number"
    )]
    SequenceIdType { id: SequenceId, data_type: DataType },
    /// The model is fed the sequence id as a number of 32 bits, which can't hold it.
    #[error(
        "sequence id {id} is too large for the model's control input, which takes it as {data_type}: use at most {most}"
    )]
    SequenceIdTooLarge { id: u64, data_type: DataType, most: u64 },

    /// A request of a sequence that is not live. This error and those down to [`Self::SequenceQueueTimeout`] occur only
    /// if this backend schedules the sequences.
    #[error(
        "SEQUENCE_MISSING: Sequence with provided ID does not exist: {0} was not started, has ended, or was idle for \
         too long; start it again"
    )]
    SequenceMissing(SequenceId),
    /// A START of a live id.
    #[error(
        "SEQUENCE_ALREADY_EXISTS: Sequence with provided ID already exists: {id}; it goes on. End it first, or set \
         parameter 'on_duplicate_start' to 'restart'; {}",
        without_end(*idle)
    )]
    SequenceExists { id: SequenceId, idle: IdleRule },
    /// Neither an id nor START.
    #[error(
        "SEQUENCE_ID_NOT_PROVIDED: Sequence ID has not been provided in request inputs: give 'sequence_id' as a request \
         parameter or as an input; only a START may leave it out, and tritonclient sends no START with id 0"
    )]
    SequenceIdNotProvided,
    /// A value of the control input that isn't 0, 1 or 2.
    #[error(
        "INVALID_SEQUENCE_CONTROL_INPUT: Unexpected value of sequence control input: {0}; 0 (go on), 1 (START) or 2 \
         (END) is expected"
    )]
    SequenceControl(u32),
    /// A special input that doesn't have one element for each row.
    #[error("SEQUENCE_ID_BAD_TYPE: Required shape for {name} is: (1); it has {}", Dims(came))]
    SequenceTensorShape { name: &'static str, came: Vec<i64> },
    /// The request parameters and the special inputs differ.
    #[error(
        "SEQUENCE_ID_CONFLICT: the request parameters say {parameter}, and input '{what}' says {input}: give one of \
         them, or both alike"
    )]
    SequenceIdConflict { what: &'static str, parameter: String, input: String },
    /// A START while every place is taken.
    #[error(
        "MAX_SEQUENCE_NUMBER_REACHED: Max sequence number has been reached. Could not create new sequence{}: \
         max_sequence_number is {max}; try again later; {}",
        named(id.as_ref()),
        without_end(*idle)
    )]
    TooManySequences { id: Option<SequenceId>, max: usize, idle: IdleRule },
    /// A START while every place is taken and `max` STARTs wait already.
    #[error(
        "SEQUENCE_QUEUE_FULL: {max} STARTs wait for a place already (max_queue_size). Could not create new sequence{}; \
         try again later; {}",
        named(id.as_ref()),
        without_end(*idle)
    )]
    SequenceQueueFull { id: Option<SequenceId>, max: usize, idle: IdleRule },
    /// Already `max` requests of the sequence wait.
    #[error(
        "MAX_QUEUED_REQUESTS_REACHED: {max} requests of sequence {id} wait already (max_queued_requests_per_sequence); \
         this one has had no effect, and the sequence goes on: wait for an answer, and send it again"
    )]
    TooManyQueued { id: SequenceId, max: usize },
    /// A request that has waited for its longest time.
    #[error(
        "SEQUENCE_QUEUE_TIMEOUT: the request of sequence {0} waited longer than its limit (its 'timeout', or \
         queue_timeout_ms for a place); it has not run"
    )]
    SequenceQueueTimeout(SequenceId),

    /// A START that resumes a sequence that is not parked.
    #[error(
        "SEQUENCE_NOT_PARKED: there is no parked sequence {0} ('resume'): it was not parked (park_ms), was parked for too \
         long, or made room for others (max_parked_sequences); start it without 'resume'"
    )]
    SequenceNotParked(SequenceId),
    /// A START that resumes a sequence which is live.
    #[error("SEQUENCE_ALREADY_EXISTS: sequence {0} is live and not parked: go on without sequence_start and 'resume'")]
    SequenceLive(SequenceId),
    /// Not a START, and the sequence is parked.
    #[error("SEQUENCE_MISSING: sequence {0} is parked: send START with 'resume', or without it to begin anew")]
    SequenceParked(SequenceId),
    /// The sequence that a START clones is not there.
    #[error(
        "SEQUENCE_MISSING: no live sequence {0} to clone ('clone_of'); if the model has 'sequence_batching', only one \
         instance makes sure that it is found"
    )]
    CloneSource(SequenceId),

    /// A parameter of the State API for a model that doesn't allow it. This error and those down to
    /// [`Self::HeldRoom`] belong to the State API.
    #[error(
        "STATE_API_OFF: request parameter '{0}' needs the State API, which the model's configuration does not allow: set \
         parameter 'state_api' to 'true' there"
    )]
    StateApiOff(String),
    /// A parameter with a value that it cannot have.
    #[error("STATE_PARAMETER: request parameter '{name}' is {value}: {allowed}")]
    StateParameter { name: String, value: String, allowed: &'static str },
    /// A parameter names a state that the model does not have.
    #[error("STATE_UNKNOWN: request parameter '{parameter}' names '{state}', and the model's states are {}", known.join(", "))]
    UnknownState { parameter: String, state: String, known: Vec<String> },
    /// Things that cannot be asked for together, or not here.
    #[error("STATE_CONFLICT: {0}")]
    StateConflict(String),
    /// A tensor of the State API that the configuration doesn't list.
    #[error(
        "STATE_NOT_LISTED: '{name}' is not listed under '{list}' in the model configuration; without \
         --disable-auto-complete-config it is added"
    )]
    StateNotListed { name: String, list: &'static str },
    /// Bytes that are not a snapshot of this model's.
    #[error("SNAPSHOT_INVALID: the snapshot {0}; nothing has changed")]
    Snapshot(#[from] SnapshotError),
    /// The sequence has made another number of steps than the request is for.
    #[error(
        "SEQUENCE_STEP_CONFLICT: the request is for step {step} of sequence {id}, which has made {made}; it has not run"
    )]
    StepConflict { id: SequenceId, step: u64, made: u64 },
    /// The held inputs of a sequence are larger than they may be.
    #[error(
        "the sequence's held inputs would have {bytes} bytes, and {limit} are allowed (max_state_bytes_per_sequence)"
    )]
    HeldTooLarge { bytes: usize, limit: usize },
    /// No room for the held inputs of a sequence.
    #[error("no room for the sequence's held inputs: {0}; its state is as it was before the request, try again later")]
    HeldRoom(NoRoom),

    /// A request lacks an input.
    #[error("input '{0}' is missing")]
    InputMissing(String),
    /// An input has another type than the model takes.
    #[error("input '{name}' is {came}, but {wanted} is expected")]
    InputType { name: String, came: String, wanted: DataType },
    /// An input has a shape that the model does not take; -1 in `wanted` is any length.
    #[error("input '{name}' has shape {}, but {} is expected", Dims(came), Dims(wanted))]
    InputShape { name: String, came: Vec<i64>, wanted: Vec<i64> },
    /// An input has several rows, and otherwise the right shape.
    #[error(
        "input '{name}' has shape {}, which is {} rows, but a request has one row, or as many as its input 'sequence_id': \
         send a request for each sequence",
        Dims(came),
        came.first().unwrap_or(&0)
    )]
    InputRows { name: String, came: Vec<i64> },
    /// A context makes the first inference of a sequence different from later ones. `rule` says which one this is.
    #[error(
        "input '{name}' has {came} elements along axis {axis} of the model, but {rule}, because \
         'input_context' puts {length} elements in front"
    )]
    InputLength { name: String, axis: usize, came: usize, rule: String, length: usize },
    /// An input without elements, in a model with a recurrence inside.
    #[error("input '{name}' has no elements, with shape {}, and {node} must not run over no steps", Dims(came))]
    NoSteps { name: String, came: Vec<i64>, node: String },
    /// An input's steps are no multiple of the model's stride over time.
    #[error(
        "input '{name}' has {came} steps along axis {axis} of the model, but a multiple of {multiple} is expected, \
         because the model has a stride over time"
    )]
    StepsMultiple { name: String, axis: usize, came: usize, multiple: NonZeroUsize },
    /// An input has another number of bytes than its shape needs.
    #[error("input '{name}' has {came} bytes, but its shape needs {wanted}")]
    InputBytes { name: String, came: usize, wanted: usize },
    /// An input of strings has another number of elements than its shape needs; `None` if it ends within one.
    #[error("input '{name}' has {} elements, but its shape needs {wanted}", readable(*came))]
    InputStrings { name: String, came: Option<usize>, wanted: usize },
    /// An input lies in memory of a GPU that cannot be read.
    #[error("input '{name}' lies in memory of GPU {gpu}, which cannot be read: {source}")]
    InputOnGpu { name: String, gpu: i32, source: DeviceError },
    /// No memory for a copy of an input.
    #[error(
        "no memory for input '{name}': {source}; the state of its sequence is as it was before the request, try again \
         later"
    )]
    InputMemory { name: String, source: MemoryError },

    /// A number is larger than the type of the generated input can hold.
    #[error(
        "generated input '{name}' ({written}) cannot go on: {value} is reached, and {data_type} holds values up to {most}; \
         the request has not run, start the sequence again"
    )]
    GeneratedTooLarge { name: String, written: String, value: i128, data_type: DataType, most: i64 },
    /// The states of a sequence that vary in size would become larger than they may.
    #[error(
        "the sequence's growing states would have {bytes} bytes, and {limit} are allowed \
         (max_state_bytes_per_sequence); its state is as it was before the request"
    )]
    StateTooLarge { bytes: usize, limit: usize },
    /// A new state has numbers that half precision can't hold.
    #[error(
        "the new value of state '{name}' has numbers above 65504, which TYPE_FP16 can't hold ('store_states_as_fp16'); the state \
         is as it was before the request"
    )]
    StateNotFp16 { name: String },
    /// No room for the states of a sequence that vary in size.
    #[error(
        "no room for the sequence's growing states: {0}; its state is as it was before the request, try again later"
    )]
    StateRoom(NoRoom),
    /// The model for initial states gave what its state cannot be; -1 in `wanted` is any length.
    #[error("the initial_state_model gave {} for state '{name}', whose rows are {}", Dims(dims), Dims(wanted))]
    InitialState { name: String, dims: Vec<i64>, wanted: Vec<i64> },

    /// A request wants an output that responses do not carry.
    #[error("output '{0}' is requested, but it is not listed under 'output' in the model configuration")]
    UnknownOutput(String),
    /// The model gave an output of a shape that cannot be taken apart into rows.
    #[error(
        "the model's output '{name}' has shape {} for a batch of {rows}, so it has no row for each request",
        Dims(dims)
    )]
    OutputRows { name: String, dims: Vec<i64>, rows: usize },
    /// A state was padded, and the run did not leave its elements where they were.
    #[error(
        "the model's output '{name}' has shape {} after a run with padded states, and {wanted} along axis {axis} are \
         wanted: 'growing_padding' is for states to which each run adds as many elements as the mask has for them",
        Dims(dims)
    )]
    PaddedState { name: String, dims: Vec<i64>, axis: usize, wanted: usize },
    /// An output's length is larger than the output.
    #[error(
        "the model's output '{name}' has shape {}, but the length along axis {axis} is said to be {length}",
        Dims(dims)
    )]
    OutputLength { name: String, dims: Vec<i64>, axis: usize, length: usize },
    /// An output is wanted in memory of a GPU that cannot be written.
    #[error("output '{name}' is wanted in memory of GPU {gpu}, which cannot be written: {source}")]
    OutputOnGpu { name: String, gpu: i32, source: DeviceError },
}

/// Why a request failed, in the words of the metric `stateful_requests_failed_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    SequenceNotFound,
    SequenceExists,
    SequenceId,
    SequenceBusy,
    NoSlot,
    QueueFull,
    QueueTimeout,
    StateTooLarge,
    NoMemory,
    StateApi,
    Input,
    Output,
    Cancelled,
    Run,
    Device,
    Internal,
}

impl Reason {
    /// All of them, with the label of each.
    pub const LABELS: [(Self, &str); 16] = [
        (Self::SequenceNotFound, "sequence_not_found"),
        (Self::SequenceExists, "sequence_exists"),
        (Self::SequenceId, "sequence_id"),
        (Self::SequenceBusy, "sequence_busy"),
        (Self::NoSlot, "no_slot"),
        (Self::QueueFull, "queue_full"),
        (Self::QueueTimeout, "queue_timeout"),
        (Self::StateTooLarge, "state_too_large"),
        (Self::NoMemory, "no_memory"),
        (Self::StateApi, "state_api"),
        (Self::Input, "input"),
        (Self::Output, "output"),
        (Self::Cancelled, "cancelled"),
        (Self::Run, "run"),
        (Self::Device, "device"),
        (Self::Internal, "internal"),
    ];
}

impl RequestError {
    /// What the metrics count it as.
    pub const fn reason(&self) -> Reason {
        match self {
            Self::UnknownSequence { .. }
            | Self::AmbiguousSequence { .. }
            | Self::SequenceMissing(_)
            | Self::SequenceNotParked(_)
            | Self::SequenceParked(_)
            | Self::CloneSource(_) => Reason::SequenceNotFound,
            Self::SequenceExists { .. } | Self::SequenceLive(_) => Reason::SequenceExists,
            Self::SequenceIdType { .. }
            | Self::SequenceIdTooLarge { .. }
            | Self::SequenceIdNotProvided
            | Self::SequenceControl(_)
            | Self::SequenceTensorShape { .. }
            | Self::SequenceIdConflict { .. } => Reason::SequenceId,
            Self::SequenceBusy(_) => Reason::SequenceBusy,
            Self::PoolFull { .. } | Self::TooManySequences { .. } | Self::SequenceQueueFull { .. } => Reason::NoSlot,
            Self::TooManyQueued { .. } => Reason::QueueFull,
            Self::SequenceQueueTimeout(_) => Reason::QueueTimeout,
            Self::StateTooLarge { .. } | Self::HeldTooLarge { .. } => Reason::StateTooLarge,
            Self::Memory(_)
            | Self::PoolMemory { .. }
            | Self::InputMemory { .. }
            | Self::StateRoom(_)
            | Self::HeldRoom(_)
            | Self::Snapshot(SnapshotError::Memory(_)) => Reason::NoMemory,
            Self::StateApiOff(_)
            | Self::StateParameter { .. }
            | Self::UnknownState { .. }
            | Self::StateConflict(_)
            | Self::StateNotListed { .. }
            | Self::StepConflict { .. }
            | Self::Snapshot(_) => Reason::StateApi,
            Self::InputMissing(_)
            | Self::InputType { .. }
            | Self::InputShape { .. }
            | Self::InputRows { .. }
            | Self::InputLength { .. }
            | Self::NoSteps { .. }
            | Self::StepsMultiple { .. }
            | Self::InputBytes { .. }
            | Self::InputStrings { .. }
            | Self::AtFault(_)
            | Self::GeneratedTooLarge { .. } => Reason::Input,
            Self::StateNotFp16 { .. } | Self::UnknownOutput(_) => Reason::Output,
            Self::Cancelled => Reason::Cancelled,
            Self::Session(_)
            | Self::InitialState { .. }
            | Self::OutputRows { .. }
            | Self::PaddedState { .. }
            | Self::OutputLength { .. } => Reason::Run,
            Self::InputOnGpu { .. } | Self::OutputOnGpu { .. } => Reason::Device,
            Self::Panic(_) | Self::Triton(_) => Reason::Internal,
        }
    }

    /// Whether a batch that failed with this may succeed without one of its rows. An output that has no row for each request
    /// may fit a smaller batch by chance, so the model is at fault; a scalar fits one row only.
    pub const fn may_be_one_rows_fault(&self) -> bool {
        match self {
            Self::Session(_) | Self::Memory(_) | Self::PaddedState { .. } | Self::Panic(_) => true,
            Self::OutputRows { dims, .. } => dims.is_empty(),
            _ => false,
        }
    }

    /// The error of a request that failed alone while others of the same moment ran. Neither a model that cannot run nor
    /// a device that has failed lets others run, so the client is at fault, unless memory was short.
    pub fn while_others_ran(self) -> Self {
        match self {
            Self::Session(error) if session_code(&error) == Code::Internal => Self::AtFault(error),
            error => error,
        }
    }

    /// Whether a START is refused because every place is taken.
    pub const fn is_without_place(&self) -> bool {
        matches!(self, Self::TooManySequences { .. } | Self::SequenceQueueFull { .. })
    }

    /// Why an input could not be copied.
    pub fn not_copied(input: &str, error: NotCopied) -> Self {
        match error {
            NotCopied::Gpu(gpu, source) => Self::InputOnGpu { name: input.to_owned(), gpu, source },
            NotCopied::Memory(source) => Self::InputMemory { name: input.to_owned(), source: source.into() },
        }
    }

    /// The answer to a request whose sequence starts with `states`, which have no elements. If a run failed, they may be
    /// the reason.
    pub fn with_empty_start(&self, states: &str) -> triton::Error {
        let mut text = self.to_string();
        if matches!(self, Self::Session(_) | Self::AtFault(_) | Self::OutputRows { .. }) {
            text += &format!(
                "; the sequence starts with states that have no elements: {states}; if such a state always has the same \
                 length, write it in parameter 'state_dims'"
            );
        }
        triton::Error::new(self.code(), text)
    }

    /// A client acts on the code, so it says who has to act: the client (`INVALID_ARG`, `NOT_FOUND`), the client later
    /// (`UNAVAILABLE`), or the operator (`INTERNAL`, `UNSUPPORTED`).
    fn code(&self) -> Code {
        match self {
            Self::Triton(error) => error.code,
            Self::Session(error) => session_code(error),
            Self::Memory(error) | Self::PoolMemory { source: error, .. } | Self::InputMemory { source: error, .. } => {
                memory_code(error)
            }
            Self::InputOnGpu { source, .. } | Self::OutputOnGpu { source, .. } => device_code(source),
            Self::Cancelled => Code::Cancelled,
            Self::UnknownSequence { .. }
            | Self::AmbiguousSequence { .. }
            | Self::SequenceMissing(_)
            | Self::SequenceNotParked(_)
            | Self::SequenceParked(_)
            | Self::CloneSource(_) => Code::NotFound,
            Self::SequenceExists { .. } | Self::SequenceLive(_) | Self::StepConflict { .. } => Code::AlreadyExists,
            Self::StateApiOff(_) => Code::Unsupported,
            Self::Snapshot(SnapshotError::Memory(error)) => memory_code(error),
            Self::TooManySequences { .. }
            | Self::SequenceQueueFull { .. }
            | Self::TooManyQueued { .. }
            | Self::SequenceQueueTimeout(_)
            | Self::PoolFull { .. }
            | Self::SequenceBusy(_)
            | Self::StateTooLarge { .. }
            | Self::StateRoom(_)
            | Self::HeldRoom(_) => Code::Unavailable,
            Self::SequenceIdType { .. }
            | Self::SequenceIdTooLarge { .. }
            | Self::SequenceIdNotProvided
            | Self::SequenceControl(_)
            | Self::SequenceTensorShape { .. }
            | Self::SequenceIdConflict { .. }
            | Self::InputMissing(_)
            | Self::InputType { .. }
            | Self::InputShape { .. }
            | Self::InputRows { .. }
            | Self::InputLength { .. }
            | Self::NoSteps { .. }
            | Self::StepsMultiple { .. }
            | Self::InputBytes { .. }
            | Self::InputStrings { .. }
            | Self::StateParameter { .. }
            | Self::UnknownState { .. }
            | Self::StateConflict(_)
            | Self::HeldTooLarge { .. }
            | Self::GeneratedTooLarge { .. }
            | Self::StateNotListed { .. }
            | Self::Snapshot(_)
            | Self::AtFault(_)
            | Self::StateNotFp16 { .. }
            | Self::UnknownOutput(_) => Code::InvalidArg,
            Self::Panic(_)
            | Self::InitialState { .. }
            | Self::OutputRows { .. }
            | Self::PaddedState { .. }
            | Self::OutputLength { .. } => Code::Internal,
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

fn readable(count: Option<usize>) -> String {
    count.map_or("unreadable".to_owned(), |count| count.to_string())
}

impl From<Refused> for RequestError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Missing(id) => Self::SequenceMissing(id),
            Refused::Exists { id, idle } => Self::SequenceExists { id, idle },
            Refused::TooMany { id, max, idle } => Self::TooManySequences { id, max, idle },
            Refused::QueueFull { id, max, idle } => Self::SequenceQueueFull { id, max, idle },
            Refused::TooManyQueued { id, max } => Self::TooManyQueued { id, max },
            Refused::Late(id) => Self::SequenceQueueTimeout(id),
            Refused::NotParked(id) => Self::SequenceNotParked(id),
            Refused::NotParkedButLive(id) => Self::SequenceLive(id),
            Refused::Parked(id) => Self::SequenceParked(id),
            Refused::CloneOfItself(id) => {
                Self::StateConflict(format!("'clone_of' names sequence {id}, which the request starts"))
            }
        }
    }
}

impl From<NoRoom> for RequestError {
    fn from(error: NoRoom) -> Self {
        match error {
            NoRoom::Memory(MemoryError::Device(failed)) if !failed.is_out_of_memory() => failed.into(),
            error => Self::StateRoom(error),
        }
    }
}

impl From<NoMemory> for RequestError {
    fn from(error: NoMemory) -> Self {
        Self::Memory(error.into())
    }
}

impl From<NoMemory> for SnapshotError {
    fn from(error: NoMemory) -> Self {
        Self::Memory(error.into())
    }
}

impl From<DeviceError> for RequestError {
    fn from(error: DeviceError) -> Self {
        Self::Memory(error.into())
    }
}

impl From<RequestError> for triton::Error {
    fn from(error: RequestError) -> Self {
        Self::new(error.code(), error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_labels_stand_in_the_order_of_the_reasons() {
        for (position, (reason, _)) in Reason::LABELS.into_iter().enumerate() {
            assert_eq!(reason as usize, position);
        }
    }
}

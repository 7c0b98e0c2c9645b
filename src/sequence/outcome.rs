//! What requests do to their sequences.

/// What a request has done to the state of its sequence. The sequence is over if its state is lost, if the request was a
/// START that has not advanced, or if it had END, whatever the outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The request succeeded. The sequence has a new state.
    Advanced,
    /// The request failed. The sequence has the state from before it, and none before its START has advanced.
    Failed,
    /// As [`Self::Failed`]: the run failed for this request alone.
    RunFailed,
    /// The sequence has no state any more.
    Lost,
}

/// A request that has run, or cannot run, and what it has done to its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finished {
    /// The lane of the sequence.
    pub lane: u32,
    /// What became of its state.
    pub outcome: Outcome,
    /// Whether the request ended it.
    pub ends: bool,
}

impl Finished {
    /// A request whose sequence is over, because nobody knows its state.
    pub const fn lost(lane: u32) -> Self {
        Self { lane, outcome: Outcome::Lost, ends: false }
    }
}

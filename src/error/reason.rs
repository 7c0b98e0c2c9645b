//! Reasons of failed requests, as the metrics count them.

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
    StateStore,
    Internal,
}

impl Reason {
    /// All of them, with the label of each.
    pub const LABELS: [(Self, &str); 17] = [
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
        (Self::StateStore, "state_store"),
        (Self::Internal, "internal"),
    ];
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

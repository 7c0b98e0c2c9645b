//! Reasons of failed requests, and codes of what both loading and requests meet: memory, a device, a run of ONNX
//! Runtime.

use gpu_rows::DeviceError;

use crate::memory::MemoryError;
use crate::session::SessionError;
use crate::triton::Code;

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

pub(super) const fn memory_code(error: &MemoryError) -> Code {
    match error {
        MemoryError::Host { .. } => Code::Unavailable,
        MemoryError::Device(error) => device_code(error),
    }
}

pub(super) const fn device_code(error: &DeviceError) -> Code {
    match error {
        // Another server may serve it.
        DeviceError::OutOfMemory { .. } | DeviceError::OutOfPinned { .. } | DeviceError::Lost { .. } => {
            Code::Unavailable
        }
        DeviceError::NoDriver | DeviceError::UselessDriver { .. } | DeviceError::NoDevice { .. } => Code::Unsupported,
        DeviceError::Failed { .. } => Code::Internal,
    }
}

pub(super) fn session_code(error: &SessionError) -> Code {
    match error {
        SessionError::Memory(error) => memory_code(error),
        SessionError::Run(why) if is_out_of_memory(why) => Code::Unavailable,
        SessionError::Run(_) | SessionError::Tensor { .. } => Code::Internal,
    }
}

/// Whether a run failed because ONNX Runtime found no memory, which only the text of its error says.
fn is_out_of_memory(why: &str) -> bool {
    ["std::bad_alloc", "Failed to allocate memory"].iter().any(|text| why.contains(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rows::NoMemory;

    use crate::error::{LoadError, RequestError, RunError};
    use crate::memory::NoRoom;
    use crate::triton;

    fn codes(error: fn() -> SessionError) -> [Code; 2] {
        [LoadError::from(error()).into(), RequestError::from(error()).into()].map(|error: triton::Error| error.code)
    }

    #[test]
    fn want_of_memory_is_told_from_a_fault_at_load_and_for_a_request() {
        let no_memory = || NoMemory { bytes: 1 }.into();
        let cases: [(fn() -> SessionError, Code); 4] = [
            (no_memory, Code::Unavailable),
            (|| SessionError::Run("BFCArena: Failed to allocate memory for".to_owned()), Code::Unavailable),
            (|| SessionError::Run("std::bad_alloc".to_owned()), Code::Unavailable),
            (|| SessionError::Run("Gather: indices out of bounds".to_owned()), Code::Internal),
        ];
        for (error, code) in cases {
            assert_eq!(codes(error), [code; 2], "{}", error());
        }
    }

    #[test]
    fn a_device_that_has_failed_is_told_from_one_without_room_for_a_growing_state() {
        let failed = DeviceError::Failed { device: 0, call: "cuMemAllocAsync", why: "unspecified".to_owned() };
        let full = DeviceError::OutOfMemory { bytes: 2, device: 0, free: 1, total: 1 };
        for (device, code) in [(failed, Code::Internal), (full, Code::Unavailable)] {
            let growing =
                triton::Error::from(RequestError::from(RunError::from(NoRoom::Memory(device.clone().into()))));
            assert_eq!([growing.code, triton::Error::from(RequestError::from(RunError::from(device))).code], [code; 2]);
        }
    }

    #[test]
    fn the_labels_stand_in_the_order_of_the_reasons() {
        for (position, (reason, _)) in Reason::LABELS.into_iter().enumerate() {
            assert_eq!(reason as usize, position);
        }
    }
}

//! Memory that holds tensors: batch buffers, slabs of state slots, and the copies between rows of them.
//!
//! Rules: a [`Buffer`] has one owner; a [`SlotMemory`] is the only way to a slot's bytes and exists once while the slot
//! is checked out. What is on the host is worked on as slices, what is on a device ([`device`]) by what is enqueued
//! there; [`Bytes`] may be either. What Triton lends ([`client`]) is only copied.
//!
//! Not for: deciding what is copied where.

mod bytes;
pub mod client;
pub mod device;
mod host;
pub mod rows;
mod slab;
pub mod strings;
mod varying;

pub use bytes::{Bytes, BytesMut, Span, Store};
pub use client::{ClientBytes, ClientBytesMut};
pub use host::Buffer;
pub use slab::{Slab, SlotMemory, SlotSpec};
pub use strings::Strings;
pub use varying::{Budget, NoRoom, PAGES_FROM, Shared, Varying};

/// Memory that cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// The system has no more memory.
    #[error("{bytes} bytes of host memory cannot be had")]
    Host {
        /// What was asked for.
        bytes: usize,
    },
    /// A device has no more, or has failed.
    #[error(transparent)]
    Device(#[from] device::DeviceError),
}

/// An empty vector with room for `count` elements. For counts that a request decides: too large a one is an error of
/// that request instead of the end of the server.
pub fn reserve<T>(count: usize) -> Result<Vec<T>, MemoryError> {
    let mut made = Vec::new();
    let bytes = count.saturating_mul(size_of::<T>());
    made.try_reserve_exact(count).map_err(|_| MemoryError::Host { bytes })?;
    Ok(made)
}

/// A vector of `count` zeros, as [`reserve`].
pub fn zeros<T: Clone + Default>(count: usize) -> Result<Vec<T>, MemoryError> {
    let mut made = reserve(count)?;
    made.resize(count, T::default());
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_there_can_be_is_an_error() {
        assert_eq!(reserve::<usize>(usize::MAX), Err(MemoryError::Host { bytes: usize::MAX }));
        assert_eq!(zeros::<u8>(usize::MAX), Err(MemoryError::Host { bytes: usize::MAX }));
        assert_eq!(zeros::<usize>(2), Ok(vec![0, 0]));
    }
}

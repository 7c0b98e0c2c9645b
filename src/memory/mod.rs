//! Memory that holds tensors: batch buffers, slabs of state slots, and the copies of rows between them.
//!
//! Rules:
//! - A [`Buffer`] has one owner.
//! - Only a [`SlotMemory`] gives access to a slot's bytes, and each slot has at most one.
//! - Host memory is read and written as slices. Memory of a device ([`device`]) is read and written only by work that
//!   is enqueued on a stream. [`Bytes`] may be either.
//! - Memory that Triton lends ([`client`]) is only copied from and to.
//!
//! Not for: deciding which bytes are copied where.

mod bytes;
pub mod client;
pub mod device;
#[cfg(feature = "exact-buffers")]
mod exact;
mod host;
pub mod layout;
pub mod rows;
mod slab;
pub mod strings;
mod varying;

pub use bytes::{Bytes, BytesMut, Span, TensorMemory};
pub use client::{ClientBytes, ClientBytesMut};
pub use host::Buffer;
pub use slab::{Slab, SlotMemory, SlotSpec};
pub use strings::Strings;
pub use varying::{Budget, Charge, NoRoom, PAGES_FROM, Shared, Varying};

/// Why memory could not be allocated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// The host has too little memory.
    #[error("{bytes} bytes of host memory cannot be had")]
    Host {
        /// Bytes that were requested.
        bytes: usize,
    },
    /// The device has too little memory, or it failed.
    #[error(transparent)]
    Device(#[from] device::DeviceError),
}

/// An empty vector with room for `count` elements. Use it where a request decides the count: if the memory cannot be
/// allocated, that request fails and the server lives.
pub fn reserve<T>(count: usize) -> Result<Vec<T>, MemoryError> {
    let mut made = Vec::new();
    let bytes = count.saturating_mul(size_of::<T>());
    made.try_reserve_exact(count).map_err(|_| MemoryError::Host { bytes })?;
    Ok(made)
}

/// A vector of `count` zeros. Use it as [`reserve`] where a request decides the count.
pub fn zeros<T: Clone + Default>(count: usize) -> Result<Vec<T>, MemoryError> {
    let mut made = reserve(count)?;
    made.resize(count, T::default());
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_that_no_memory_can_hold_is_an_error() {
        assert_eq!(reserve::<usize>(usize::MAX), Err(MemoryError::Host { bytes: usize::MAX }));
        assert_eq!(zeros::<u8>(usize::MAX), Err(MemoryError::Host { bytes: usize::MAX }));
        assert_eq!(zeros::<usize>(2), Ok(vec![0, 0]));
    }
}

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
pub mod device;
mod slab;
mod varying;

use rows::NoMemory;

pub use bytes::{Bytes, BytesMut, Span, TensorMemory};
pub use slab::{Slab, SlotMemory, SlotSpec};
pub use varying::{Budget, Charge, NoRoom, PAGES_FROM, Shared, Varying};

/// Why memory could not be allocated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// The host has too little memory.
    #[error(transparent)]
    Host(#[from] NoMemory),
    /// The device has too little memory, or it failed.
    #[error(transparent)]
    Device(#[from] device::DeviceError),
}

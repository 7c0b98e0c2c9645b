//! Memory of states and tensors, on the host ([`rows`]) or on a GPU ([`gpu_rows`]).
//!
//! Rules:
//! - Only a [`SlotMemory`] gives access to a slot's bytes, and each slot has at most one.
//! - Host memory is read and written as slices. Memory of a device is read and written only by work that is enqueued on a
//!   stream. [`Bytes`] may be either.
//!
//! Not for: deciding which bytes are copied where.

mod bytes;
mod slab;
mod varying;

use rows::NoMemory;

pub use bytes::{Bytes, BytesMut, TensorMemory};

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
    Device(#[from] gpu_rows::DeviceError),
}

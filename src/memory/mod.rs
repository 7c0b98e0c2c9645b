//! Memory of states and tensors, on the host ([`rows`]) or on a GPU ([`gpu_rows`]).
//!
//! Rules:
//! - Only a [`SlotMemory`] gives access to a slot's bytes, and each slot has at most one.
//! - Host memory is read and written as slices. Memory of a device is read and written only by work that is enqueued on
//!   a stream. [`Bytes`] may be either.
//!
//! Not for: deciding which bytes are copied where.

mod fixed;
mod varying;

pub use fixed::{Bytes, BytesMut, MemoryError, Slab, SlotMemory, SlotSpec, TensorMemory};
pub use varying::{Budget, Charge, NoRoom, PAGES_FROM, Shared, Varying};

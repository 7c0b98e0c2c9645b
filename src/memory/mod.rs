//! Memory that holds tensors: batch buffers, slabs of state slots, and the copies between rows of them.
//!
//! Rules: a [`Buffer`] has one owner; a [`SlotMemory`] is the only way to a slot's bytes and exists once while the
//! slot is checked out. Everything above works on slices. Not for: deciding what is copied where.
//!
//! Host memory is what there is today. Device memory joins here: a second kind of buffer and slab, with the row
//! copies of [`rows`] as one kernel a direction.

mod host;
pub mod rows;
pub mod strings;
mod varying;

pub use host::{Buffer, OutOfMemory, Slab, SlotMemory};
pub use strings::Strings;
pub use varying::{Budget, NoRoom, Varying};

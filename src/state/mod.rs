//! What a sequence's state is and where it is kept: the layout of a slot, the table of slots,
//! and which states lie in batch buffers instead.
//!
//! Not for: sequences and their life ([`crate::sequence`]), memory itself ([`crate::memory`]).

#![forbid(unsafe_code)]

pub mod layout;
pub mod pool;
pub mod residency;

//! What a sequence's state is and where it is kept: the layout of a slot and the table of slots.
//!
//! Not for: sequences and their life ([`crate::sequence`]), memory itself ([`crate::memory`]).

#![forbid(unsafe_code)]

pub mod layout;
pub mod pool;

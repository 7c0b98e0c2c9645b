//! State slots: the layout of a slot and the table of slots.
//!
//! Not for: sequences and their life ([`crate::sequence`]), memory itself ([`crate::memory`]), or where the newest state
//! of a sequence is ([`crate::store`]).

#![forbid(unsafe_code)]

pub mod layout;
pub mod pool;

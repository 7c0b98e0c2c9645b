//! Where each state lies within a slot.
//!
//! A slot holds all states of one sequence, each as its row alone would be (see [`RowLayout`]), one after another at
//! multiples of [`SLOT_ALIGNMENT`], so that any of them can be bound to ONNX Runtime in place.

use crate::tensor::RowLayout;

/// Alignment of a slot and of every state in it, in bytes: a cache line, and enough for any vector load.
pub const SLOT_ALIGNMENT: usize = 64;

/// Offsets of the states within a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotLayout {
    offsets: Vec<usize>,
    slot_bytes: usize,
    state_bytes: usize,
}

impl SlotLayout {
    /// Lays the states out in the order given.
    pub fn new(states: &[RowLayout]) -> Self {
        let mut end = 0;
        let mut offsets = Vec::with_capacity(states.len());
        for state in states {
            offsets.push(end);
            end += state.row_bytes().next_multiple_of(SLOT_ALIGNMENT);
        }
        Self { offsets, slot_bytes: end, state_bytes: states.iter().map(|state| state.row_bytes()).sum() }
    }

    /// Byte at which state number `state` begins within its slot.
    pub fn offset(&self, state: usize) -> usize {
        self.offsets[state]
    }

    /// Bytes from one slot to the next.
    pub const fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Bytes of state that a sequence has, without the gaps of alignment.
    pub const fn state_bytes(&self) -> usize {
        self.state_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_aligned_and_do_not_overlap() {
        let state = |outer, inner_bytes| RowLayout { outer, inner_bytes };
        let layout = SlotLayout::new(&[state(2, 50), state(1, 64), state(1, 1), state(1, 0)]);
        assert_eq!(layout.offsets, [0, 128, 192, 256]);
        assert_eq!(layout.slot_bytes(), 256);
        assert_eq!(layout.state_bytes(), 165);
        assert_eq!(SlotLayout::new(&[]).slot_bytes(), 0);
    }
}

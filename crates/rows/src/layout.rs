//! Where each state lies within a slot.
//!
//! A slot holds all states of one sequence, each as its row alone would be (see [`crate::tensor::RowLayout`]), one
//! after another at multiples of [`SLOT_ALIGNMENT`], so that any of them can be bound to ONNX Runtime in place.

/// Alignment of a slot and of every state in it, in bytes: a cache line, and enough for any vector load.
pub const SLOT_ALIGNMENT: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotLayout {
    offsets: Vec<usize>,
    slot_bytes: usize,
    state_bytes: usize,
}

impl SlotLayout {
    /// Lays out states of these sizes, in the order given.
    /// `None` if the sizes overflow.
    pub fn new(stored_bytes: &[usize]) -> Option<Self> {
        let (mut end, mut state_bytes) = (0usize, 0usize);
        let mut offsets = Vec::with_capacity(stored_bytes.len());
        for bytes in stored_bytes {
            offsets.push(end);
            end = end.checked_add(bytes.checked_next_multiple_of(SLOT_ALIGNMENT)?)?;
            state_bytes = state_bytes.checked_add(*bytes)?;
        }
        Some(Self { offsets, slot_bytes: end, state_bytes })
    }

    /// Byte at which state number `state` begins within its slot.
    pub fn offset(&self, state: usize) -> usize {
        self.offsets[state]
    }

    /// Bytes that the first `states` states take.
    pub fn part_bytes(&self, states: usize) -> usize {
        self.offsets.get(states).copied().unwrap_or(self.slot_bytes)
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
        let layout = SlotLayout::new(&[100, 64, 1, 0]).unwrap();
        assert_eq!(layout.offsets, [0, 128, 192, 256]);
        assert_eq!(layout.slot_bytes(), 256);
        assert_eq!(layout.state_bytes(), 165);
        assert_eq!([0, 2, 4].map(|states| layout.part_bytes(states)), [0, 192, 256]);
        assert_eq!(SlotLayout::new(&[]).unwrap().slot_bytes(), 0);
        assert_eq!(SlotLayout::new(&[usize::MAX - 10]), None);
        assert_eq!(SlotLayout::new(&[usize::MAX / 2, usize::MAX / 2]), None);
    }
}

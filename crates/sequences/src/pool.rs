//! The table of state slots: which of them are free, which hold a sequence, and how many slabs exist.
//!
//! Slots are added and removed in slabs. The first slab stays for the life of the pool. Another slab is added when few
//! slots are free. The last slab is removed when all its slots are free and many other slots are free, too. The
//! lazy-buffer parameters of the model configuration set these thresholds. The number of slots never exceeds the
//! capacity and the reserve.
//!
//! Rules:
//! - Each time a slot is occupied, it gets a generation that was never used before. So a stale [`SlotId`] finds
//!   nothing, and never another sequence.
//! - The free slots and the occupied slots together are all slots.
//!
//! Not for: memory (the pool only stores an `S` for each slab) or sequences (it only stores an `R` for each slot).

use std::collections::BTreeSet;
use std::fmt;

/// How large the pool may get, and when it grows and shrinks. All fields are numbers of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotLimits {
    /// Slots for sequences of different ids.
    pub capacity: usize,
    /// Further slots. They are made when all slots within the capacity are occupied, and removed when they are free.
    pub reserve: usize,
    /// Slots of the first slab (`initial_buffer_size`), at most the capacity.
    pub first_slab: usize,
    /// Slots of each further slab (`subsequent_buffer_size`). The last one is cut to the capacity.
    pub next_slab: usize,
    /// A slab is added when fewer slots than this are free (`buffer_alloc_threshold`).
    pub grow_below: usize,
    /// The last slab is removed when more slots than this are free (`buffer_dealloc_threshold`).
    pub shrink_above: usize,
}

impl SlotLimits {
    /// All slots in one slab, made at load. A model without lazy-buffer parameters has these limits.
    pub const fn all_at_once(capacity: usize) -> Self {
        Self { capacity, reserve: 0, first_slab: capacity, next_slab: capacity, grow_below: 0, shrink_above: capacity }
    }
}

impl fmt::Display for SlotLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first_slab >= self.capacity {
            return write!(f, "all slots made at load");
        }
        write!(
            f,
            "first slab {}, next slabs {}, grows below {} free, shrinks above {} free",
            self.first_slab, self.next_slab, self.grow_below, self.shrink_above
        )
    }
}

/// One use of one slot by one sequence. It is stale once the slot has been released, and then finds nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotId {
    slab: u32,
    index: u32,
    generation: u64,
}

impl SlotId {
    pub const fn index(self) -> usize {
        self.index as usize
    }
}

struct Slab<S, R> {
    memory: S,
    size: usize,
    /// The slots that have been occupied at least once, with the generation and record of each one that is occupied
    /// now. Other slots are added when they are needed.
    slots: Vec<Option<(u64, R)>>,
    /// Which of `slots` are free.
    vacant: Vec<u32>,
}

impl<S, R> Slab<S, R> {
    const fn free(&self) -> usize {
        self.size - self.slots.len() + self.vacant.len()
    }
}

/// The slot table. `S` is the memory of a slab, `R` the record of an occupied slot. A stale id finds `None`.
pub struct SlotPool<S, R> {
    limits: SlotLimits,
    slabs: Vec<Slab<S, R>>,
    slabs_with_free: BTreeSet<u32>,
    /// Slots that exist.
    pub(crate) slots: usize,
    /// Slots that hold a sequence.
    pub(crate) live: usize,
    next_generation: u64,
}

impl<S, R> SlotPool<S, R> {
    pub const fn new(limits: SlotLimits) -> Self {
        Self { limits, slabs: Vec::new(), slabs_with_free: BTreeSet::new(), slots: 0, live: 0, next_generation: 0 }
    }

    /// Occupies a free slot in the first slab that has one; `None` if no slot is free. The pool also hands out slots of
    /// the reserve; the caller decides which sequence may take one.
    pub fn acquire(&mut self, record: R) -> Option<SlotId> {
        // Slabs fill up in their order, so that the last one can become free and be removed.
        let slab_index = *self.slabs_with_free.first()?;
        let slab = &mut self.slabs[slab_index as usize];
        let generation = self.next_generation;
        let index = slab.vacant.pop().unwrap_or_else(|| {
            slab.slots.push(None);
            slab.slots.len() as u32 - 1
        });
        slab.slots[index as usize] = Some((generation, record));
        if slab.free() == 0 {
            self.slabs_with_free.remove(&slab_index);
        }
        self.next_generation += 1;
        self.live += 1;
        self.check();
        Some(SlotId { slab: slab_index, index, generation })
    }

    pub fn release(&mut self, id: SlotId) -> Option<R> {
        let slab = self.slabs.get_mut(id.slab as usize)?;
        let (_, record) = slab.slots.get_mut(id.index())?.take_if(|(generation, _)| *generation == id.generation)?;
        slab.vacant.push(id.index);
        self.slabs_with_free.insert(id.slab);
        self.live -= 1;
        self.check();
        Some(record)
    }

    pub fn record(&self, id: SlotId) -> Option<&R> {
        let (generation, record) = self.slabs.get(id.slab as usize)?.slots.get(id.index())?.as_ref()?;
        (*generation == id.generation).then_some(record)
    }

    pub fn record_mut(&mut self, id: SlotId) -> Option<&mut R> {
        let (generation, record) = self.slabs.get_mut(id.slab as usize)?.slots.get_mut(id.index())?.as_mut()?;
        (*generation == id.generation).then_some(record)
    }

    pub fn memory(&self, id: SlotId) -> Option<S>
    where
        S: Clone,
    {
        self.record(id).map(|_| self.slabs[id.slab as usize].memory.clone())
    }

    /// The size of the slab to add because fewer slots are free than the threshold, or because there is no slab yet.
    /// `None` if no slab is due.
    pub fn slab_due(&self) -> Option<usize> {
        let is_low = self.free() < self.limits.grow_below && self.slots < self.limits.capacity;
        (self.slabs.is_empty() || is_low).then(|| self.next_slab_slots())
    }

    /// Adds a slab of the size that [`Self::next_slab_slots`] or [`Self::slab_due`] returned. Returns the memory if the
    /// slab is not needed any more, because `wanted` slots have become free or another slab has been added meanwhile.
    pub fn add_slab(&mut self, memory: S, slots: usize, wanted: usize) -> Option<S> {
        let is_needed = self.free() < wanted || self.slab_due().is_some();
        if !is_needed || slots > self.most_slots() - self.slots {
            return Some(memory);
        }
        if slots > 0 {
            self.slabs_with_free.insert(self.slabs.len() as u32);
        }
        self.slabs.push(Slab { memory, size: slots, slots: Vec::new(), vacant: Vec::new() });
        self.slots += slots;
        self.check();
        None
    }

    /// Whether the thresholds ask to add or to remove a slab.
    pub fn needs_adjustment(&self) -> bool {
        self.slab_due().is_some() || self.last_slab_is_spare()
    }

    /// Removes the last slab if all its slots are free and the thresholds ask for it. Returns its memory.
    pub fn take_spare_slab(&mut self) -> Option<S> {
        let slab = if self.last_slab_is_spare() { self.slabs.pop() } else { None }?;
        self.slots -= slab.size;
        self.slabs_with_free.remove(&(self.slabs.len() as u32));
        self.check();
        Some(slab.memory)
    }

    pub const fn free(&self) -> usize {
        self.slots - self.live
    }

    pub const fn slabs(&self) -> usize {
        self.slabs.len()
    }

    pub const fn capacity(&self) -> usize {
        self.limits.capacity
    }

    /// The size of the next slab; 0 if no more slots may exist.
    pub fn next_slab_slots(&self) -> usize {
        let size = if self.slabs.is_empty() { self.limits.first_slab } else { self.limits.next_slab.max(1) };
        size.min(self.most_slots() - self.slots)
    }

    /// Most slots that may exist now. Slots of the reserve are made only after all others.
    const fn most_slots(&self) -> usize {
        let SlotLimits { capacity, reserve, .. } = self.limits;
        if self.slots < capacity { capacity } else { capacity + reserve }
    }

    /// Whether the last slab can be removed. Enough free slots must be left, or the next batch would add the slab
    /// again.
    fn last_slab_is_spare(&self) -> bool {
        let Some(slab) = self.slabs.last().filter(|slab| self.slabs.len() > 1 && slab.free() == slab.size) else {
            return false;
        };
        let is_reserve = self.slots > self.limits.capacity;
        is_reserve || (self.free() > self.limits.shrink_above && self.free() - slab.free() >= self.limits.grow_below)
    }

    fn check(&self) {
        debug_assert_eq!(self.slabs.iter().map(Slab::free).sum::<usize>(), self.free());
        debug_assert!(self.slots <= self.limits.capacity + self.limits.reserve);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    type Pool = SlotPool<usize, u32>;

    fn pool(limits: SlotLimits) -> Pool {
        let mut pool = SlotPool::new(limits);
        add_slabs(&mut pool);
        pool
    }

    fn add_slabs(pool: &mut Pool) {
        while let Some(slots) = pool.slab_due() {
            assert_eq!(pool.add_slab(slots, slots, 1), None);
        }
    }

    fn acquire(pool: &mut Pool, record: u32) -> Option<SlotId> {
        add_slabs(pool);
        let acquired = pool.acquire(record);
        let slots = pool.next_slab_slots();
        if acquired.is_some() || slots == 0 {
            return acquired;
        }
        assert_eq!(pool.add_slab(slots, slots, 1), None);
        pool.acquire(record)
    }

    fn adjust(pool: &mut Pool) {
        add_slabs(pool);
        while pool.take_spare_slab().is_some() {}
    }

    const LAZY: SlotLimits =
        SlotLimits { capacity: 11, reserve: 0, first_slab: 4, next_slab: 3, grow_below: 2, shrink_above: 5 };

    #[test]
    fn a_full_pool_refuses_and_serves_again_after_a_release() {
        let mut pool = pool(SlotLimits::all_at_once(2));
        let first = pool.acquire(1).unwrap();
        pool.acquire(2).unwrap();
        assert_eq!(pool.acquire(3), None);
        assert_eq!(pool.release(first), Some(1));
        assert!(pool.acquire(3).is_some());
    }

    #[test]
    fn a_stale_id_finds_nothing() {
        let mut pool = pool(SlotLimits::all_at_once(1));
        let old = pool.acquire(1).unwrap();
        pool.release(old);
        let new = pool.acquire(2).unwrap();
        assert_eq!((old.slab, old.index), (new.slab, new.index));
        assert_eq!(pool.record(old), None);
        assert_eq!(pool.memory(old), None);
        assert_eq!(pool.release(old), None);
        assert_eq!(pool.record(new), Some(&2));
    }

    #[test]
    fn slabs_are_added_when_few_slots_are_free_and_the_last_one_is_cut_to_the_capacity() {
        let mut pool = pool(LAZY);
        let mut sizes = Vec::new();
        for i in 0..11 {
            acquire(&mut pool, i).unwrap();
            adjust(&mut pool);
            sizes.push(pool.slots);
        }
        assert_eq!(sizes, [4, 4, 7, 7, 7, 10, 10, 10, 11, 11, 11]);
        assert_eq!(pool.acquire(99), None);
    }

    #[test]
    fn only_the_last_slab_is_removed_and_only_if_it_has_no_sequence_and_is_not_the_first() {
        let mut pool = pool(LAZY);
        let ids: Vec<_> = (0..11).map(|i| acquire(&mut pool, i).unwrap()).collect();
        adjust(&mut pool);
        for id in &ids[..10] {
            pool.release(*id);
        }
        adjust(&mut pool);
        assert_eq!(pool.slots, 11, "the last slab still holds a sequence");
        pool.release(ids[10]);
        adjust(&mut pool);
        assert_eq!((pool.slots, pool.slabs()), (4, 1));
    }

    #[test]
    fn the_reserve_is_added_after_the_capacity_and_removed_when_it_is_free() {
        let mut pool = pool(SlotLimits { reserve: 2, ..SlotLimits::all_at_once(1) });
        pool.acquire(1).unwrap();
        let beyond = [acquire(&mut pool, 2).unwrap(), acquire(&mut pool, 3).unwrap()];
        assert_eq!(pool.acquire(4), None);
        for id in beyond {
            pool.release(id);
        }
        adjust(&mut pool);
        assert_eq!((pool.slots, pool.slabs()), (1, 1));
    }

    #[test]
    fn without_the_slab_that_is_due_no_sequence_starts_and_the_others_stay() {
        let mut pool = pool(LAZY);
        let ids: Vec<_> = (0..4).map(|i| pool.acquire(i).unwrap()).collect();
        assert_eq!((pool.acquire(4), pool.next_slab_slots()), (None, 3));
        assert_eq!(pool.record(ids[3]), Some(&3));
        assert_eq!(pool.add_slab(3, 3, 1), None);
        assert!(pool.acquire(4).is_some());
    }

    #[test]
    fn a_slab_without_room_within_the_limits_is_returned() {
        let mut pool = pool(SlotLimits { first_slab: 1, ..SlotLimits::all_at_once(3) });
        pool.acquire(1).unwrap();
        assert_eq!(pool.add_slab(2, 2, 1), None);
        assert_eq!(pool.add_slab(2, 2, 1), Some(2));
        assert_eq!(pool.slots, 3);
    }

    #[derive(Clone, Debug)]
    enum Op {
        Acquire(u32),
        Release(usize),
        Adjust,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            3 => any::<u32>().prop_map(Op::Acquire),
            3 => (0usize..64).prop_map(Op::Release),
            1 => Just(Op::Adjust),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 256 }, failure_persistence: None, ..Default::default() })]
        #[test]
        fn the_pool_agrees_with_a_map(
            ops in prop::collection::vec(op(), 0..if cfg!(miri) { 30 } else { 200 }),
            capacity in 1usize..20, first in 1usize..8, next in 1usize..8, grow in 0usize..6, shrink in 0usize..12,
        ) {
            let limits = SlotLimits { capacity, reserve: 0, first_slab: first, next_slab: next, grow_below: grow, shrink_above: shrink };
            let mut pool = pool(limits);
            let mut live: HashMap<SlotId, u32> = HashMap::new();
            let mut ever: Vec<SlotId> = Vec::new();
            for op in ops {
                match op {
                    Op::Acquire(record) => match acquire(&mut pool, record) {
                        Some(id) => {
                            prop_assert!(live.len() < capacity);
                            prop_assert!(live.keys().all(|o| (o.slab, o.index) != (id.slab, id.index)));
                            live.insert(id, record);
                            ever.push(id);
                        }
                        None => prop_assert_eq!(live.len(), capacity),
                    },
                    Op::Release(nth) if !ever.is_empty() => {
                        let id = ever[nth % ever.len()];
                        prop_assert_eq!(pool.release(id), live.remove(&id));
                    }
                    Op::Release(_) => {}
                    Op::Adjust => {
                        adjust(&mut pool);
                        prop_assert!(pool.free() >= grow.min(capacity - live.len()));
                    }
                }
                prop_assert_eq!(pool.live, live.len());
                prop_assert!(pool.slots <= capacity && pool.slots >= first.min(capacity));
                for id in &ever {
                    prop_assert_eq!(pool.record(*id), live.get(id));
                }
            }
        }
    }
}

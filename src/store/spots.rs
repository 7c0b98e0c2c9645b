//! Which sequences' states are in which batch buffers.
//!
//! A run reads the states of its rows from one batch buffer and writes them to another, where they stay: the next run
//! of the same sequences reads them there, in any order of the requests, and nothing is copied. When a batch has other
//! sequences than the buffer that suits it best, only the rows that joined are copied in, and only the rows that they
//! or the run would overwrite are written back to their slots. There are two buffers until a batch comes back that had
//! to leave: then there may be one more.
//!
//! Rules: the newest state of a sequence is at one spot: here or, if it has no spot here, in its slot. A spot changes
//! only after the bytes are there, so what this table says is true at any moment, also when a run fails. A sequence
//! that is over may still have a spot. Nobody reads it, because its slot id is never used again.
//!
//! Not for: memory (a spot is a buffer and a position in it) or the life of sequences.

#![forbid(unsafe_code)]

use std::collections::VecDeque;

use foldhash::{HashMap, HashMapExt};
use sequences::pool::SlotId;

/// Where the newest state of a sequence is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spot {
    pub buffer: usize,
    pub position: usize,
}

#[derive(Debug, Default)]
pub struct BufferPlan {
    /// The batch buffer that the run reads.
    pub from: usize,
    /// The batch buffer that it writes.
    pub into: usize,
    /// For each position, which row of the batch goes there.
    pub order: Vec<usize>,
    /// States to write back to their slots before anything else.
    pub leaving: Vec<(SlotId, Spot)>,
}

#[derive(Default)]
struct BatchBuffer {
    rows: Vec<Option<Resident>>,
    live: usize,
    /// Rows of the run that wrote it, or that it is filled for.
    run_rows: usize,
    last_use: u64,
}

struct Resident {
    slot: SlotId,
    /// The last plan that it was part of.
    planned: u64,
}

pub struct Spots {
    buffers: Vec<BatchBuffer>,
    by_slot: HashMap<SlotId, Spot>,
    most: usize,
    /// Batch buffers that there may be so far: one more when a batch comes back that had to leave.
    allowed: usize,
    /// Sequences that last had to leave together.
    left: VecDeque<Vec<SlotId>>,
    /// Where a row is depends on the number of rows, because the batch axis of a state is not the first.
    by_rows: bool,
    plans: u64,
    /// Where the rows of the planned batch are now.
    found: Vec<Option<Spot>>,
    /// How many of them are in place, for each buffer.
    staying: Vec<usize>,
}

impl Spots {
    /// `resident` batches can stay beside the one that is written. `by_rows`: a row's bytes are elsewhere in a batch of
    /// another number of rows.
    pub fn new(resident: usize, by_rows: bool) -> Self {
        Self {
            buffers: Vec::new(),
            by_slot: HashMap::new(),
            most: resident + 1,
            // A run reads one and writes another.
            allowed: 2,
            left: VecDeque::new(),
            by_rows,
            plans: 0,
            found: Vec::new(),
            staying: Vec::new(),
        }
    }

    /// Where the newest state of a sequence is; `None`: in its slot.
    pub fn spot(&self, slot: SlotId) -> Option<Spot> {
        self.by_slot.get(&slot).copied()
    }

    /// Number of rows by which the bytes of a buffer are laid out.
    pub fn run_rows(&self, buffer: usize) -> usize {
        self.buffers.get(buffer).map_or(0, |buffer| buffer.run_rows)
    }

    /// How to run a batch of these sequences, each at most once (`None`: one without a state so far), filled up to
    /// `run_rows` rows. What is `leaving` must be written back and [forgotten](Self::forget) next; a sequence of the
    /// batch may be among it.
    pub fn plan(&mut self, rows: &[Option<SlotId>], run_rows: usize, plan: &mut BufferPlan) {
        self.plans += 1;
        self.mark(rows, run_rows);
        self.allow_for(rows);
        plan.from = self.best_to_read(run_rows);
        // The run writes into another buffer, because a run that fails must not change the states that it has read.
        plan.into = self.least_wanted(Some(plan.from), run_rows);
        self.order(plan);
        plan.leaving.clear();
        let relaid = self.is_relaid(plan.from, run_rows);
        plan.leaving
            .extend(self.met(plan.from, run_rows).filter(|(row, _)| relaid || !self.is_planned(row)).map(leaving));
        let before = plan.leaving.len();
        plan.leaving.extend(self.met(plan.into, run_rows).filter(|(row, _)| !self.is_planned(row)).map(leaving));
        if plan.leaving.len() > before {
            // Bounded, because each plan may look through them.
            self.left.truncate(self.most);
            self.left.push_front(plan.leaving[before..].iter().map(|(slot, _)| *slot).collect());
        }
        for buffer in [plan.from, plan.into] {
            self.buffers[buffer].last_use = self.plans;
        }
    }

    /// The state has been copied to, or written at, a spot in a buffer for runs of `run_rows` rows.
    pub fn move_to(&mut self, slot: SlotId, spot: Spot, run_rows: usize) {
        self.forget(slot);
        let buffer = &mut self.buffers[spot.buffer];
        buffer.run_rows = run_rows;
        if buffer.rows.len() <= spot.position {
            buffer.rows.resize_with(spot.position + 1, || None);
        }
        let before = buffer.rows[spot.position].replace(Resident { slot, planned: self.plans });
        debug_assert!(before.is_none(), "a spot is taken");
        buffer.live += 1;
        self.by_slot.insert(slot, spot);
    }

    /// The state is newest in its slot, or its sequence is over.
    pub fn forget(&mut self, slot: SlotId) {
        if let Some(spot) = self.by_slot.remove(&slot) {
            let buffer = &mut self.buffers[spot.buffer];
            buffer.rows[spot.position] = None;
            buffer.live -= 1;
        }
    }

    /// Finds the rows of a batch, and how many of them are in place in each buffer.
    fn mark(&mut self, rows: &[Option<SlotId>], run_rows: usize) {
        self.staying.clear();
        self.staying.resize(self.buffers.len(), 0);
        self.found.clear();
        self.found.extend(rows.iter().map(|slot| self.by_slot.get(slot.as_ref()?).copied()));
        for &Spot { buffer, position } in self.found.iter().flatten() {
            let of = &mut self.buffers[buffer];
            if let Some(row) = &mut of.rows[position] {
                row.planned = self.plans;
            }
            if position < rows.len() && !(self.by_rows && of.run_rows != run_rows) {
                self.staying[buffer] += 1;
            }
        }
    }

    /// Allows one more buffer if the whole batch had to leave not long ago: where batches take turns it pays, where
    /// each has other sequences it would only take memory and caches.
    fn allow_for(&mut self, rows: &[Option<SlotId>]) {
        let is_in_slot = |row: usize| rows[row].is_some() && self.found[row].is_none();
        if self.allowed == self.most || rows.is_empty() || !(0..rows.len()).all(is_in_slot) {
            return;
        }
        let came_back = |group: &Vec<SlotId>| rows.iter().flatten().all(|slot| group.contains(slot));
        if let Some(group) = self.left.iter().position(came_back) {
            self.left.remove(group);
            self.allowed += 1;
        }
    }

    fn best_to_read(&mut self, run_rows: usize) -> usize {
        // Rows that are in place need no copy.
        let most = (0..self.buffers.len()).max_by_key(|&buffer| self.staying[buffer]);
        match most.filter(|&buffer| self.staying[buffer] > 0) {
            Some(buffer) => buffer,
            None => self.least_wanted(None, run_rows),
        }
    }

    /// A buffer in which no other sequence is in the way, of these the one that was used last; a new one; or else the
    /// one that was used longest ago.
    fn least_wanted(&mut self, but: Option<usize>, run_rows: usize) -> usize {
        let others = || (0..self.buffers.len()).filter(|&buffer| Some(buffer) != but);
        let is_free =
            |&buffer: &usize| self.met(buffer, run_rows).all(|(row, _)| but.is_some() && self.is_planned(row));
        if let Some(free) = others().filter(is_free).max_by_key(|&buffer| self.buffers[buffer].last_use) {
            return free;
        }
        if self.buffers.len() < self.allowed {
            self.buffers.push(BatchBuffer::default());
            return self.buffers.len() - 1;
        }
        others().min_by_key(|&buffer| self.buffers[buffer].last_use).unwrap_or_default()
    }

    /// Whether the rows of a buffer are elsewhere in a run over `run_rows` rows.
    fn is_relaid(&self, buffer: usize, run_rows: usize) -> bool {
        self.by_rows && self.buffers[buffer].run_rows != run_rows
    }

    /// The states in a buffer that a run over `run_rows` rows would overwrite, or that are not where it expects them.
    fn met(&self, buffer: usize, run_rows: usize) -> impl Iterator<Item = (&Resident, Spot)> {
        let of = &self.buffers[buffer];
        let most = match of.live {
            0 => 0,
            _ if self.is_relaid(buffer, run_rows) => of.rows.len(),
            _ => run_rows,
        };
        let rows = of.rows.iter().take(most).enumerate();
        rows.filter_map(move |(position, row)| Some((row.as_ref()?, Spot { buffer, position })))
    }

    const fn is_planned(&self, row: &Resident) -> bool {
        row.planned == self.plans
    }

    /// Rows that are in place stay there, the others go where room is.
    fn order(&self, plan: &mut BufferPlan) {
        const NONE: usize = usize::MAX;
        let (rows, from) = (self.found.len(), plan.from);
        let stays = |spot: &Option<Spot>| {
            let spot = spot.filter(|spot| spot.buffer == from && spot.position < rows)?;
            // In a buffer that is laid out for another number of rows, none is in place.
            (self.staying[from] > 0).then_some(spot.position)
        };
        plan.order.clear();
        plan.order.resize(rows, NONE);
        for (row, spot) in self.found.iter().enumerate() {
            if let Some(position) = stays(spot) {
                plan.order[position] = row;
            }
        }
        let mut room = 0;
        for (row, _) in self.found.iter().enumerate().filter(|(_, spot)| stays(spot).is_none()) {
            while plan.order[room] != NONE {
                room += 1;
            }
            plan.order[room] = row;
        }
    }
}

fn leaving((row, spot): (&Resident, Spot)) -> (SlotId, Spot) {
    (row.slot, spot)
}

/// Puts the rows in an order: at each position the row that stood at `order[position]`.
pub(super) fn permute<T>(rows: &mut [T], order: &[usize]) {
    for position in 0..order.len() {
        let mut from = order[position];
        // Where a row has been swapped away, it is where the row went that came to its position.
        while from < position {
            from = order[from];
        }
        rows.swap(position, from);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use sequences::pool::{SlotLimits, SlotPool};

    /// Slots of sequences 0, 1, …
    fn slots(count: usize) -> Vec<SlotId> {
        let mut pool: SlotPool<(), ()> = SlotPool::new(SlotLimits::all_at_once(count));
        pool.add_slab((), count, 0);
        (0..count).map(|_| pool.acquire(()).unwrap()).collect()
    }

    /// Memory as batch buffers and slots have it: for each spot the sequence and the step whose state it is.
    #[derive(Default)]
    struct Memory {
        buffers: BTreeMap<(usize, usize), (SlotId, u32)>,
        slots: HashMap<SlotId, (SlotId, u32)>,
        copies: usize,
    }

    struct World {
        spots: Spots,
        plan: BufferPlan,
        memory: Memory,
        steps: HashMap<SlotId, u32>,
    }

    impl World {
        fn new(resident: usize, by_rows: bool) -> Self {
            let (spots, plan) = (Spots::new(resident, by_rows), BufferPlan::default());
            Self { spots, plan, memory: Memory::default(), steps: HashMap::new() }
        }

        fn at(&self, spot: Spot) -> (usize, usize) {
            // What was written for another number of rows lies elsewhere.
            let shift = if self.spots.by_rows { 1000 * self.spots.run_rows(spot.buffer) } else { 0 };
            (spot.buffer, shift + spot.position)
        }

        fn write_back(&mut self, slot: SlotId, spot: Spot) {
            let state = self.memory.buffers[&self.at(spot)];
            self.memory.slots.insert(slot, state);
            self.memory.copies += 1;
            self.spots.forget(slot);
        }

        /// Runs a batch and holds what it reads against what each sequence has. Returns the copies.
        fn run(&mut self, batch: &[SlotId], padding: usize, ended: &[bool], fails: bool) -> usize {
            self.memory.copies = 0;
            let rows: Vec<_> = batch.iter().map(|slot| self.steps.contains_key(slot).then_some(*slot)).collect();
            let run_rows = batch.len() + padding;
            let mut plan = std::mem::take(&mut self.plan);
            self.spots.plan(&rows, run_rows, &mut plan);
            assert_ne!(plan.from, plan.into);
            let mut order = plan.order.clone();
            order.sort_unstable();
            assert_eq!(order, (0..batch.len()).collect::<Vec<_>>());
            plan.leaving.iter().for_each(|&(slot, spot)| self.write_back(slot, spot));
            let read = |position: usize| Spot { buffer: plan.from, position };
            let at = |position: usize, spots: &Spots| {
                (plan.from, if spots.by_rows { 1000 * run_rows } else { 0 } + position)
            };
            let mut joined = Vec::new();
            for (position, &row) in plan.order.iter().enumerate() {
                let slot = batch[row];
                let spot = self.spots.spot(slot).filter(|_| rows[row].is_some());
                if spot == Some(read(position)) {
                    continue;
                }
                let state = match (rows[row], spot) {
                    (None, _) => (slot, 0),
                    (_, Some(spot)) => self.memory.buffers[&self.at(spot)],
                    (_, None) => self.memory.slots[&slot],
                };
                self.memory.copies += usize::from(rows[row].is_some());
                self.memory.buffers.insert(at(position, &self.spots), state);
                joined.extend(rows[row].map(|slot| (slot, position)));
            }
            for (slot, position) in joined {
                self.spots.move_to(slot, read(position), run_rows);
            }
            for (position, &row) in plan.order.iter().enumerate() {
                let expected = (batch[row], self.steps.get(&batch[row]).copied().unwrap_or_default());
                assert_eq!(self.memory.buffers[&at(position, &self.spots)], expected, "a foreign or an old state");
            }
            for position in batch.len()..run_rows {
                self.memory.buffers.remove(&at(position, &self.spots));
            }
            if !fails {
                for position in 0..run_rows {
                    let written = if self.spots.by_rows { 1000 * run_rows } else { 0 } + position;
                    self.memory.buffers.remove(&(plan.into, written));
                }
                for (position, &row) in plan.order.iter().enumerate() {
                    let slot = batch[row];
                    if ended[row] {
                        self.steps.remove(&slot);
                        self.spots.forget(slot);
                        continue;
                    }
                    let step = self.steps.get(&slot).copied().unwrap_or_default() + 1;
                    self.steps.insert(slot, step);
                    self.spots.move_to(slot, Spot { buffer: plan.into, position }, run_rows);
                    let spot = self.at(Spot { buffer: plan.into, position });
                    self.memory.buffers.insert(spot, (slot, step));
                }
            }
            self.plan = plan;
            self.memory.copies
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 1000 }, failure_persistence: None, ..Default::default() })]
        #[test]
        fn every_run_reads_the_newest_state_of_each_of_its_sequences(
            resident in 1usize..4, by_rows: bool, sequences in 1usize..9,
            batches in prop::collection::vec(
                (any::<prop::sample::Index>(), any::<u64>(), 0usize..3, prop::bool::weighted(0.1), any::<u64>()),
                1..if cfg!(miri) { 10 } else { 60 },
            ),
        ) {
            let slots = slots(sequences);
            let mut world = World::new(resident, by_rows);
            for (size, shuffle, padding, fails, ends) in batches {
                let mut batch = slots.clone();
                batch.sort_by_key(|slot| (slot.index() as u64 + 1).wrapping_mul(shuffle | 1).rotate_left(17));
                batch.truncate(1 + size.index(sequences));
                let ended: Vec<_> = (0..batch.len()).map(|row| (ends >> (3 * row)) & 7 == 0).collect();
                world.run(&batch, padding, &ended, fails);
                prop_assert!(world.spots.buffers.len() <= resident + 1);
                let live = world.spots.buffers.iter().map(|buffer| buffer.live).sum::<usize>();
                prop_assert_eq!(live, world.spots.by_slot.len());
            }
        }
    }

    const GOES_ON: [bool; 8] = [false; 8];

    #[test]
    fn the_same_batch_in_any_order_copies_nothing() {
        for by_rows in [false, true] {
            let (slots, mut world) = (slots(4), World::new(1, by_rows));
            world.run(&slots, 0, &GOES_ON, false);
            for order in [[3, 1, 0, 2], [0, 1, 2, 3], [2, 3, 1, 0]] {
                assert_eq!(world.run(&order.map(|row: usize| slots[row]), 0, &GOES_ON, false), 0);
            }
        }
    }

    #[test]
    fn batches_in_turn_copy_nothing_where_all_of_them_can_stay() {
        let (slots, mut world) = (slots(8), World::new(4, false));
        let sets: Vec<_> = slots.chunks(2).collect();
        for set in &sets {
            world.run(set, 0, &GOES_ON, false);
        }
        let copies: Vec<_> = (0..16).map(|turn| world.run(sets[turn % 4], 0, &GOES_ON, false)).collect();
        assert_eq!(copies[4..], [0; 12], "after each has come back once: {copies:?}");
        assert_eq!(world.spots.buffers.len(), 5);
    }

    #[test]
    fn batches_that_never_come_back_take_two_buffers() {
        let (slots, mut world) = (slots(64), World::new(4, false));
        for round in 0..40 {
            let batch: Vec<_> = (0..8).map(|row| slots[(row * 7 + round * 11 + row * row * round) % 64]).collect();
            let mut batch: Vec<_> = batch;
            batch.sort_by_key(|slot| slot.index());
            batch.dedup();
            world.run(&batch, 0, &GOES_ON, false);
        }
        assert_eq!(world.spots.buffers.len(), 2);
    }

    #[test]
    fn a_row_that_leaves_and_one_that_joins_cost_a_copy_each() {
        let (slots, mut world) = (slots(5), World::new(1, false));
        world.run(&slots[4..], 0, &GOES_ON, false);
        world.run(&slots[..4], 0, &GOES_ON, false);
        world.run(&slots[..4], 0, &GOES_ON, false);
        assert!(world.run(&[slots[0], slots[1], slots[2], slots[4]], 0, &GOES_ON, false) <= 2);
        assert_eq!(world.run(&[slots[4], slots[1], slots[2], slots[0]], 0, &GOES_ON, false), 0);
    }
}

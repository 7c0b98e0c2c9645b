//! The store without a model: batches whose states are written by the test, and the calls for one sequence.

#![allow(clippy::unwrap_used, reason = "all of this is a test")]

use std::collections::HashMap;

use gpu_rows::{Device, OwnedStream, Queue};
use proptest::prelude::*;
use rows::strings::Strings;
use rows::tensor::StorageType::Exact;
use rows::tensor::{DataType, RowAt, RowLayout};
use sequences::{Admission, Key, SequenceId};

use super::binding_of_tests::{binding, binding_of};
use super::*;
use crate::binding::{Initial, InitialContent};
use crate::memory::{Bytes, SlotSpec};
use crate::session::RowContent;

/// Most bytes of the varying states of a sequence.
const SEQUENCE_BYTES: usize = 200;
/// The most that they have together.
const BUDGET: usize = 300;
const ROWS: usize = 4;

struct World {
    store: StateStore,
    sequences: Arc<LiveSequences>,
    copier: Copier,
    /// The sequences, by their ids.
    slots: Vec<SlotId>,
}

impl World {
    /// A store with so many sequences that have started, on the host or on a device.
    fn new(binding: Arc<Binding>, sequences: usize, on_device: bool) -> Self {
        Self::with_budget(binding, sequences, on_device, BUDGET)
    }

    fn with_budget(binding: Arc<Binding>, sequences: usize, on_device: bool, budget: usize) -> Self {
        gpu_rows::simulate();
        let device = on_device.then(|| Device::open(0).unwrap());
        let copier = device.as_ref().map_or(Copier::default(), |device| {
            Copier::on_device(Queue::new(OwnedStream::open(device).unwrap(), Arc::default()).unwrap())
        });
        let slot = SlotSpec {
            slot_bytes: binding.slot.slot_bytes(),
            device: device.map(|device| (device, binding.device_bytes())),
        };
        let live = LiveSequences::for_tests(slot, sequences, budget);
        let limits = StoreLimits { most_rows: ROWS, resident_batches: 1, sequence_bytes: SEQUENCE_BYTES };
        let store = StateStore::new(binding, live.clone(), copier.clone(), limits);
        let mut world = Self { store, sequences: live, copier, slots: Vec::new() };
        for id in 0..sequences {
            let lease = world.admit(id, true, false);
            world.slots.push(lease.slot());
            world.finish(lease);
        }
        world
    }

    fn admit(&self, id: usize, start: bool, end: bool) -> Lease {
        let key = Key { instance: 0, lane: None, id: SequenceId::Number(1 + id as u64) };
        self.sequences.begin_payload(0);
        self.sequences.admit(0, &[Admission { key, start, end }], |_| {}).remove(0).unwrap()
    }

    /// Settles a request that has advanced its sequence.
    fn finish(&self, mut lease: Lease) {
        lease.advance();
        drop(lease);
        self.sequences.settle(0, Vec::new());
    }

    fn end(&mut self, id: usize) {
        let lease = self.admit(id, false, true);
        self.store.drop(lease.slot());
        self.finish(lease);
    }

    /// Runs a batch of these sequences after which each has this first state; those whose run fails keep theirs.
    fn run(&mut self, batch: &[(usize, [f32; 2])], fails: bool) {
        let mut rows: Vec<_> = batch
            .iter()
            .map(|&(id, _)| RowState { lease: Some(self.admit(id, false, false)), ..RowState::default() })
            .collect();
        self.store.load(&mut rows, batch.len()).unwrap();
        let order: Vec<_> = rows.iter().map(|row| row.lease.as_ref().unwrap().slot()).collect();
        if !fails {
            let mut run = self.store.run(&rows, batch.len(), &[]);
            for (number, count) in [(0, 2), (1, 4)] {
                let layout = RowLayout::new(DataType::Fp32, &[1, count], Some(0)).unwrap();
                let tensor = run.outputs[number].as_mut().unwrap();
                tensor.set_rows(batch.len()).unwrap();
                for (position, slot) in order.iter().enumerate() {
                    let (_, first) = batch.iter().find(|(id, _)| self.slots[*id] == *slot).unwrap();
                    let value = after_run(*first)[number].clone();
                    let InitialContent::Bytes(bytes) = &value.content else { panic!("no bytes") };
                    let content = RowContent::Stored(Exact, Bytes::Host(bytes));
                    let row = layout.row(RowAt { position, rows: batch.len() });
                    tensor.put(&self.copier, &row, content).unwrap();
                }
            }
            self.copier.end_phase();
            let mut results: Vec<Result<(), RequestError>> = rows.iter().map(|_| Ok(())).collect();
            self.store.commit(&mut rows, batch.len(), &mut results);
            assert!(results.iter().all(Result::is_ok));
        }
        self.copier.synchronise().unwrap();
        self.store.release();
        for row in rows {
            match (row.lease, fails) {
                (Some(lease), false) => self.finish(lease),
                (lease, _) => {
                    drop(lease);
                    self.sequences.settle(0, Vec::new());
                }
            }
        }
    }

    fn read(&mut self, id: usize) -> Option<SequenceState> {
        self.store.read(self.slots[id]).unwrap()
    }

    fn first(&mut self, id: usize) -> Option<[f32; 2]> {
        let InitialContent::Bytes(bytes) = &self.read(id)?.states[0].content else { panic!("no bytes") };
        Some(bytemuck::pod_read_unaligned(bytes))
    }
}

fn floats(dims: &[i64], values: &[f32]) -> Initial {
    Initial { dims: dims.to_vec(), content: InitialContent::Bytes(bytemuck::cast_slice(values).to_vec()) }
}

/// The states of fixed size of a sequence whose run gave it this first one.
fn after_run(first: [f32; 2]) -> [Initial; 2] {
    [floats(&[1, 2], &first), floats(&[1, 4], &[first[1], 0.25, -0.0, 65504.0])]
}

fn names(names: &[&str]) -> Initial {
    Initial { dims: vec![1, names.len() as i64], content: InitialContent::Strings(names.iter().collect::<Strings>()) }
}

fn value(seed: f32, steps: usize) -> SequenceState {
    SequenceState {
        states: vec![
            floats(&[1, 2], &[seed, -seed]),
            floats(&[1, 4], &[seed, 0.5, -0.0, 65504.0]),
            floats(&[1, steps as i64], &vec![seed; steps]),
            names(&["a", "", "stream"][..steps.min(3)]),
        ],
        contexts: vec![bytemuck::cast_slice(&[seed, seed + 1.0]).to_vec()],
    }
}

#[test]
fn every_kind_of_state_is_read_as_it_was_written() {
    for on_device in [false, true] {
        let mut world = World::new(binding(true), 2, on_device);
        for (id, seed, steps) in [(0, 1.0, 3), (1, 2.0, 20), (0, 3.0, 0), (1, 4.0, 1)] {
            let value = value(seed, steps);
            assert!(world.store.write(world.slots[id], &value, None).unwrap());
            assert_eq!(world.read(id).unwrap(), value, "on a device: {on_device}");
        }
        assert!(copy(&mut world.store, world.slots[1], world.slots[0]).unwrap());
        assert_eq!(world.read(0).unwrap(), value(4.0, 1));
        let zeros = |value: Initial| Initial { content: InitialContent::Zeros, ..value };
        let mut written = value(5.0, 2);
        written.states = written.states.into_iter().map(zeros).collect();
        assert!(world.store.write(world.slots[0], &written, None).unwrap());
        let read = world.read(0).unwrap();
        assert_eq!(read.states[..2], [floats(&[1, 2], &[0.0; 2]), floats(&[1, 4], &[0.0; 4])]);
        assert_eq!(read.states[2..], [floats(&[1, 2], &[0.0; 2]), names(&["", ""])]);
    }
}

#[test]
fn a_state_that_does_not_fit_is_refused_and_changes_nothing() {
    let mut world = World::new(binding(true), 2, false);
    let before = value(1.0, 2);
    assert!(world.store.write(world.slots[0], &before, None).unwrap());
    let altered = |alter: fn(&mut SequenceState)| {
        let mut value = value(2.0, 2);
        alter(&mut value);
        value
    };
    for (wrong, words) in [
        (altered(|value| drop(value.states.pop())), "3 states came, and the model has 4"),
        (altered(|value| value.states[0].dims = vec![1, 3]), "'S0' has dims [1, 3], and a row has [1, 2]"),
        (altered(|value| value.states[2].dims = vec![1, -1]), "'S2' has dims [1, -1]"),
        (altered(|value| value.states[2].dims = vec![1, 9]), "'S2' does not have the elements of dims [1, 9]"),
        (altered(|value| value.states[3] = floats(&[1, 2], &[0.0; 2])), "'S3' does not have the elements"),
        (
            altered(|value| value.contexts[0].truncate(4)),
            "contexts of [4] bytes came, and the model has contexts of [8] bytes",
        ),
        (altered(|value| value.states[2] = floats(&[1, 50], &[0.0; 50])), "200 are allowed"),
    ] {
        let error = world.store.write(world.slots[0], &wrong, None).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        assert_eq!(world.read(0).unwrap(), before);
    }
    // The other sequence has what is left of the budget.
    assert!(world.store.write(world.slots[1], &value(3.0, 40), None).unwrap());
    let error = world.store.write(world.slots[0], &value(2.0, 40), None).unwrap_err().to_string();
    assert!(error.contains("max_state_bytes"), "{error}");
    assert_eq!((world.read(0).unwrap(), world.read(1).unwrap()), (before, value(3.0, 40)));
}

#[test]
fn a_saved_state_is_restored_when_the_budget_is_used_up() {
    let mut world = World::new(binding(true), 2, false);
    let before = value(1.0, 30);
    assert!(world.store.write(world.slots[0], &before, None).unwrap());
    let saved = world.store.save(world.slots[0]).unwrap().unwrap();
    assert!(world.store.write(world.slots[0], &value(2.0, 2), None).unwrap());
    assert!(world.store.write(world.slots[1], &value(3.0, 30), None).unwrap());
    assert!(world.store.write(world.slots[1], &value(3.0, 35), None).is_err());
    assert!(world.store.write(world.slots[0], &saved.state, saved.charge).unwrap());
    assert_eq!((world.read(0).unwrap(), world.read(1).unwrap()), (before, value(3.0, 30)));
    // The copy has been paid back.
    assert!(world.store.write(world.slots[1], &value(3.0, 35), None).unwrap());
}

#[test]
fn a_sequence_that_is_over_has_no_state() {
    let mut world = World::new(binding(true), 2, false);
    assert!(world.store.write(world.slots[0], &value(1.0, 2), None).unwrap());
    world.end(0);
    assert_eq!(world.read(0), None);
    assert!(!world.store.write(world.slots[0], &value(2.0, 2), None).unwrap());
    assert!(!copy(&mut world.store, world.slots[0], world.slots[1]).unwrap());
    assert!(!copy(&mut world.store, world.slots[1], world.slots[0]).unwrap());
    world.store.evict(&world.slots.clone()).unwrap();
}

#[test]
fn a_state_in_a_batch_buffer_is_read_replaced_and_evicted() {
    for on_device in [false, true] {
        let mut world = World::new(binding(false), 3, on_device);
        world.run(&[(0, [1.0, 1.0]), (1, [2.0, 2.0]), (2, [3.0, 3.0])], false);
        let slots = world.slots.clone();
        assert!(slots.iter().all(|&slot| world.store.buffers.spots.spot(slot).is_some()));
        world.store.evict(&slots[..1]).unwrap();
        assert!(
            world.store.buffers.spots.spot(slots[0]).is_none() && world.store.buffers.spots.spot(slots[1]).is_some()
        );
        assert!(copy(&mut world.store, slots[2], slots[1]).unwrap());
        assert_eq!([0, 1, 2].map(|id| world.first(id).unwrap()), [[1.0; 2], [3.0; 2], [3.0; 2]]);
        world.run(&[(1, [5.0, 5.0])], true);
        world.run(&[(0, [6.0, 6.0]), (2, [7.0, 7.0])], false);
        assert_eq!([0, 1, 2].map(|id| world.first(id).unwrap()), [[6.0; 2], [3.0; 2], [7.0; 2]]);
    }
}

#[derive(Clone, Debug)]
enum Op {
    Run {
        batch: Vec<usize>,
        fails: bool,
    },
    Read(usize),
    /// With so many elements in the states that grow.
    Write(usize, usize),
    Copy(usize, usize),
    Evict(Vec<usize>),
    End(usize),
}

fn op(sequences: usize) -> impl Strategy<Value = Op> {
    let id = 0..sequences;
    let some = prop::sample::subsequence((0..sequences).collect::<Vec<_>>(), 1..=ROWS);
    prop_oneof![
        6 => (some.clone().prop_shuffle(), prop::bool::weighted(0.1)).prop_map(|(batch, fails)| Op::Run { batch, fails }),
        2 => id.clone().prop_map(Op::Read),
        2 => (id.clone(), 0usize..4).prop_map(|(id, steps)| Op::Write(id, steps)),
        1 => (id.clone(), id.clone()).prop_map(|(from, to)| Op::Copy(from, to)),
        1 => some.prop_map(Op::Evict),
        1 => id.prop_map(Op::End),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 150 }, failure_persistence: None, ..Default::default() })]
    #[test]
    fn whatever_is_asked_each_sequence_has_its_own_newest_state(
        on_device: bool, states in 2usize..=3, ops in prop::collection::vec(op(6), 1..if cfg!(miri) { 10 } else { 50 }),
    ) {
        let mut world = World::with_budget(binding_of(states), 6, on_device, 6 * SEQUENCE_BYTES);
        let state = |seed: f32, steps: usize| {
            let mut state = value(seed, steps);
            state.states.truncate(states);
            state
        };
        let mut model: HashMap<usize, SequenceState> = (0..6).map(|id| (id, state(0.0, 1))).collect();
        for slot in world.slots.clone() {
            prop_assert!(world.store.write(slot, &state(0.0, 1), None).unwrap());
        }
        for (step, op) in ops.into_iter().enumerate() {
            let seed = 1.0 + step as f32;
            match op {
                Op::Run { batch, fails } => {
                    let batch: Vec<_> = batch.into_iter().filter(|id| model.contains_key(id)).collect();
                    // Only rows whose growing states have the same dims share a run.
                    let dims = |id: usize| model[&id].states.iter().map(|state| state.dims.clone()).collect::<Vec<_>>();
                    let batch: Vec<_> = batch.iter().copied().filter(|&id| dims(id) == dims(batch[0])).collect();
                    let batch: Vec<_> = batch.into_iter().map(|id| (id, [id as f32, seed])).collect();
                    if !batch.is_empty() {
                        world.run(&batch, fails);
                    }
                    for (id, first) in batch.into_iter().filter(|_| !fails) {
                        model.entry(id).and_modify(|state| state.states[..2].clone_from_slice(&after_run(first)));
                    }
                }
                Op::Read(id) => prop_assert_eq!(world.read(id), model.get(&id).cloned()),
                Op::Write(id, steps) => {
                    let is_live = world.store.write(world.slots[id], &state(seed, steps), None).unwrap();
                    prop_assert_eq!(is_live, model.contains_key(&id));
                    model.entry(id).and_modify(|old| *old = state(seed, steps));
                }
                Op::Copy(from, to) => {
                    let copied = copy(&mut world.store, world.slots[from], world.slots[to]).unwrap();
                    prop_assert_eq!(copied, model.contains_key(&from) && model.contains_key(&to));
                    if copied {
                        model.insert(to, model[&from].clone());
                    }
                }
                Op::Evict(ids) => {
                    let slots: Vec<_> = ids.into_iter().map(|id| world.slots[id]).collect();
                    world.store.evict(&slots).unwrap();
                    prop_assert!(slots.iter().all(|&slot| world.store.buffers.spots.spot(slot).is_none()));
                }
                Op::End(id) => {
                    if model.remove(&id).is_some() {
                        world.end(id);
                    }
                }
            }
        }
        for id in 0..6 {
            prop_assert_eq!(world.read(id), model.get(&id).cloned());
        }
    }

    #[test]
    fn rows_are_put_in_any_order(order in Just((0..9).collect::<Vec<usize>>()).prop_shuffle()) {
        let mut rows: Vec<usize> = (100..109).collect();
        permute(&mut rows, &order);
        prop_assert_eq!(rows, order.iter().map(|from| 100 + from).collect::<Vec<_>>());
    }
}

/// Gives a sequence the state of another. Returns false if either is over.
fn copy(store: &mut StateStore, from: SlotId, to: SlotId) -> Result<bool, RequestError> {
    match store.read(from)? {
        Some(state) => Ok(store.write(to, &state, None)?),
        None => Ok(false),
    }
}

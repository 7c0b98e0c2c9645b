//! The table against hand-written cases, and against a simulation of Triton's `oldest` scheduler that knows which
//! incarnation each request truly belongs to.

use std::collections::{BTreeMap, HashMap, VecDeque};

use proptest::prelude::*;

use super::*;
use crate::sequence::SequenceId;

type Table = Sequences<(), u32, ()>;

const IDLE: Duration = Duration::from_secs(10);
const QUIET: Duration = Duration::from_millis(20);

fn table(capacity: usize) -> Table {
    let policy = Policy { idle_limit: IDLE, quiet: QUIET, queue_requests: 64 };
    Sequences::new(policy, SlotLimits::all_at_once(capacity), Box::new(|_| Ok(()))).unwrap()
}

fn key(id: u64) -> Key {
    Key { instance: 0, id: SequenceId::Number(id) }
}

/// Admits and settles one request as a payload of its own.
fn step(table: &mut Table, id: u64, start: bool, end: bool, now: Instant) -> Result<SlotId, Refusal<()>> {
    let mut released = Vec::new();
    table.begin_payload(0, now);
    let slot = table.admit(&key(id), start, &mut released)?.slot;
    if table.settle(slot, Outcome::Advanced, end, now, &mut released) {
        table.hold(slot, 0);
    }
    table.finish_payload(0, 1, true, now, &mut released).unwrap();
    Ok(slot)
}

#[test]
fn a_sequence_keeps_its_slot_until_its_end() {
    let (mut table, now) = (table(2), Instant::now());
    let slot = step(&mut table, 7, true, false, now).unwrap();
    assert_eq!(step(&mut table, 7, false, false, now), Ok(slot));
    assert_eq!(step(&mut table, 7, false, true, now), Ok(slot));
    assert_eq!(step(&mut table, 7, false, false, now), Err(Refusal::Unknown));
    assert_eq!(table.live(), 0);
}

#[test]
fn a_one_shot_sequence_leaves_nothing() {
    let (mut table, now) = (table(1), Instant::now());
    for id in 1..10 {
        step(&mut table, id, true, true, now).unwrap();
    }
    assert_eq!((table.live(), table.counts().started, table.counts().ended), (0, 9, 9));
}

#[test]
fn a_full_table_refuses_a_new_sequence_but_not_one_that_starts_over() {
    let (mut table, now) = (table(1), Instant::now());
    let first = step(&mut table, 1, true, false, now).unwrap();
    assert_eq!(step(&mut table, 2, true, false, now), Err(Refusal::Full { capacity: 1 }));
    let second = step(&mut table, 1, true, false, now).unwrap();
    assert_ne!(first, second);
    assert_eq!(table.counts().rejected, 1);
}

#[test]
fn a_failed_start_leaves_no_sequence_and_a_failed_step_leaves_the_sequence() {
    let (mut table, now, mut released) = (table(2), Instant::now(), Vec::new());
    let slot = table.admit(&key(1), true, &mut released).unwrap().slot;
    table.settle(slot, Outcome::Failed, false, now, &mut released);
    assert_eq!(step(&mut table, 1, false, false, now), Err(Refusal::Unknown));

    let slot = step(&mut table, 2, true, false, now).unwrap();
    table.admit(&key(2), false, &mut released).unwrap();
    table.settle(slot, Outcome::Failed, false, now, &mut released);
    assert_eq!(step(&mut table, 2, false, false, now), Ok(slot));
    table.admit(&key(2), false, &mut released).unwrap();
    table.settle(slot, Outcome::Failed, true, now, &mut released);
    assert_eq!(table.live(), 0);
}

#[test]
fn idle_sequences_expire_oldest_first_and_busy_ones_do_not() {
    let (mut table, now, mut released) = (table(3), Instant::now(), Vec::new());
    for id in 1..=3 {
        step(&mut table, id, true, false, now + Duration::from_secs(id)).unwrap();
    }
    table.admit(&key(1), false, &mut released).unwrap();
    table.tick(now + Duration::from_secs(12), &mut released);
    assert_eq!(table.next_tick(now + Duration::from_secs(12)), now + Duration::from_secs(13));
    assert_eq!((table.live(), table.counts().expired), (2, 1));
    table.tick(now + Duration::from_secs(100), &mut released);
    assert_eq!(table.live(), 1, "the one with a request in the works stays");
}

#[test]
fn the_start_of_a_second_incarnation_is_held_until_the_first_has_ended() {
    let (mut table, now, mut released) = (table(4), Instant::now(), Vec::new());
    let first = step(&mut table, 1, true, false, now).unwrap();
    let second = step(&mut table, 1, true, false, now).unwrap();
    assert_ne!(first, second);
    let late = table.admit(&key(1), false, &mut released).unwrap().slot;
    assert_eq!(late, first, "what arrives while the second START is held belongs to the first");
    assert!(!table.settle(late, Outcome::Advanced, true, now, &mut released));
    assert_eq!(released.len(), 1, "its END lets the second START go");
    assert_eq!(step(&mut table, 1, false, false, now), Ok(second));
}

#[test]
fn a_restart_is_let_go_when_the_instance_is_quiet_or_has_seen_enough() {
    let (mut table, now, mut released) = (table(4), Instant::now(), Vec::new());
    step(&mut table, 1, true, false, now).unwrap();
    step(&mut table, 1, true, false, now).unwrap();
    table.tick(now + QUIET / 2, &mut released);
    assert_eq!((table.live(), released.len()), (2, 0));
    table.tick(now + QUIET, &mut released);
    assert_eq!((table.live(), released.len()), (1, 1));

    let second = step(&mut table, 1, true, false, now).unwrap();
    for id in 10..10 + u64::from(SHORT_PAYLOADS) {
        assert_eq!(table.live(), 2);
        step(&mut table, id, true, true, now).unwrap();
    }
    assert_eq!(table.live(), 1);
    assert_eq!(step(&mut table, 1, false, false, now), Ok(second));
}

#[test]
fn an_instance_that_goes_takes_its_sequences_along() {
    let (mut table, now, mut released) = (table(4), Instant::now(), Vec::new());
    step(&mut table, 1, true, false, now).unwrap();
    let other = Key { instance: 1, id: SequenceId::Number(1) };
    let slot = table.admit(&other, true, &mut released).unwrap().slot;
    table.settle(slot, Outcome::Advanced, false, now, &mut released);
    table.retire_instance(0, &mut released);
    assert_eq!(table.live(), 1);
    assert!(table.admit(&other, false, &mut released).is_ok());
}

/// A request in the simulated core.
#[derive(Clone, Copy, Debug)]
struct Sent {
    id: u64,
    incarnation: u64,
    start: bool,
    end: bool,
    core_slot: usize,
}

#[derive(Default)]
struct CoreSlot {
    queue: VecDeque<Sent>,
    in_flight: bool,
    id: Option<u64>,
}

/// Triton's `oldest` scheduler for one instance: a sequence has a slot, each slot has one request in flight, the next
/// one joins the common queue the moment that one is released, and up to two payloads are formed ahead.
struct Core {
    batch: usize,
    slots: Vec<CoreSlot>,
    active: HashMap<u64, (usize, u64)>,
    queue: VecDeque<Sent>,
    payloads: VecDeque<Vec<Sent>>,
    incarnations: u64,
}

impl Core {
    /// A client may send the next sequence of an id while the last one's END is on its way. It starts a sequence over
    /// that it has not ended only when all answers are in; otherwise nothing in what reaches the backend tells the
    /// two apart.
    fn send(&mut self, id: u64, start: bool, end: bool) {
        let waiting = |slot: &CoreSlot| slot.id == Some(id) && (slot.in_flight || !slot.queue.is_empty());
        if start && self.active.contains_key(&id) && self.slots.iter().any(waiting) {
            return;
        }
        let core_slot = match self.active.get(&id) {
            Some(&(slot, _)) => slot,
            None if start => match self.slots.iter().position(|slot| slot.id.is_none()) {
                Some(slot) => slot,
                None => return,
            },
            None => return,
        };
        if start {
            self.incarnations += 1;
            self.active.insert(id, (core_slot, self.incarnations));
            self.slots[core_slot].id = Some(id);
        }
        let incarnation = self.active[&id].1;
        if end {
            self.active.remove(&id);
        }
        self.slots[core_slot].queue.push_back(Sent { id, incarnation, start, end, core_slot });
        self.pump(core_slot);
    }

    fn pump(&mut self, slot: usize) {
        let slot = &mut self.slots[slot];
        if !slot.in_flight && let Some(next) = slot.queue.pop_front() {
            slot.in_flight = true;
            self.queue.push_back(next);
        }
    }

    fn form(&mut self) {
        if self.payloads.len() < 2 && !self.queue.is_empty() {
            let take = self.batch.min(self.queue.len());
            self.payloads.push_back(self.queue.drain(..take).collect());
        }
    }

    fn release(&mut self, sent: Sent) {
        let slot = &mut self.slots[sent.core_slot];
        slot.in_flight = false;
        let ended = sent.end && slot.queue.is_empty() && !self.active.values().any(|active| active.0 == sent.core_slot);
        if ended {
            slot.id = None;
        }
        self.pump(sent.core_slot);
    }
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Send { id: u64, start: bool, end: bool },
    Form,
    Execute,
    Quiet,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (1u64..4, prop::bool::weighted(0.4), prop::bool::weighted(0.4))
            .prop_map(|(id, start, end)| Op::Send { id, start, end }),
        3 => Just(Op::Form),
        3 => Just(Op::Execute),
        1 => Just(Op::Quiet),
    ]
}

struct World {
    core: Core,
    table: Sequences<(), Sent, ()>,
    slots: BTreeMap<u64, SlotId>,
    now: Instant,
}

impl World {
    fn execute(&mut self) {
        self.core.form();
        let Some(payload) = self.core.payloads.pop_front() else { return };
        let mut released = Vec::new();
        self.table.begin_payload(0, self.now);
        let mut rows = Vec::new();
        for sent in &payload {
            let admitted = self.table.admit(&key(sent.id), sent.start, &mut released).unwrap();
            if sent.start {
                self.slots.insert(sent.incarnation, admitted.slot);
            }
            assert_eq!(admitted.slot, self.slots[&sent.incarnation], "{sent:?} met another incarnation");
            rows.push((*sent, admitted.slot));
        }
        for (sent, slot) in rows {
            match self.table.settle(slot, Outcome::Advanced, sent.end, self.now, &mut released) {
                true => self.table.hold(slot, sent),
                false => released.push(sent),
            }
        }
        let short = payload.len() < self.core.batch;
        self.table.finish_payload(0, payload.len(), short, self.now, &mut released).unwrap();
        released.into_iter().for_each(|sent| self.core.release(sent));
    }

    /// Time passes with nothing in core's queue, which is what a quiet instance means.
    fn quiet(&mut self) {
        while !(self.core.queue.is_empty() && self.core.payloads.is_empty()) {
            self.execute();
        }
        self.now += QUIET;
        let mut released = Vec::new();
        self.table.tick(self.now, &mut released);
        released.into_iter().for_each(|sent| self.core.release(sent));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 2000 }, failure_persistence: None, ..Default::default() })]
    #[test]
    fn every_request_meets_its_own_incarnation_however_clients_reuse_ids(
        ops in prop::collection::vec(op(), 0..if cfg!(miri) { 40 } else { 150 }), batch in 1usize..5,
    ) {
        let core_slots = 6;
        let policy = Policy { idle_limit: IDLE * 1000, quiet: QUIET, queue_requests: core_slots };
        let table = Sequences::new(policy, SlotLimits::all_at_once(64), Box::new(|_| Ok(()))).unwrap();
        let core = Core {
            batch,
            slots: (0..core_slots).map(|_| CoreSlot::default()).collect(),
            active: HashMap::new(),
            queue: VecDeque::new(),
            payloads: VecDeque::new(),
            incarnations: 0,
        };
        let mut world = World { core, table, slots: BTreeMap::new(), now: Instant::now() };
        for op in ops {
            match op {
                Op::Send { id, start, end } => world.core.send(id, start, end),
                Op::Form => world.core.form(),
                Op::Execute => world.execute(),
                Op::Quiet => world.quiet(),
            }
        }
        for _ in 0..300 {
            world.quiet();
        }
        prop_assert!(world.core.slots.iter().all(|slot| !slot.in_flight && slot.queue.is_empty()), "a request is stuck");
        prop_assert_eq!(world.table.live(), world.core.active.len());
    }
}

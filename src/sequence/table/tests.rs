//! The table against hand-written cases, and against a simulation of Triton's `oldest` scheduler that knows which
//! incarnation each request truly belongs to.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use proptest::prelude::*;

use super::*;
use crate::sequence::SequenceId;
use crate::sequence::contest::REST;

type Table = Sequences<(), (), u32, ()>;

const IDLE: Duration = Duration::from_secs(10);
const QUIET: Duration = Duration::from_millis(20);

fn table(capacity: usize) -> Table {
    let policy = Policy { idle_limit: IDLE, quiet: QUIET, pause: QUIET / 4, queue_requests: 64 };
    let limits = SlotLimits { reserve: 64, ..SlotLimits::all_at_once(capacity) };
    Sequences::new(policy, limits, Box::new(|_| Ok(()))).unwrap()
}

fn key(id: u64) -> Key {
    Key { instance: 0, lane: None, id: SequenceId::Number(id) }
}

/// Admits and settles one request as a payload of its own.
fn step(table: &mut Table, id: u64, start: bool, end: bool, now: Instant) -> Result<SlotId, Refusal<()>> {
    let mut released = Vec::new();
    table.begin_payload(0, 1, true, now);
    let slot = table.admit(&key(id), start, end, &mut released)?.slot;
    if table.settle(slot, Outcome::Advanced, end, now, &mut released) {
        table.hold(slot, 0, &mut released);
    }
    table.finish_payload(0, now, &mut released).unwrap();
    confirm(table, now);
    Ok(slot)
}

/// Everything that was let go has been released.
fn confirm<H>(table: &mut Sequences<(), (), H, ()>, now: Instant) {
    let keys = table.take_let_go();
    table.have_been_released(keys, now);
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
    let slot = table.admit(&key(1), true, false, &mut released).unwrap().slot;
    table.settle(slot, Outcome::Failed, false, now, &mut released);
    assert_eq!(step(&mut table, 1, false, false, now), Err(Refusal::Unknown));

    let slot = step(&mut table, 2, true, false, now).unwrap();
    table.admit(&key(2), false, false, &mut released).unwrap();
    table.settle(slot, Outcome::Failed, false, now, &mut released);
    assert_eq!(step(&mut table, 2, false, false, now), Ok(slot));
    table.admit(&key(2), false, false, &mut released).unwrap();
    table.settle(slot, Outcome::Failed, true, now, &mut released);
    assert_eq!(table.live(), 0);
}

#[test]
fn idle_sequences_expire_oldest_first_and_busy_ones_do_not() {
    let (mut table, now, mut released) = (table(3), Instant::now(), Vec::new());
    for id in 1..=3 {
        step(&mut table, id, true, false, now + Duration::from_secs(id)).unwrap();
    }
    table.admit(&key(1), false, false, &mut released).unwrap();
    table.tick(now + Duration::from_secs(12), &mut released).unwrap();
    assert_eq!(table.next_tick(now + Duration::from_secs(12)), now + Duration::from_secs(13));
    assert_eq!((table.live(), table.counts().expired), (2, 1));
    table.tick(now + Duration::from_secs(100), &mut released).unwrap();
    assert_eq!(table.live(), 1, "the one with a request in the works stays");
}

#[test]
fn what_is_due_on_one_instance_expires_while_another_is_in_a_long_run() {
    let (mut table, now, mut released) = (table(3), Instant::now(), Vec::new());
    step(&mut table, 1, true, false, now).unwrap();
    table.begin_payload(0, 1, true, now);
    let other = Key { instance: 1, ..key(2) };
    table.begin_payload(1, 1, true, now);
    let slot = table.admit(&other, true, false, &mut released).unwrap().slot;
    table.settle(slot, Outcome::Advanced, false, now + QUIET, &mut released);
    table.finish_payload(1, now + QUIET, &mut released).unwrap();
    table.tick(now + IDLE * 2, &mut released).unwrap();
    assert_eq!((table.live(), table.counts().expired), (1, 1));
}

#[test]
fn an_instance_that_goes_ends_each_of_its_sequences_once() {
    let (mut table, now, mut released) = (table(3), Instant::now(), Vec::new());
    step(&mut table, 1, true, false, now).unwrap();
    let second = table.admit(&key(1), true, false, &mut released).unwrap().slot;
    table.settle(second, Outcome::Failed, false, now, &mut released);
    step(&mut table, 2, true, false, now).unwrap();
    table.retire_instance(0, &mut released);
    assert_eq!((table.live(), table.counts().started, table.counts().ended), (0, 3, 3));
}

#[test]
fn a_sequence_whose_next_request_may_wait_in_core_does_not_expire() {
    let (mut table, now, mut released) = (table(3), Instant::now(), Vec::new());
    step(&mut table, 1, true, false, now).unwrap();
    let later = now + IDLE * 2;
    table.begin_payload(0, 1, false, now);
    table.tick(later, &mut released).unwrap();
    assert_eq!(table.live(), 1, "its instance works");
    table.finish_payload(0, later, &mut released).unwrap();
    table.tick(later, &mut released).unwrap();
    assert_eq!(table.live(), 1, "its instance may have more to do");
    table.tick(later + QUIET, &mut released).unwrap();
    assert_eq!(table.live(), 0);
}

#[test]
fn the_start_of_a_second_incarnation_is_held_until_the_first_has_ended() {
    let (mut table, now, mut released) = (table(4), Instant::now(), Vec::new());
    let first = step(&mut table, 1, true, false, now).unwrap();
    let second = step(&mut table, 1, true, false, now).unwrap();
    assert_ne!(first, second);
    let late = table.admit(&key(1), false, false, &mut released).unwrap().slot;
    assert_eq!(late, first, "what arrives while the second START is held belongs to the first");
    assert!(!table.settle(late, Outcome::Advanced, true, now, &mut released));
    assert_eq!(released.len(), 1, "its END lets the second START go");
    assert_eq!(step(&mut table, 1, false, false, now), Ok(second));
}

#[test]
fn a_second_incarnation_whose_answer_takes_long_has_its_turn_when_it_is_held() {
    let (mut table, now, mut released) = (table(4), Instant::now(), Vec::new());
    step(&mut table, 1, true, false, now).unwrap();
    table.begin_payload(0, 1, true, now);
    let second = table.admit(&key(1), true, false, &mut released).unwrap().slot;
    // Others run meanwhile, and the first incarnation is at rest.
    let later = now + REST;
    let others = |table: &mut Table, released: &mut Vec<u32>| {
        for _ in 0..=SHORT_PAYLOADS {
            table.begin_payload(0, 1, true, later);
            table.finish_payload(0, later, released).unwrap();
        }
    };
    others(&mut table, &mut released);
    assert!(table.settle(second, Outcome::Advanced, false, later, &mut released));
    table.hold(second, 7, &mut released);
    assert!(released.is_empty());
    others(&mut table, &mut released);
    assert_eq!(released, [7]);
}

#[test]
fn where_a_start_that_was_to_be_held_has_been_released_nobody_gets_the_wrong_state() {
    let (mut table, now, mut released) = (table(4), Instant::now(), Vec::new());
    step(&mut table, 1, true, false, now).unwrap();
    let second = table.admit(&key(1), true, false, &mut released).unwrap().slot;
    assert!(table.settle(second, Outcome::Failed, false, now, &mut released));
    table.release_unheld(second);
    assert_eq!(step(&mut table, 1, false, false, now), Err(Refusal::Unknown));
    assert_eq!(step(&mut table, 1, false, true, now), Err(Refusal::Unknown));
    assert_eq!(table.live(), 0, "nothing is left of them");
    step(&mut table, 1, true, false, now).unwrap();
    step(&mut table, 1, false, true, now).unwrap();
}

/// Lets the table see payloads of other sequences.
fn others(table: &mut Table, payloads: usize, now: Instant) {
    for id in (100..).take(payloads) {
        step(table, id, true, true, now).unwrap();
    }
}

/// Enough for what waited in core when a sequence started to have come.
const OF_AGE: usize = 2 * SHORT_PAYLOADS;

#[test]
fn a_sequence_of_age_that_is_started_over_is_over_when_its_instance_is_quiet() {
    let (mut table, now, mut released) = (table(4), Instant::now(), Vec::new());
    step(&mut table, 1, true, false, now).unwrap();
    others(&mut table, OF_AGE, now);
    let second = step(&mut table, 1, true, false, now).unwrap();
    table.tick(now + QUIET / 2, &mut released).unwrap();
    assert_eq!((table.live(), released.len()), (2, 0));
    table.tick(now + QUIET, &mut released).unwrap();
    assert_eq!((table.live(), released.len()), (1, 1), "the second START is let go");
    assert_eq!(step(&mut table, 1, false, false, now), Ok(second));
}

#[test]
fn a_sequence_of_age_that_is_started_over_is_over_when_its_instance_has_seen_enough() {
    let (mut table, now) = (table(4), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    others(&mut table, OF_AGE, now);
    let second = step(&mut table, 1, true, false, now).unwrap();
    others(&mut table, SHORT_PAYLOADS - 1, now);
    assert_eq!(table.live(), 2);
    others(&mut table, 1, now);
    assert_eq!(table.live(), 1);
    assert_eq!(step(&mut table, 1, false, false, now), Ok(second));
}

#[test]
fn what_runs_before_a_request_has_been_released_proves_nothing_of_what_core_sends_then() {
    let (mut table, now, mut released) = (table(4), Instant::now(), Vec::new());
    step(&mut table, 1, true, false, now).unwrap();
    others(&mut table, OF_AGE, now);
    // A request of the first incarnation, and the START of the second, which are settled after others have begun.
    table.begin_payload(0, 1, true, now);
    let first = table.admit(&key(1), false, false, &mut released).unwrap().slot;
    table.begin_payload(0, 1, true, now);
    let second = table.admit(&key(1), true, false, &mut released).unwrap().slot;
    table.settle(first, Outcome::Advanced, false, now, &mut released);
    (0..SHORT_PAYLOADS).for_each(|_| table.begin_payload(0, 1, true, now));
    table.finish_payload(0, now, &mut released).unwrap();
    assert_eq!(table.admit(&key(1), false, true, &mut released).unwrap().slot, first, "core had it");
    table.settle(first, Outcome::Advanced, true, now, &mut released);
    assert!(!table.settle(second, Outcome::Advanced, false, now, &mut released));
}

#[test]
fn a_held_start_does_not_expire_and_has_its_whole_time_when_it_is_let_go() {
    let (mut table, now, mut released) = (table(4), Instant::now(), Vec::new());
    let first = step(&mut table, 1, true, false, now).unwrap();
    let second = step(&mut table, 1, true, false, now).unwrap();
    // The first one has a long backlog.
    for seconds in 1..15 {
        let later = now + Duration::from_secs(seconds);
        table.begin_payload(0, 64, false, later);
        assert_eq!(table.admit(&key(1), false, seconds == 14, &mut released).unwrap().slot, first);
        table.settle(first, Outcome::Advanced, seconds == 14, later, &mut released);
        table.finish_payload(0, later, &mut released).unwrap();
        table.tick(later, &mut released).unwrap();
    }
    assert_eq!(released.len(), 1, "the END of the first lets the second go");
    let later = now + Duration::from_secs(15);
    confirm(&mut table, later);
    table.tick(later + IDLE - QUIET, &mut released).unwrap();
    assert_eq!(step(&mut table, 1, false, false, later + IDLE - QUIET), Ok(second));
    table.tick(later + IDLE * 3, &mut released).unwrap();
    assert_eq!((table.live(), table.counts().expired), (0, 1));
}

#[test]
fn several_pauses_prove_what_one_does_not() {
    let (mut table, now, mut released) = (table(4), Instant::now(), Vec::new());
    step(&mut table, 1, true, false, now).unwrap();
    others(&mut table, OF_AGE, now);
    let second = step(&mut table, 1, true, false, now).unwrap();
    // Requests of all shapes, so that no payload is short, and never quiet.
    for number in 1..=SHORT_PAYLOADS as u32 {
        assert_eq!(table.live(), 2, "{number}");
        let later = now + QUIET / 2 * number;
        table.begin_payload(0, 1, false, later);
        table.finish_payload(0, later, &mut released).unwrap();
    }
    assert_eq!(table.live(), 1);
    assert_eq!(step(&mut table, 1, false, false, now + QUIET * 3), Ok(second));
}

#[test]
fn a_young_sequence_that_is_started_over_is_over_when_it_stays_at_rest() {
    let (mut table, now, mut released) = (table(4), Instant::now(), Vec::new());
    step(&mut table, 1, true, false, now).unwrap();
    let second = step(&mut table, 1, true, false, now).unwrap();
    table.tick(now + QUIET, &mut released).unwrap();
    assert_eq!(released.len(), 0);
    table.tick(now + REST, &mut released).unwrap();
    assert_eq!((table.live(), released.len()), (2, 1), "the second START is let go");
    table.tick(now + REST + QUIET, &mut released).unwrap();
    assert_eq!(table.live(), 2, "but it has not been released: nothing can have come");
    confirm(&mut table, now + REST + QUIET);
    table.tick(now + REST + QUIET, &mut released).unwrap();
    assert_eq!(table.live(), 2, "now it has, a moment ago");
    table.tick(now + REST + QUIET * 2, &mut released).unwrap();
    assert_eq!(table.live(), 1, "nothing came, so the first is over");
    assert!(!table.drop_doubtful(&mut released), "the second is not");
    assert_eq!(step(&mut table, 1, false, false, now), Ok(second));
}

#[test]
fn a_start_that_core_sent_late_gets_its_turn_and_the_later_incarnation_gets_it_back() {
    let (mut table, now, mut released) = (table(4), Instant::now(), Vec::new());
    let later = step(&mut table, 1, true, false, now).unwrap();
    let earlier = step(&mut table, 1, true, false, now).unwrap();
    table.tick(now + REST, &mut released).unwrap();
    assert_eq!(step(&mut table, 1, false, true, now), Ok(earlier), "its END was in core's queue");
    assert_eq!(step(&mut table, 1, false, false, now), Ok(later));
    assert_eq!(table.live(), 1);
}

#[test]
fn what_a_one_shot_sequence_started_over_goes_soon_if_it_is_of_age_and_else_when_slots_run_out() {
    let (mut table, now, mut released) = (table(2), Instant::now(), Vec::new());
    step(&mut table, 1, true, false, now).unwrap();
    others(&mut table, OF_AGE, now);
    step(&mut table, 1, true, true, now).unwrap();
    table.tick(now + QUIET, &mut released).unwrap();
    assert_eq!(table.live(), 0);

    step(&mut table, 1, true, false, now).unwrap();
    step(&mut table, 1, true, true, now).unwrap();
    step(&mut table, 2, true, false, now).unwrap();
    assert_eq!(table.live(), 2);
    assert!(step(&mut table, 3, true, false, now).is_ok());
    assert_eq!(step(&mut table, 4, true, false, now), Err(Refusal::Full { capacity: 2 }));
}

#[test]
fn a_restart_that_fails_does_not_bring_the_old_state_back() {
    let (mut table, now, mut released) = (table(4), Instant::now(), Vec::new());
    step(&mut table, 1, true, false, now).unwrap();
    let failed = table.admit(&key(1), true, false, &mut released).unwrap().slot;
    assert!(table.settle(failed, Outcome::Failed, false, now, &mut released), "held: the first may have more to come");
    table.hold(failed, 0, &mut released);
    table.tick(now + REST, &mut released).unwrap();
    assert_eq!(released.len(), 1);
    assert_eq!(step(&mut table, 1, false, false, now), Err(Refusal::Unknown));
    assert_eq!(step(&mut table, 1, false, true, now), Err(Refusal::Unknown));
    assert!(step(&mut table, 1, true, false, now).is_ok());
}

#[test]
fn incarnations_in_different_lanes_never_meet_and_a_start_in_its_own_lane_starts_over() {
    let (mut table, now, mut released) = (table(4), Instant::now(), Vec::new());
    let lane = |lane| Key { lane: Some(lane), ..key(1) };
    let settle = |table: &mut Table, slot, end| {
        assert!(!table.settle(slot, Outcome::Advanced, end, now, &mut Vec::new()));
    };
    let first = table.admit(&lane(0), true, false, &mut released).unwrap().slot;
    let second = table.admit(&lane(1), true, false, &mut released).unwrap().slot;
    settle(&mut table, first, false);
    settle(&mut table, second, false);
    assert_eq!(table.admit(&lane(1), false, false, &mut released).unwrap().slot, second);
    assert_eq!(table.admit(&lane(0), false, false, &mut released).unwrap().slot, first);
    settle(&mut table, second, true);
    settle(&mut table, first, false);
    let again = table.admit(&lane(0), true, false, &mut released).unwrap().slot;
    assert_ne!(again, first);
    assert_eq!(table.live(), 1);
    settle(&mut table, again, false);
    let other = Key { lane: Some(0), ..key(2) };
    table.admit(&other, true, false, &mut released).unwrap();
    assert_eq!(table.live(), 1, "whoever had the lane is over");
}

#[test]
fn an_instance_that_goes_takes_its_sequences_along() {
    let (mut table, now, mut released) = (table(4), Instant::now(), Vec::new());
    step(&mut table, 1, true, false, now).unwrap();
    let other = Key { instance: 1, lane: None, id: SequenceId::Number(1) };
    let slot = table.admit(&other, true, false, &mut released).unwrap().slot;
    table.settle(slot, Outcome::Advanced, false, now, &mut released);
    table.retire_instance(0, &mut released);
    assert_eq!(table.live(), 1);
    assert!(table.admit(&other, false, false, &mut released).is_ok());
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
    unanswered: HashMap<u64, usize>,
    queue: VecDeque<Sent>,
    payloads: VecDeque<Vec<Sent>>,
    incarnations: u64,
}

impl Core {
    /// A client may send the next sequence of an id while the last one's END is on its way. It starts a sequence over
    /// that it has not ended only when it has all answers; otherwise nothing in what reaches the backend tells the two
    /// apart.
    fn send(&mut self, id: u64, start: bool, end: bool) {
        let unanswered = self.unanswered.entry(id).or_default();
        if start && self.active.contains_key(&id) && *unanswered > 0 {
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
        *unanswered += 1;
        let incarnation = self.active[&id].1;
        if end {
            self.active.remove(&id);
        }
        self.slots[core_slot].queue.push_back(Sent { id, incarnation, start, end, core_slot });
        self.pump(core_slot);
    }

    fn pump(&mut self, slot: usize) {
        let slot = &mut self.slots[slot];
        if !slot.in_flight
            && let Some(next) = slot.queue.pop_front()
        {
            slot.in_flight = true;
            if next.end {
                // Free for the next sequence, which waits behind this request: another START may overtake it.
                slot.id = None;
            }
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
        self.slots[sent.core_slot].in_flight = false;
        self.pump(sent.core_slot);
    }
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Send { id: u64, start: bool, end: bool },
    Form,
    Execute,
    Settle,
    Quiet,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (1u64..4, prop::bool::weighted(0.4), prop::bool::weighted(0.4))
            .prop_map(|(id, start, end)| Op::Send { id, start, end }),
        3 => Just(Op::Form),
        3 => Just(Op::Execute),
        3 => Just(Op::Settle),
        1 => Just(Op::Quiet),
    ]
}

struct World {
    core: Core,
    table: Sequences<(), (), Sent, ()>,
    slots: BTreeMap<u64, SlotId>,
    /// Payloads that have run, and are settled while the next ones run.
    unsettled: VecDeque<Vec<(Sent, SlotId)>>,
    now: Instant,
}

impl World {
    fn execute(&mut self) {
        self.core.form();
        let Some(payload) = self.core.payloads.pop_front() else { return };
        let mut released = Vec::new();
        self.table.begin_payload(0, payload.len(), false, self.now);
        let mut rows = Vec::new();
        for sent in &payload {
            let admitted = self.table.admit(&key(sent.id), sent.start, sent.end, &mut released).unwrap();
            if sent.start {
                self.slots.insert(sent.incarnation, admitted.slot);
            }
            assert_eq!(admitted.slot, self.slots[&sent.incarnation], "{sent:?} met another incarnation");
            rows.push((*sent, admitted.slot));
        }
        self.unsettled.push_back(rows);
        self.release(released);
    }

    fn release(&mut self, released: Vec<Sent>) {
        released.into_iter().for_each(|sent| self.core.release(sent));
        confirm(&mut self.table, self.now);
    }

    fn settle(&mut self) {
        let Some(rows) = self.unsettled.pop_front() else { return };
        let mut released = Vec::new();
        for (sent, slot) in rows {
            *self.core.unanswered.entry(sent.id).or_default() -= 1;
            match self.table.settle(slot, Outcome::Advanced, sent.end, self.now, &mut released) {
                true => self.table.hold(slot, sent, &mut released),
                false => released.push(sent),
            }
            self.release(std::mem::take(&mut released));
        }
        self.table.finish_payload(0, self.now, &mut released).unwrap();
        self.release(released);
    }

    fn drain(&mut self) {
        while !(self.core.queue.is_empty() && self.core.payloads.is_empty() && self.unsettled.is_empty()) {
            self.execute();
            self.settle();
        }
    }

    /// Time passes with nothing in core's queue, which is what a quiet instance means.
    fn quiet(&mut self) {
        self.drain();
        self.now += REST;
        let mut released = Vec::new();
        self.table.tick(self.now, &mut released).unwrap();
        self.release(released);
        self.drain();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 4000 }, failure_persistence: None, ..Default::default() })]
    #[test]
    fn every_request_meets_its_own_incarnation_however_clients_reuse_ids(
        ops in prop::collection::vec(op(), 0..if cfg!(miri) { 40 } else { 150 }), batch in 1usize..5,
    ) {
        let core_slots = 6;
        // Turns are given to a quiet instance only: on a busy one they rest on counts of payloads, and a request that
        // the client sends in the very moment of a turn would be taken for one that core had queued.
        let policy = Policy { idle_limit: IDLE * 1000, quiet: QUIET, pause: QUIET / 4, queue_requests: usize::MAX };
        let table = Sequences::new(policy, SlotLimits::all_at_once(64), Box::new(|_| Ok(()))).unwrap();
        let core = Core {
            batch,
            slots: (0..core_slots).map(|_| CoreSlot::default()).collect(),
            active: HashMap::new(),
            unanswered: HashMap::new(),
            queue: VecDeque::new(),
            payloads: VecDeque::new(),
            incarnations: 0,
        };
        let (slots, unsettled) = (BTreeMap::new(), VecDeque::new());
        let mut world = World { core, table, slots, unsettled, now: Instant::now() };
        // An END may have been for another incarnation than the one that is left.
        let ended: HashSet<u64> = ops
            .iter()
            .filter_map(|op| match op {
                Op::Send { id, end: true, .. } => Some(*id),
                _ => None,
            })
            .collect();
        for op in ops {
            match op {
                Op::Send { id, start, end } => world.core.send(id, start, end),
                Op::Form => world.core.form(),
                Op::Execute => world.execute(),
                Op::Settle => world.settle(),
                Op::Quiet => world.quiet(),
            }
        }
        for _ in 0..300 {
            world.quiet();
        }
        prop_assert!(world.core.slots.iter().all(|slot| !slot.in_flight && slot.queue.is_empty()), "a request is stuck");
        for (id, (_, incarnation)) in &world.core.active {
            let slot = world.slots[incarnation];
            prop_assert!(world.table.pool.record(slot).is_some(), "a live sequence was dropped");
            if !ended.contains(id) {
                prop_assert!(!world.table.doubtful.contains(&slot), "a live sequence would be dropped if slots ran out");
            }
        }
        let with_contest = world.table.chains.values().filter(|chain| chain.contest.is_some()).count();
        prop_assert_eq!(world.table.contested.len(), with_contest);
        let doubtful = world.table.doubtful.len();
        prop_assert!(world.table.doubtful.iter().all(|slot| world.table.pool.record(*slot).is_some()));
        prop_assert!(world.table.live() <= world.core.active.len() + doubtful, "a slot leaked");
    }
}

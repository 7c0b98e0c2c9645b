//! Tests the table with single cases. [`super::model_tests`] tests it with random operations against a simulation of
//! core.

mod starts;

use super::*;
use crate::SequenceId;
use crate::watermark::LOOKS;

type Table = Sequences<(), (), u32>;

const IDLE: Duration = Duration::from_secs(10);
const QUIET: Duration = Duration::from_millis(20);
const QUEUE: usize = 64;

fn policy() -> Policy {
    Policy {
        idle: Some(IdleLimits { limit: IDLE, dropped_after: IDLE / 2 }),
        quiet: QUIET,
        by_lane: false,
        queue_requests: QUEUE,
        has_place_for_all: false,
    }
}

fn table_of(policy: Policy, limits: SlotLimits) -> Table {
    let mut table = Sequences::new(policy, limits);
    add_slabs(&mut table);
    table
}

fn add_slabs(table: &mut Table) {
    while let Some(slots) = table.slab_due() {
        assert_eq!(table.add_slab((), slots, 0), None);
    }
}

/// Drops the states of the sequences of an instance that are over, as it does in each turn.
fn drop_states(table: &mut Table, instance: u32) {
    table.take_over(instance).into_iter().for_each(|slot| table.free(slot));
}

/// Admits a payload; another slab can be made at any time.
fn admit_all(table: &mut Table, admissions: &[Admission], now: Instant) -> Vec<Result<SlotId, Refusal>> {
    let instance = admissions[0].key.instance;
    table.begin_payload(instance, now);
    table.prepare(instance, admissions, now);
    drop_states(table, instance);
    while let Some(Shortage { slab_slots, wanted }) = table.prepare(instance, admissions, now) {
        assert_eq!(table.add_slab((), slab_slots, wanted), None);
    }
    let admitted = table.admit(instance, admissions, now);
    admitted.into_iter().map(|admitted| Ok(admitted?.slot)).collect()
}

fn table(capacity: usize) -> Table {
    table_of(policy(), SlotLimits { reserve: 64, ..SlotLimits::all_at_once(capacity) })
}

fn key(id: u64) -> Key {
    Key { instance: 0, lane: None, id: SequenceId::Number(id) }
}

/// Admits a payload of one request.
fn admit(table: &mut Table, key: &Key, start: bool, end: bool, now: Instant) -> Result<SlotId, Refusal> {
    let admission = Admission { key: key.clone(), start, end };
    let admitted = admit_all(table, &[admission], now).pop().unwrap();
    confirm(table, now);
    admitted
}

/// Settles a request and finishes its payload. Returns the number of held requests that this releases.
fn settle(table: &mut Table, instance: u32, slot: SlotId, outcome: Outcome, end: bool, now: Instant) -> usize {
    if table.settle(slot, outcome, end, now) {
        table.hold(slot, 0);
    }
    table.finish_payload(instance, now);
    confirm(table, now)
}

/// Admits and settles one request as a payload of its own.
fn step(table: &mut Table, id: u64, start: bool, end: bool, now: Instant) -> Result<SlotId, Refusal> {
    match admit(table, &key(id), start, end, now) {
        Ok(slot) => {
            settle(table, 0, slot, Outcome::Advanced, end, now);
            Ok(slot)
        }
        Err(refusal) => {
            table.finish_payload(0, now);
            Err(refusal)
        }
    }
}

/// Releases the requests that the table no longer holds. Returns how many.
fn confirm(table: &mut Table, now: Instant) -> usize {
    let (released, releasing): (Vec<_>, Vec<_>) = table.take_released().into_iter().unzip();
    table.have_been_released(releasing, now);
    released.len()
}

/// Returns the number of held requests that the tick releases.
fn tick(table: &mut Table, now: Instant) -> usize {
    table.tick(0, now);
    drop_states(table, 0);
    confirm(table, now)
}

/// Lets the instance be idle until [`QUIET`] after `now`. Returns the number of held requests that this releases.
fn pause(table: &mut Table, now: Instant) -> usize {
    (1..=LOOKS).map(|look| tick(table, now + QUIET / LOOKS * look)).sum()
}

/// Steps another sequence. Its requests prove that core has sent everything that it had queued before.
fn step_another(table: &mut Table, now: Instant) {
    step(table, 1000, true, false, now).unwrap();
    step(table, 1000, false, false, now).unwrap();
    step(table, 1000, false, true, now).unwrap();
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
fn the_slot_of_a_sequence_that_is_over_is_in_use_until_its_instance_has_dropped_the_state() {
    let (mut table, now) = (table(1), Instant::now());
    let slot = step(&mut table, 7, true, false, now).unwrap();
    (1..=LOOKS).for_each(|look| table.tick(0, now + IDLE + QUIET / LOOKS * look));
    assert_eq!((table.live(), table.counts().expired, table.memory(slot)), (0, 1, Some(())));
    assert_eq!(step(&mut table, 7, false, false, now + IDLE), Err(Refusal::Unknown), "a turn of the instance");
    assert_eq!(table.memory(slot), None);
}

#[test]
fn sequences_of_one_request_leave_no_chain() {
    let (mut table, now) = (table(1), Instant::now());
    for id in 1..10 {
        step(&mut table, id, true, true, now).unwrap();
    }
    assert_eq!((table.live(), table.counts().started, table.counts().ended), (0, 9, 9));
    pause(&mut table, now);
    assert_eq!(table.incarnations.known(), (0, 0));
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
fn a_sequence_that_starts_over_uses_no_more_of_the_capacity() {
    let (mut table, now) = (table(2), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    step(&mut table, 1, true, false, now).unwrap();
    assert_eq!(table.live(), 2);
    assert!(step(&mut table, 2, true, false, now).is_ok());
    assert_eq!(step(&mut table, 3, true, false, now), Err(Refusal::Full { capacity: 2 }));
}

#[test]
fn a_start_that_core_has_a_place_for_expires_the_longest_idle_sequence_that_core_has_dropped() {
    let limits = SlotLimits { reserve: 2, ..SlotLimits::all_at_once(2) };
    let (mut table, now) = (table_of(Policy { has_place_for_all: true, ..policy() }, limits), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    step(&mut table, 2, true, false, now + QUIET * 3).unwrap();
    // Core has dropped one of the two, for example because its client cancelled a request. We cannot tell which, so the
    // START takes a slot of the reserve.
    step(&mut table, 3, true, false, now + QUIET * 4).unwrap();
    assert_eq!((table.live(), table.counts().expired), (3, 0));
    let dropped = now + IDLE / 2;
    pause(&mut table, dropped);
    step(&mut table, 4, true, false, dropped + QUIET).unwrap();
    assert_eq!((table.live(), table.counts().expired), (3, 1));
    assert_eq!(step(&mut table, 1, false, false, dropped + QUIET), Err(Refusal::Unknown));
    assert!(step(&mut table, 2, false, false, dropped + QUIET).is_ok());
}

#[test]
fn a_full_table_keeps_a_sequence_whose_request_may_wait_in_core() {
    let limits = SlotLimits { reserve: 2, ..SlotLimits::all_at_once(1) };
    let (mut table, now) = (table_of(Policy { has_place_for_all: true, ..policy() }, limits), Instant::now());
    let first = step(&mut table, 1, true, false, now).unwrap();
    // Since then, core's queue has been full. The next request of the first sequence waits in it.
    let later = now + IDLE;
    step(&mut table, 2, true, false, later).unwrap();
    step(&mut table, 3, true, false, later).unwrap();
    assert_eq!(step(&mut table, 1, false, false, later), Ok(first));
    assert_eq!(table.counts().expired, 0);
}

#[test]
fn a_failed_start_leaves_no_sequence_and_a_failed_step_leaves_the_sequence() {
    let (mut table, now) = (table(2), Instant::now());
    let slot = admit(&mut table, &key(1), true, false, now).unwrap();
    settle(&mut table, 0, slot, Outcome::Failed, false, now);
    assert_eq!(step(&mut table, 1, false, false, now), Err(Refusal::Unknown));

    let slot = step(&mut table, 2, true, false, now).unwrap();
    admit(&mut table, &key(2), false, false, now).unwrap();
    settle(&mut table, 0, slot, Outcome::Failed, false, now);
    assert_eq!(step(&mut table, 2, false, false, now), Ok(slot));
    admit(&mut table, &key(2), false, false, now).unwrap();
    settle(&mut table, 0, slot, Outcome::Failed, true, now);
    assert_eq!(table.live(), 0);
}

#[test]
fn what_follows_a_start_without_a_slot_never_reaches_the_next_sequence() {
    for end_comes in [true, false] {
        let (mut table, now) = (table(1), Instant::now());
        step(&mut table, 1, true, false, now).unwrap();
        assert_eq!(step(&mut table, 2, true, false, now), Err(Refusal::Full { capacity: 1 }));
        step(&mut table, 1, false, true, now).unwrap();
        // The client has sent a request and END after the refused START, and then another START, which overtakes them
        // in another slot of core.
        let slot = step(&mut table, 2, true, false, now).unwrap();
        assert_eq!(step(&mut table, 2, false, false, now), Err(Refusal::Unknown), "it follows the refused START");
        assert_eq!(step(&mut table, 2, false, end_comes, now), Err(Refusal::Unknown), "it follows the refused START");
        assert_eq!(pause(&mut table, now), 1, "core has no request left that follows the refused START");
        assert_eq!(step(&mut table, 2, false, false, now), Ok(slot));
    }
}

#[test]
fn idle_sequences_expire_oldest_first_and_busy_ones_do_not() {
    let (mut table, now) = (table(4), Instant::now());
    for id in 1..=3 {
        step(&mut table, id, true, false, now + Duration::from_secs(id)).unwrap();
    }
    let busy = Key { instance: 1, ..key(1) };
    admit(&mut table, &busy, true, false, now).unwrap();
    pause(&mut table, now + Duration::from_secs(12) - QUIET);
    assert_eq!(table.next_tick(0, now + Duration::from_secs(12)), Some(now + Duration::from_secs(13)));
    assert_eq!((table.live(), table.counts().expired), (2, 2));
    tick(&mut table, now + Duration::from_secs(100));
    assert_eq!(table.live(), 1, "the sequence with a request in flight stays");
}

#[test]
fn a_sequence_expires_when_everything_that_core_had_queued_at_its_idle_limit_has_come() {
    let (mut table, now) = (table(9), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    let later = now + IDLE;
    let other = admit(&mut table, &key(2), true, false, now).unwrap();
    tick(&mut table, later);
    assert_eq!(table.live(), 2, "its instance is busy, so core may have a request of it");
    settle(&mut table, 0, other, Outcome::Advanced, false, later);
    tick(&mut table, later);
    assert_eq!(table.live(), 2);
    // The next request of this sequence proves that core has sent everything that it had queued.
    step(&mut table, 2, false, false, later).unwrap();
    admit(&mut table, &key(2), false, false, later).unwrap();
    tick(&mut table, later);
    assert_eq!((table.live(), table.counts().expired), (1, 1));
}

#[test]
fn a_request_in_time_keeps_a_sequence_whose_expiry_waits_for_core() {
    let (mut table, now) = (table(9), Instant::now());
    let slot = step(&mut table, 1, true, false, now).unwrap();
    let other = admit(&mut table, &key(2), true, false, now).unwrap();
    tick(&mut table, now + IDLE);
    settle(&mut table, 0, other, Outcome::Advanced, true, now + IDLE);
    assert_eq!(step(&mut table, 1, false, false, now + IDLE), Ok(slot));
    tick(&mut table, now + IDLE + QUIET * 2);
    assert_eq!((table.live(), table.counts().expired), (1, 0));
}

#[test]
fn idle_lanes_expire_while_other_lanes_are_busy() {
    let now = Instant::now();
    let mut table = table_of(Policy { by_lane: true, queue_requests: 1, ..policy() }, SlotLimits::all_at_once(2));
    let lane = |lane| Key { lane: Some(lane), ..key(u64::from(lane) + 1) };
    let idle = admit(&mut table, &lane(0), true, false, now).unwrap();
    settle(&mut table, 0, idle, Outcome::Advanced, false, now);
    let busy = admit(&mut table, &lane(1), true, false, now).unwrap();
    settle(&mut table, 0, busy, Outcome::Advanced, false, now);
    for _ in 0..2 {
        admit(&mut table, &lane(1), false, false, now + IDLE).unwrap();
        tick(&mut table, now + IDLE);
        settle(&mut table, 0, busy, Outcome::Advanced, false, now + IDLE);
    }
    assert_eq!((table.live(), table.counts().expired), (1, 1));
}

#[test]
fn without_idle_limits_only_the_caller_ends_a_sequence() {
    let now = Instant::now();
    let policy = Policy { idle: None, by_lane: true, queue_requests: 1, has_place_for_all: true, ..policy() };
    let mut table = table_of(policy, SlotLimits::all_at_once(1));
    let lane = |lane| Key { lane: Some(lane), ..key(u64::from(lane) + 1) };
    let slot = admit(&mut table, &lane(0), true, false, now).unwrap();
    settle(&mut table, 0, slot, Outcome::Advanced, false, now);
    let later = now + 1000 * IDLE;
    tick(&mut table, later);
    assert!(admit(&mut table, &lane(1), true, false, later).is_err());
    assert_eq!((table.live(), table.next_tick(0, later)), (1, None));
    table.end_lane(0, 0, true);
    assert_eq!((table.live(), table.counts().expired), (0, 1));
}

#[test]
fn removing_an_instance_ends_each_of_its_sequences_once() {
    let (mut table, now) = (table(4), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    step(&mut table, 1, true, false, now).unwrap();
    step(&mut table, 2, true, false, now).unwrap();
    let other = Key { instance: 1, ..key(1) };
    let slot = admit(&mut table, &other, true, false, now).unwrap();
    settle(&mut table, 1, slot, Outcome::Advanced, false, now);
    table.retire_instance(0);
    assert_eq!((table.live(), table.counts().started, table.counts().ended, confirm(&mut table, now)), (1, 4, 3, 1));
    assert!(admit(&mut table, &other, false, false, now).is_ok());
    assert_eq!(table.incarnations.used_capacity(), 1);
}

#[test]
fn incarnations_in_different_lanes_are_separate_and_a_start_replaces_the_one_in_its_lane() {
    let now = Instant::now();
    let mut table = table_of(Policy { by_lane: true, queue_requests: 1, ..policy() }, SlotLimits::all_at_once(4));
    let lane = |lane| Key { lane: Some(lane), ..key(1) };
    let mut step = |key: &Key, start, end| {
        let slot = admit(&mut table, key, start, end, now);
        match slot {
            Ok(slot) => assert_eq!(settle(&mut table, 0, slot, Outcome::Advanced, end, now), 0),
            Err(_) => table.finish_payload(0, now),
        }
        (slot, table.live())
    };
    let first = step(&lane(0), true, false).0.unwrap();
    let second = step(&lane(1), true, false).0.unwrap();
    assert_eq!(step(&lane(1), false, false), (Ok(second), 2));
    assert_eq!(step(&lane(0), false, false), (Ok(first), 2));
    assert_eq!(step(&lane(1), false, true), (Ok(second), 1));
    assert_ne!(step(&lane(0), true, false).0, Ok(first));
    let other = Key { lane: Some(0), ..key(2) };
    assert_eq!(step(&other, false, false), (Err(Refusal::Unknown), 1), "the lane has a sequence of another id");
    assert_eq!(step(&other, true, false).1, 1, "the sequence that had the lane is over");
    assert_eq!(step(&lane(0), false, false), (Err(Refusal::Unknown), 1));
}

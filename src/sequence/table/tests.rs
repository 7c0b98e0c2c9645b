//! The table against hand-written cases. [`super::model_tests`] plays it against a simulation of core.

use super::*;
use crate::sequence::SequenceId;

type Table = Sequences<(), (), u32>;

const IDLE: Duration = Duration::from_secs(10);
const QUIET: Duration = Duration::from_millis(20);
const QUEUE: usize = 64;

fn policy() -> Policy {
    Policy {
        idle_limit: IDLE,
        dropped_after: IDLE / 2,
        quiet: QUIET,
        rest: QUIET,
        by_lane: false,
        queue_requests: QUEUE,
        has_place_for_all: false,
    }
}

fn table_of(policy: Policy, limits: SlotLimits) -> Table {
    let mut table = Sequences::new(policy, limits);
    add_slabs(&mut table, &[]);
    table
}

fn add_slabs(table: &mut Table, admissions: &[Admission]) {
    while let Some(slots) = table.slab_needed(admissions, Instant::now()).or(table.slab_due()) {
        table.add_slab((), slots);
    }
}

fn table(capacity: usize) -> Table {
    table_of(policy(), SlotLimits { reserve: 64, ..SlotLimits::all_at_once(capacity) })
}

fn key(id: u64) -> Key {
    Key { instance: 0, lane: None, id: SequenceId::Number(id) }
}

/// Admits the only request of a payload.
fn admit(table: &mut Table, key: &Key, start: bool, end: bool, now: Instant) -> Result<SlotId, Refusal> {
    let mut released = Vec::new();
    let admission = Admission { key: key.clone(), start, end };
    add_slabs(table, std::slice::from_ref(&admission));
    let admitted = table.admit(key.instance, 1, &[admission], now, &mut released).pop().unwrap();
    confirm(table, now);
    admitted.map(|admitted| admitted.slot)
}

/// Settles the request and finishes its payload. Returns how many held requests that releases.
fn settle(table: &mut Table, instance: u32, slot: SlotId, outcome: Outcome, end: bool, now: Instant) -> usize {
    let mut released = Vec::new();
    if table.settle(slot, outcome, end, now, &mut released) {
        table.hold(slot, 0, &mut released);
    }
    table.finish_payload(instance, now, &mut released);
    confirm(table, now);
    released.len()
}

/// Admits and settles one request as a payload of its own.
fn step(table: &mut Table, id: u64, start: bool, end: bool, now: Instant) -> Result<SlotId, Refusal> {
    match admit(table, &key(id), start, end, now) {
        Ok(slot) => {
            settle(table, 0, slot, Outcome::Advanced, end, now);
            Ok(slot)
        }
        Err(refusal) => {
            table.finish_payload(0, now, &mut Vec::new());
            Err(refusal)
        }
    }
}

/// What was to be released has been.
fn confirm(table: &mut Table, now: Instant) {
    let keys = table.take_releasing();
    table.have_been_released(keys, now);
}

fn tick(table: &mut Table, now: Instant) -> usize {
    let mut released = Vec::new();
    table.tick(now, &mut released);
    confirm(table, now);
    released.len()
}

/// Another sequence goes on for long enough to show that core has sent what it had before.
fn others_go_on(table: &mut Table, now: Instant) {
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
fn sequences_of_one_request_leave_nothing() {
    let (mut table, now) = (table(1), Instant::now());
    for id in 1..10 {
        step(&mut table, id, true, true, now).unwrap();
    }
    assert_eq!((table.live(), table.counts().started, table.counts().ended), (0, 9, 9));
    tick(&mut table, now + QUIET);
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
fn a_sequence_that_starts_over_takes_no_room_from_new_ones() {
    let (mut table, now) = (table(2), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    step(&mut table, 1, true, false, now).unwrap();
    assert_eq!(table.live(), 2);
    assert!(step(&mut table, 2, true, false, now).is_ok());
    assert_eq!(step(&mut table, 3, true, false, now), Err(Refusal::Full { capacity: 2 }));
}

#[test]
fn where_core_has_a_place_the_sequence_idle_for_the_longest_makes_room_once_core_has_dropped_it() {
    let limits = SlotLimits { reserve: 2, ..SlotLimits::all_at_once(2) };
    let (mut table, now) = (table_of(Policy { has_place_for_all: true, ..policy() }, limits), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    step(&mut table, 2, true, false, now + QUIET).unwrap();
    // Core may have dropped one because it was cancelled: nobody can tell which, so the reserve serves.
    step(&mut table, 3, true, false, now + QUIET * 2).unwrap();
    assert_eq!((table.live(), table.counts().expired), (3, 0));
    step(&mut table, 4, true, false, now + IDLE / 2 + QUIET / 2).unwrap();
    assert_eq!((table.live(), table.counts().expired), (3, 1));
    assert_eq!(step(&mut table, 1, false, false, now + IDLE / 2 + QUIET), Err(Refusal::Unknown));
    assert!(step(&mut table, 2, false, false, now + IDLE / 2 + QUIET).is_ok());
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
        // The client has sent a request and END ahead, and then START, which overtakes them in another place of core.
        let slot = step(&mut table, 2, true, false, now).unwrap();
        assert_eq!(step(&mut table, 2, false, false, now), Err(Refusal::Unknown), "of the refused one");
        if end_comes {
            assert_eq!(step(&mut table, 2, false, true, now), Err(Refusal::Unknown), "of the refused one");
        } else {
            assert_eq!(tick(&mut table, now + QUIET), 1, "core has no more of the refused one");
        }
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
    tick(&mut table, now + Duration::from_secs(12));
    assert_eq!(table.next_tick(now + Duration::from_secs(12)), now + Duration::from_secs(13));
    assert_eq!((table.live(), table.counts().expired), (2, 2));
    tick(&mut table, now + Duration::from_secs(100));
    assert_eq!(table.live(), 1, "the one with a request in the works stays");
}

#[test]
fn a_sequence_expires_when_everything_has_come_that_was_queued_when_its_time_was_over() {
    let (mut table, now) = (table(9), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    let later = now + IDLE;
    let other = admit(&mut table, &key(2), true, false, now).unwrap();
    tick(&mut table, later);
    assert_eq!(table.live(), 2, "its instance works, and its request may wait behind that");
    settle(&mut table, 0, other, Outcome::Advanced, false, later);
    tick(&mut table, later);
    assert_eq!(table.live(), 2);
    // What follows proves that the queue of that time has come.
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
fn silent_lanes_expire_while_others_are_busy() {
    let now = Instant::now();
    let mut table = table_of(Policy { by_lane: true, queue_requests: 1, ..policy() }, SlotLimits::all_at_once(2));
    let lane = |lane| Key { lane: Some(lane), ..key(u64::from(lane) + 1) };
    let silent = admit(&mut table, &lane(0), true, false, now).unwrap();
    settle(&mut table, 0, silent, Outcome::Advanced, false, now);
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
fn an_instance_that_goes_ends_each_of_its_sequences_once() {
    let (mut table, now) = (table(4), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    step(&mut table, 1, true, false, now).unwrap();
    step(&mut table, 2, true, false, now).unwrap();
    let other = Key { instance: 1, ..key(1) };
    let slot = admit(&mut table, &other, true, false, now).unwrap();
    settle(&mut table, 1, slot, Outcome::Advanced, false, now);
    let mut released = Vec::new();
    table.retire_instance(0, &mut released);
    assert_eq!((table.live(), table.counts().started, table.counts().ended, released.len()), (1, 4, 3, 1));
    assert!(admit(&mut table, &other, false, false, now).is_ok());
    assert_eq!((table.records.held, table.incarnations.places()), (0, 1));
}

#[test]
fn the_start_of_a_second_incarnation_is_held_until_the_first_has_ended() {
    let (mut table, now) = (table(4), Instant::now());
    let first = step(&mut table, 1, true, false, now).unwrap();
    let second = step(&mut table, 1, true, false, now).unwrap();
    assert_ne!(first, second);
    let late = admit(&mut table, &key(1), false, true, now);
    assert_eq!(late, Ok(first), "what comes while the second START is held belongs to the first");
    assert_eq!(settle(&mut table, 0, first, Outcome::Advanced, true, now), 1, "its END releases the second START");
    assert_eq!(step(&mut table, 1, false, false, now), Ok(second));
}

#[test]
fn an_end_and_the_next_start_in_one_payload_come_in_either_order() {
    for end_first in [true, false] {
        let (mut table, now) = (table(4), Instant::now());
        let first = step(&mut table, 1, true, false, now).unwrap();
        let mut both = [(false, true), (true, false)].map(|(start, end)| Admission { key: key(1), start, end });
        if !end_first {
            both.reverse();
        }
        let slots = table.admit(0, 2, &both, now, &mut Vec::new());
        let slots: Vec<_> = slots.into_iter().map(|admitted| admitted.unwrap().slot).collect();
        let (end, start) = if end_first { (slots[0], slots[1]) } else { (slots[1], slots[0]) };
        assert_eq!(end, first);
        let mut released = Vec::new();
        assert!(!table.settle(end, Outcome::Advanced, true, now, &mut released));
        assert!(!table.settle(start, Outcome::Advanced, false, now, &mut released), "it is alone");
    }
}

#[test]
fn a_sequence_that_is_started_over_ends_at_once_if_core_can_have_nothing_of_it() {
    let (mut table, now) = (table(4), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    others_go_on(&mut table, now);
    let second = admit(&mut table, &key(1), true, false, now).unwrap();
    assert_eq!(table.live(), 1);
    let mut released = Vec::new();
    assert!(!table.settle(second, Outcome::Advanced, false, now, &mut released), "its START is not held");
}

#[test]
fn a_sequence_that_is_started_over_on_a_quiet_instance_waits_for_nothing() {
    let (mut table, now) = (table(4), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    let second = admit(&mut table, &key(1), true, false, now + QUIET).unwrap();
    assert!(!table.settle(second, Outcome::Advanced, false, now + QUIET, &mut Vec::new()));
    assert_eq!(table.live(), 1);
}

#[test]
fn a_start_is_held_until_one_busy_client_goes_on() {
    let (mut table, now) = (table(4), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    others_go_on(&mut table, now);
    step(&mut table, 2, true, false, now).unwrap();
    step(&mut table, 1, false, false, now).unwrap();
    let second = step(&mut table, 1, true, false, now).unwrap();
    assert_eq!(table.live(), 3);
    step(&mut table, 2, false, false, now).unwrap();
    assert_eq!(table.live(), 3, "this one may have been queued before");
    step(&mut table, 2, false, false, now).unwrap();
    assert_eq!(table.live(), 2);
    assert_eq!(step(&mut table, 1, false, false, now), Ok(second));
}

#[test]
fn a_start_is_held_until_a_quiet_instance_has_nothing_queued() {
    let (mut table, now) = (table(4), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    let second = step(&mut table, 1, true, false, now).unwrap();
    assert!(table.is_holding());
    assert_eq!(table.next_tick(now), now + QUIET);
    assert_eq!(tick(&mut table, now + QUIET / 2), 0);
    assert_eq!(tick(&mut table, now + QUIET), 1);
    assert_eq!(step(&mut table, 1, false, false, now + QUIET), Ok(second));
}

#[test]
fn a_start_that_comes_soon_after_another_waits_for_the_quiet_time() {
    let (mut table, now) = (table(4), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    let second = step(&mut table, 1, true, false, now).unwrap();
    others_go_on(&mut table, now);
    assert_eq!(table.live(), 2, "the second START may be the older one, and the client be about to go on");
    assert_eq!(table.next_tick(now), now + QUIET);
    assert_eq!(tick(&mut table, now + QUIET), 1);
    assert_eq!(step(&mut table, 1, false, false, now + QUIET), Ok(second));
}

#[test]
fn a_start_is_held_until_as_many_others_have_come_as_core_can_queue() {
    let (mut table, now) = (table(4), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    others_go_on(&mut table, now);
    step(&mut table, 1, false, false, now).unwrap();
    let second = step(&mut table, 1, true, false, now).unwrap();
    for id in 0..QUEUE as u64 - 1 {
        assert_eq!(table.live(), 2);
        step(&mut table, 100 + id, true, true, now).unwrap();
    }
    assert_eq!(step(&mut table, 1, false, false, now), Ok(second));
}

#[test]
fn what_comes_before_a_release_proves_nothing_of_what_core_sends_then() {
    let (mut table, now) = (table(4), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    step(&mut table, 2, true, false, now).unwrap();
    // A request of the first incarnation, and the START of the second, which are settled after others have begun.
    let first = admit(&mut table, &key(1), false, false, now).unwrap();
    let second = admit(&mut table, &key(1), true, false, now).unwrap();
    admit(&mut table, &key(2), false, false, now).unwrap();
    settle(&mut table, 0, first, Outcome::Advanced, false, now);
    assert_eq!(table.live(), 3);
    assert_eq!(admit(&mut table, &key(1), false, true, now), Ok(first), "core had it");
    settle(&mut table, 0, second, Outcome::Advanced, false, now);
    assert!(table.is_holding());
}

#[test]
fn a_held_start_does_not_expire_and_has_its_whole_time_when_it_is_released() {
    let (mut table, now) = (table(4), Instant::now());
    let first = step(&mut table, 1, true, false, now).unwrap();
    let second = step(&mut table, 1, true, false, now).unwrap();
    // The first one has a long backlog.
    let mut released = 0;
    for seconds in 1..15 {
        let later = now + Duration::from_secs(seconds);
        assert_eq!(admit(&mut table, &key(1), false, seconds == 14, later), Ok(first));
        released += settle(&mut table, 0, first, Outcome::Advanced, seconds == 14, later);
        // No quiet tick: core has the next request at hand.
    }
    assert_eq!(released, 1, "the END of the first releases the second START");
    let later = now + Duration::from_secs(14) + IDLE - QUIET;
    tick(&mut table, later);
    assert_eq!(step(&mut table, 1, false, false, later), Ok(second));
    tick(&mut table, later + IDLE);
    assert_eq!((table.live(), table.counts().expired), (0, 1));
}

#[test]
fn what_a_sequence_of_one_request_has_started_over_ends_when_core_can_have_nothing_of_it() {
    let (mut table, now) = (table(2), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    step(&mut table, 1, true, true, now).unwrap();
    assert_eq!(table.live(), 1, "its END may be in the queue");
    tick(&mut table, now + QUIET);
    assert_eq!(table.live(), 0);
}

#[test]
fn a_restart_that_fails_does_not_bring_the_old_state_back() {
    let (mut table, now) = (table(4), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    let failed = admit(&mut table, &key(1), true, false, now).unwrap();
    settle(&mut table, 0, failed, Outcome::Failed, false, now);
    assert!(table.is_holding(), "the first may have more to come");
    assert_eq!(tick(&mut table, now + QUIET), 1);
    assert_eq!(step(&mut table, 1, false, false, now), Err(Refusal::Unknown));
    assert_eq!(step(&mut table, 1, false, true, now), Err(Refusal::Unknown));
    assert!(step(&mut table, 1, true, false, now).is_ok());
    assert!(step(&mut table, 1, false, false, now).is_ok());
}

#[test]
fn a_start_soon_after_an_end_and_a_start_gets_its_turn_when_the_first_is_ended_or_rests() {
    for end_comes in [true, false] {
        let (mut table, now) = (table(4), Instant::now());
        step(&mut table, 1, true, true, now).unwrap();
        let first = step(&mut table, 1, true, false, now).unwrap();
        let second = step(&mut table, 1, true, false, now).unwrap();
        assert_eq!(step(&mut table, 1, false, end_comes, now), Ok(first));
        assert_eq!(tick(&mut table, now + QUIET), usize::from(!end_comes));
        assert_eq!(step(&mut table, 1, false, true, now), Ok(second));
        assert_eq!(table.live(), 0);
    }
}

#[test]
fn a_start_that_may_have_waited_behind_an_earlier_incarnation_does_not_displace_the_one_in_front() {
    let (mut table, now) = (table(4), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    others_go_on(&mut table, now);
    step(&mut table, 1, false, false, now).unwrap();
    let second = step(&mut table, 1, true, false, now).unwrap();
    assert!(table.is_holding());
    step(&mut table, 2, true, false, now).unwrap();
    step(&mut table, 1, false, false, now).unwrap();
    step(&mut table, 2, false, false, now).unwrap();
    // The request that proves the first to be over comes with a START that can have waited behind the first.
    let admission = |id, start| Admission { key: key(id), start, end: false };
    let mut released = Vec::new();
    let admitted = table.admit(0, 2, &[admission(2, false), admission(1, true)], now, &mut released);
    assert_eq!(released.len(), 1, "the second START is released");
    confirm(&mut table, now);
    for admitted in admitted {
        let slot = admitted.unwrap().slot;
        if table.settle(slot, Outcome::Advanced, false, now, &mut released) {
            table.hold(slot, 0, &mut released);
        }
    }
    table.finish_payload(0, now, &mut released);
    others_go_on(&mut table, now);
    assert_eq!(step(&mut table, 1, false, true, now), Ok(second), "its client is about to go on");
}

#[test]
fn two_incarnations_that_have_requests_at_once_both_end() {
    let (mut table, now) = (table(4), Instant::now());
    let first = step(&mut table, 1, true, false, now).unwrap();
    step(&mut table, 1, true, false, now).unwrap();
    assert_eq!(admit(&mut table, &key(1), false, false, now), Ok(first));
    assert_eq!(admit(&mut table, &key(1), false, false, now), Err(Refusal::Unknown));
    settle(&mut table, 0, first, Outcome::Advanced, false, now);
    table.finish_payload(0, now, &mut Vec::new());
    assert_eq!(step(&mut table, 1, false, true, now), Err(Refusal::Unknown));
    tick(&mut table, now + QUIET);
    tick(&mut table, now + QUIET * 2);
    assert_eq!((table.live(), table.is_holding()), (0, false));
    step(&mut table, 1, true, false, now + QUIET * 2).unwrap();
    step(&mut table, 1, false, true, now + QUIET * 2).unwrap();
}

#[test]
fn where_a_start_that_was_to_be_held_has_been_released_nobody_gets_the_wrong_state() {
    let (mut table, now) = (table(4), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    let second = admit(&mut table, &key(1), true, false, now).unwrap();
    let mut released = Vec::new();
    assert!(table.settle(second, Outcome::Failed, false, now, &mut released));
    table.release_unheld(second, &mut released);
    confirm(&mut table, now);
    table.finish_payload(0, now, &mut released);
    assert_eq!(step(&mut table, 1, false, false, now), Err(Refusal::Unknown));
    assert_eq!(step(&mut table, 1, false, true, now), Err(Refusal::Unknown));
    assert_eq!(table.live(), 0, "nothing is left of them");
    tick(&mut table, now + QUIET);
    step(&mut table, 1, true, false, now).unwrap();
    step(&mut table, 1, false, true, now).unwrap();
}

#[test]
fn incarnations_in_different_lanes_never_meet_and_a_start_in_its_own_lane_starts_over() {
    let now = Instant::now();
    let mut table = table_of(Policy { by_lane: true, queue_requests: 1, ..policy() }, SlotLimits::all_at_once(4));
    let lane = |lane| Key { lane: Some(lane), ..key(1) };
    let mut step = |key: &Key, start, end| {
        let slot = admit(&mut table, key, start, end, now);
        match slot {
            Ok(slot) => assert_eq!(settle(&mut table, 0, slot, Outcome::Advanced, end, now), 0),
            Err(_) => table.finish_payload(0, now, &mut Vec::new()),
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
    assert_eq!(step(&other, false, false), (Err(Refusal::Unknown), 1), "the lane is another's");
    assert_eq!(step(&other, true, false).1, 1, "whoever had the lane is over");
    assert_eq!(step(&lane(0), false, false), (Err(Refusal::Unknown), 1));
}

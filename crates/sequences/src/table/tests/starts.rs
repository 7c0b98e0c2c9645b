//! A START of an id that has a live sequence: when it is held, and which sequence ends.

use super::*;

#[test]
fn the_start_of_a_second_incarnation_is_held_until_the_first_has_ended() {
    let (mut table, now) = (table(4), Instant::now());
    let first = step(&mut table, 1, true, false, now).unwrap();
    let second = step(&mut table, 1, true, false, now).unwrap();
    assert_ne!(first, second);
    let late = admit(&mut table, &key(1), false, true, now);
    assert_eq!(late, Ok(first), "while the second START is held, requests belong to the first incarnation");
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
        let slots = admit_all(&mut table, &both, now);
        let slots: Vec<_> = slots.into_iter().map(Result::unwrap).collect();
        let (end, start) = if end_first { (slots[0], slots[1]) } else { (slots[1], slots[0]) };
        assert_eq!(end, first);
        assert!(!table.settle(end, Outcome::Advanced, true, now));
        assert!(!table.settle(start, Outcome::Advanced, false, now), "the first incarnation has ended");
    }
}

#[test]
fn a_sequence_that_is_started_over_ends_at_once_if_core_has_no_request_of_it() {
    let (mut table, now) = (table(4), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    step_another(&mut table, now);
    let second = admit(&mut table, &key(1), true, false, now).unwrap();
    assert_eq!(table.live(), 1);
    assert!(!table.settle(second, Outcome::Advanced, false, now), "its START is not held");
}

#[test]
fn a_sequence_that_is_started_over_on_an_idle_instance_ends_at_once() {
    let (mut table, now) = (table(4), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    step_another(&mut table, now);
    step(&mut table, 1, false, false, now).unwrap();
    step(&mut table, 1, true, false, now).unwrap();
    assert_eq!((pause(&mut table, now), table.live()), (1, 1));
    let third = admit(&mut table, &key(1), true, false, now + QUIET).unwrap();
    assert!(table.settle(third, Outcome::Advanced, false, now + QUIET), "the second one was released");
}

#[test]
fn a_start_is_held_until_requests_of_another_sequence_prove_that_the_first_is_over() {
    let (mut table, now) = (table(4), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    step_another(&mut table, now);
    step(&mut table, 2, true, false, now).unwrap();
    step(&mut table, 1, false, false, now).unwrap();
    let second = step(&mut table, 1, true, false, now).unwrap();
    assert_eq!(table.live(), 3);
    step(&mut table, 2, false, false, now).unwrap();
    assert_eq!(
        table.live(),
        3,
        "core may have queued this request before the last one of the first incarnation was released"
    );
    step(&mut table, 2, false, false, now).unwrap();
    assert_eq!(table.live(), 2);
    assert_eq!(step(&mut table, 1, false, false, now), Ok(second));
}

#[test]
fn a_start_is_held_until_its_instance_has_been_idle_for_one_uninterrupted_pause() {
    let (mut table, now) = (table(4), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    step_another(&mut table, now);
    let first = step(&mut table, 1, false, false, now).unwrap();
    let second = step(&mut table, 1, true, false, now).unwrap();
    let mut now = now;
    for id in 100..200 {
        assert_eq!(table.next_tick(0, now), Some(now + QUIET / LOOKS));
        assert_eq!(tick(&mut table, now + QUIET * 50), 0, "a stop of the whole process is no pause");
        now += QUIET * 50;
        step(&mut table, id, true, true, now).unwrap();
        if id == 130 {
            assert_eq!(step(&mut table, 1, false, false, now), Ok(first));
            break;
        }
    }
    assert_eq!(pause(&mut table, now), 1);
    assert_eq!(step(&mut table, 1, false, false, now + QUIET), Ok(second));
}

#[test]
fn two_starts_whose_order_cannot_be_known_end_both_sequences() {
    for proof in ["requests", "pause"] {
        let (mut table, now) = (table(4), Instant::now());
        step(&mut table, 7, true, true, now).unwrap();
        step(&mut table, 1, true, false, now).unwrap();
        // Core may have kept this START behind the END of sequence 7.
        step(&mut table, 1, true, false, now).unwrap();
        if proof == "requests" {
            step_another(&mut table, now);
        } else {
            assert_eq!(pause(&mut table, now), 1);
        }
        assert_eq!(table.live(), 0, "the second START may be the older one, and the client may continue the first");
        assert_eq!(step(&mut table, 1, false, false, now), Err(Refusal::Ambiguous));
        // This START may be older than both: core may have delayed it behind one of their requests.
        assert_eq!(step(&mut table, 1, true, false, now), Err(Refusal::Ambiguous));
        assert_eq!(step(&mut table, 1, false, false, now), Err(Refusal::Ambiguous), "it follows this START");
        pause(&mut table, now);
        assert_eq!(step(&mut table, 1, false, false, now), Err(Refusal::Unknown));
        let next = step(&mut table, 1, true, false, now).unwrap();
        pause(&mut table, now);
        assert_eq!(step(&mut table, 1, false, false, now), Ok(next));
    }
}

#[test]
fn a_sequence_goes_on_for_ever_after_a_start_of_its_id_that_came_soon_and_has_ended() {
    let (mut table, now) = (table(4), Instant::now());
    let first = step(&mut table, 1, true, false, now).unwrap();
    step(&mut table, 1, true, true, now).unwrap();
    for request in 0..600 {
        let now = now + QUIET * 2 * request;
        assert_eq!(step(&mut table, 1, false, false, now), Ok(first));
        pause(&mut table, now);
    }
    assert_eq!(table.live(), 1);
}

#[test]
fn what_a_lost_payload_had_may_follow_any_sequence() {
    let (mut table, now) = (table(4), Instant::now());
    let first = step(&mut table, 1, true, false, now).unwrap();
    step_another(&mut table, now);
    // A panic takes a request of the first sequence before the table hears of it, and core sends its END.
    table.begin_payload(0, now);
    table.finish_payload(0, now);
    let second = step(&mut table, 1, true, false, now).unwrap();
    assert_eq!(step(&mut table, 1, false, true, now), Ok(first));
    assert_eq!(step(&mut table, 1, false, false, now), Ok(second));
}

#[test]
fn the_late_confirmation_of_a_release_is_not_taken_for_that_of_another_one() {
    let (mut table, now) = (table(4), Instant::now());
    let first = step(&mut table, 1, true, false, now).unwrap();
    let second = step(&mut table, 1, true, false, now).unwrap();
    let third = step(&mut table, 1, true, false, now).unwrap();
    let end = |table: &mut Table, slot| {
        let admission = Admission { key: key(1), start: false, end: true };
        assert_eq!(admit_all(table, &[admission], now), [Ok(slot)]);
        assert!(!table.settle(slot, Outcome::Advanced, true, now));
        table.finish_payload(0, now);
        table.take_released().into_iter().map(|(_, sequence)| sequence).collect::<Vec<_>>()
    };
    let of_second = end(&mut table, first);
    let of_third = end(&mut table, second);
    assert_eq!((of_second[0].1, of_third[0].1, of_second.len() + of_third.len()), (second, third, 2));
    table.have_been_released(of_second, now);
    assert!(!table.records.has_nothing_queued(third), "its START is still being released");
    table.have_been_released(of_third, now);
    pause(&mut table, now);
    assert!(table.records.has_nothing_queued(third));
}

#[test]
fn a_start_is_held_until_as_many_requests_have_come_as_core_queues() {
    let (mut table, now) = (table(4), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    step_another(&mut table, now);
    step(&mut table, 1, false, false, now).unwrap();
    let second = step(&mut table, 1, true, false, now).unwrap();
    for id in 0..QUEUE as u64 - 1 {
        assert_eq!(table.live(), 2);
        step(&mut table, 100 + id, true, true, now).unwrap();
    }
    assert_eq!(step(&mut table, 1, false, false, now), Ok(second));
}

#[test]
fn requests_that_come_before_a_release_prove_nothing_about_requests_that_follow_it() {
    let (mut table, now) = (table(4), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    step(&mut table, 2, true, false, now).unwrap();
    // A request of the first incarnation and the START of the second are settled after later payloads have begun.
    let first = admit(&mut table, &key(1), false, false, now).unwrap();
    let second = admit(&mut table, &key(1), true, false, now).unwrap();
    admit(&mut table, &key(2), false, false, now).unwrap();
    settle(&mut table, 0, first, Outcome::Advanced, false, now);
    assert_eq!(table.live(), 3);
    assert_eq!(admit(&mut table, &key(1), false, true, now), Ok(first), "core had this request");
    assert_eq!(settle(&mut table, 0, second, Outcome::Advanced, false, now), 0, "it is held");
    assert_eq!(settle(&mut table, 0, first, Outcome::Advanced, true, now), 1);
}

#[test]
fn the_idle_time_of_a_held_start_begins_when_it_is_released() {
    let (mut table, now) = (table(4), Instant::now());
    let first = step(&mut table, 1, true, false, now).unwrap();
    let second = step(&mut table, 1, true, false, now).unwrap();
    // Core has many requests of the first incarnation.
    let mut released = 0;
    for seconds in 1..15 {
        let later = now + Duration::from_secs(seconds);
        assert_eq!(admit(&mut table, &key(1), false, seconds == 14, later), Ok(first));
        released += settle(&mut table, 0, first, Outcome::Advanced, seconds == 14, later);
        // No tick here: core sends the next request at once.
    }
    assert_eq!(released, 1, "the END of the first incarnation releases the second START");
    let later = now + Duration::from_secs(14) + IDLE - QUIET;
    tick(&mut table, later);
    assert_eq!(step(&mut table, 1, false, false, later), Ok(second));
    pause(&mut table, later + IDLE);
    assert_eq!((table.live(), table.counts().expired), (0, 1));
}

#[test]
fn a_sequence_that_a_sequence_of_one_request_starts_over_ends_with_the_next_start_or_when_it_is_idle() {
    for starts_again in [true, false] {
        let (mut table, now) = (table(2), Instant::now());
        step(&mut table, 1, true, false, now).unwrap();
        step(&mut table, 1, true, true, now).unwrap();
        pause(&mut table, now);
        assert_eq!(table.live(), 1, "nothing tells which of the two STARTs is older");
        if starts_again {
            let slot = step(&mut table, 1, true, false, now + QUIET).unwrap();
            assert_eq!((step(&mut table, 1, false, false, now + QUIET), table.live()), (Ok(slot), 1));
        } else {
            pause(&mut table, now + IDLE);
            assert_eq!((table.live(), table.counts().expired), (0, 1));
        }
    }
}

#[test]
fn a_restart_that_fails_does_not_bring_the_old_state_back() {
    for is_newer in [true, false] {
        let (mut table, now) = (table(4), Instant::now());
        step(&mut table, 1, true, false, now).unwrap();
        if is_newer {
            step_another(&mut table, now);
            step(&mut table, 1, false, false, now).unwrap();
        }
        let failed = admit(&mut table, &key(1), true, false, now).unwrap();
        let released = settle(&mut table, 0, failed, Outcome::Failed, false, now);
        assert_eq!(released, 0, "core may have requests of the first incarnation");
        assert_eq!(pause(&mut table, now), 1);
        assert_eq!(step(&mut table, 1, false, false, now), Err(Refusal::Unknown));
        assert_eq!(step(&mut table, 1, false, true, now), Err(Refusal::Unknown));
        pause(&mut table, now);
        let slot = step(&mut table, 1, true, false, now).unwrap();
        pause(&mut table, now);
        assert_eq!((step(&mut table, 1, false, false, now), table.live()), (Ok(slot), 1));
    }
}

#[test]
fn a_start_that_core_may_have_delayed_behind_one_that_failed_ends_too() {
    let (mut table, now) = (table(4), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    pause(&mut table, now);
    step(&mut table, 1, false, false, now).unwrap();
    let failed = admit(&mut table, &key(1), true, false, now).unwrap();
    settle(&mut table, 0, failed, Outcome::Failed, false, now);
    // The client may have sent this START, and its END, before the one that failed, and go on with that one.
    step(&mut table, 1, true, false, now).unwrap();
    step_another(&mut table, now);
    assert_eq!(table.live(), 0);
    assert_eq!(step(&mut table, 1, false, false, now), Err(Refusal::Ambiguous));
}

#[test]
fn a_start_that_comes_soon_after_another_is_released_when_the_other_sequence_ends() {
    let (mut table, now) = (table(4), Instant::now());
    step(&mut table, 1, true, true, now).unwrap();
    let first = step(&mut table, 1, true, false, now).unwrap();
    let second = step(&mut table, 1, true, false, now).unwrap();
    assert_eq!(step(&mut table, 1, false, true, now), Ok(first));
    assert_eq!(step(&mut table, 1, false, true, now), Ok(second));
    assert_eq!(table.live(), 0);
}

#[test]
fn a_sequence_that_goes_on_after_another_start_and_then_rests_ends_with_the_other_one() {
    let (mut table, now) = (table(4), Instant::now());
    step(&mut table, 1, true, true, now).unwrap();
    let first = step(&mut table, 1, true, false, now).unwrap();
    step(&mut table, 1, true, false, now).unwrap();
    assert_eq!(step(&mut table, 1, false, false, now), Ok(first), "so core has requests of both");
    assert_eq!(pause(&mut table, now), 1);
    assert_eq!(step(&mut table, 1, false, false, now), Err(Refusal::Ambiguous));
    pause(&mut table, now);
    assert!(step(&mut table, 1, true, false, now).is_ok());
}

#[test]
fn a_start_that_comes_beside_a_request_of_the_front_incarnation_may_end_both() {
    let (mut table, now) = (table(4), Instant::now());
    step(&mut table, 1, true, true, now).unwrap();
    let first = step(&mut table, 1, true, false, now).unwrap();
    let admission = |start| Admission { key: key(1), start, end: false };
    let admitted = admit_all(&mut table, &[admission(true), admission(false)], now);
    let [Ok(second), Ok(of_first)] = admitted[..] else { panic!("{admitted:?}") };
    assert_eq!(of_first, first);
    assert!(table.settle(second, Outcome::Advanced, false, now));
    table.hold(second, 0);
    settle(&mut table, 0, first, Outcome::Advanced, false, now);
    assert_eq!(pause(&mut table, now), 1);
    assert_eq!(step(&mut table, 1, false, false, now), Err(Refusal::Ambiguous));
}

#[test]
fn starts_that_need_more_slots_than_there_are_get_a_slab_of_the_reserve() {
    let limits = SlotLimits { reserve: 4, ..SlotLimits::all_at_once(1) };
    let (mut table, now) = (table_of(policy(), limits), Instant::now());
    // Both are of one id: the second follows the first, which is not there yet when the payload arrives.
    let start = Admission { key: key(1), start: true, end: false };
    let slots = admit_all(&mut table, &[start.clone(), start], now);
    assert!(slots.iter().all(Result::is_ok), "{slots:?}");

    let policy = Policy { has_place_for_all: true, ..policy() };
    let mut table = table_of(policy, limits);
    step(&mut table, 1, true, false, now).unwrap();
    // The sequence could be dropped to make room, but its next request is in the same payload.
    let later = now + IDLE / 2;
    let both = [(1, false), (2, true)].map(|(id, start)| Admission { key: key(id), start, end: false });
    let slots = admit_all(&mut table, &both, later);
    assert!(slots.iter().all(Result::is_ok), "{slots:?}");
}

#[test]
fn without_memory_for_a_slab_a_start_is_refused_and_the_others_of_its_payload_go_on() {
    let limits = SlotLimits { reserve: 4, ..SlotLimits::all_at_once(1) };
    let (mut table, now) = (table_of(Policy { has_place_for_all: true, ..policy() }, limits), Instant::now());
    let first = step(&mut table, 1, true, false, now).unwrap();
    let both = [(1, false), (2, true)].map(|(id, start)| Admission { key: key(id), start, end: false });
    table.begin_payload(0, now);
    let shortage = table.prepare(0, &both, now);
    assert_eq!(shortage, Some(Shortage { slab_slots: 1, wanted: 1 }));
    let admitted = table.admit(0, &both, now);
    let slots: Vec<_> = admitted.into_iter().map(|admitted| Ok(admitted?.slot)).collect();
    assert_eq!(slots, [Ok(first), Err(Refusal::Memory(()))]);
}

#[test]
fn two_incarnations_that_have_requests_at_once_both_end() {
    let (mut table, now) = (table(4), Instant::now());
    let first = step(&mut table, 1, true, false, now).unwrap();
    step(&mut table, 1, true, false, now).unwrap();
    assert_eq!(admit(&mut table, &key(1), false, false, now), Ok(first));
    assert_eq!(admit(&mut table, &key(1), false, false, now), Err(Refusal::Ambiguous));
    settle(&mut table, 0, first, Outcome::Advanced, false, now);
    table.finish_payload(0, now);
    assert_eq!(step(&mut table, 1, false, true, now), Err(Refusal::Ambiguous));
    pause(&mut table, now);
    pause(&mut table, now + QUIET);
    assert_eq!((table.live(), table.incarnations.known()), (0, (0, 0)));
    step(&mut table, 1, true, false, now + QUIET * 2).unwrap();
    step(&mut table, 1, false, true, now + QUIET * 2).unwrap();
}

#[test]
fn after_the_release_of_a_start_that_should_have_been_held_no_request_gets_a_state() {
    let (mut table, now) = (table(4), Instant::now());
    step(&mut table, 1, true, false, now).unwrap();
    let second = admit(&mut table, &key(1), true, false, now).unwrap();
    assert!(table.settle(second, Outcome::Failed, false, now));
    table.release_unheld(second);
    confirm(&mut table, now);
    table.finish_payload(0, now);
    assert_eq!(step(&mut table, 1, false, false, now), Err(Refusal::Ambiguous));
    assert_eq!(step(&mut table, 1, false, true, now), Err(Refusal::Ambiguous));
    assert_eq!(table.live(), 0, "both incarnations are over");
    pause(&mut table, now);
    step(&mut table, 1, true, false, now).unwrap();
    step(&mut table, 1, false, true, now).unwrap();
}

//! Sequences that are not here, and may be in a store.

use super::*;

/// A bench whose scheduler looks for sequences in a store.
fn bench_with_store(rules: Rules) -> Bench {
    Bench::new(Rules { looks_up: true, ..rules })
}

#[test]
fn a_sequence_that_is_not_here_is_looked_for_and_its_requests_wait() {
    let mut bench = bench_with_store(rules());
    bench.send(7, "", 1).unwrap();
    bench.send(7, "", 2).unwrap();
    bench.send(8, "S", 3).unwrap();
    let lookups = bench.scheduler.take_lookups();
    let [Lookup { lane, id: ref of, starts: false }] = lookups[..] else { panic!("{lookups:?}") };
    assert_eq!(*of, id(7));
    assert!(bench.scheduler.take_lookups().is_empty());
    // Others run meanwhile.
    assert_eq!(bench.run(Outcome::Advanced), [3]);
    let mut wake = Vec::new();
    for _ in 0..2 {
        assert_eq!(bench.scheduler.found(lane, bench.now, &mut wake), []);
        assert_eq!(wake, [0]);
    }
    // It has a state before its first request, so a failure leaves it.
    assert_eq!(bench.run(Outcome::Failed), [1]);
    assert_eq!(bench.run(Outcome::Advanced), [2]);
    assert_eq!(bench.scheduler.live(), 2);
}

#[test]
fn the_requests_of_a_sequence_that_is_not_found_are_refused_and_its_place_is_free() {
    let mut bench = bench_with_store(Rules { max_sequences: 1, max_waiting: 1, ..rules() });
    bench.send(7, "", 1).unwrap();
    bench.send(7, "E", 2).unwrap();
    bench.send(8, "", 3).unwrap();
    assert_eq!(bench.send(9, "", 4), Err(Refused::QueueFull { id: Some(id(9)), max: 1, idle: IdleRule::Never }));
    let lane = bench.scheduler.take_lookups().remove(0).lane;
    let refused = bench.scheduler.not_found(lane, bench.now, &mut Vec::new());
    assert_eq!(refused, [(1, Refused::Missing(id(7))), (2, Refused::Missing(id(7)))]);
    // The next one got its place.
    assert_eq!(bench.scheduler.take_lookups().len(), 1);
    assert_eq!(bench.scheduler.live(), 1);
}

#[test]
fn requests_behind_an_end_are_behind_it_until_it_has_run() {
    let mut bench = bench_with_store(rules());
    bench.send(7, "S", 1).unwrap();
    assert_eq!(bench.run(Outcome::Advanced), [1]);
    bench.send(7, "E", 2).unwrap();
    bench.send(7, "E", 3).unwrap();
    bench.send(7, "", 4).unwrap();
    let lanes: Vec<_> = bench.scheduler.take_lookups().into_iter().map(|of| of.lane).collect();
    let behind = |bench: &Bench| lanes.iter().map(|&lane| bench.scheduler.is_behind_an_end(lane)).collect::<Vec<_>>();
    assert_eq!(behind(&bench), [true, true]);
    assert_eq!(bench.run(Outcome::Advanced), [2]);
    assert_eq!(behind(&bench), [false, true]);
    bench.scheduler.not_found(lanes[0], bench.now, &mut Vec::new());
    assert_eq!(behind(&bench), [false, false]);
    bench.scheduler.not_found(lanes[1], bench.now, &mut Vec::new());
    assert_eq!(bench.scheduler.live(), 0);
}

#[test]
fn what_is_found_after_a_start_with_the_id_is_not_taken_for_the_older_sequence() {
    for (first, on_duplicate_start) in [("", OnDuplicateStart::Restart), ("E", OnDuplicateStart::Reject)] {
        let mut bench = bench_with_store(Rules { on_duplicate_start, ..rules() });
        bench.send(7, first, 1).unwrap();
        let lane = bench.scheduler.take_lookups().remove(0).lane;
        bench.send(7, "S", 2).unwrap();
        assert_eq!(bench.run(Outcome::Advanced), [2]);
        let refused = bench.scheduler.found(lane, bench.now, &mut Vec::new());
        assert_eq!(refused, [(1, Refused::Missing(id(7)))]);
        bench.send(7, "", 3).unwrap();
        assert_eq!(bench.run(Outcome::Advanced), [3]);
        assert_eq!(bench.scheduler.live(), 1);
    }
}

#[test]
fn a_sequence_that_waits_for_its_place_for_too_long_is_not_looked_for() {
    let mut bench = bench_with_store(Rules { max_sequences: 1, max_waiting: 1, ..rules() });
    bench.send(8, "S", 1).unwrap();
    bench.send(7, "", 2).unwrap();
    bench.now += 10 * SECOND;
    assert_eq!(bench.scheduler.scan(bench.now, &mut Vec::new()), [(2, Refused::Late(id(7)))]);
    assert!(bench.scheduler.take_lookups().is_empty());
    assert_eq!(bench.scheduler.waiting(), 0);
}

#[test]
fn the_rows_of_a_request_may_name_sequences_that_are_not_here() {
    let bench = bench_with_store(Rules { max_sequences: 1, ..rules() });
    let control = |number| Control { id: Some(id(number)), start: false, end: false, origin: Origin::Own };
    assert_eq!(bench.scheduler.check(&[&control(7)]), Ok(()));
    assert!(bench.scheduler.check(&[&control(7), &control(8)]).is_err());
    assert_eq!(Bench::new(rules()).scheduler.check(&[&control(7)]), Err((0, Refused::Missing(id(7)))));
}

#[test]
fn a_start_waits_until_it_is_entered_in_the_store() {
    let mut bench = bench_with_store(Rules { enters_starts: true, ..rules() });
    bench.send(7, "S", 1).unwrap();
    bench.send(7, "", 2).unwrap();
    let lookup = bench.scheduler.take_lookups().remove(0);
    assert_eq!((lookup.id, lookup.starts), (id(7), true));
    assert_eq!(bench.run(Outcome::Advanced), []);
    let mut wake = Vec::new();
    for _ in 0..2 {
        bench.scheduler.entered(lookup.lane, &mut wake);
        assert_eq!(wake, [0]);
    }
    assert_eq!(bench.run(Outcome::Advanced), [1]);
    assert_eq!(bench.run(Outcome::Advanced), [2]);
    // A START that fails leaves no sequence.
    bench.send(8, "S", 3).unwrap();
    let lane = bench.scheduler.take_lookups().remove(0).lane;
    bench.scheduler.entered(lane, &mut wake);
    assert_eq!(bench.run(Outcome::Failed), [3]);
    assert_eq!(bench.scheduler.live(), 1);
}

#[test]
fn a_start_that_replaces_one_that_is_being_entered_is_entered_after_it() {
    let rules = Rules { enters_starts: true, on_duplicate_start: OnDuplicateStart::Restart, ..rules() };
    let mut bench = bench_with_store(rules);
    bench.send(7, "S", 1).unwrap();
    bench.send(7, "S", 2).unwrap();
    let lookups = bench.scheduler.take_lookups();
    assert!(lookups.iter().all(|lookup| lookup.starts) && lookups[0].lane < lookups[1].lane);
    lookups.iter().for_each(|lookup| bench.scheduler.entered(lookup.lane, &mut Vec::new()));
    assert_eq!(bench.run(Outcome::Advanced), [1, 2]);
    assert_eq!(bench.scheduler.live(), 1);
}

#[test]
fn a_sequence_that_is_released_leaves_when_its_request_has_run() {
    let mut bench = bench_with_store(Rules { max_sequences: 2, ..rules() });
    let over = |lane| vec![Over { lane, why: OverBy::Released }];
    bench.send(7, "S", 1).unwrap();
    let mut wake = Vec::new();
    // It has no state yet, so it can't leave.
    assert_eq!(bench.scheduler.release(0, bench.now, &mut wake), []);
    let running = bench.take();
    bench.send(7, "", 2).unwrap();
    assert_eq!(bench.scheduler.release(0, bench.now, &mut wake), []);
    bench.finish(&running, Outcome::Advanced);
    // Its next request waits for the worker.
    assert_eq!(bench.scheduler.release(0, bench.now, &mut wake), [(2, Refused::Moved(id(7)))]);
    assert_eq!((wake, bench.scheduler.live(), bench.scheduler.queued()), (vec![0], 0, 0));
    assert_eq!(bench.scheduler.take(0, 8).over, over(0));

    bench.send(8, "S", 3).unwrap();
    bench.run(Outcome::Advanced);
    bench.send(8, "", 4).unwrap();
    let running = bench.take();
    bench.send(8, "", 5).unwrap();
    assert_eq!(bench.scheduler.release(1, bench.now, &mut Vec::new()), [(5, Refused::Moved(id(8)))]);
    assert_eq!(bench.send(8, "", 6), Err(Refused::Moved(id(8))));
    assert!(bench.scheduler.take(0, 8).over.is_empty());
    bench.finish(&running, Outcome::Advanced);
    assert_eq!(bench.scheduler.take(0, 8).over, over(1));
    // It is looked for again.
    bench.send(8, "", 7).unwrap();
    assert_eq!(bench.scheduler.take_lookups().len(), 1);
}

#[test]
fn a_sequence_that_ends_is_not_released() {
    let mut bench = bench_with_store(rules());
    bench.send(7, "S", 1).unwrap();
    bench.run(Outcome::Advanced);
    bench.send(7, "E", 2).unwrap();
    assert_eq!(bench.scheduler.release(0, bench.now, &mut Vec::new()), []);
    assert_eq!(bench.run(Outcome::Advanced), [2]);
    assert_eq!(bench.scheduler.release(0, bench.now, &mut Vec::new()), []);
}

#[test]
fn a_request_of_several_steps_makes_all_of_them_before_its_sequence_leaves() {
    let mut bench = bench_with_store(rules());
    bench.send(7, "S", 1).unwrap();
    bench.run(Outcome::Advanced);
    bench.send(7, "", 2).unwrap();
    bench.take();
    bench.scheduler.put_back([(0, 2)].into_iter());
    bench.send(7, "", 3).unwrap();
    assert_eq!(bench.scheduler.release(0, bench.now, &mut Vec::new()), [(3, Refused::Moved(id(7)))]);
    assert!(bench.scheduler.take(0, 0).over.is_empty());
    assert_eq!(bench.run(Outcome::Advanced), [2]);
    assert_eq!(bench.scheduler.take(0, 8).over, [Over { lane: 0, why: OverBy::Released }]);
}

#[test]
fn all_sequences_leave_a_scheduler_that_is_drained() {
    let mut bench = bench_with_store(Rules { max_sequences: 4, max_waiting: 4, ..rules() });
    let mut wake = Vec::new();
    for number in [7, 8] {
        bench.send(number, "S", 1).unwrap();
    }
    bench.run(Outcome::Advanced);
    // One is idle, one has a request that runs and one that waits, one begins, one is looked for, and one waits for a
    // place.
    bench.send(8, "", 2).unwrap();
    bench.send(9, "S", 3).unwrap();
    let running = bench.take();
    bench.send(8, "", 4).unwrap();
    bench.send(10, "", 5).unwrap();
    bench.send(11, "S", 6).unwrap();
    assert_eq!(bench.scheduler.waiting(), 1);
    let mut refused = bench.scheduler.drain(bench.now, &mut wake);
    refused.sort_by_key(|(request, _)| *request);
    assert_eq!(refused, [(4, Refused::Moved(id(8))), (6, Refused::Drains)]);
    assert_eq!(bench.scheduler.take(0, 8).over, [Over { lane: 0, why: OverBy::Released }]);
    assert_eq!(bench.send(7, "", 7), Err(Refused::Drains));
    assert_eq!(bench.send(12, "S", 8), Err(Refused::Drains));
    assert_eq!(bench.send(9, "", 9), Err(Refused::Moved(id(9))));
    bench.finish(&running, Outcome::Advanced);
    let over: Vec<_> = bench.scheduler.take(0, 8).over.iter().map(|over| (over.lane, over.why)).collect();
    assert_eq!(over, [(1, OverBy::Released), (2, OverBy::Released)]);
    // What was being looked for is taken, makes its step, and leaves.
    let lane = bench.scheduler.take_lookups().remove(0).lane;
    assert_eq!(bench.scheduler.found(lane, bench.now, &mut wake), []);
    assert_eq!(bench.run(Outcome::Advanced), [5]);
    assert_eq!(bench.scheduler.take(0, 8).over, [Over { lane, why: OverBy::Released }]);
    assert_eq!(bench.scheduler.live(), 0);
    assert_eq!(bench.scheduler.drain(bench.now, &mut wake), []);
}

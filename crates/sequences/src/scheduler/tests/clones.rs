//! Sequences that begin with the state of another one.

use super::*;

#[test]
fn a_clone_waits_for_the_last_step_of_its_source() {
    let mut bench = Bench::new(rules());
    bench.send(1, "S", 10).unwrap();
    let long = bench.take();
    bench.clone(1, 2, 20).unwrap();
    bench.send(1, "", 11).unwrap();
    bench.scheduler.put_back(long.clone().into_iter());
    assert_eq!(bench.run(Outcome::Advanced), [10]);
    assert_eq!(bench.run(Outcome::Advanced), [20, 11]);
}

#[test]
fn clones_that_wait_for_a_sequence_are_not_among_its_requests() {
    let mut bench = Bench::new(Rules { max_queued: 2, ..rules() });
    bench.send(1, "S", 10).unwrap();
    bench.clone(1, 2, 20).unwrap();
    bench.clone(1, 3, 30).unwrap();
    bench.send(1, "", 11).unwrap();
    assert_eq!(bench.send(1, "", 12), Err(Refused::TooManyQueued { id: id(1), max: 2 }));
    assert_eq!(bench.scheduler.queued(), 4);
}

#[test]
fn a_clone_begins_after_what_arrived_before_it_and_before_what_arrived_after_it() {
    let mut bench = Bench::new(rules());
    bench.send(1, "S", 10).unwrap();
    bench.send(1, "", 11).unwrap();
    bench.clone(1, 2, 20).unwrap();
    bench.send(2, "", 21).unwrap();
    bench.send(1, "", 12).unwrap();
    assert_eq!(bench.run(Outcome::Advanced), [10]);
    assert_eq!(bench.run(Outcome::Advanced), [11]);
    let work = bench.scheduler.take(0, 8);
    let came: Vec<_> = work.ready.iter().map(|ready| (ready.request, ready.begins)).collect();
    assert_eq!(came, [(20, Begins::Clone(0)), (12, Begins::Plain)], "the clone comes first");
}

#[test]
fn the_end_of_a_sequence_is_in_no_batch_with_its_clone() {
    let mut bench = Bench::new(rules());
    bench.send(1, "S", 10).unwrap();
    assert_eq!(bench.run(Outcome::Advanced), [10]);
    bench.clone(1, 2, 20).unwrap();
    bench.send(1, "E", 11).unwrap();
    assert_eq!(bench.run(Outcome::Advanced), [20]);
    assert_eq!(bench.run(Outcome::Lost), [11]);
}

#[test]
fn a_clone_of_a_sequence_whose_run_failed_comes_before_its_next_request() {
    let mut bench = Bench::new(Rules { max_sequences: 99, ..rules() });
    bench.send(1, "S", 9).unwrap();
    bench.run(Outcome::Advanced);
    bench.send(1, "", 10).unwrap();
    bench.run(Outcome::RunFailed);
    // They wait for longer than the sequence waits for its turn.
    for other in 3..20 {
        bench.send(other, "S", 0).unwrap();
    }
    bench.clone(1, 2, 20).unwrap();
    bench.send(1, "", 11).unwrap();
    let one_at_a_time = std::iter::from_fn(|| bench.scheduler.take(0, 1).ready.pop()).map(|ready| ready.request);
    let came: Vec<_> = one_at_a_time.filter(|&request| request != 0).collect();
    assert_eq!(came, [20, 11]);
}

#[test]
fn a_clone_of_an_idle_sequence_begins_at_once_with_the_same_worker() {
    let mut bench = Bench { scheduler: Scheduler::new(rules(), 2, Instant::now()), ..Bench::new(rules()) };
    bench.send(1, "S", 10).unwrap();
    let batch = bench.take();
    bench.finish(&batch, Outcome::Advanced);
    bench.clone(1, 2, 20).unwrap();
    assert_eq!(bench.scheduler.take(0, 8).ready[0].begins, Begins::Clone(0));
    assert_eq!(bench.scheduler.live(), 2);
}

#[test]
fn a_clone_is_refused_where_there_is_nothing_to_clone_or_no_place() {
    let mut bench = Bench::new(Rules { max_sequences: 2, max_waiting: 5, ..rules() });
    assert_eq!(bench.clone(1, 2, 20), Err(Refused::Missing(id(1))));
    bench.send(1, "S", 10).unwrap();
    assert_eq!(bench.clone(1, 1, 11), Err(exists(1)));
    bench.send(2, "S", 20).unwrap();
    assert_eq!(bench.clone(1, 3, 30), Err(too_many(3, 2)), "it does not wait");
    bench.send(3, "S", 30).unwrap();
    bench.send(2, "E", 21).unwrap();
    assert_eq!(bench.clone(2, 4, 40), Err(Refused::Missing(id(2))), "its END is queued");
    assert_eq!(bench.clone(3, 4, 40), Err(Refused::Missing(id(3))), "it has not begun");
    let mut bench = Bench::new(Rules { on_duplicate_start: OnDuplicateStart::Restart, ..rules() });
    bench.send(1, "S", 10).unwrap();
    assert_eq!(bench.clone(1, 1, 11), Err(Refused::CloneOfItself(id(1))));
}

#[test]
fn a_sequence_that_fails_takes_the_clones_that_wait_for_it_along() {
    let mut bench = Bench::new(rules());
    bench.send(1, "S", 10).unwrap();
    bench.clone(1, 2, 20).unwrap();
    bench.send(2, "", 21).unwrap();
    bench.clone(2, 3, 30).unwrap();
    let batch = bench.take();
    let missing = |of| Refused::Missing(id(of));
    assert_eq!(bench.finish(&batch, Outcome::Lost), [(20, missing(1)), (21, missing(2)), (30, missing(2))]);
    assert_eq!((bench.scheduler.live(), bench.scheduler.placed), (0, 0));
}

#[test]
fn a_long_chain_of_clones_falls_with_its_first_sequence() {
    let mut bench = Bench::new(Rules { max_sequences: 100_000, ..rules() });
    bench.send(1, "S", 1).unwrap();
    (1..50_000).for_each(|of| bench.clone(of, of + 1, 0).unwrap());
    let batch = bench.take();
    assert_eq!(bench.finish(&batch, Outcome::Lost).len(), 49_999);
    assert_eq!(bench.scheduler.live(), 0);
}

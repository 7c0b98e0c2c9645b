mod clones;
mod lookups;
mod random;

use std::time::Duration;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn rules() -> Rules {
    Rules {
        max_sequences: 3,
        max_waiting: 0,
        longest_wait: 10 * SECOND,
        max_queued: 100,
        on_duplicate_start: OnDuplicateStart::Reject,
        id_reuse: IdReuse::Last,
        idle: IdleRule::Never,
        parking: None,
        looks_up: false,
        enters_starts: false,
        first_id: 1,
    }
}

/// The errors of a scheduler without a rule for idle sequences.
const fn exists(number: u64) -> Refused {
    Refused::Exists { id: id(number), idle: IdleRule::Never }
}

const fn too_many(number: u64, max: usize) -> Refused {
    Refused::TooMany { id: Some(id(number)), max, idle: IdleRule::Never }
}

/// A scheduler with a clock, whose requests are numbers.
struct Bench {
    scheduler: Scheduler<u32>,
    now: Instant,
}

const fn id(number: u64) -> SequenceId {
    SequenceId::Number(number)
}

impl Bench {
    fn new(rules: Rules) -> Self {
        let now = Instant::now();
        Self { scheduler: Scheduler::new(rules, 1, now), now }
    }

    fn send(&mut self, sequence: u64, what: &str, request: u32) -> Result<(), Refused> {
        let (start, end) = (what.contains('S'), what.contains('E'));
        let control = Control { id: (sequence != 0).then(|| id(sequence)), start, end, origin: Origin::Own };
        self.scheduler.arrive(control, request, None, self.now).map(drop).map_err(|(_, refused)| refused)
    }

    /// Sends a START with the state of another sequence.
    fn clone(&mut self, of: u64, sequence: u64, request: u32) -> Result<(), Refused> {
        let control = Control { id: Some(id(sequence)), start: true, end: false, origin: Origin::Clone(id(of)) };
        self.scheduler.arrive(control, request, None, self.now).map(drop).map_err(|(_, refused)| refused)
    }

    /// Sends a START of a parked sequence.
    fn resume(&mut self, sequence: u64, request: u32) -> Result<(), Refused> {
        let control = Control { id: Some(id(sequence)), start: true, end: false, origin: Origin::Parked };
        self.scheduler.arrive(control, request, None, self.now).map(drop).map_err(|(_, refused)| refused)
    }

    fn take(&mut self) -> Vec<(u32, u32)> {
        let work = self.scheduler.take(0, 8);
        work.ready.into_iter().map(|ready| (ready.lane, ready.request)).collect()
    }

    fn finish(&mut self, batch: &[(u32, u32)], outcome: Outcome) -> Vec<(u32, Refused)> {
        let finished = batch.iter().map(|&(lane, _)| Finished { lane, outcome, ends: false });
        self.scheduler.finish(finished, self.now, &mut Vec::new())
    }

    /// Takes and finishes whatever is queued.
    fn run(&mut self, outcome: Outcome) -> Vec<u32> {
        let batch = self.take();
        self.finish(&batch, outcome);
        batch.into_iter().map(|(_, request)| request).collect()
    }

    fn pass(&mut self, time: Duration) -> Vec<(u32, Refused)> {
        self.now += time;
        self.scheduler.scan(self.now, &mut Vec::new())
    }
}

#[test]
fn requests_of_a_sequence_run_one_at_a_time_in_order_beside_others() {
    let mut bench = Bench::new(rules());
    for (sequence, what, request) in [(1, "S", 10), (1, "", 11), (2, "S", 20), (1, "E", 12), (2, "", 21)] {
        bench.send(sequence, what, request).unwrap();
    }
    assert_eq!(bench.run(Outcome::Advanced), [10, 20]);
    assert_eq!(bench.run(Outcome::Advanced), [11, 21]);
    assert_eq!(bench.run(Outcome::Lost), [12]);
    assert!(bench.run(Outcome::Advanced).is_empty());
}

#[test]
fn a_sequence_whose_request_runs_keeps_nobody_waiting() {
    let mut bench = Bench::new(rules());
    bench.send(1, "S", 10).unwrap();
    let running = bench.take();
    bench.send(1, "", 11).unwrap();
    bench.send(2, "S", 20).unwrap();
    assert_eq!(bench.run(Outcome::Advanced), [20]);
    bench.finish(&running, Outcome::Advanced);
    assert_eq!(bench.run(Outcome::Advanced), [11]);
}

#[test]
fn a_request_with_steps_left_goes_behind_the_others_and_stays_the_first_of_its_sequence() {
    let mut bench = Bench::new(rules());
    for (sequence, what, request) in [(1, "S", 10), (1, "", 11), (2, "S", 20)] {
        bench.send(sequence, what, request).unwrap();
    }
    let [long, other] = bench.take()[..] else { panic!("two are ready") };
    bench.send(3, "S", 30).unwrap();
    bench.finish(&[other], Outcome::Advanced);
    bench.scheduler.put_back([long].into_iter());
    assert_eq!(bench.scheduler.queued(), 2, "the one with steps left waits no more");
    assert_eq!(bench.take().iter().map(|(_, request)| *request).collect::<Vec<_>>(), [30, 10]);
    bench.scheduler.put_back([long].into_iter());
    assert_eq!(bench.run(Outcome::Advanced), [10]);
    assert_eq!(bench.run(Outcome::Advanced), [11]);
}

#[test]
fn between_two_steps_a_sequence_may_have_as_many_requests_as_during_one() {
    let mut bench = Bench::new(Rules { max_queued: 1, ..rules() });
    bench.send(1, "S", 10).unwrap();
    let long = bench.take();
    bench.scheduler.put_back(long.into_iter());
    bench.send(1, "", 11).unwrap();
    assert!(matches!(bench.send(1, "", 12), Err(Refused::TooManyQueued { .. })));
    assert_eq!(bench.run(Outcome::Advanced), [10]);
    assert_eq!(bench.run(Outcome::Advanced), [11]);
}

#[test]
fn the_only_request_of_a_worker_is_one_that_no_step_has_run_of() {
    let mut bench = Bench::new(rules());
    assert_eq!(bench.scheduler.only_request(0), None);
    bench.send(1, "S", 10).unwrap();
    let (lane, _) = bench.scheduler.only_request(0).expect("one is ready");
    bench.send(1, "", 11).unwrap();
    assert_eq!(bench.scheduler.only_request(0), Some((lane, &10)), "the other one waits for it");
    bench.send(2, "S", 20).unwrap();
    assert_eq!(bench.scheduler.only_request(0), None);
    let batch = bench.take();
    bench.scheduler.put_back(batch[..1].iter().copied());
    assert_eq!(bench.scheduler.only_request(0), None);
}

#[test]
fn a_sequence_with_steps_left_is_not_idle_and_one_that_fails_takes_its_requests_along() {
    let mut bench = Bench::new(Rules { idle: IdleRule::After(SECOND), ..rules() });
    bench.send(1, "S", 10).unwrap();
    bench.send(1, "E", 11).unwrap();
    for _ in 0..5 {
        let long = bench.take();
        bench.scheduler.put_back(long.into_iter());
        assert!(bench.pass(SECOND).is_empty());
    }
    let long = bench.take();
    assert_eq!(bench.finish(&long, Outcome::Failed), [(11, Refused::Missing(id(1)))]);
    assert_eq!((bench.scheduler.live(), bench.scheduler.queued()), (0, 0));
}

#[test]
fn what_follows_a_queued_end_is_missing_and_a_new_start_runs_beside_it() {
    let mut bench = Bench::new(rules());
    bench.send(1, "S", 10).unwrap();
    bench.send(1, "E", 11).unwrap();
    assert_eq!(bench.send(1, "", 12), Err(Refused::Missing(id(1))));
    bench.send(1, "S", 13).unwrap();
    let batch = bench.take();
    assert_eq!(batch.iter().map(|(_, request)| *request).collect::<Vec<_>>(), [10, 13]);
    assert_ne!(batch[0].0, batch[1].0, "they have states of their own");
}

#[test]
fn a_failed_start_takes_what_follows_it_along() {
    let mut bench = Bench::new(rules());
    bench.send(1, "S", 10).unwrap();
    bench.send(1, "", 11).unwrap();
    let batch = bench.take();
    assert_eq!(bench.finish(&batch, Outcome::Lost), [(11, Refused::Missing(id(1)))]);
    assert_eq!(bench.scheduler.live(), 0);
}

#[test]
fn a_live_id_is_refused_before_the_number_of_sequences_is() {
    let mut bench = Bench::new(Rules { max_sequences: 1, ..rules() });
    bench.send(1, "S", 10).unwrap();
    assert_eq!(bench.send(1, "S", 11), Err(exists(1)));
    assert_eq!(bench.send(2, "S", 12), Err(too_many(2, 1)));
    bench.run(Outcome::Lost);
    bench.send(2, "S", 13).unwrap();
}

#[test]
fn a_restart_follows_what_was_queued_before_it() {
    let mut bench = Bench::new(Rules { on_duplicate_start: OnDuplicateStart::Restart, ..rules() });
    bench.send(1, "S", 10).unwrap();
    bench.send(1, "", 11).unwrap();
    bench.send(1, "S", 12).unwrap();
    bench.send(1, "", 13).unwrap();
    assert_eq!(bench.run(Outcome::Advanced), [10, 12]);
    assert_eq!(bench.run(Outcome::Advanced), [11, 13]);
    assert_eq!(bench.scheduler.live(), 1);
    assert_eq!(bench.scheduler.take(0, 8).over.len(), 1, "the worker hears that the old one is over");
    bench.send(1, "S", 14).unwrap();
    assert_eq!(bench.scheduler.live(), 1, "an idle one gives its place at once");
}

#[test]
fn starts_wait_for_a_place_in_order_and_not_for_longer_than_they_may() {
    let mut bench = Bench::new(Rules { max_sequences: 1, max_waiting: 2, ..rules() });
    bench.send(1, "S", 10).unwrap();
    bench.send(2, "S", 20).unwrap();
    bench.send(2, "", 21).unwrap();
    bench.send(3, "S", 30).unwrap();
    assert_eq!(bench.send(4, "S", 40), Err(Refused::QueueFull { id: Some(id(4)), max: 2, idle: IdleRule::Never }));
    assert_eq!(bench.run(Outcome::Lost), [10]);
    assert_eq!(bench.run(Outcome::Advanced), [20]);
    assert_eq!(bench.run(Outcome::Lost), [21]);
    assert_eq!(bench.run(Outcome::Advanced), [30]);
    bench.send(5, "S", 50).unwrap();
    bench.send(5, "", 51).unwrap();
    assert_eq!(bench.pass(9 * SECOND), []);
    assert_eq!(bench.pass(SECOND), [(50, Refused::Late(id(5))), (51, Refused::Missing(id(5)))]);
    assert_eq!(bench.scheduler.next_scan(), None);
}

#[test]
fn only_so_many_requests_of_a_sequence_wait_and_one_more_changes_nothing() {
    let mut bench = Bench::new(Rules { max_sequences: 2, max_waiting: 1, max_queued: 2, ..rules() });
    let full = |of| Err(Refused::TooManyQueued { id: id(of), max: 2 });
    for (sequence, what, request) in [(1, "S", 10), (1, "", 11), (2, "S", 20), (3, "S", 30), (3, "", 31)] {
        bench.send(sequence, what, request).unwrap();
    }
    assert_eq!(bench.send(1, "", 12), full(1));
    assert_eq!(bench.send(1, "E", 12), full(1));
    assert_eq!(bench.send(3, "E", 32), full(3), "it waits for a place");
    bench.clone(1, 4, 40).unwrap_err();
    assert_eq!(bench.scheduler.queued(), 5);
    let running = bench.take();
    bench.send(1, "E", 13).expect("the one that runs waits no longer");
    assert_eq!(bench.finish(&running, Outcome::Lost), [(11, Refused::Missing(id(1))), (13, Refused::Missing(id(1)))]);
    assert_eq!(bench.run(Outcome::Advanced), [30]);
    bench.send(3, "E", 33).unwrap();
    assert_eq!((bench.run(Outcome::Advanced), bench.run(Outcome::Lost)), (vec![31], vec![33]));
    assert_eq!((bench.scheduler.queued(), bench.scheduler.live()), (0, 0));
}

#[test]
fn an_idle_sequence_is_over_after_its_time_and_failures_do_not_keep_it() {
    let mut bench = Bench::new(Rules { idle: IdleRule::After(10 * SECOND), ..rules() });
    bench.send(1, "S", 10).unwrap();
    bench.send(2, "S", 20).unwrap();
    bench.run(Outcome::Advanced);
    bench.pass(6 * SECOND);
    bench.send(1, "", 11).unwrap();
    bench.run(Outcome::Advanced);
    bench.send(2, "", 21).unwrap();
    bench.run(Outcome::Failed);
    bench.pass(5 * SECOND);
    assert_eq!(bench.send(2, "", 22), Err(Refused::Missing(id(2))));
    bench.send(1, "", 12).unwrap();
    assert_eq!(bench.scheduler.take(0, 8).over, [Over { lane: 1, why: OverBy::Idle }]);
}

#[test]
fn a_request_that_is_under_way_when_the_time_is_over_decides() {
    for (outcome, lives) in [(Outcome::Advanced, true), (Outcome::Failed, false)] {
        let mut bench = Bench::new(Rules { idle: IdleRule::After(SECOND), ..rules() });
        bench.send(1, "S", 10).unwrap();
        bench.run(Outcome::Advanced);
        bench.send(1, "", 11).unwrap();
        let running = bench.take();
        bench.pass(2 * SECOND);
        bench.finish(&running, outcome);
        assert_eq!(bench.send(1, "", 12).is_ok(), lives);
    }
}

#[test]
fn two_scans_end_what_neither_saw_succeed() {
    let mut bench = Bench::new(Rules { idle: IdleRule::TwoScans(10 * SECOND), ..rules() });
    for sequence in 1..=3 {
        bench.send(sequence, "S", 0).unwrap();
    }
    bench.run(Outcome::Advanced);
    bench.pass(10 * SECOND);
    bench.send(1, "", 11).unwrap();
    bench.send(2, "", 21).unwrap();
    let (batch, outcomes) = (bench.take(), [Outcome::Advanced, Outcome::Failed]);
    for (of, outcome) in batch.iter().zip(outcomes) {
        bench.finish(&[*of], outcome);
    }
    bench.pass(10 * SECOND);
    assert_eq!([1, 2, 3].map(|sequence| bench.send(sequence, "", 0).is_ok()), [true, false, false]);
}

#[test]
fn a_made_id_is_none_that_lives() {
    let mut bench = Bench::new(rules());
    bench.send(1, "S", 10).unwrap();
    bench.send(0, "S", 20).unwrap();
    let ids: Vec<_> = bench.scheduler.take(0, 8).ready.into_iter().map(|ready| ready.id).collect();
    assert_eq!(ids, [id(1), id(2)]);
}

#[test]
fn one_batch_of_ten_has_one_of_the_sequences_whose_last_request_failed_and_they_take_turns() {
    let mut bench = Bench::new(Rules { max_sequences: 9, ..rules() });
    let all = [1, 2, 3, 4, 5];
    let send = |bench: &mut Bench, what| all.iter().for_each(|&of| bench.send(of, what, of as u32).unwrap());
    send(&mut bench, "S");
    bench.run(Outcome::Advanced);
    send(&mut bench, "");
    let (good, bad): (Vec<_>, Vec<_>) = bench.take().into_iter().partition(|(_, of)| *of < 3);
    bench.finish(&good, Outcome::Advanced);
    bench.finish(&bad, Outcome::RunFailed);
    send(&mut bench, "");
    // The first two go on all the time. The third to fifth still have to show that they don't fail again.
    for batch in 1..=30 {
        let taken = bench.take();
        let mut of: Vec<_> = taken.iter().map(|(_, of)| *of).collect();
        of.sort_unstable();
        // Two batches came before these.
        let expected = if batch % 10 == 8 { vec![1, 2, 3 + batch / 10] } else { vec![1, 2] };
        assert_eq!(of, expected, "batch {batch}");
        bench.finish(&taken, Outcome::Advanced);
        [1, 2].iter().for_each(|&of| bench.send(of, "", of as u32).unwrap());
    }
    for of in [3, 4, 5] {
        bench.send(of, "", of as u32).unwrap();
    }
    assert_eq!(bench.take().len(), 5, "each has succeeded again");
}

#[test]
fn a_sequence_that_has_failed_waits_for_nothing_if_no_other_is_ready() {
    let mut bench = Bench::new(rules());
    bench.send(1, "S", 1).unwrap();
    bench.run(Outcome::Advanced);
    for _ in 0..3 {
        bench.send(1, "", 1).unwrap();
        assert_eq!(bench.run(Outcome::RunFailed), [1]);
    }
}

#[test]
fn a_sequence_whose_request_did_not_run_is_in_the_next_batch() {
    let mut bench = Bench::new(rules());
    for id in [1, 2] {
        bench.send(id, "S", id as u32).unwrap();
    }
    bench.run(Outcome::Advanced);
    for _ in 0..3 {
        for id in [1, 2] {
            bench.send(id, "", id as u32).unwrap();
        }
        assert_eq!(bench.run(Outcome::Failed), [1, 2], "their time was over, or they were cancelled");
    }
}

#[test]
fn a_restart_without_a_place_ends_the_old_sequence_when_its_requests_have_run() {
    let restart = OnDuplicateStart::Restart;
    let mut bench = Bench::new(Rules { max_sequences: 1, on_duplicate_start: restart, ..rules() });
    bench.send(1, "S", 10).unwrap();
    bench.send(1, "", 11).unwrap();
    assert_eq!(bench.send(1, "S", 12), Err(too_many(1, 1)));
    assert_eq!(bench.send(1, "", 13), Err(Refused::Missing(id(1))), "it follows the START");
    assert_eq!((bench.run(Outcome::Advanced), bench.run(Outcome::Advanced)), (vec![10], vec![11]));
    assert_eq!(bench.scheduler.live(), 0);
}

#[test]
fn a_start_that_waits_gets_the_place_of_a_sequence_whose_restart_is_refused() {
    let restart = OnDuplicateStart::Restart;
    let mut bench = Bench::new(Rules { max_sequences: 1, max_waiting: 1, on_duplicate_start: restart, ..rules() });
    bench.send(1, "S", 10).unwrap();
    bench.run(Outcome::Advanced);
    bench.send(2, "S", 20).unwrap();
    assert_eq!(bench.clone(9, 1, 11), Err(Refused::Missing(id(9))));
    bench.scheduler.fill_places(bench.now, &mut Vec::new());
    assert_eq!(bench.run(Outcome::Advanced), [20]);
}

fn parking(most: usize) -> Rules {
    let parking = Some(Parking { time: 10 * SECOND, most });
    Rules { idle: IdleRule::After(SECOND), parking, ..rules() }
}

#[test]
fn a_parked_sequence_goes_on_in_its_lane_without_having_had_a_place() {
    let mut bench = Bench::new(Rules { max_sequences: 1, ..parking(1) });
    bench.send(1, "S", 10).unwrap();
    bench.run(Outcome::Advanced);
    bench.pass(2 * SECOND);
    assert_eq!((bench.scheduler.live(), bench.scheduler.take(0, 8).over.len()), (0, 0), "its state stays");
    assert_eq!(bench.send(1, "", 11), Err(Refused::Parked(id(1))));
    bench.send(2, "S", 20).unwrap();
    let idle = IdleRule::After(SECOND);
    assert_eq!(bench.resume(1, 12), Err(Refused::TooMany { id: Some(id(1)), max: 1, idle }));
    bench.run(Outcome::Lost);
    bench.resume(1, 13).unwrap();
    let work = bench.scheduler.take(0, 8);
    assert_eq!((work.ready[0].lane, work.ready[0].begins), (0, Begins::Resumed));
    assert_eq!(bench.resume(1, 14), Err(Refused::NotParkedButLive(id(1))));
}

#[test]
fn a_parked_sequence_is_over_after_its_time_or_for_a_later_one_or_a_new_start() {
    let mut bench = Bench::new(Rules { max_sequences: 3, ..parking(2) });
    for sequence in 1..=3 {
        bench.send(sequence, "S", 0).unwrap();
        bench.run(Outcome::Advanced);
        bench.pass(2 * SECOND);
    }
    assert_eq!(bench.scheduler.take(0, 8).over, [Over { lane: 0, why: OverBy::Idle }], "two are parked at most");
    bench.send(2, "S", 20).unwrap();
    let work = bench.scheduler.take(0, 8);
    assert_eq!((work.ready[0].begins, work.over), (Begins::Plain, vec![Over { lane: 1, why: OverBy::Idle }]));
    assert_eq!(bench.scheduler.next_scan(), Some(bench.now + SECOND), "when the new one is idle for too long");
    bench.finish(&[(work.ready[0].lane, 0)], Outcome::Lost);
    assert_eq!(bench.scheduler.next_scan(), Some(bench.now + 10 * SECOND));
    bench.pass(10 * SECOND);
    assert_eq!(bench.resume(3, 30), Err(Refused::NotParked(id(3))));
    assert_eq!(bench.scheduler.take(0, 8).over, [Over { lane: 2, why: OverBy::Idle }]);
    assert!(bench.scheduler.sequences.is_empty());
}

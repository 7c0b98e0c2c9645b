//! Random requests against what the scheduler promises.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// What is sent: which id (0: none), START, END, and what a START begins with.
type Sent = (u64, bool, bool, Origin);

fn origin() -> impl Strategy<Value = Origin> {
    let clone = (1u64..5).prop_map(|of| Origin::Clone(id(of)));
    prop_oneof![3 => Just(Origin::Own), 2 => clone, 1 => Just(Origin::Parked)]
}

#[derive(Clone, Debug)]
enum Op {
    Send(Sent),
    Take {
        worker: usize,
        most: usize,
    },
    /// Finishes a batch that was taken, with an outcome for each request.
    Finish {
        batch: prop::sample::Index,
        outcomes: u64,
    },
    /// Finishes all of them. Each succeeds.
    FinishAll,
    Pass(u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0u64..5, prop::bool::weighted(0.3), prop::bool::weighted(0.2), origin()).prop_map(Op::Send),
        3 => (0usize..2, 1usize..4).prop_map(|(worker, most)| Op::Take { worker, most }),
        3 => (any::<prop::sample::Index>(), any::<u64>()).prop_map(|(batch, outcomes)| Op::Finish { batch, outcomes }),
        1 => (0u64..8).prop_map(Op::Pass),
    ]
}

fn any_rules() -> impl Strategy<Value = Rules> {
    let idle =
        prop_oneof![Just(IdleRule::Never), Just(IdleRule::After(5 * SECOND)), Just(IdleRule::TwoScans(5 * SECOND))];
    let parking = prop::option::of(
        (1u64..6, 1usize..3).prop_map(|(seconds, most)| Parking { time: Duration::from_secs(seconds), most }),
    );
    let flags = (any::<bool>(), any::<bool>());
    let numbers = (1usize..4, 0usize..3, 1usize..8);
    (numbers, flags, idle, parking).prop_map(|((most, waiting, queued), (restarts, at_once), idle, parking)| Rules {
        max_sequences: most,
        max_waiting: waiting,
        longest_wait: 3 * SECOND,
        max_queued: queued,
        on_duplicate_start: if restarts { OnDuplicateStart::Restart } else { OnDuplicateStart::Reject },
        id_reuse: if at_once { IdReuse::AtOnce } else { IdReuse::Last },
        idle,
        parking,
        looks_up: false,
        enters_starts: false,
        first_id: 1,
    })
}

/// Watches what goes in and comes out.
#[derive(Default)]
struct Watch {
    /// By lane: the requests that have come out, and the worker.
    lanes: BTreeMap<u32, (Vec<u32>, usize)>,
    running: Vec<(u32, u32)>,
    /// Requests that are queued.
    queued: Vec<u32>,
    /// The STARTs that have begun with the state of a lane, by that lane.
    clones: BTreeMap<u32, Vec<u32>>,
    /// Lanes whose START has succeeded.
    begun: BTreeSet<u32>,
    /// Lanes that are over.
    over: Vec<u32>,
}

impl Watch {
    /// A sequence is over with END, with its state, and with a START that has not succeeded.
    fn finished(&mut self, batch: &[Finished]) {
        for &Finished { lane, outcome, ends } in batch {
            if outcome == Outcome::Advanced {
                self.begun.insert(lane);
            }
            if ends || outcome == Outcome::Lost || !self.begun.contains(&lane) {
                self.over.push(lane);
            }
        }
    }

    fn refused(&mut self, refused: Vec<(u32, Refused)>) {
        for (request, why) in refused {
            assert!(self.queued.contains(&request), "{request} was refused ({why:?}) and was not queued");
            self.queued.retain(|&queued| queued != request);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 2000 }, failure_persistence: None, ..Default::default() })]
    #[test]
    fn each_request_comes_out_once_in_order_and_alone_in_its_sequence(
        rules in any_rules(), ops in prop::collection::vec(op(), 1..80),
    ) {
        let mut now = Instant::now();
        let mut scheduler = Scheduler::new(rules, 2, now);
        let (mut watch, mut batches, mut next) = (Watch::default(), Vec::<Vec<(u32, u32, bool)>>::new(), 0u32);
        let mut ends = BTreeMap::new();
        for op in ops.into_iter().chain((0..60).flat_map(|_| {
            // Everything is let run out.
            [Op::Take { worker: 0, most: 9 }, Op::Take { worker: 1, most: 9 }, Op::FinishAll]
        })) {
            match op {
                Op::Send((sequence, start, end, origin)) if sequence != 0 || start => {
                    let origin = if start { origin } else { Origin::Own };
                    let control = Control { id: (sequence != 0).then(|| id(sequence)), start, end, origin };
                    ends.insert(next, end);
                    watch.queued.push(next);
                    if let Err((request, why)) = scheduler.arrive(control, next, None, now) {
                        watch.refused(vec![(request, why)]);
                    }
                    next += 1;
                }
                Op::Send(_) => {}
                Op::Take { worker, most } => {
                    let work = scheduler.take(worker, most);
                    watch.over.extend(work.over.iter().map(|over| over.lane));
                    prop_assert!(work.ready.len() <= most);
                    let mut batch = Vec::new();
                    for Ready { lane, request, begins, .. } in work.ready {
                        prop_assert!(!watch.over.contains(&lane), "{request} has no state");
                        let clones = watch.clones.get(&lane).into_iter().flatten();
                        prop_assert!(clones.max().is_none_or(|&clone| clone < request), "a clone came too late");
                        if let Begins::Clone(of) = begins {
                            prop_assert!(!watch.over.contains(&of), "the state to clone is gone");
                            prop_assert!(watch.running.iter().all(|(running, _)| *running != of), "it still changes");
                            let (came, with) = &watch.lanes[&of];
                            prop_assert_eq!(*with, worker, "another worker has the state");
                            prop_assert!(came.last().is_some_and(|&last| last < request), "the clone comes too late");
                            watch.clones.entry(of).or_default().push(request);
                        }
                        if begins == Begins::Resumed {
                            prop_assert!(watch.lanes.contains_key(&lane), "there is no state to resume");
                        }
                        prop_assert!(watch.running.iter().all(|(running, _)| *running != lane), "two of a sequence run");
                        watch.running.push((lane, request));
                        prop_assert!(watch.queued.contains(&request), "{request} came out twice");
                        watch.queued.retain(|&queued| queued != request);
                        let (came, of) = watch.lanes.entry(lane).or_insert((Vec::new(), worker));
                        prop_assert_eq!(*of, worker, "a sequence has moved");
                        prop_assert!(came.last().is_none_or(|&last| last < request), "out of order");
                        came.push(request);
                        batch.push((lane, request, ends[&request]));
                    }
                    if !batch.is_empty() {
                        batches.push(batch);
                    }
                }
                Op::FinishAll => {
                    let all = batches.drain(..).flatten();
                    let finished = all.map(|(lane, _, ends)| Finished { lane, outcome: Outcome::Advanced, ends });
                    let finished: Vec<_> = finished.collect();
                    watch.running.clear();
                    watch.finished(&finished);
                    let refused = scheduler.finish(finished.into_iter(), now, &mut Vec::new());
                    watch.refused(refused);
                }
                Op::Finish { batch, outcomes } if !batches.is_empty() => {
                    let batch = batches.remove(batch.index(batches.len()));
                    let finished = |(bit, &(lane, _, ends)): (usize, &(u32, u32, bool))| {
                        let outcome = match (outcomes >> (3 * (bit % 20))) & 7 {
                            0 | 1 => Outcome::Lost,
                            2 => Outcome::Failed,
                            3 => Outcome::RunFailed,
                            _ => Outcome::Advanced,
                        };
                        Finished { lane, outcome, ends }
                    };
                    let finished: Vec<_> = batch.iter().enumerate().map(finished).collect();
                    watch.running.retain(|(lane, _)| !batch.iter().any(|(of, ..)| of == lane));
                    watch.finished(&finished);
                    let refused = scheduler.finish(finished.into_iter(), now, &mut Vec::new());
                    watch.refused(refused);
                }
                Op::Finish { .. } => {}
                Op::Pass(seconds) => {
                    now += Duration::from_secs(seconds);
                    let refused = scheduler.scan(now, &mut Vec::new());
                    watch.refused(refused);
                }
            }
            prop_assert!(scheduler.placed <= rules.max_sequences && scheduler.waiting.len() <= rules.max_waiting);
            prop_assert_eq!(scheduler.placed + scheduler.waiting.len(), scheduler.live());
            prop_assert!(scheduler.parked.len() <= rules.parking.map_or(0, |parking| parking.most));
            prop_assert_eq!(scheduler.workers.iter().map(|worker| worker.sequences).sum::<usize>(), scheduler.placed);
            prop_assert!(scheduler.by_id.values().all(|lane| !scheduler.sequences[lane].closed));
            let closed = scheduler.sequences.values().filter(|sequence| sequence.closed && rules.looks_up).count();
            prop_assert_eq!(scheduler.closing.values().map(BTreeSet::len).sum::<usize>(), closed);
            prop_assert!(scheduler.last_success.len() <= scheduler.placed);
            prop_assert_eq!(scheduler.queued(), watch.queued.len());
            prop_assert!(scheduler.sequences.values().all(|sequence| sequence.queued <= rules.max_queued));
            prop_assert!(scheduler.waiting_until.iter().map(|(_, lane)| lane).all(|lane| scheduler.waiting.contains(lane)));
            prop_assert_eq!(scheduler.waiting_until.len(), scheduler.waiting.len());
        }
        // No END may come that frees a place. Then the STARTs that wait are refused when their time is over.
        now += rules.longest_wait;
        let refused = scheduler.scan(now, &mut Vec::new());
        watch.refused(refused);
        for worker in [0, 1] {
            for Ready { request, .. } in scheduler.take(worker, 99).ready {
                watch.queued.retain(|&queued| queued != request);
            }
        }
        prop_assert_eq!(watch.queued, Vec::<u32>::new(), "never came out");
    }
}

fn control() -> impl Strategy<Value = Control> {
    (0u64..5, prop::bool::weighted(0.4), prop::bool::weighted(0.3)).prop_map(|(sequence, start, end)| {
        let sequence = if start { sequence } else { sequence.max(1) };
        Control { id: (sequence != 0).then(|| id(sequence)), start, end, origin: Origin::Own }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 2000 }, failure_persistence: None, ..Default::default() })]
    #[test]
    fn what_is_found_fit_to_arrive_arrives_and_what_is_not_is_refused_at_that_row(
        max_sequences in 1usize..5, max_waiting in 0usize..3, max_queued in 1usize..4, restarts: bool, is_run: bool,
        before in prop::collection::vec(control(), 0..8), rows in prop::collection::vec(control(), 1..6),
    ) {
        let now = Instant::now();
        let on_duplicate_start = if restarts { OnDuplicateStart::Restart } else { OnDuplicateStart::Reject };
        let mut scheduler = Scheduler::new(Rules { max_sequences, max_waiting, max_queued, on_duplicate_start, ..rules() }, 1, now);
        for control in &before {
            _ = scheduler.arrive(control.clone(), 0, None, now);
        }
        while is_run && scheduler.has_work(0) {
            let advanced = |ready: Ready<i32>| Finished { lane: ready.lane, outcome: Outcome::Advanced, ends: false };
            let ready = scheduler.take(0, 9).ready;
            scheduler.finish(ready.into_iter().map(advanced), now, &mut Vec::new());
        }
        let found = scheduler.check(&rows.iter().collect::<Vec<_>>());
        let mut refused = rows.into_iter().enumerate().filter_map(|(row, control)| {
            scheduler.arrive(control, 0, None, now).err().map(|(_, why)| (row, why))
        });
        prop_assert_eq!(found.err(), refused.next());
    }
}

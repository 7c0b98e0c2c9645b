//! Models that the backend schedules itself: any number of requests of a sequence in flight, in any payloads.

use std::sync::atomic::{AtomicBool, Ordering};

use super::traffic::row_of;
use super::*;

pub fn own(parameters: &[(&str, &str)]) -> Value {
    let mut config = config(Value::Null);
    config.as_object_mut().unwrap().remove("sequence_batching");
    config["parameters"].as_object_mut().unwrap().remove("max_candidate_sequence_use_ratio");
    fake_triton::with_parameters(config, parameters)
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Expected {
    Sum(Row),
    Error(triton_sys::TRITONSERVER_Error_Code),
}

/// Why a request of a live sequence does not succeed.
#[derive(Clone, Copy)]
struct Failure {
    code: triton_sys::TRITONSERVER_Error_Code,
    /// Its data is wrong, so it was refused before it was queued.
    is_refused: bool,
}

/// The sums of the live sequences, as the requests arrive.
#[derive(Default)]
struct Oracle(BTreeMap<u64, Row>);

impl Oracle {
    fn arrives(&mut self, id: u64, flags: u32, row: Row, fails: Option<Failure>) -> Expected {
        let before = match (flags & START != 0, self.0.get(&id)) {
            (true, Some(_)) => return Expected::Error(TRITONSERVER_ERROR_ALREADY_EXISTS),
            (false, None) => return Expected::Error(TRITONSERVER_ERROR_NOT_FOUND),
            (_, before) => before.copied().unwrap_or_default(),
        };
        let sum = if fails.is_some() { before } else { [before[0] + row[0], before[1] + row[1]] };
        if fails.is_some_and(|failure| failure.is_refused) {
            // Its END doesn't count.
        } else if flags & END != 0 {
            self.0.remove(&id);
        } else {
            self.0.insert(id, sum);
        }
        fails.map_or(Expected::Sum(sum), |failure| Expected::Error(failure.code))
    }
}

/// A random request.
fn by_chance(random: &mut Random, ids: u64) -> (u64, u32, Row) {
    let flags = if random.one_in(4) { START } else { 0 } | if random.one_in(6) { END } else { 0 };
    (1 + random.below(ids), flags, [random.below(100) as f32, random.below(100) as f32])
}

/// Sends random payloads, in which a sequence may stand several times, without waiting for answers.
pub fn send(
    model: &Loaded,
    random: &mut Random,
    payloads: usize,
    alter: impl Fn(&mut Random, Request) -> Request,
) -> Vec<Arc<Request>> {
    let mut sent = Vec::new();
    for _ in 0..payloads {
        let mut payload = Vec::new();
        for _ in 0..=random.below(5) {
            let (id, flags, row) = by_chance(random, 7);
            let mut request = alter(random, request(id, flags, row));
            // A START that is cancelled may or may not be over when the next one arrives.
            request.cancelled = flags & START == 0 && random.one_in(10);
            payload.push(Arc::new(request));
        }
        model.instance.send(&payload);
        sent.extend(payload);
    }
    sent
}

/// Ends the sequences 1 to 7, and checks that a new one finds a place.
pub fn end_all(model: &Loaded) {
    for id in 1..=7 {
        model.run(vec![request(id, END, [0.0, 0.0])]);
    }
    let after = model.run(vec![request(100, START | END, [1.0, 2.0])]);
    assert_eq!(sums(&after), [Some([1.0, 2.0])], "every place is free again");
}

/// The answers are those of sequences that got their requests in the order in which they were sent. A request that is
/// `altered` may fail instead.
pub fn assert_in_order(sent: &[Arc<Request>], altered: impl Fn(&Request) -> bool) {
    let mut oracle = Oracle::default();
    for (number, request) in sent.iter().enumerate() {
        let Id::Number(id) = request.id else { panic!("{:?} is no number", request.id) };
        let came = match sum(request) {
            Some(sum) => Expected::Sum(sum),
            None => Expected::Error(request.error().unwrap().0),
        };
        let (is_altered, is_error) = (altered(request), matches!(came, Expected::Error(_)));
        let fails = match request.error() {
            Some((code, text)) if is_altered => {
                let is_at_output = ["is wanted in memory", "is requested, but"].iter().any(|part| text.contains(part));
                let data_is_wrong = [TRITONSERVER_ERROR_INVALID_ARG, TRITONSERVER_ERROR_UNSUPPORTED].contains(&code);
                Some(Failure { code, is_refused: data_is_wrong && !is_at_output })
            }
            _ if request.cancelled => Some(Failure { code: TRITONSERVER_ERROR_CANCELLED, is_refused: false }),
            _ => None,
        };
        let row = bytemuck::pod_read_unaligned::<Row>(&row_of(request));
        let expected = oracle.arrives(id, request.flags, row, fails);
        let is_right = came == expected || (is_altered && is_error && matches!(expected, Expected::Error(_)));
        let of_id = sent[..=number].iter().filter(|other| other.id == request.id);
        let told: Vec<_> = of_id.map(|other| (other.flags, other.cancelled, altered(other), other.answer())).collect();
        assert!(is_right, "request {number} of sequence {id}: {expected:?} was expected after {told:#?}");
    }
}

#[test]
fn many_requests_of_a_sequence_in_flight_are_answered_in_their_order() {
    let Some(triton) = Triton::start() else { return };
    for workers in 1..=4 {
        let model = load(&triton, &own(&[("worker_count", &workers.to_string())]));
        let sent = send(&model, &mut Random::new(workers), 400, |_, request| request);
        wait_for_release(&sent);
        assert_in_order(&sent, |_| false);
        model.unload();
    }
    triton.assert_clean();
}

#[test]
fn whatever_fails_each_request_is_answered_once_and_released_once() {
    let Some(triton) = Triton::start() else { return };
    for (seed, one_in) in [(20, 300), (21, 60), (22, 15), (23, 4)] {
        let model =
            load(&triton, &own(&[("worker_count", "2"), ("max_sequence_number", "4"), ("max_queue_size", "2")]));
        let mut random = Random::new(seed);
        ledger::set_faults(Faults::Random { random: Random::new(seed), one_in });
        let sent = send(&model, &mut random, 300, |random, request| {
            if !random.one_in(12) {
                return request;
            }
            let wrong = wrong(1 + random.below(7), request.flags);
            let chosen = random.below(wrong.len() as u64) as usize;
            wrong.into_iter().nth(chosen).unwrap().0
        });
        // A START may wait for a place; the ENDs of the others free it.
        for id in 1..=7 {
            model.instance.send(&[Arc::new(request(id, END, [0.0, 0.0]))]);
        }
        wait_for_release(&sent);
        ledger::set_faults(Faults::None);
        let after = model.run(vec![request(100, START | END, [1.0, 2.0])]);
        assert!(sum(&after[0]).is_some() || after[0].error().unwrap().0 == TRITONSERVER_ERROR_UNAVAILABLE);
        model.unload();
    }
    triton.assert_clean();
}

/// A request whose worker is busy with it until the flag is set.
fn request_at_work_until(is_over: &Arc<AtomicBool>, id: u64) -> Arc<Request> {
    let is_over = is_over.clone();
    let mut request = request(id, 0, [0.0, 0.0]);
    request.meanwhile = Some(Box::new(move || assert!(becomes_true(|| is_over.load(Ordering::Relaxed)))));
    Arc::new(request)
}

#[test]
fn the_last_request_is_released_while_the_first_worker_is_busy() {
    serve(&own(&[("worker_count", "2")]), |model| {
        // The first sequence goes to the first worker, the second to the second.
        model.run(vec![request(1, START, [1.0, 1.0])]);
        model.run(vec![request(2, START, [2.0, 2.0])]);
        let is_over = Arc::new(AtomicBool::new(false));
        let busy = [request_at_work_until(&is_over, 1)];
        let last = [Arc::new(request(2, 0, [1.0, 1.0]))];
        model.instance.send(&busy);
        model.instance.send(&last);
        let is_released = becomes_true(|| last[0].is_released());
        is_over.store(true, Ordering::Relaxed);
        wait_for_release(&busy);
        assert!(is_released, "it waits for a run that is not its own");
        assert_eq!((sums(&busy), sums(&last)), (vec![Some([1.0, 1.0])], vec![Some([3.0, 3.0])]));
    });
}

#[test]
fn a_start_that_has_waited_for_too_long_is_refused_while_the_only_worker_is_busy() {
    let rules = [("max_sequence_number", "2"), ("max_queue_size", "1"), ("queue_timeout_ms", "10")];
    serve(&own(&rules), |model| {
        model.run(vec![request(1, START, [1.0, 1.0])]);
        model.run(vec![request(2, START, [2.0, 2.0])]);
        let is_over = Arc::new(AtomicBool::new(false));
        let busy = [request_at_work_until(&is_over, 1)];
        let late = [Arc::new(request(3, START, [1.0, 1.0]))];
        model.instance.send(&busy);
        model.instance.send(&late);
        let is_answered = becomes_true(|| late[0].answer().is_some());
        is_over.store(true, Ordering::Relaxed);
        wait_for_release(&busy);
        wait_for_release(&late);
        assert!(is_answered, "it waits for a run that is not its own");
        assert_error(&late[0], TRITONSERVER_ERROR_UNAVAILABLE, "SEQUENCE_QUEUE_TIMEOUT");
    });
}

/// The configuration with the State API. Requests carry VALUE or a state, and the model has a default for no input.
pub fn stateful_config(parameters: &[(&str, &str)]) -> Value {
    let mut config = own(parameters);
    let state = json!({ "name": "state.SUM_IN", "data_type": "TYPE_FP32", "dims": [2], "optional": true });
    let text = |name: &str| json!({ "name": name, "data_type": "TYPE_STRING", "dims": [1], "optional": true });
    config["input"].as_array_mut().unwrap().extend([state.clone(), text("state_snapshot")]);
    config["output"].as_array_mut().unwrap().extend([state, text("state_snapshot"), text("state_info")]);
    fake_triton::with_parameters(config, &[("state_api", "true")])
}

/// A random request that reads, sets, copies or removes states.
pub fn asked_of_states(random: &mut Random, mut request: Request) -> Request {
    if random.one_in(3) {
        request.inputs.clear();
    }
    if random.one_in(4) {
        let state = bytemuck::bytes_of(&[7.0f32, 8.0]).to_vec();
        request.inputs.push(Input::new("state.SUM_IN", TRITONSERVER_TYPE_FP32, &[1, 2], state));
    }
    match random.below(12) {
        0 => request.with_parameter("commit", "false").with_parameter("get_state", "true"),
        1 => request.with_parameter("get_state", "SUM_IN"),
        2 => request.with_parameter("snapshot", "true").with_parameter("query_state", "true"),
        3 => request.with_parameter("reset_state", "true"),
        4 => request.with_parameter("delete", "true"),
        5 | 6 => {
            let of = 1 + random.below(7) as i64;
            request.with_number("clone_of", of)
        }
        7 => request.with_number("sequence_step", 1),
        8 => request.with_parameter("get_state", "nothing"),
        _ => request,
    }
}

#[test]
fn whatever_is_asked_of_states_each_request_is_answered_once_and_released_once() {
    let Some(triton) = Triton::start() else { return };
    for (seed, one_in) in [(30, 0), (31, 100), (32, 10)] {
        let model = load(&triton, &stateful_config(&[("worker_count", "2"), ("max_sequence_number", "6")]));
        let mut random = Random::new(seed);
        if one_in > 0 {
            ledger::set_faults(Faults::Random { random: Random::new(seed), one_in });
        }
        let sent = send(&model, &mut random, 400, asked_of_states);
        wait_for_release(&sent);
        ledger::set_faults(Faults::None);
        end_all(&model);
        model.unload();
    }
    triton.assert_clean();
}

#[cfg(feature = "fault-injection")]
#[test]
fn a_panic_costs_no_answer_and_no_other_sequence() {
    let stages = ["decode", "admit", "gather", "run", "respond", "complete"];
    for workers in ["1", "2"] {
        serve(&own(&[("worker_count", workers)]), |model| {
            for stage in stages {
                model.run((1..=3).map(|id| request(id, START, [id as f32, 0.0])).collect());
                let injected = request(2, 0, [9.0, 9.0]).with_parameter("inject_panic", stage);
                let payload = model.run(vec![request(1, 0, [1.0, 1.0]), injected, request(3, 0, [1.0, 1.0])]);
                assert!(payload.iter().all(|request| request.answer().is_some()), "{stage}");
                // A sequence goes on with its own sum, or is over.
                let payload = model.run((1..=3).map(|id| request(id, END, [0.0, 0.0])).collect());
                for (request, id) in payload.iter().zip(1..) {
                    let own = [[id as f32, 0.0], [id as f32 + 1.0, 1.0]];
                    let is_own = sum(request).is_none_or(|sum| own.contains(&sum));
                    assert!(is_own, "{stage}, sequence {id}: {:?}", sum(request));
                }
                let payload = model.run((1..=3).map(|id| request(id, START | END, [5.0, 6.0])).collect());
                assert_eq!(sums(&payload), [Some([5.0, 6.0]); 3], "{stage}: every id can be started again");
            }
        });
    }
}

#[cfg(feature = "fault-injection")]
#[test]
fn rows_that_a_panic_drops_give_their_slots_back() {
    serve(&own(&[("max_sequence_number", "2")]), |model| {
        // A panic answers its rows before the scheduler hears that their places are free.
        let is_started = |id| sums(&model.run(vec![request(id, START, [1.0, 1.0])])) == [Some([1.0, 1.0])];
        for _ in 0..3 {
            for id in 1..=2 {
                let gets_place = (0..10_000).any(|_| {
                    let started = is_started(id);
                    if !started {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    started
                });
                assert!(gets_place, "sequence {id}");
            }
            let panic = |id| request(id, 0, [1.0, 1.0]).with_parameter("inject_panic", "admit");
            model.run((1..=2).map(panic).collect());
        }
    });
}

#[test]
fn an_end_that_reads_a_state_ends_its_sequence_also_if_the_response_fails() {
    let by_core = |config: Value| {
        let mut stateful = stateful_config(&[]);
        stateful["sequence_batching"] = config["sequence_batching"].clone();
        stateful
    };
    for config in [stateful_config(&[]), by_core(oldest(2)), by_core(direct())] {
        serve(&config, |model| {
            model.run(vec![request(1, START, [1.0, 1.0])]);
            let mut end = request(1, END, [1.0, 1.0]).with_parameter("get_state", "SUM_IN");
            // There is no such GPU.
            end.outputs_gpu = Some(3);
            let ended = model.run(vec![end]);
            assert_error(&ended[0], TRITONSERVER_ERROR_UNSUPPORTED, "memory of GPU 3");
            let late = model.run(vec![request(1, 0, [1.0, 1.0])]);
            assert_eq!(late[0].error().map(|(code, _)| code), Some(TRITONSERVER_ERROR_NOT_FOUND));
        });
    }
}

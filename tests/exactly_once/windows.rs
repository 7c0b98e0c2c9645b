//! Requests of several steps (`input_windows`): the model gets VALUE two elements at a time, whatever a request brings.

use super::own::own;
use super::*;

/// The configuration, with windows.
fn cut(mut config: Value) -> Value {
    config["input"][0] = json!({ "name": "VALUE", "data_type": "TYPE_FP32", "dims": [-1], "allow_ragged_batch": true });
    config["output"][0]["dims"] = json!([-1, 2]);
    fake_triton::with_parameters(config, &[("input_windows", "VALUE=2")])
}

fn schedulers() -> [Value; 4] {
    [cut(oldest(8)), cut(direct()), cut(own(&[])), cut(own(&[("worker_count", "2")]))]
}

/// The same, with an answer for each step.
pub fn decoupled(mut config: Value) -> Value {
    config["model_transaction_policy"] = json!({ "decoupled": true });
    config["output"][0]["dims"] = json!([2]);
    config
}

/// A request that brings these elements. With an `at` above 3, its first step fails.
fn bringing(id: u64, flags: u32, values: &[f32], at: i64) -> Request {
    let bytes = bytemuck::cast_slice(values).to_vec();
    let value = Input::new("VALUE", TRITONSERVER_TYPE_FP32, &[1, values.len() as i64], bytes);
    Request::new(Id::Number(id), flags, vec![value, index(at)], &["SUM"])
}

/// The sum after each step; `None` for an error.
fn sums_of_steps(request: &Request) -> Option<Vec<Row>> {
    match request.answer()? {
        Answer::Outputs(outputs) => {
            let (dims, bytes) = &outputs["SUM"];
            let sums: Vec<Row> = bytes.chunks_exact(8).map(bytemuck::pod_read_unaligned).collect();
            assert_eq!(dims.as_slice(), [1, sums.len() as i64, 2]);
            Some(sums)
        }
        Answer::End | Answer::Error(..) => None,
    }
}

/// The sums in the answers for each step, which all came; `None` if the last is an error.
fn sums_of_answers(request: &Request) -> (Vec<Row>, Option<()>) {
    let sum = |answer: &Answer| match answer {
        Answer::Outputs(outputs) => Some(bytemuck::pod_read_unaligned(&outputs["SUM"].1)),
        Answer::End | Answer::Error(..) => None,
    };
    let last = request.answer();
    let sums = request.parts().iter().chain(&last).filter_map(sum).collect();
    (sums, last.filter(|last| !matches!(last, Answer::Error(..))).map(|_| ()))
}

/// What a sequence has.
#[derive(Clone, Default)]
struct Known {
    sum: Row,
    left: Vec<f32>,
}

impl Known {
    fn bring(&mut self, values: &[f32]) -> Vec<Row> {
        self.left.extend(values);
        let windows = self.left.len() / 2;
        let taken: Vec<f32> = self.left.drain(..2 * windows).collect();
        let step = |window: &[f32]| {
            self.sum = [self.sum[0] + window[0], self.sum[1] + window[1]];
            self.sum
        };
        taken.chunks_exact(2).map(step).collect()
    }
}

fn some(random: &mut Random) -> Vec<f32> {
    (0..random.below(12)).map(|_| random.below(100) as f32).collect()
}

#[test]
fn requests_of_any_length_are_answered_with_the_sums_of_their_windows() {
    let Some(triton) = Triton::start() else { return };
    for (seed, config) in (1..).zip(schedulers()) {
        let (model, mut random) = (load(&triton, &config), Random::new(seed));
        let mut known = vec![Known::default(); 4];
        for round in 0..200 {
            let asked: Vec<_> = (0..4).map(|_| (some(&mut random), random.one_in(8))).collect();
            let request = |(at, (values, fails)): (usize, &(Vec<f32>, bool))| {
                let flags = if round == 0 { START } else { 0 };
                bringing(at as u64 + 1, flags, values, if *fails && round > 0 { 4 } else { 0 })
            };
            let payload = model.run(asked.iter().enumerate().map(request).collect());
            for (at, (request, (values, fails))) in payload.iter().zip(&asked).enumerate() {
                let before = known[at].clone();
                let expected = known[at].bring(values);
                if *fails && round > 0 && !expected.is_empty() {
                    let (_, text) = request.error().unwrap();
                    assert_eq!(text.contains(" of the request)"), expected.len() > 1, "{text}");
                    known[at] = before;
                } else {
                    assert_eq!(sums_of_steps(request), Some(expected), "round {round}, sequence {}", at + 1);
                }
            }
        }
        model.unload();
    }
    triton.assert_clean();
}

#[test]
fn each_step_is_answered_when_it_is_made() {
    let Some(triton) = Triton::start() else { return };
    for (seed, config) in (1..).zip(schedulers().map(decoupled)) {
        let (model, mut random) = (load(&triton, &config), Random::new(seed));
        let mut known = vec![Known::default(); 4];
        for round in 0..200 {
            let asked: Vec<_> = (0..4).map(|_| (some(&mut random), round > 0 && random.one_in(8))).collect();
            let request = |(at, (values, fails)): (usize, &(Vec<f32>, bool))| {
                let flags = if round == 0 { START } else { 0 };
                bringing(at as u64 + 1, flags, values, if *fails { 4 } else { 0 })
            };
            let payload = model.run(asked.iter().enumerate().map(request).collect());
            for (at, (request, (values, fails))) in payload.iter().zip(&asked).enumerate() {
                let before = known[at].clone();
                let expected = known[at].bring(values);
                if expected.is_empty() {
                    assert_eq!(request.answer(), Some(Answer::End));
                } else if *fails {
                    assert_eq!(sums_of_answers(request), (Vec::new(), None), "its first step fails");
                    known[at] = before;
                } else {
                    assert_eq!(request.parts().len() + 1, expected.len());
                    assert_eq!(sums_of_answers(request), (expected, Some(())), "round {round}, sequence {}", at + 1);
                }
            }
        }
        model.unload();
    }
    triton.assert_clean();
}

#[test]
fn a_client_that_goes_stops_the_steps_of_its_request() {
    let Some(triton) = Triton::start() else { return };
    for config in schedulers().map(decoupled) {
        let model = load(&triton, &config);
        model.run(vec![bringing(1, START, &[1.0, 2.0], 0)]);
        let mut leaves = bringing(1, 0, &[1.0; 20], 0);
        leaves.cancelled_after = Some(4);
        let payload = model.run(vec![leaves]);
        assert_eq!(sums_of_answers(&payload[0]), (vec![[2.0, 3.0], [3.0, 4.0], [4.0, 5.0], [5.0, 6.0]], None));
        let (_, text) = payload[0].error().unwrap();
        assert!(text.contains("step 5 of 10 of the request"), "{text}");
        let payload = model.run(vec![bringing(1, 0, &[1.0, 1.0], 0)]);
        assert_eq!(sums_of_answers(&payload[0]), (vec![[2.0, 3.0]], Some(())), "the state from before the request");
        model.unload();
    }
    triton.assert_clean();
}

#[test]
fn whatever_fails_between_the_steps_each_request_is_answered_once_and_released_once() {
    let Some(triton) = Triton::start() else { return };
    for (seed, config) in (1..).zip(schedulers().into_iter().chain(schedulers().map(decoupled))) {
        run_with_faults(&triton, &config, seed, 150, |id, flags, random| {
            let mut request = bringing(id, flags, &some(random), if random.one_in(10) { 4 } else { 0 });
            request.cancelled = random.one_in(15);
            request
        });
    }
    triton.assert_clean();
}

#[cfg(feature = "fault-injection")]
mod panics {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::super::panics::silence;
    use super::*;

    /// Four windows.
    fn four(id: u64) -> Request {
        bringing(id, 0, &[1.0; 8], 0)
    }

    /// What the sequences answer to one more window, and then end.
    fn last(model: &Loaded, ids: &[u64]) -> Vec<Option<Vec<Row>>> {
        let payload = model.run(ids.iter().map(|&id| bringing(id, END, &[1.0, 1.0], 0)).collect());
        payload.iter().map(|request| sums_of_steps(request)).collect()
    }

    #[test]
    fn a_panic_while_a_step_is_stored_gives_the_states_from_before_the_requests_back() {
        let Some(triton) = Triton::start() else { return };
        silence();
        for config in schedulers() {
            let model = load(&triton, &config);
            model.run((1..=2).map(|id| bringing(id, START, &[id as f32, 0.0], 0)).collect());
            let payload = model.run(vec![four(1), four(2).with_parameter("inject_panic", "store")]);
            let (_, text) = payload[1].error().unwrap();
            assert!(text.contains("injected at store"), "{text}");
            // It fails, too, if both run together.
            let expected = match sums_of_steps(&payload[0]) {
                Some(sums) => {
                    assert_eq!(sums, [[2.0, 1.0], [3.0, 2.0], [4.0, 3.0], [5.0, 4.0]]);
                    [6.0, 5.0]
                }
                None => [2.0, 1.0],
            };
            assert_eq!(last(&model, &[1, 2]), [Some(vec![expected]), Some(vec![[3.0, 1.0]])]);
            model.unload();
        }
        triton.assert_clean();
    }

    #[test]
    fn a_panic_after_the_last_step_ends_the_sequence() {
        let Some(triton) = Triton::start() else { return };
        silence();
        for config in schedulers() {
            let model = load(&triton, &config);
            model.run(vec![bringing(1, START, &[1.0, 2.0, 3.0], 0), bringing(2, START, &[2.0, 0.0], 0)]);
            let payload = model.run(vec![four(1).with_parameter("inject_panic", "complete"), four(2)]);
            let (_, text) = payload[0].error().unwrap();
            assert!(text.contains("injected at complete"), "{text}");
            assert_eq!(sums_of_steps(&payload[1]).unwrap().len(), 4);
            // What it has left over is that from after the request, so its state must not be that from before.
            assert_eq!(last(&model, &[1, 2]), [None, Some(vec![[7.0, 5.0]])]);
            model.unload();
        }
        triton.assert_clean();
    }

    #[test]
    fn a_panic_at_a_new_request_costs_no_request_between_two_steps() {
        let Some(triton) = Triton::start() else { return };
        silence();
        let model = load(&triton, &cut(own(&[])));
        model.run((1..=2).map(|id| bringing(id, START, &[id as f32, 0.0], 0)).collect());
        let (is_busy, is_sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (mut long, busy, sent) = (four(1), is_busy.clone(), is_sent.clone());
        // The worker is busy with the first step until the other request has come.
        long.meanwhile = Some(Box::new(move || {
            busy.store(true, Ordering::Relaxed);
            assert!(becomes_true(|| sent.load(Ordering::Relaxed)));
        }));
        let (long, other) = ([Arc::new(long)], [Arc::new(four(2).with_parameter("inject_panic", "admit"))]);
        model.instance.send(&long);
        assert!(becomes_true(|| is_busy.load(Ordering::Relaxed)));
        model.instance.send(&other);
        is_sent.store(true, Ordering::Relaxed);
        wait_for_release(&long);
        wait_for_release(&other);
        let (_, text) = other[0].error().unwrap();
        assert!(text.contains("lost this request"), "{text}");
        assert_eq!(sums_of_steps(&long[0]), Some(vec![[2.0, 1.0], [3.0, 2.0], [4.0, 3.0], [5.0, 4.0]]));
        assert_eq!(last(&model, &[1, 2]), [Some(vec![[6.0, 5.0]]), None]);
        model.unload();
        triton.assert_clean();
    }
}

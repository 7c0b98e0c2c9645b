//! Every request is answered once and released once, on every path, against a stand-in for Triton that counts and that
//! fails on demand, with a real ONNX Runtime.
//!
//! `cargo test --features fault-injection --test exactly_once` adds the panics.

#![allow(clippy::unwrap_used, reason = "all of this is a test")]

#[allow(dead_code, reason = "the other tests have a use for the rest")]
mod fake_triton;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fake_triton::ledger::{self, Faults, Random};
use fake_triton::running_sum::{self, Row, index, request, sum, value};
use fake_triton::{Answer, FALLIBLE, Id, Input, Loaded, LoadedInstance, LoadedModel, Request, Shared, Triton};
use fake_triton::{END, START, becomes_true, onnx, wait_for_release};
use serde_json::{Value, json};
use triton_sys::{
    TRITONSERVER_ERROR_CANCELLED, TRITONSERVER_ERROR_INTERNAL, TRITONSERVER_ERROR_INVALID_ARG,
    TRITONSERVER_ERROR_NOT_FOUND, TRITONSERVER_ERROR_UNAVAILABLE, TRITONSERVER_ERROR_UNSUPPORTED,
    TRITONSERVER_TYPE_BYTES, TRITONSERVER_TYPE_FP32, TRITONSERVER_TYPE_INT64,
};

fn config(scheduler: Value) -> Value {
    running_sum::config(scheduler, json!({ "count": 1, "kind": "KIND_CPU" }))
}

fn oldest(capacity: usize) -> Value {
    config(running_sum::oldest(capacity))
}

fn direct() -> Value {
    config(json!({ "max_sequence_idle_microseconds": 60_000_000, "direct": {} }))
}

fn load(triton: &Triton, config: &Value) -> Loaded {
    triton.load("running_sum", config, &onnx::running_sum()).unwrap()
}

/// What can be wrong with a request, with the code and a part of the text of its answer.
fn wrong(id: u64, flags: u32) -> Vec<(Request, triton_sys::TRITONSERVER_Error_Code, &'static str)> {
    let with = |inputs: Vec<Input>| Request::new(Id::Number(id), flags, inputs, &["SUM"]);
    let altered = |alter: fn(&mut Input)| {
        let mut input = value([1.0, 1.0]);
        alter(&mut input);
        with(vec![input, index(0)])
    };
    let mut cancelled = request(id, flags, [1.0, 1.0]);
    cancelled.cancelled = true;
    let mut on_gpu = request(id, flags, [1.0, 1.0]);
    on_gpu.outputs_gpu = Some(0);
    let unlisted = Request::new(Id::Number(id), flags, vec![value([1.0, 1.0]), index(0)], &["SUM", "SUM_OUT"]);
    vec![
        (altered(|input| input.data_type = TRITONSERVER_TYPE_INT64), TRITONSERVER_ERROR_INVALID_ARG, "TYPE_INT64"),
        (altered(|input| input.data_type.0 = 99), TRITONSERVER_ERROR_INVALID_ARG, "an unknown type"),
        (altered(|input| input.dims = vec![1, 3]), TRITONSERVER_ERROR_INVALID_ARG, "shape [1, 3]"),
        (altered(|input| input.dims = vec![2, 2]), TRITONSERVER_ERROR_INVALID_ARG, "shape [2, 2]"),
        (altered(|input| input.dims = vec![1, -2]), TRITONSERVER_ERROR_INVALID_ARG, "shape [1, -2]"),
        (altered(|input| input.dims = vec![]), TRITONSERVER_ERROR_INVALID_ARG, "shape []"),
        (altered(|input| input.pieces[0].truncate(7)), TRITONSERVER_ERROR_INVALID_ARG, "7 bytes"),
        (altered(|input| input.pieces.push(vec![0; 4])), TRITONSERVER_ERROR_INVALID_ARG, "12 bytes"),
        (altered(|input| input.pieces.clear()), TRITONSERVER_ERROR_INVALID_ARG, "0 bytes"),
        (altered(|input| input.gpu = Some(0)), TRITONSERVER_ERROR_UNSUPPORTED, "'VALUE' lies in memory of GPU 0"),
        (
            altered(|input| (input.pieces, input.gpu) = (vec![vec![0; 3], vec![0; 5]], Some(0))),
            TRITONSERVER_ERROR_UNSUPPORTED,
            "'VALUE' lies in memory of GPU 0",
        ),
        (with(vec![index(0)]), TRITONSERVER_ERROR_INVALID_ARG, "'VALUE' is missing"),
        (with(vec![]), TRITONSERVER_ERROR_INVALID_ARG, "is missing"),
        (with(vec![value([1.0, 1.0]), index(4)]), TRITONSERVER_ERROR_INTERNAL, "ONNX Runtime"),
        (unlisted, TRITONSERVER_ERROR_INVALID_ARG, "'SUM_OUT' is requested"),
        (on_gpu, TRITONSERVER_ERROR_UNSUPPORTED, "'SUM' is wanted in memory of GPU 0"),
        (cancelled, TRITONSERVER_ERROR_CANCELLED, "cancelled"),
    ]
}

fn assert_error(request: &Request, code: triton_sys::TRITONSERVER_Error_Code, part: &str) {
    let (came, text) = request.error().unwrap_or_else(|| panic!("'{part}' was expected: {:?}", request.answer()));
    assert!(came == code && text.contains(part), "code {} and '{part}' were expected: {} {text}", code.0, came.0);
    assert_eq!(request.fate.lock().statistics, [false], "a failure is counted as one");
}

#[test]
fn good_requests_are_answered_with_their_sums() {
    let Some(triton) = Triton::start() else { return };
    let model = load(&triton, &oldest(8));
    for step in 1..=5 {
        let step = step as f32;
        let flags = if step == 1.0 { START } else { 0 };
        let mut named = request(0, flags, [step, 0.0]);
        named.id = Id::name("a sequence");
        // A value may come in pieces that are cut anywhere, empty ones among them.
        let mut cut = request(7, flags, [step, 1.0]);
        let bytes = cut.inputs[0].pieces[0].clone();
        cut.inputs[0].pieces = vec![bytes[..3].to_vec(), vec![], bytes[3..].to_vec()];
        let payload = model.run(vec![request(6, flags, [-step, 0.5]), named, cut]);
        let total = step * (step + 1.0) / 2.0;
        let sums: Vec<_> = payload.iter().map(|request| sum(request)).collect();
        assert_eq!(sums, [Some([-total, 0.5 * step]), Some([total, 0.0]), Some([total, step])]);
        assert!(payload.iter().all(|request| request.fate.lock().statistics == [true]));
    }
    model.unload();
    triton.assert_clean();
}

#[test]
fn a_wrong_request_fails_alone_and_leaves_its_state_as_it_was() {
    let Some(triton) = Triton::start() else { return };
    let model = load(&triton, &oldest(8));
    model.run(vec![request(1, START, [1.0, 2.0]), request(2, START, [10.0, 20.0])]);
    for (count, (bad, code, part)) in (1..).zip(wrong(1, 0)) {
        let payload = model.run(vec![bad, request(2, 0, [1.0, 1.0])]);
        assert_error(&payload[0], code, part);
        assert_eq!(sum(&payload[1]), Some([10.0 + count as f32, 20.0 + count as f32]), "{part}");
        assert_eq!(sum(&model.run(vec![request(1, 0, [0.0, 0.0])])[0]), Some([1.0, 2.0]), "{part}");
    }
    model.unload();
    triton.assert_clean();
}

#[test]
fn a_wrong_start_starts_nothing_and_a_wrong_end_ends() {
    let Some(triton) = Triton::start() else { return };
    let model = load(&triton, &oldest(2));
    // Each has an id of its own: what follows a START without state has to come before the next START is released.
    let each_wrong = |first: u64, flags| {
        (first..)
            .zip(wrong(first, flags))
            .map(move |(id, (bad, code, part))| (id, Request { id: Id::Number(id), ..bad }, code, part))
    };
    for (id, bad, code, part) in each_wrong(100, START) {
        assert_error(&model.run(vec![bad])[0], code, part);
        assert_error(&model.run(vec![request(id, 0, [0.0, 0.0])])[0], TRITONSERVER_ERROR_NOT_FOUND, "not live");
    }
    for (id, bad, code, part) in each_wrong(200, END) {
        model.run(vec![request(id, START, [1.0, 1.0])]);
        assert_error(&model.run(vec![bad])[0], code, part);
        assert_error(&model.run(vec![request(id, 0, [0.0, 0.0])])[0], TRITONSERVER_ERROR_NOT_FOUND, "not live");
    }
    for (_, bad, code, part) in each_wrong(300, START | END) {
        assert_error(&model.run(vec![bad])[0], code, part);
    }
    let payload = model.run(vec![request(1, START, [1.0, 1.0]), request(2, START, [2.0, 2.0])]);
    assert!(payload.iter().all(|request| sum(request).is_some()), "both slots are free again");
    model.unload();
    triton.assert_clean();
}

#[test]
fn a_full_pool_refuses_a_start_and_takes_it_after_an_end() {
    let Some(triton) = Triton::start() else { return };
    let mut half = oldest(6);
    half["parameters"]["max_candidate_sequence_use_ratio"] = json!({ "string_value": "0.5" });
    let model = load(&triton, &half);
    let payload = model.run((1..=5).map(|id| request(id, START, [1.0, 1.0])).collect());
    for refused in &payload[3..] {
        assert_error(refused, TRITONSERVER_ERROR_UNAVAILABLE, "all 3 that the model may have");
    }
    assert!(payload[..3].iter().all(|request| sum(request) == Some([1.0, 1.0])));
    let payload = model.run(vec![request(1, END, [1.0, 1.0]), request(4, 0, [1.0, 1.0])]);
    assert_eq!(sum(&payload[0]), Some([2.0, 2.0]));
    assert_error(&payload[1], TRITONSERVER_ERROR_NOT_FOUND, "sequence 4 is not live");
    assert_eq!(sum(&model.run(vec![request(4, START, [5.0, 5.0])])[0]), Some([5.0, 5.0]));
    model.unload();
    triton.assert_clean();
}

#[test]
fn a_gpu_that_is_not_there_is_a_plain_error_or_the_cpu_where_that_is_allowed() {
    let Some(triton) = Triton::start() else { return };
    if triton_stateful::memory::device::Device::open(0).is_ok() {
        eprintln!("skipped: this machine has a GPU");
        return;
    }
    let mut config = oldest(8);
    config["instance_group"] = json!([{ "count": 1, "kind": "KIND_GPU", "gpus": [0] }]);
    let (code, text) = triton.load("running_sum", &config, &onnx::running_sum()).err().unwrap();
    assert_eq!(code, TRITONSERVER_ERROR_UNSUPPORTED);
    assert!(text.contains("NVIDIA's driver") && text.contains("libcuda.so.1"), "{text}");
    config["parameters"]["allow_cpu_fallback"] = json!({ "string_value": "1" });
    let model = triton.load_on(Some(0), "running_sum", &config, &onnx::running_sum()).unwrap();
    let answered = model.run(vec![request(5, START, [1.0, 2.0]), request(6, START, [3.0, 4.0])]);
    assert_eq!(answered.iter().map(|request| sum(request)).collect::<Vec<_>>(), [Some([1.0, 2.0]), Some([3.0, 4.0])]);
    model.unload();
    triton.assert_clean();
}

#[test]
fn fillers_are_released_and_warm_ups_answered() {
    let Some(triton) = Triton::start() else { return };
    for config in [oldest(4), direct()] {
        let model = load(&triton, &config);
        let filler = || Request::new(Id::Number(0), 0, vec![value([9.0, 9.0]), index(4)], &[]);
        let payload = model.run(vec![filler(), request(1, START, [1.0, 2.0]), filler(), request(0, 0, [3.0, 4.0])]);
        let sums: Vec<_> = payload.iter().map(|request| sum(request)).collect();
        assert_eq!(sums, [None, Some([1.0, 2.0]), None, Some([3.0, 4.0])]);
        let payload = model.run(vec![filler(), request(1, END, [1.0, 2.0]), request(0, START | END, [5.0, 6.0])]);
        let sums: Vec<_> = payload.iter().map(|request| sum(request)).collect();
        assert_eq!(sums, [None, Some([2.0, 4.0]), Some([5.0, 6.0])]);
        model.run(vec![]);
        model.unload();
    }
    triton.assert_clean();
}

#[test]
fn a_run_that_fails_costs_only_the_rows_at_fault() {
    let Some(triton) = Triton::start() else { return };
    let model = load(&triton, &oldest(16));
    let ids = 1..=12u64;
    model.run(ids.clone().map(|id| request(id, START, [id as f32, 0.0])).collect());
    let at_fault = |id: u64| id.is_multiple_of(5) || id == 2;
    let row = |id: u64| {
        let position = if at_fault(id) { 77 } else { -1 };
        Request::new(Id::Number(id), 0, vec![value([1.0, 1.0]), index(position)], &["SUM"])
    };
    let payload = model.run(ids.clone().map(row).collect());
    for (id, request) in ids.clone().zip(&payload) {
        if at_fault(id) {
            assert_error(request, TRITONSERVER_ERROR_INTERNAL, "ONNX Runtime");
        } else {
            assert_eq!(sum(request), Some([id as f32 + 1.0, 1.0]));
        }
    }
    let payload = model.run(ids.clone().map(|id| request(id, 0, [0.0, 0.0])).collect());
    for (id, request) in ids.zip(&payload) {
        let expected = if at_fault(id) { [id as f32, 0.0] } else { [id as f32 + 1.0, 1.0] };
        assert_eq!(sum(request), Some(expected), "sequence {id}");
    }
    model.unload();
    triton.assert_clean();
}

/// Strings as Triton carries them.
fn carried(elements: &[&str]) -> Vec<u8> {
    elements.iter().flat_map(|one| [&(one.len() as u32).to_le_bytes()[..], one.as_bytes()].concat()).collect()
}

/// A request whose first input lies in memory that its client changes when the input has been decoded.
fn changing(mut request: Request, to: &[u8]) -> Request {
    let (shared, to) = (Shared::new(&request.inputs[0].pieces.concat()), to.to_vec());
    request.inputs[0].shared = Some(shared.clone());
    request.meanwhile = Some(Box::new(move || shared.write(&to)));
    request
}

#[test]
fn strings_are_read_once_whatever_their_client_writes_meanwhile() {
    let Some(triton) = Triton::start() else { return };
    let mut config = oldest(8);
    config["name"] = json!("delay_of_strings");
    config["input"] = json!([{ "name": "VALUE", "data_type": "TYPE_STRING", "dims": [2] }]);
    config["output"] = json!([{ "name": "LAST", "data_type": "TYPE_STRING", "dims": [2] }]);
    config["parameters"]["state_pairs"] = json!({ "string_value": "<<<HELD_IN, HELD_OUT>>>" });
    let model = triton.load("delay_of_strings", &config, &onnx::delay_of_strings()).unwrap();
    let ask = |id: u64, flags: u32, elements: [&str; 2]| {
        let value = Input::new("VALUE", TRITONSERVER_TYPE_BYTES, &[1, 2], carried(&elements));
        Request::new(Id::Number(id), flags, vec![value], &["LAST"])
    };
    let last = |request: &Request| match request.answer() {
        Some(Answer::Outputs(outputs)) => outputs["LAST"].1.clone(),
        answer => panic!("{answer:?}"),
    };
    model.run(vec![ask(1, START, ["mine", "first"]), ask(2, START, ["its", "own"])]);
    let mut before = ["mine", "first"];
    // More elements, fewer, and what is none at all.
    for (now, to) in [
        (["mine", "three"], carried(&["", "", "other"])),
        (["mine", "fewer"], carried(&["one for both "])),
        (["mine", "wrong"], vec![0xff; 17]),
    ] {
        let payload = model.run(vec![changing(ask(1, 0, now), &to), ask(2, 0, ["its", "own"])]);
        assert_eq!([last(&payload[0]), last(&payload[1])], [carried(&before), carried(&["its", "own"])]);
        before = now;
    }
    assert_eq!(last(&model.run(vec![ask(1, END, ["", ""])])[0]), carried(&before));
    model.unload();
    triton.assert_clean();
}

#[test]
fn a_value_for_the_whole_batch_is_the_one_that_its_rows_were_compared_by() {
    let Some(triton) = Triton::start() else { return };
    let mut config = oldest(8);
    config["name"] = json!("shifted_sum");
    config["input"][1] = json!({ "name": "SHIFT", "data_type": "TYPE_FP32", "dims": [2] });
    let model = triton.load("shifted_sum", &config, &onnx::shifted_sum()).unwrap();
    let ask = |id: u64, flags: u32, shift: Row| {
        let shift = Input::new("SHIFT", TRITONSERVER_TYPE_FP32, &[1, 2], bytemuck::bytes_of(&shift).to_vec());
        Request::new(Id::Number(id), flags, vec![shift, value([0.0, 0.0])], &["SUM"])
    };
    let changed = [100.0f32, 100.0];
    let payload = model.run(vec![
        changing(ask(1, START, [1.0, 2.0]), bytemuck::bytes_of(&changed)),
        ask(2, START, [1.0, 2.0]),
        ask(3, START, [3.0, 4.0]),
    ]);
    let sums: Vec<_> = payload.iter().map(|request| sum(request)).collect();
    assert_eq!(sums, [Some([1.0, 2.0]), Some([1.0, 2.0]), Some([3.0, 4.0])]);
    model.unload();
    triton.assert_clean();
}

#[test]
fn the_start_of_a_sequence_that_is_live_is_answered_and_released_later() {
    let Some(triton) = Triton::start() else { return };
    let model = load(&triton, &oldest(8));
    model.run(vec![request(1, START, [1.0, 1.0])]);
    let restart = model.run(vec![request(1, START, [5.0, 5.0])]);
    assert_eq!(sum(&restart[0]), Some([5.0, 5.0]), "answered at once");
    wait_for_release(&restart);
    assert_eq!(sum(&model.run(vec![request(1, 0, [1.0, 1.0])])[0]), Some([6.0, 6.0]));
    // Several at once, of several sequences; nobody waits.
    model.run(vec![request(2, START, [2.0, 2.0])]);
    let held =
        model.run(vec![request(1, START, [7.0, 7.0]), request(2, START, [8.0, 8.0]), request(2, START, [9.0, 9.0])]);
    assert!(held.iter().all(|request| sum(request).is_some()));
    model.unload();
    assert!(held.iter().all(|request| request.is_released()), "at the latest when the instance goes");
    triton.assert_clean();
}

#[test]
fn one_id_several_times_in_a_payload_is_answered_each_time() {
    let Some(triton) = Triton::start() else { return };
    for config in [oldest(8), direct()] {
        for (count, flags) in
            [[START, 0, 0], [START, START, START], [0, START, END], [END, START, END], [START | END, START, 0]]
                .into_iter()
                .chain([[END, END, END], [START, END, START]])
                .enumerate()
        {
            let model = load(&triton, &config);
            let mut all = Vec::new();
            for id in [1, count as u64 + 2] {
                all.extend(model.run(flags.iter().map(|&flags| request(id, flags, [1.0, 1.0])).collect()));
                all.extend(model.run(flags.iter().map(|&flags| request(id, flags, [1.0, 1.0])).collect()));
            }
            model.unload();
            assert!(all.iter().all(|request| request.is_released()));
        }
    }
    triton.assert_clean();
}

/// Requests of three live sequences and of three new ones, some of them wrong.
fn mixed_payload(first: u64) -> Vec<Request> {
    let mut named = request(0, START | END, [1.0, 1.0]);
    named.id = Id::name("once");
    vec![
        request(first, 0, [1.0, 1.0]),
        request(first + 1, END, [1.0, 1.0]),
        Request::new(Id::Number(first + 2), 0, vec![value([1.0, 1.0]), index(9)], &["SUM"]),
        request(first + 3, START, [1.0, 1.0]),
        Request::new(Id::Number(first + 4), START, vec![index(0)], &["SUM"]),
        Request::new(Id::Number(0), 0, vec![], &[]),
        named,
    ]
}

#[test]
fn each_function_of_triton_fails_in_turn() {
    let Some(triton) = Triton::start() else { return };
    let model = load(&triton, &oldest(64));
    let mut first = 1;
    let mut faults = BTreeMap::new();
    for &function in FALLIBLE {
        for after in 0.. {
            model.run((first..first + 3).map(|id| request(id, START, [2.0, 2.0])).collect());
            let (payload, failed) = model.run_with(Faults::Nth { function, after }, mixed_payload(first));
            *faults.entry(function).or_insert(0) += failed;
            wait_for_release(&payload);
            assert_next_payload(&model, first, &payload);
            first += 10;
            if failed == 0 {
                break;
            }
        }
        let (payload, _) = model.run_with(Faults::Always(function), mixed_payload(first));
        wait_for_release(&payload);
        first += 10;
    }
    model.unload();
    triton.assert_clean();
    for needed in ["ModelInstanceState", "RequestFlags", "RequestInput", "ResponseNew", "OutputBuffer", "ResponseSend"]
    {
        let times = faults[format!("TRITONBACKEND_{needed}").as_str()];
        assert!(times > 0, "{needed} was never called");
    }
}

/// After a payload with a failure somewhere, the live sequences go on from where their last answer says, and end.
fn assert_next_payload(model: &Loaded, first: u64, payload: &[Arc<Request>]) {
    let next = model.run(vec![request(first, END, [0.0, 0.0]), request(first + 2, END, [0.0, 0.0])]);
    // An answer that was lost on its way may have left a state behind.
    let lost = payload[0].answer().is_none();
    let expected = if sum(&payload[0]).is_some() { [3.0, 3.0] } else { [2.0, 2.0] };
    assert!(sum(&next[0]) == Some(expected) || lost, "{:?} after {:?}", next[0].answer(), payload[0].answer());
    assert_eq!(sum(&next[1]), Some([2.0, 2.0]), "its run had failed");
    model.run(vec![request(first + 1, END, [0.0, 0.0]), request(first + 3, END, [0.0, 0.0])]);
}

#[test]
fn each_function_of_triton_fails_in_turn_while_models_come_and_go() {
    let Some(triton) = Triton::start() else { return };
    let mut stayed = 0;
    for &function in FALLIBLE {
        for after in 0.. {
            ledger::set_faults(Faults::Nth { function, after });
            stayed += usize::from(come_and_go());
            let failed = ledger::set_faults(Faults::None);
            let is_gone = || threads("stateful-reaper") <= stayed;
            assert!(becomes_true(is_gone), "a model stayed behind when {function} failed");
            if failed == 0 {
                break;
            }
        }
    }
    triton.assert_clean();
}

/// Loads a model, runs one request, and unloads, as core does whatever fails. Returns whether the backend was kept
/// from getting its own objects back, which it then cannot free.
fn come_and_go() -> bool {
    let model = LoadedModel::new("running_sum", &oldest(4), &onnx::running_sum());
    let mut leaks = false;
    if model.initialize().is_ok() {
        let instance = LoadedInstance::new(&model);
        if instance.initialize().is_ok() {
            let loaded = Loaded { model, instance };
            loaded.run(vec![request(1, START, [1.0, 1.0])]);
            leaks |= loaded.instance.finalize().is_err();
            return leaks | loaded.model.finalize().is_err();
        }
        leaks |= instance.finalize().is_err();
    }
    leaks | model.finalize().is_err()
}

/// Threads of this process with that name. The system may still list one for a moment after it has been joined.
fn threads(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|comm| comm.trim_end() == name).count()
}

/// What a client knows of its sequence's sum.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Known {
    Dead,
    Sum(Row),
    Nothing,
}

/// Payloads by chance, over a few sequences, held against what a client can know.
struct Traffic {
    random: Random,
    known: BTreeMap<u64, Known>,
    /// Ids of which two incarnations may have lived at once; what an END leaves behind is not certain.
    mixed: Vec<u64>,
    held: Vec<Arc<Request>>,
    answers: usize,
}

impl Traffic {
    fn new(seed: u64, ids: u64) -> Self {
        let known = (1..=ids).map(|id| (id, Known::Dead)).collect();
        Self { random: Random(seed), known, mixed: Vec::new(), held: Vec::new(), answers: 0 }
    }

    fn step(&mut self, model: &Loaded, faults: Option<u64>) {
        self.held.retain(|request| !request.is_released());
        let mut payload = Vec::new();
        let mut busy: Vec<u64> = self.held.iter().filter_map(|request| number(request)).collect();
        for _ in 0..=self.random.below(7) {
            let id = 1 + self.random.below(self.known.len() as u64);
            // Core sends the next request of a sequence when the last one is released.
            if !busy.contains(&id) {
                busy.push(id);
                payload.push(self.request(id));
            }
        }
        if self.random.one_in(4) {
            payload.push(Request::new(Id::Number(0), 0, vec![], &[]));
        }
        let random = Random(self.random.below(u64::MAX));
        let faults = faults.map_or(Faults::None, |one_in| Faults::Random { random, one_in });
        let (payload, failed) = model.run_with(faults, payload);
        for request in &payload {
            self.learn(request, failed > 0);
        }
        self.held.extend(payload);
    }

    fn request(&mut self, id: u64) -> Request {
        let random = &mut self.random;
        let live = self.known[&id] != Known::Dead;
        let start = if live { random.one_in(40) } else { !random.one_in(10) };
        let flags = if start { START } else { 0 } | if random.one_in(6) { END } else { 0 };
        if random.one_in(8) {
            let wrong = wrong(id, flags);
            let chosen = random.below(wrong.len() as u64) as usize;
            return wrong.into_iter().nth(chosen).unwrap().0;
        }
        request(id, flags, [random.below(100) as f32, random.below(100) as f32])
    }

    fn learn(&mut self, request: &Request, faults: bool) {
        let Some(id) = number(request) else { return };
        let (start, end) = (request.flags & START != 0, request.flags & END != 0);
        let before = self.known[&id];
        if start && before != Known::Dead {
            self.mixed.push(id);
        }
        let (row, sum) = (bytemuck::pod_read_unaligned::<Row>(&row_of(request)), sum(request));
        let expected = match (start, before) {
            (true, _) => Some(row),
            (false, Known::Sum(sum)) => Some([sum[0] + row[0], sum[1] + row[1]]),
            (false, Known::Dead | Known::Nothing) => None,
        };
        let after = match (sum, expected) {
            (Some(sum), Some(expected)) => {
                assert_eq!(sum, expected, "sequence {id}, flags {}", request.flags);
                self.answers += 1;
                Known::Sum(sum)
            }
            (Some(_), None) if before == Known::Dead => panic!("sequence {id} was not live and has been continued"),
            // It may be the rest of a sequence that has been started over, which goes without notice.
            (Some(_), None) => Known::Nothing,
            (None, _) if request.answer().is_none() => Known::Nothing,
            (None, _) if !start => before,
            (None, _) if before == Known::Dead && !faults => Known::Dead,
            (None, _) => Known::Nothing,
        };
        let is_certain = !faults && !self.mixed.contains(&id);
        let after = match end {
            true if is_certain => Known::Dead,
            true => Known::Nothing,
            false => after,
        };
        if !faults && !start && matches!(before, Known::Sum(_)) {
            let refused = request.error().filter(|(code, _)| *code == TRITONSERVER_ERROR_NOT_FOUND);
            assert_eq!(refused, None, "sequence {id} was live");
        }
        self.known.insert(id, after);
    }
}

fn number(request: &Request) -> Option<u64> {
    match request.id {
        Id::Number(number) if number != 0 => Some(number),
        _ => None,
    }
}

/// The value that a request carries, as far as it is one.
fn row_of(request: &Request) -> [u8; 8] {
    let pieces = request.inputs.iter().find(|input| input.name.as_bytes() == b"VALUE").map(|input| &input.pieces);
    pieces.and_then(|pieces| pieces.first()?.as_slice().try_into().ok()).unwrap_or_default()
}

#[test]
fn traffic_by_chance_is_answered_rightly() {
    let Some(triton) = Triton::start() else { return };
    for seed in 0..4 {
        let model = load(&triton, &oldest(6));
        let mut traffic = Traffic::new(seed, 9);
        (0..400).for_each(|_| traffic.step(&model, None));
        wait_for_release(&traffic.held);
        assert!(traffic.answers > 300, "{}", traffic.answers);
        model.unload();
    }
    triton.assert_clean();
}

#[test]
fn answers_that_take_long_leave_while_the_next_payload_runs_and_before_the_model_goes() {
    let Some(triton) = Triton::start() else { return };
    triton.slow_down(Duration::from_micros(300));
    let model = load(&triton, &oldest(30));
    let mut traffic = Traffic::new(30, 9);
    (0..60).for_each(|_| traffic.step(&model, None));
    wait_for_release(&traffic.held);
    assert!(traffic.answers > 30, "{}", traffic.answers);
    let payload = |ids: [u64; 3]| ids.map(|id| Arc::new(request(id, START, [id as f32, 1.0])));
    let (first, second) = (payload([100, 101, 102]), payload([103, 104, 105]));
    let began = Instant::now();
    model.instance.execute(&first).unwrap();
    model.instance.execute(&second).unwrap();
    let is_late = first.iter().chain(&second).any(|request| !request.is_released());
    // Six answers take 1.8 ms; where the machine was held up for longer, there is nothing to see.
    assert!(is_late || began.elapsed() > Duration::from_micros(1800), "Execute has waited for its answers");
    model.unload();
    for request in first.iter().chain(&second) {
        assert_eq!((sum(request).map(|sum| sum[1]), request.is_released()), (Some(1.0), true), "{:?}", request.id);
    }
    triton.assert_clean();
}

#[test]
fn traffic_by_chance_survives_failures_by_chance() {
    let Some(triton) = Triton::start() else { return };
    for (seed, one_in) in [(10, 200), (11, 50), (12, 20), (13, 7), (14, 2)] {
        let model = load(&triton, &oldest(6));
        let mut traffic = Traffic::new(seed, 9);
        (0..300).for_each(|_| traffic.step(&model, Some(one_in)));
        wait_for_release(&traffic.held);
        let (payload, _) = model.run_with(Faults::None, vec![request(100, START | END, [1.0, 2.0])]);
        assert!(sum(&payload[0]).is_some() || payload[0].error().unwrap().0 == TRITONSERVER_ERROR_UNAVAILABLE);
        model.unload();
    }
    triton.assert_clean();
}

#[test]
fn lanes_of_the_direct_strategy_keep_their_sums_apart() {
    let Some(triton) = Triton::start() else { return };
    let (model, mut random) = (load(&triton, &direct()), Random(21));
    // One sequence at a time has a lane; two lanes may have the same id.
    let mut lanes: [Option<(u64, Row)>; 4] = [None; 4];
    for _ in 0..300 {
        let mut expected = Vec::new();
        let mut payload = Vec::new();
        for lane in &mut lanes {
            let row = [random.below(100) as f32, random.below(100) as f32];
            let end = random.one_in(6);
            let (id, sum, flags) = match lane {
                _ if random.one_in(5) => (0, None, 0),
                Some((id, sum)) if !random.one_in(10) => (*id, Some([sum[0] + row[0], sum[1] + row[1]]), 0),
                _ => (1 + random.below(5), Some(row), START),
            };
            match (id, sum) {
                (0, _) => payload.push(Request::new(Id::Number(0), 0, vec![], &[])),
                _ => payload.push(request(id, flags | if end { END } else { 0 }, row)),
            }
            if let Some(sum) = sum {
                *lane = (!end).then_some((id, sum));
            }
            expected.push(sum);
        }
        let sums: Vec<_> = model.run(payload).iter().map(|request| sum(request)).collect();
        assert_eq!(sums, expected);
    }
    model.unload();
    triton.assert_clean();
}

#[cfg(feature = "fault-injection")]
mod panics {
    use super::*;

    const STAGES: [&str; 6] = ["decode", "admit", "gather", "run", "respond", "complete"];

    /// Panics that a test asked for are no news.
    fn silence() {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let injected = info.payload().downcast_ref::<String>().is_some_and(|text| text.starts_with("injected at"));
            if !injected {
                usual(info);
            }
        }));
    }

    /// A payload in which request 2 of the sequences 1 to 3 panics at a stage, and sequence 4 starts.
    fn payload_with_a_panic(stage: &str) -> Vec<Request> {
        let injected = request(2, 0, [9.0, 9.0]).with_parameter("inject_panic", stage);
        vec![request(1, 0, [9.0, 9.0]), injected, request(3, 0, [9.0, 9.0]), request(4, START | END, [9.0, 9.0])]
    }

    #[test]
    fn a_panic_costs_the_request_that_it_is_for_and_no_other() {
        let Some(triton) = Triton::start() else { return };
        silence();
        let model = load(&triton, &oldest(8));
        for stage in ["decode", "gather", "run", "respond"] {
            model.run((1..=3).map(|id| request(id, START, [id as f32, 0.0])).collect());
            let payload = model.run(payload_with_a_panic(stage));
            assert_error(&payload[1], TRITONSERVER_ERROR_INTERNAL, &format!("panicked: injected at {stage}"));
            let others = [0, 2, 3].map(|at| sum(&payload[at]));
            assert_eq!(others, [Some([10.0, 9.0]), Some([12.0, 9.0]), Some([9.0, 9.0])], "{stage}");
            let payload = model.run((1..=3).map(|id| request(id, END, [0.0, 0.0])).collect());
            let sums: Vec<_> = payload.iter().map(|request| sum(request)).collect();
            assert_eq!(sums, [Some([10.0, 9.0]), Some([2.0, 0.0]), Some([12.0, 9.0])], "{stage}");
        }
        model.unload();
        triton.assert_clean();
    }

    #[test]
    fn a_panic_while_a_state_is_kept_ends_its_sequence_and_no_other() {
        let Some(triton) = Triton::start() else { return };
        silence();
        let model = load(&triton, &oldest(8));
        model.run((1..=3).map(|id| request(id, START, [id as f32, 0.0])).collect());
        let payload = model.run(payload_with_a_panic("complete"));
        assert_error(&payload[1], TRITONSERVER_ERROR_INTERNAL, "panicked: injected at complete");
        let payload = model.run((1..=3).map(|id| request(id, END, [0.0, 0.0])).collect());
        assert_eq!((sum(&payload[0]), sum(&payload[2])), (Some([10.0, 9.0]), Some([12.0, 9.0])));
        assert_error(&payload[1], TRITONSERVER_ERROR_NOT_FOUND, "sequence 2");
        model.unload();
        triton.assert_clean();
    }

    /// Its START is not held as it should be, so core may send what follows it.
    #[test]
    fn what_follows_the_lost_start_of_a_live_sequence_does_not_get_its_state() {
        let Some(triton) = Triton::start() else { return };
        silence();
        let model = load(&triton, &oldest(4));
        model.run(vec![request(1, START, [5.0, 5.0]), request(2, START, [7.0, 7.0])]);
        model.run(vec![request(1, START, [1.0, 1.0]).with_parameter("inject_panic", "admit")]);
        let payload = model.run(vec![request(1, 0, [1.0, 1.0]), request(2, 0, [1.0, 1.0])]);
        assert_error(&payload[0], TRITONSERVER_ERROR_NOT_FOUND, "sequence 1");
        assert_eq!(sum(&payload[1]), Some([8.0, 8.0]));
        model.run(vec![request(1, END, [1.0, 1.0])]);
        let payload = model.run(vec![request(1, START | END, [2.0, 2.0])]);
        assert_eq!(sum(&payload[0]), Some([2.0, 2.0]));
        model.unload();
        triton.assert_clean();
    }

    #[test]
    fn a_panic_outside_of_a_batch_costs_the_payload_and_no_state() {
        let Some(triton) = Triton::start() else { return };
        silence();
        let model = load(&triton, &oldest(3));
        model.run((1..=2).map(|id| request(id, START, [id as f32, 0.0])).collect());
        let injected = request(2, 0, [9.0, 9.0]).with_parameter("inject_panic", "admit");
        let payload = model.run(vec![request(1, 0, [9.0, 9.0]), injected, request(4, START, [9.0, 9.0])]);
        for request in &payload {
            let (code, text) = request.error().unwrap();
            assert!(code == TRITONSERVER_ERROR_INTERNAL && text.contains("lost this request"), "{text}");
        }
        let payload = model.run((1..=2).map(|id| request(id, 0, [0.0, 0.0])).collect());
        assert_eq!((sum(&payload[0]), sum(&payload[1])), (Some([1.0, 0.0]), Some([2.0, 0.0])));
        let payload = model.run(vec![request(5, START | END, [1.0, 1.0])]);
        assert_eq!(sum(&payload[0]), Some([1.0, 1.0]), "no slot was lost");
        model.unload();
        triton.assert_clean();
    }

    #[test]
    fn panics_and_failures_by_chance_leave_nothing_behind() {
        let Some(triton) = Triton::start() else { return };
        silence();
        let mut random = Random(5);
        let model = load(&triton, &oldest(6));
        let mut all = Vec::new();
        for _ in 0..300 {
            let count = 1 + random.below(6);
            let payload = (0..count).map(|_| {
                let flags = random.pick(&[0, 0, START, END, START | END]);
                let request = request(1 + random.below(8), flags, [1.0, 1.0]);
                if random.one_in(5) { request.with_parameter("inject_panic", random.pick(&STAGES)) } else { request }
            });
            let payload: Vec<_> = payload.collect();
            let faults = Faults::Random { random: random.clone(), one_in: 30 };
            all.extend(model.run_with(faults, payload).0);
        }
        model.unload();
        assert!(all.iter().all(|request| request.is_released()));
        triton.assert_clean();
    }
}

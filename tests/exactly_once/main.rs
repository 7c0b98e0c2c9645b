//! Every request is answered once and released once, on every path, against a stand-in for Triton that counts and that
//! fails on demand, with a real ONNX Runtime.
//!
//! `cargo test --features fault-injection --test exactly_once` adds the panics.

#![allow(clippy::unwrap_used, reason = "all of this is a test")]

#[allow(dead_code, reason = "the other tests have a use for the rest")]
#[path = "../fake_triton/mod.rs"]
mod fake_triton;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fake_triton::ledger::{self, Faults, Random};
use fake_triton::running_sum::{self, Row, index, request, sum, value};
use fake_triton::{Answer, FALLIBLE, Id, Input, Loaded, LoadedInstance, LoadedModel, Request, Shared, Triton};
use fake_triton::{END, START, becomes_true, onnx, wait_for_release};
use serde_json::{Value, json};
use triton_sys::{
    TRITONSERVER_ERROR_ALREADY_EXISTS, TRITONSERVER_ERROR_CANCELLED, TRITONSERVER_ERROR_INTERNAL,
    TRITONSERVER_ERROR_INVALID_ARG, TRITONSERVER_ERROR_NOT_FOUND, TRITONSERVER_ERROR_UNAVAILABLE,
    TRITONSERVER_ERROR_UNSUPPORTED, TRITONSERVER_TYPE_BYTES, TRITONSERVER_TYPE_FP32, TRITONSERVER_TYPE_INT64,
};

mod failures;
pub mod fuzzed;
mod own;
#[cfg(feature = "fault-injection")]
mod panics;
mod repeat;
mod requests;
mod shared_memory;
mod steps;
mod traffic;
mod two_instances;
mod windows;

/// Where a request can panic (parameter `inject_panic`).
const STAGES: [&str; 7] = ["decode", "admit", "gather", "run", "respond", "store", "complete"];

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

/// Loads the model, tests it, and unloads it.
fn serve(config: &Value, test: impl FnOnce(&Loaded)) {
    let Some(triton) = Triton::start() else { return };
    let model = load(&triton, config);
    test(&model);
    model.unload();
    triton.assert_clean();
}

/// Sends `payloads` of four random requests while, at random, whatever can fail does. `request` gets its id and flags.
fn run_with_faults(
    triton: &Triton,
    config: &Value,
    seed: u64,
    payloads: usize,
    request: impl Fn(u64, u32, &mut Random) -> Request,
) {
    for one_in in [200, 40, 8] {
        let (model, mut random) = (load(triton, config), Random::new(seed));
        ledger::set_faults(Faults::Random { random: Random::new(seed + one_in), one_in });
        let mut sent = Vec::new();
        for _ in 0..payloads {
            let request = |id: u64, random: &mut Random| {
                let flags = if random.one_in(4) { START } else { 0 } | if random.one_in(5) { END } else { 0 };
                let mut request = request(id, flags, random);
                if cfg!(feature = "fault-injection") && random.one_in(12) {
                    request = request.with_parameter("inject_panic", random.pick(&STAGES));
                }
                Arc::new(request)
            };
            let payload: Vec<_> = (1..=4).map(|id| request(id, &mut random)).collect();
            model.instance.send(&payload);
            sent.extend(payload);
        }
        ledger::set_faults(Faults::None);
        model.unload();
        assert!(sent.iter().all(|request| request.is_released()), "at the latest when the instance goes");
    }
}

fn sums(payload: &[Arc<Request>]) -> Vec<Option<Row>> {
    payload.iter().map(|request| sum(request)).collect()
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

/// `scripts/sanitize` runs it to see that a sanitizer watches the buffers.
#[cfg(feature = "exact-buffers")]
#[test]
#[ignore = "it reads a byte behind a buffer, which only a sanitizer notices"]
fn a_byte_behind_a_buffer_is_read() {
    let buffer = rows::Buffer::new(100).unwrap();
    // SAFETY: none: this reads one byte past the end on purpose. Run it only under a sanitizer.
    assert!(std::hint::black_box(unsafe { buffer.as_ptr().add(100).read_volatile() }) < 255);
}

/// `scripts/sanitize thread` runs it to see that ThreadSanitizer watches the threads.
#[cfg(feature = "exact-buffers")]
#[test]
#[ignore = "two threads write the same byte, which only ThreadSanitizer notices"]
fn two_threads_write_one_byte() {
    static mut BYTE: u8 = 0;
    std::thread::scope(|scope| {
        for value in 1..=2 {
            // SAFETY: none: nothing orders the two writes, on purpose. Run it only under ThreadSanitizer.
            scope.spawn(move || unsafe { (&raw mut BYTE).write_volatile(value) });
        }
    });
}

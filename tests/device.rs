//! Models whose states are on a device, which is simulated in host memory, against the stand-in for Triton, with a real
//! ONNX Runtime: what a step asks of the device, and where inputs and outputs may lie.
//!
//! `cargo test --features simulated-device --test device`

#![allow(clippy::unwrap_used, reason = "all of this is a test")]

#[allow(dead_code, reason = "the other tests have a use for the rest")]
mod fake_triton;

use std::path::PathBuf;
use std::sync::Once;

use fake_triton::delay::{self, last};
use fake_triton::running_sum::{self, Row, request};
use fake_triton::{END, Failure, Loaded, LoadedInstance, LoadedModel, Request, START, Triton, onnx, with_parameters};
use gpu_rows::{Counts, Device, DeviceBuffer};
use serde_json::{Value, json};
use triton_sys::{TRITONSERVER_ERROR_INVALID_ARG, TRITONSERVER_ERROR_UNAVAILABLE};

/// Bytes that each simulated device has.
const DEVICE_BYTES: usize = 1 << 20;

/// The file that makes devices fail.
fn failure() -> PathBuf {
    std::env::temp_dir().join(format!("triton-stateful-failure-{}", std::process::id()))
}

/// A server in whose process GPUs are simulated.
fn start() -> Option<Triton> {
    static SIMULATE: Once = Once::new();
    // SAFETY: before anything in this process reads the environment on another thread.
    SIMULATE.call_once(|| unsafe {
        std::env::set_var("TRITON_STATEFUL_SIMULATED_DEVICES", "2");
        std::env::set_var("TRITON_STATEFUL_SIMULATED_BYTES", DEVICE_BYTES.to_string());
        std::env::set_var("TRITON_STATEFUL_SIMULATED_FAILURE", failure());
    });
    Triton::start()
}

fn config(gpus: &[i32], count: u32) -> Value {
    running_sum::config(running_sum::oldest(64), json!({ "count": count, "kind": "KIND_GPU", "gpus": gpus }))
}

fn load(triton: &Triton, config: &Value) -> Result<Loaded, Failure> {
    triton.load_on(Some(0), "running_sum", config, &onnx::running_sum())
}

fn sum(request: &Request) -> Row {
    running_sum::sum(request).unwrap_or_else(|| panic!("{:?}", request.answer()))
}

/// What a task asks of the first device.
fn asked(task: impl FnOnce()) -> Counts {
    let device = Device::open(0).unwrap();
    let before = device.counts();
    task();
    let after = device.counts();
    Counts {
        allocations: after.allocations - before.allocations,
        waits: after.waits - before.waits,
        launches: after.launches - before.launches,
        copies: after.copies - before.copies,
    }
}

#[test]
fn a_steady_step_waits_once_allocates_nothing_and_moves_no_state() {
    let Some(triton) = start() else { return };
    let model = load(&triton, &config(&[0], 1)).unwrap();
    let step = |flags| model.run((1..=4).map(|id| request(id, flags, [id as f32, 1.0])).collect());
    step(START);
    step(0);
    let asked = asked(|| (0..50).for_each(|_| drop(step(0))));
    // Two inputs go to the device and one output comes back.
    assert_eq!(asked, Counts { allocations: 0, waits: 50, launches: 0, copies: 150 });
    let answered = step(END);
    let sums: Vec<_> = answered.iter().map(|request| sum(request)).collect();
    assert_eq!(sums, [1.0, 2.0, 3.0, 4.0].map(|id| [53.0 * id, 53.0]));
    model.unload();
    triton.assert_clean();
}

#[test]
fn states_that_join_and_leave_take_one_launch_each() {
    let Some(triton) = start() else { return };
    let model = load(&triton, &with_parameters(config(&[0], 1), &[("resident_batches", "1")])).unwrap();
    let step = |ids: std::ops::Range<u64>, flags| {
        model.run(ids.map(|id| request(id, flags, [1.0, id as f32])).collect());
    };
    step(1..5, START);
    step(5..9, START);
    step(1..5, 0);
    for _ in 0..3 {
        // Each time four states go home, and four come in: out of the slots that the others leave.
        let asked = asked(|| step(5..9, 0));
        assert!(asked.launches <= 2 && asked.waits == 1 && asked.allocations == 0, "{asked:?}");
        step(1..5, 0);
    }
    let answered = model.run((1..5).map(|id| request(id, END, [0.0, 0.0])).collect());
    let sums: Vec<_> = answered.iter().map(|request| sum(request)).collect();
    assert_eq!(sums, [1.0, 2.0, 3.0, 4.0].map(|id| [5.0, 5.0 * id]));
    model.unload();
    triton.assert_clean();
}

#[test]
fn states_of_a_large_batch_are_found_after_smaller_ones() {
    let Some(triton) = start() else { return };
    let model = load(&triton, &with_parameters(config(&[0], 1), &[("resident_batches", "1")])).unwrap();
    let step = |ids: &[u64], flags| model.run(ids.iter().map(|&id| request(id, flags, [id as f32, 1.0])).collect());
    step(&[1, 2, 3, 4], START);
    for ids in [&[4][..], &[2], &[1, 3], &[4, 1, 2], &[3]] {
        step(ids, 0);
    }
    let sums: Vec<_> = step(&[1, 2, 3, 4], END).iter().map(|request| sum(request)).collect();
    assert_eq!(sums, [1.0, 2.0, 3.0, 4.0].map(|id| [4.0 * id, 4.0]));
    model.unload();
    triton.assert_clean();
}

#[test]
fn inputs_and_outputs_may_lie_on_the_device_or_not() {
    let Some(triton) = start() else { return };
    let model = load(&triton, &config(&[0], 1)).unwrap();
    for (number, gpus) in [
        (0, [None; 3]),
        (1, [Some(0), None, Some(0)]),
        (2, [Some(0); 3]),
        (3, [Some(1); 3]),
        (4, [None, Some(1), Some(0)]),
    ] {
        let mut total = [0.0, 0.0];
        for step in 1..5 {
            let row = [step as f32, number as f32];
            total = [total[0] + row[0], total[1] + row[1]];
            let flags = if step == 1 { START } else { 0 };
            let mut on_gpu = request(100 + number, flags, row);
            let mut in_pieces = request(200 + number, flags, row);
            in_pieces.inputs[0].pieces =
                vec![bytemuck::bytes_of(&row[0]).to_vec(), bytemuck::bytes_of(&row[1]).to_vec()];
            for request in [&mut on_gpu, &mut in_pieces] {
                request.inputs[0].gpu = gpus[0];
                request.inputs[1].gpu = gpus[1];
                request.outputs_gpu = gpus[2];
            }
            let answered = model.run(vec![on_gpu, request(300 + number, flags, row), in_pieces]);
            assert!(answered.iter().all(|request| sum(request) == total), "{number}, step {step}");
        }
    }
    model.unload();
    triton.assert_clean();
}

#[test]
fn a_run_that_fails_over_inputs_on_the_device_costs_only_the_row_at_fault() {
    let Some(triton) = start() else { return };
    let model = load(&triton, &config(&[0], 1)).unwrap();
    let on_gpu = |id: u64, flags: u32, row: usize| {
        let mut request = request(id, flags, [id as f32, 1.0]);
        request.inputs[1].pieces = vec![(row as i64).to_ne_bytes().to_vec()];
        request.inputs.iter_mut().for_each(|input| input.gpu = Some(0));
        request
    };
    model.run((1..=3).map(|id| on_gpu(id, START, 0)).collect());
    let answered = model.run((1..=3).map(|id| on_gpu(id, 0, if id == 2 { 77 } else { 0 })).collect());
    let (code, text) = answered[1].error().unwrap();
    assert!(code == TRITONSERVER_ERROR_INVALID_ARG && text.contains("ONNX Runtime"), "{text}");
    let answered = model.run((1..=3).map(|id| on_gpu(id, END, 0)).collect());
    let sums: Vec<_> = answered.iter().map(|request| sum(request)).collect();
    assert_eq!(sums, [[3.0, 3.0], [4.0, 2.0], [9.0, 3.0]]);
    model.unload();
    triton.assert_clean();
}

#[test]
fn a_start_that_finds_no_memory_is_refused_with_the_numbers_and_the_others_go_on() {
    let Some(triton) = start() else { return };
    let lazy = [
        ("initial_buffer_size", "4"),
        ("subsequent_buffer_size", "4000"),
        ("buffer_alloc_threshold", "4"),
        ("buffer_dealloc_threshold", "8"),
        ("warmup_batch_sizes", "4"),
    ];
    let mut config = with_parameters(config(&[0], 1), &lazy);
    config["sequence_batching"]["oldest"]["max_candidate_sequences"] = json!(40_000);
    config["max_batch_size"] = json!(4);
    let model = load(&triton, &config).unwrap();
    // The second slab of the pool finds nothing left.
    let hoard = hoard();
    model.run((1..5).map(|id| request(id, START, [1.0, 1.0])).collect());
    let refused = model.run(vec![request(9, START, [1.0, 1.0])]);
    let (code, text) = refused[0].error().unwrap();
    assert_eq!(code, TRITONSERVER_ERROR_UNAVAILABLE, "{text}");
    assert!(text.contains("memory of GPU 0") && text.contains(&format!("of {DEVICE_BYTES} bytes are free")), "{text}");
    let answered = model.run((1..5).map(|id| request(id, 0, [1.0, 1.0])).collect());
    assert!(answered.iter().all(|request| sum(request) == [2.0, 2.0]));
    drop(hoard);
    let answered = model.run(vec![request(9, START, [1.0, 1.0])]);
    assert_eq!(sum(&answered[0]), [1.0, 1.0], "there is memory again");
    model.unload();
    triton.assert_clean();
}

/// All memory of the first device that can still be had.
fn hoard() -> Vec<DeviceBuffer> {
    let device = Device::open(0).unwrap();
    let mut hoard = Vec::new();
    for bytes in [100 << 10, 4 << 10, 256] {
        while let Ok(taken) = device.allocate(bytes) {
            hoard.push(taken);
        }
    }
    hoard
}

#[test]
fn inputs_on_the_device_stand_although_the_table_of_moves_goes_in_parts() {
    const ROWS: u64 = 2000;
    let Some(triton) = start() else { return };
    let mut config = with_parameters(config(&[0], 1), &[("max_candidate_sequence_use_ratio", "1")]);
    config["max_batch_size"] = json!(ROWS);
    config["sequence_batching"]["oldest"]["max_candidate_sequences"] = json!(ROWS);
    let model = load(&triton, &config).unwrap();
    // Enough for the inputs, and not for a larger table.
    let mut hoard = hoard();
    hoard.remove(0);
    for step in 1..=2 {
        let payload = (1..=ROWS).map(|id| {
            let mut request = request(id, if step == 1 { START } else { 0 }, [id as f32, 1.0]);
            request.inputs[0].gpu = (id > 1).then_some(0);
            request
        });
        let answered = model.run(payload.collect());
        for (id, request) in (1..).zip(&answered) {
            assert_eq!(sum(request), [step as f32 * id as f32, step as f32], "step {step}, sequence {id}");
        }
    }
    drop(hoard);
    model.unload();
    triton.assert_clean();
}

#[test]
fn growing_states_of_sequences_that_part_survive_a_full_device() {
    let Some(triton) = start() else { return };
    let config = delay::config(-1, json!({ "count": 1, "kind": "KIND_GPU", "gpus": [0] }));
    let model = triton.load_on(Some(0), "delay", &config, &onnx::delay(true)).unwrap();
    let ask = |id: u64, flags: u32, value: f32| delay::request(id, flags, &[value; 300]);
    // Each alone, and all: the tensors that they are put together in are there.
    for id in 1..=3 {
        model.run(vec![ask(id, START, 0.0)]);
    }
    for value in [1.0, 10.0] {
        model.run(vec![ask(1, 0, value), ask(2, 0, 2.0 * value), ask(3, 0, 3.0 * value)]);
    }
    // All are in a tensor of their batch now, and have no room of their own.
    let hoard = hoard();
    assert_eq!(last(&model.run(vec![ask(1, 0, 11.0)])[0]), [10.0; 300]);
    let answered = model.run(vec![ask(2, 0, 21.0), ask(1, 0, 12.0)]);
    assert_eq!([last(&answered[0]), last(&answered[1])], [[20.0; 300], [11.0; 300]]);
    drop(hoard);
    let answered = model.run((1..=3).map(|id| ask(id, END, 0.0)).collect());
    let values: Vec<_> = answered.iter().map(|request| last(request)).collect();
    assert_eq!(values, [[12.0; 300], [21.0; 300], [30.0; 300]]);
    model.unload();
    triton.assert_clean();
}

#[test]
fn each_device_has_the_sequences_of_its_instances() {
    let Some(triton) = start() else { return };
    let model = LoadedModel::new("running_sum", &config(&[0, 1], 2), &onnx::running_sum());
    model.initialize().unwrap();
    let instances: Vec<_> = (0..4).map(|number| LoadedInstance::on(&model, Some(number % 2))).collect();
    instances.iter().for_each(|instance| instance.initialize().unwrap());
    let mut of_instances: Vec<_> = instances.into_iter().collect();
    let first = Loaded { model, instance: of_instances.remove(0) };
    let run = |number: usize, payload: Vec<Request>| match number {
        0 => first.run(payload),
        _ => of_instances[number - 1].run(payload),
    };
    // The same id on both devices is two sequences, as core would not send one to both.
    for step in 1..=3 {
        for number in 0..4 {
            let flags = if step == 1 { START } else { 0 };
            let id = 1 + number as u64 / 2;
            let answered = run(number, vec![request(id * 10 + number as u64, flags, [number as f32, 1.0])]);
            assert_eq!(sum(&answered[0]), [step as f32 * number as f32, step as f32]);
        }
    }
    of_instances.iter().for_each(|instance| instance.finalize().unwrap());
    first.unload();
    triton.assert_clean();
}

#[test]
fn what_a_gpu_cannot_do_is_refused_at_load() {
    let Some(triton) = start() else { return };
    for (parameters, words) in [
        (&[("trt_cache_dir", "here"), ("enable_trt_caching", "1")][..], &["trt_cache_dir", "here", "absolute"][..]),
        (&[("ort_ep", "rocm")], &["ort_ep", "rocm", "cuda"]),
    ] {
        let (code, text) = load(&triton, &with_parameters(config(&[0], 1), parameters)).err().unwrap();
        assert_eq!(code, TRITONSERVER_ERROR_INVALID_ARG, "{text}");
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    }
}

#[test]
fn an_instance_whose_gpu_has_failed_is_not_ready() {
    let Some(triton) = start() else { return };
    // No other test uses this one, which stays as it is.
    let model = triton.load_on(Some(7), "running_sum", &config(&[7], 1), &onnx::running_sum()).unwrap();
    let other = load(&triton, &config(&[0], 1)).unwrap();
    model.run(vec![request(1, START, [1.0, 1.0])]);
    model.instance.ready().unwrap();
    std::fs::write(failure(), "").unwrap();
    let answered = model.run(vec![request(1, 0, [1.0, 1.0])]);
    std::fs::remove_file(failure()).unwrap();
    let refused = |text: &str| text.contains("GPU 7") && text.contains("restart the server");
    let (code, text) = answered[0].error().unwrap();
    assert!(code == TRITONSERVER_ERROR_UNAVAILABLE && refused(&text), "{text}");
    let (code, text) = model.instance.ready().unwrap_err();
    assert!(code == TRITONSERVER_ERROR_UNAVAILABLE && refused(&text), "{text}");
    other.instance.ready().unwrap();
    other.run(vec![request(1, START | END, [1.0, 1.0])]);
    model.unload();
    other.unload();
    triton.assert_clean();
}

#[test]
fn a_gpu_of_a_client_that_has_failed_costs_only_the_requests_that_use_it() {
    let Some(triton) = start() else { return };
    let mut by_us = config(&[0], 1);
    by_us.as_object_mut().unwrap().remove("sequence_batching");
    by_us["parameters"].as_object_mut().unwrap().remove("max_candidate_sequence_use_ratio");
    let on = |id: u64, flags: u32, input: Option<i64>, output: Option<i64>| {
        let mut request = request(id, flags, [1.0, 1.0]);
        (request.inputs[0].gpu, request.outputs_gpu) = (input, output);
        request
    };
    let lost = Some(5);
    for (number, config) in [config(&[0], 1), by_us].into_iter().enumerate() {
        let model = load(&triton, &config).unwrap();
        if number == 0 {
            // It fails from now on. No other test uses it.
            std::fs::write(failure(), "").unwrap();
            model.run(vec![on(50, START | END, lost, None)]);
            std::fs::remove_file(failure()).unwrap();
        }
        model.run((1..=4).map(|id| request(id, START, [id as f32, 1.0])).collect());
        let answered = model.run(vec![
            on(1, 0, None, lost),
            on(2, 0, Some(6), Some(6)),
            on(3, END, lost, None),
            on(4, 0, None, None),
            on(5, START, lost, None),
        ]);
        let found: Vec<_> = answered.iter().map(|request| running_sum::sum(request)).collect();
        assert_eq!(found, [None, Some([3.0, 2.0]), None, Some([5.0, 2.0]), None]);
        for at in [0, 2, 4] {
            assert!(answered[at].error().unwrap().1.contains("GPU 5"), "{:?}", answered[at].answer());
        }
        let answered = model.run([2, 4, 5].map(|id| request(id, END, [1.0, 1.0])).into());
        let found: Vec<_> = answered.iter().map(|request| running_sum::sum(request)).collect();
        assert_eq!(found, [Some([4.0, 3.0]), Some([6.0, 3.0]), None], "the START has failed");
        model.unload();
    }
    triton.assert_clean();
}

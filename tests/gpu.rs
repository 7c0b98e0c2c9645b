//! Models on a GPU with ONNX Runtime's own CUDA provider, whose CUDA is a stand-in in host memory (`tests/fake_cuda`):
//! the driver as this backend calls it, the provider's options, its stream, where its tensors lie, what it copies, CUDA
//! graphs. Copies happen there and other kernels do not, so the models are of copies alone.
//!
//! `scripts/test-on-fake-cuda` builds the stand-in, gets ONNX Runtime's library for GPUs, and runs this. Without them
//! it says so and does nothing.

#![allow(clippy::unwrap_used, reason = "all of this is a test")]

#[allow(dead_code, reason = "the other tests have a use for the rest")]
mod fake_triton;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use fake_triton::delay::{self, last, request};
use fake_triton::ledger::Random;
use fake_triton::{END, Failure, Loaded, LoadedInstance, REPORTED, Request, START, Triton, onnx, with_parameters};
use libloading::Library;
use serde_json::{Value, json};
use triton_sys::{TRITONSERVER_ERROR_INTERNAL, TRITONSERVER_ERROR_UNAVAILABLE};

/// The stand-in for CUDA.
struct FakeCuda {
    driver: Library,
    runtime: Library,
}

impl FakeCuda {
    /// That in the folder `FAKE_CUDA`; `None`, with a line that says so, without the variable.
    fn find() -> Option<&'static Self> {
        static FOUND: OnceLock<Option<FakeCuda>> = OnceLock::new();
        let load = |folder: &Path, names: &[&str]| {
            let file = names.iter().map(|name| folder.join(name)).find(|file| file.exists());
            // SAFETY: libraries without initialisers.
            unsafe { Library::new(file.unwrap_or_else(|| panic!("no {names:?} in {}", folder.display()))) }.unwrap()
        };
        let find = || {
            let Some(folder) = std::env::var_os("FAKE_CUDA").map(PathBuf::from) else {
                eprintln!("skipped: no stand-in for CUDA; scripts/test-on-fake-cuda makes it");
                return None;
            };
            let runtime = load(&folder, &["libcudart.so.13", "libcudart.so.12"]);
            Some(Self { driver: load(&folder, &["libcuda.so.1"]), runtime })
        };
        FOUND.get_or_init(find).as_ref()
    }

    fn number(library: &Library, name: &[u8]) -> usize {
        // SAFETY: a function of that type of tests/fake_cuda.
        unsafe { library.get::<unsafe extern "C" fn() -> usize>(name).unwrap()() }
    }

    /// Bytes of memory of each GPU in use.
    fn used(&self) -> [usize; 2] {
        // SAFETY: as in `number`.
        let used = unsafe { self.driver.get::<unsafe extern "C" fn(i32) -> usize>(b"fake_cuda_used").unwrap() };
        // SAFETY: as above; there are so many GPUs.
        [0, 1].map(|gpu| unsafe { used(gpu) })
    }

    fn limit(&self, bytes: usize) {
        // SAFETY: as in `number`.
        unsafe { self.driver.get::<unsafe extern "C" fn(usize)>(b"fake_cuda_limit").unwrap()(bytes) }
    }

    /// Bytes that ONNX Runtime copied to the device, and from it.
    fn copied_by_provider(&self) -> (usize, usize) {
        // SAFETY: as in `number`.
        let copied = unsafe { self.runtime.get::<unsafe extern "C" fn(i32) -> usize>(b"fake_cuda_copied") }.unwrap();
        // SAFETY: as above.
        unsafe { (copied(1), copied(2)) }
    }

    /// Bytes of pinned host memory that ONNX Runtime ever allocated.
    fn pinned(&self) -> usize {
        Self::number(&self.runtime, b"fake_cuda_pinned")
    }

    /// Kernels that are loaded.
    fn modules(&self) -> usize {
        Self::number(&self.driver, b"fake_cuda_modules")
    }

    /// Waits for streams by this backend, and its allocations of pinned memory.
    fn waits_and_pins(&self) -> [usize; 2] {
        [&b"fake_cuda_driver_waits"[..], b"fake_cuda_host_allocations"].map(|name| Self::number(&self.driver, name))
    }

    /// Makes so many captures fail.
    fn fail_captures(&self, count: usize) {
        // SAFETY: as in `number`.
        unsafe { self.runtime.get::<unsafe extern "C" fn(usize)>(b"fake_cuda_fail_captures").unwrap()(count) }
    }

    /// Graphs that were captured, and launches of such.
    fn graphs(&self) -> (usize, usize) {
        let number = |name| Self::number(&self.runtime, name);
        (number(b"fake_cuda_captures"), number(b"fake_cuda_graph_launches"))
    }
}

/// A server, and the stand-in for CUDA, which nobody else uses meanwhile.
fn start() -> Option<(Triton, &'static FakeCuda)> {
    let cuda = FakeCuda::find()?;
    let triton = Triton::start()?;
    assert_eq!(cuda.used(), [0, 0], "a test before has left memory of the device");
    Some((triton, cuda))
}

fn config(gpus: &[i32], parameters: &[(&str, &str)]) -> Value {
    with_parameters(delay::config(2, on_gpus(gpus)), parameters)
}

fn growing(parameters: &[(&str, &str)]) -> Value {
    with_parameters(delay::config(-1, on_gpus(&[0])), parameters)
}

fn on_gpus(gpus: &[i32]) -> Value {
    json!({ "count": 1, "kind": "KIND_GPU", "gpus": gpus })
}

fn load_on(triton: &Triton, gpu: i32, config: &Value) -> Result<Loaded, Failure> {
    let grows = config["input"][0]["dims"] == json!([-1]);
    triton.load_on(Some(gpu), "delay", config, &onnx::delay(grows))
}

fn load(triton: &Triton, config: &Value) -> Result<Loaded, Failure> {
    load_on(triton, 0, config)
}

/// Payloads of sequences by chance, each answer held against the request before it. All have ended when it returns.
fn by_chance(
    run: &dyn Fn(Vec<Request>) -> Vec<std::sync::Arc<Request>>,
    width: &dyn Fn(&mut Random) -> usize,
    at_start: &[f32],
) {
    // Whole numbers that fp16 can hold.
    let mut random = Random::new(7);
    let mut live: HashMap<u64, Vec<f32>> = HashMap::new();
    for round in 0..300 {
        let first = 1 + random.below(20);
        let ids: Vec<u64> = (first..first + 1 + random.below(4)).collect();
        let columns = width(&mut random);
        let mut expected = Vec::new();
        let payload = ids.iter().map(|&id| {
            let row: Vec<f32> =
                (0..columns).map(|column| ((round * 7 + id as usize * 31 + column) % 2048) as f32).collect();
            let mut flags = if live.contains_key(&id) { 0 } else { START };
            expected.push(live.get(&id).cloned().unwrap_or_else(|| at_start.to_vec()));
            live.insert(id, row.clone());
            if random.one_in(6) {
                flags |= END;
                live.remove(&id);
            }
            request(id, flags, &row)
        });
        let answered = run(payload.collect());
        let came: Vec<_> = answered.iter().map(|request| last(request)).collect();
        assert!(
            came == expected,
            "round {round}: {:.60}… and not {:.60}…",
            format!("{came:?}"),
            format!("{expected:?}")
        );
    }
    for (id, held) in live {
        let answered = run(vec![request(id, END, &held)]);
        assert_eq!(last(&answered[0]), held);
    }
}

#[test]
fn sequences_have_their_own_states_in_whatever_company() {
    let Some((triton, cuda)) = start() else { return };
    for parameters in
        [&[][..], &[("resident_batches", "1")], &[("always_pad_to_max_batch", "1")], &[("store_states_as_fp16", "1")]]
    {
        let model = load(&triton, &config(&[0], parameters)).unwrap();
        let before = cuda.copied_by_provider();
        by_chance(&|payload| model.run(payload), &|_| 2, &[0.0, 0.0]);
        assert_eq!(cuda.copied_by_provider(), before, "all tensors are where the provider wants them: {parameters:?}");
        model.unload();
        assert_eq!(cuda.used(), [0, 0], "everything was given back");
        assert!(cuda.modules() <= 2, "a GPU that a request has brought keeps its kernel, and only that");
    }
    triton.assert_clean();
}

#[test]
fn each_gpu_has_its_instances_whatever_gpu_requests_bring() {
    let Some((triton, cuda)) = start() else { return };
    let first = load_on(&triton, 0, &config(&[0, 1], &[])).unwrap();
    let second = LoadedInstance::on(&first.model, Some(1));
    second.initialize().unwrap();
    for tensors in [None, Some(0), Some(1)] {
        let on = |mut payload: Vec<Request>| {
            for (number, request) in payload.iter_mut().enumerate().filter(|(number, _)| number % 2 == 0) {
                request.inputs[0].gpu = tensors.filter(|_| number < 2);
                request.outputs_gpu = tensors;
            }
            payload
        };
        by_chance(&|payload| first.run(on(payload)), &|_| 2, &[0.0, 0.0]);
        by_chance(&|payload| second.run(on(payload)), &|_| 2, &[0.0, 0.0]);
    }
    second.finalize().unwrap();
    first.unload();
    assert_eq!(cuda.used(), [0, 0], "everything was given back");
    triton.assert_clean();
}

#[test]
fn tensors_on_another_gpu_cost_one_wait_a_payload_and_no_memory() {
    let Some((triton, cuda)) = start() else { return };
    let model = load(&triton, &config(&[0], &[])).unwrap();
    let on_other = |id, flags| {
        let mut request = request(id, flags, &[id as f32, 2.0]);
        request.inputs[0].gpu = Some(1);
        request.outputs_gpu = Some(1);
        request
    };
    let ids = 1..=4;
    model.run(ids.clone().map(|id| on_other(id, START)).collect());
    let cost = |payload: Vec<Request>| {
        let before = cuda.waits_and_pins();
        let answered = model.run(payload);
        answered.iter().for_each(|request| assert_eq!(last(request)[1], 2.0));
        let now = cuda.waits_and_pins();
        [0, 1].map(|of| now[of] - before[of])
    };
    let one = cost(vec![on_other(1, 0)]);
    let four = cost(ids.map(|id| on_other(id, 0)).collect());
    assert_eq!((one[1], four), (0, one), "a payload of four costs as much as one of one");
    model.unload();
    triton.assert_clean();
}

#[test]
fn memory_that_the_driver_refuses_costs_only_its_request() {
    let Some((triton, _)) = start() else { return };
    let model = load(&triton, &config(&[0], &[])).unwrap();
    let on_other = |id: u64, flags, first: f32| {
        let mut request = request(id, flags, &[first, 2.0]);
        request.inputs[0].gpu = Some(1);
        request
    };
    model.run((1..=4).map(|id| on_other(id, START, id as f32)).collect());
    let refused = f32::from_bits(0xdead_beef);
    let answered = model.run((1..=4).map(|id| on_other(id, 0, if id == 3 { refused } else { 0.0 })).collect());
    for (id, request) in (1..).zip(&answered) {
        match request.error() {
            Some((_, text)) => assert!(id == 3 && text.contains("GPU 1"), "{id}: {text}"),
            None => assert_eq!(last(request)[0], id as f32),
        }
    }
    let answered = model.run((1..=4).map(|id| on_other(id, END, 0.0)).collect());
    assert_eq!(answered.iter().map(|request| last(request)[0]).collect::<Vec<_>>(), [0.0, 0.0, 3.0, 0.0]);
    model.unload();
    triton.assert_clean();
}

#[test]
fn a_capture_is_ended_so_that_later_work_is_done() {
    let Some((_triton, cuda)) = start() else { return };
    let device = gpu_rows::Device::open(0).unwrap();
    let stream = gpu_rows::OwnedStream::open(&device).unwrap();
    stream.end_capture().unwrap();
    for failures in [0, 1] {
        cuda.fail_captures(failures);
        // SAFETY: a function of that type of tests/fake_cuda, and a live stream.
        let begun = unsafe {
            let begin = cuda.runtime.get::<unsafe extern "C" fn(usize, i32) -> i32>(b"cudaStreamBeginCapture");
            begin.unwrap()(stream.handle(), 0)
        };
        assert_eq!(begun, 0);
        stream.end_capture().unwrap();
        let mut queue = gpu_rows::Queue::new(stream.clone(), Default::default()).unwrap();
        let (mut host, buffer) = (device.allocate_pinned(4).unwrap(), device.allocate(4).unwrap());
        host.bytes_mut().fill(7);
        // SAFETY: both live until the queue has waited.
        unsafe { queue.upload(&host, &buffer, 4).unwrap() };
        queue.synchronise().unwrap();
        host.bytes_mut().fill(0);
        // SAFETY: as above.
        unsafe { queue.download(buffer.address(), &mut host, 4).unwrap() };
        queue.synchronise().unwrap();
        assert_eq!(host.bytes(), [7; 4], "nothing went into the capture");
    }
}

#[test]
fn instances_report_their_memory() {
    let Some((triton, cuda)) = start() else { return };
    REPORTED.lock().clear();
    let mut config = config(&[0, 1], &[("warmup_batch_sizes", "4")]);
    config["sequence_batching"]["oldest"]["max_candidate_sequences"] = json!(1000);
    let model = load(&triton, &config).unwrap();
    let others: Vec<_> = [1, 0].map(|gpu| LoadedInstance::on(&model.model, Some(gpu))).into();
    others.iter().for_each(|instance| instance.initialize().unwrap());
    let reported = REPORTED.lock().clone();
    let of =
        |device| reported.iter().filter(move |usage| usage.is_gpu && usage.device == device).map(|usage| usage.bytes);
    assert_eq!([of(0).count(), of(1).count()], [2, 1]);
    assert_eq!([of(0).sum::<usize>(), of(1).sum()], cuda.used(), "pools, sessions and buffers: {reported:?}");
    assert!(cuda.used().iter().all(|&used| used >= 900 * 64), "each device has a pool");
    others.iter().for_each(|instance| instance.finalize().unwrap());
    model.unload();
    triton.assert_clean();
}

#[test]
fn growing_states_stay_on_the_device() {
    let Some((triton, cuda)) = start() else { return };
    for parameters in [&[][..], &[("store_states_as_fp16", "1")]] {
        let model = load(&triton, &growing(parameters)).unwrap();
        let before = cuda.copied_by_provider().0;
        // States of one batch have one size, as core sees to for requests.
        by_chance(&|payload| model.run(payload), &|random| 1 + random.below(3) as usize * 500, &[]);
        assert_eq!(cuda.copied_by_provider().0, before, "nothing went to the device but by us: {parameters:?}");
        model.unload();
        assert_eq!(cuda.used(), [0, 0], "everything was given back");
    }
    triton.assert_clean();
}

#[test]
fn what_onnx_runtime_reads_on_the_host_is_there_before_the_run() {
    let Some((triton, cuda)) = start() else { return };
    let model = triton.load_on(Some(0), "delay", &config(&[0], &[]), &onnx::delay_on_host()).unwrap();
    by_chance(&|payload| model.run(payload), &|_| 2, &[0.0, 0.0]);
    model.unload();
    assert_eq!(cuda.used(), [0, 0]);
    triton.assert_clean();
}

#[test]
fn nodes_that_copy_parameters_to_the_device_give_their_pinned_memory_back() {
    let Some((triton, cuda)) = start() else { return };
    // ONNX Runtime captures no Concat of so many tensors.
    for parameters in [&[][..], &[("enable_cuda_graph", "1"), ("warmup_batch_sizes", "1")]] {
        let mut config = config(&[0], parameters);
        let joined = json!({ "name": "JOINED", "data_type": "TYPE_FP32", "dims": [2 * onnx::JOINED] });
        config["output"].as_array_mut().unwrap().push(joined);
        let model = triton.load_on(Some(0), "delay", &config, &onnx::delay_with_concat()).unwrap();
        let run = |count: u64| {
            for _ in 0..count {
                let answered = model.run(vec![request(7, START | END, &[1.0, 2.0])]);
                assert_eq!(last(&answered[0]), [0.0, 0.0]);
            }
        };
        run(100);
        let before = cuda.pinned();
        run(10_000);
        assert_eq!(cuda.pinned(), before, "memory that a run pins is there for the next");
        model.unload();
    }
    triton.assert_clean();
}

#[test]
fn states_that_grow_take_memory_in_proportion() {
    let Some((triton, cuda)) = start() else { return };
    let model = load(&triton, &growing(&[])).unwrap();
    let before = cuda.used()[0];
    let longest = 2000;
    for length in 1..=longest {
        let flags = if length == 1 { START } else { 0 };
        model.run(vec![request(7, flags, &vec![1.0; length * 64])]);
    }
    let state = longest * 64 * 4;
    let used = cuda.used()[0] - before;
    assert!(used < 12 * state, "{used} bytes for a state of {state}");
    model.unload();
    assert_eq!(cuda.used(), [0, 0], "everything was given back");
    triton.assert_clean();
}

#[test]
fn runs_are_captured_once_for_each_size_and_replayed() {
    let Some((triton, cuda)) = start() else { return };
    let graphs = [("enable_cuda_graph", "1"), ("warmup_batch_sizes", "1,2,4"), ("resident_batches", "2")];
    // Without the sizes, full batches.
    let full = load(&triton, &config(&[0], &[graphs[0]])).unwrap();
    let before = cuda.graphs();
    by_chance(&|payload| full.run(payload), &|_| 2, &[0.0, 0.0]);
    assert!((1..=4 * 5).contains(&(cuda.graphs().0 - before.0)), "of 4 rows, between pairs of batch buffers");
    full.unload();

    let model = load(&triton, &config(&[0], &graphs)).unwrap();
    let before = cuda.graphs();
    let run = || {
        by_chance(&|payload| model.run(payload), &|_| 2, &[0.0, 0.0]);
        (cuda.graphs().0 - before.0, cuda.graphs().1 - before.1)
    };
    let ((captures, launches), again) = (run(), run());
    // Three sizes, and pairs of three batch buffers.
    assert!((1..=3 * 6).contains(&captures), "{captures} captures");
    assert!(launches > 100, "{launches} launches");
    assert!(again.0 <= 3 * 6 && again.1 > 2 * launches - captures, "{captures}, {launches}, then {again:?}");
    model.unload();
    assert_eq!(cuda.used(), [0, 0]);
    triton.assert_clean();
}

#[test]
fn runs_go_without_a_graph_whose_capture_fails() {
    let Some((triton, cuda)) = start() else { return };
    let graphs = [("enable_cuda_graph", "1"), ("warmup_batch_sizes", "1,2,4"), ("resident_batches", "2")];
    // A capture that fails is tried twice more; after a third failure, runs of that size go without.
    for failures in [2, usize::MAX] {
        let model = load(&triton, &config(&[0], &graphs)).unwrap();
        cuda.fail_captures(failures);
        let before = cuda.graphs();
        by_chance(&|payload| model.run(payload), &|_| 2, &[0.0, 0.0]);
        let launches = cuda.graphs().1 - before.1;
        assert_eq!(launches > 100, failures == 2, "{launches} launches after {failures} failures");
        cuda.fail_captures(0);
        model.unload();
        assert_eq!(cuda.used(), [0, 0]);
    }
    triton.assert_clean();
}

#[test]
fn what_the_provider_refuses_is_told_and_nothing_stays() {
    let Some((triton, cuda)) = start() else { return };
    let refused = |config: &Value, code, words: &[&str]| {
        let (came, text) = load(&triton, config).err().unwrap();
        assert!(came == code && words.iter().all(|word| text.contains(word)), "{} {text}", came.0);
        assert_eq!(cuda.used(), [0, 0]);
    };
    let invalid = triton_sys::TRITONSERVER_ERROR_INVALID_ARG;
    let mut unknown = config(&[0], &[]);
    unknown["optimization"] = json!({ "execution_accelerators": {
        "gpu_execution_accelerator": [{ "name": "cuda", "parameters": { "nonsense": "7" } }],
    } });
    refused(&unknown, invalid, &["options for GPU 0", "nonsense=7"]);
    let tensorrt = config(&[0], &[("ort_ep", "trt"), ("compute_precision", "fp16")]);
    refused(&tensorrt, TRITONSERVER_ERROR_INTERNAL, &["GPU 0", "TensorRT"]);
    refused(&config(&[5], &[]), triton_sys::TRITONSERVER_ERROR_UNSUPPORTED, &["no GPU 5", "the driver knows 2"]);
    refused(
        &config(&[0], &[("enable_cuda_graph", "1"), ("warmup_batch_sizes", ",")]),
        invalid,
        &["warmup_batch_sizes"],
    );
    let open = growing(&[("enable_cuda_graph", "1"), ("warmup_batch_sizes", "1")]);
    let (code, text) = load(&triton, &open).err().unwrap();
    assert!(code == invalid && text.contains("enable_cuda_graph") && text.contains("open"), "{text}");
    let graphs = config(&[0], &[("enable_cuda_graph", "1")]);
    let (code, text) = triton.load_on(Some(0), "delay", &graphs, &onnx::delay_with_nonzero()).err().unwrap();
    assert!(code == invalid && text.contains("enable_cuda_graph") && text.contains("node 'found' (NonZero)"), "{text}");
    let mut shaped = graphs.clone();
    let add = |list: &mut Value, name: &str, kind: &str| {
        list.as_array_mut().unwrap().push(json!({ "name": name, "data_type": kind, "dims": [2] }));
    };
    add(&mut shaped["input"], "SHAPE", "TYPE_INT64");
    add(&mut shaped["output"], "SHAPED", "TYPE_FP32");
    shaped["parameters"]["trust_batch"] = json!({ "string_value": "true" });
    let (code, text) = triton.load_on(Some(0), "delay", &shaped, &onnx::delay_with_shape()).err().unwrap();
    assert!(code == invalid && text.contains("reads 'SHAPE' on the host"), "{text}");
    // An option that is wrong is no want of a GPU.
    unknown["parameters"]["allow_cpu_fallback"] = json!({ "string_value": "1" });
    refused(&unknown, invalid, &["nonsense=7"]);
    triton.assert_clean();
}

#[test]
fn instances_run_on_the_cpu_where_allowed_if_a_provider_or_a_gpu_is_missing() {
    let Some((triton, cuda)) = start() else { return };
    for (gpu, parameter) in [(0, ("ort_ep", "trt")), (5, ("ort_ep", "cuda"))] {
        let model = load_on(&triton, gpu, &config(&[gpu], &[("allow_cpu_fallback", "1"), parameter])).unwrap();
        by_chance(&|payload| model.run(payload), &|_| 2, &[0.0, 0.0]);
        assert_eq!(cuda.used(), [0, 0]);
        model.unload();
    }
    triton.assert_clean();
}

#[test]
fn a_start_without_memory_is_refused_and_the_others_go_on() {
    let Some((triton, cuda)) = start() else { return };
    let lazy = [
        ("initial_buffer_size", "4"),
        ("subsequent_buffer_size", "40000"),
        ("buffer_alloc_threshold", "4"),
        ("buffer_dealloc_threshold", "8"),
        ("warmup_batch_sizes", "4"),
    ];
    let mut config = config(&[0], &lazy);
    config["sequence_batching"]["oldest"]["max_candidate_sequences"] = json!(100_000);
    let model = load(&triton, &config).unwrap();
    cuda.limit(cuda.used()[0] + (1 << 20));
    model.run((1..=4).map(|id| request(id, START, &[id as f32, 1.0])).collect());
    let refused = model.run(vec![request(9, START, &[1.0, 1.0])]);
    let (code, text) = refused[0].error().unwrap();
    assert!(code == TRITONSERVER_ERROR_UNAVAILABLE && text.contains("memory of GPU 0"), "{text}");
    let answered = model.run((1..=4).map(|id| request(id, 0, &[0.0, 0.0])).collect());
    assert_eq!(answered.iter().map(|request| last(request)[0]).collect::<Vec<_>>(), [1.0, 2.0, 3.0, 4.0]);
    cuda.limit(1 << 32);
    assert_eq!(last(&model.run(vec![request(9, START, &[1.0, 1.0])])[0]), [0.0, 0.0]);
    model.unload();
    triton.assert_clean();
}

//! The calls of a step to ONNX Runtime: the arguments; an IO binding, without which ONNX Runtime can't leave an output
//! of open shape on a device; CUDA graphs, captured once for each number of rows and set of given tensors, and replayed
//! from then on; and a limit of the time of runs.
//!
//! Rules: a graph is bound to addresses, so the buffers of a step with graphs are never replaced. It is also bound to
//! the thread that captured it, because ONNX Runtime keeps it there. Triton loads a model on another thread, so graphs
//! are captured while requests are served. While one is captured, nothing else of this backend may allocate or run on a
//! GPU. A capture waits for the runs under way. While a session is opened or another graph is captured, runs go without
//! a graph, and the next one tries again.

use std::collections::HashMap;
use std::ffi::c_char;
use std::ptr;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use gpu_rows::{for_capture, for_run};
use ort::sys::{OrtIoBinding, OrtValue};

use super::open::{RunOptions, Session};
use super::value::{MemoryKind, SessionError, check};

/// What ONNX Runtime is called with: pointers to names and tensors that the step owns, or that are lent to it for a
/// run.
#[derive(Default)]
pub struct Arguments {
    pub input_names: Vec<*const c_char>,
    pub output_names: Vec<*const c_char>,
    pub input_values: Vec<*const OrtValue>,
    pub output_values: Vec<*mut OrtValue>,
}

// SAFETY: only a run of the step that owns the lists follows the pointers. It has just listed what it owns or is lent,
// and none of that is bound to a thread.
unsafe impl Send for Arguments {}

/// A binding of a session, filled anew for each run.
pub struct BoundRun {
    /// The first field, so that it is released before its session.
    binding: IoBinding,
    device: MemoryKind,
    session: Arc<Session>,
}

struct IoBinding(*mut OrtIoBinding);

// SAFETY: an object without thread affinity, used by its owner only.
unsafe impl Send for IoBinding {}

impl BoundRun {
    pub fn new(session: Arc<Session>, device: MemoryKind) -> Result<Self, SessionError> {
        let mut binding = ptr::null_mut();
        // SAFETY: the session is alive; the binding is owned from then on.
        unsafe { check((ort::api().CreateIoBinding)(session.as_ptr(), &mut binding)) }.map_err(SessionError::Run)?;
        Ok(Self { binding: IoBinding(binding), device, session })
    }

    /// Runs. Outputs that are null become values that ONNX Runtime makes, on the device or on the host as `stays` says
    /// of each output. They are the caller's to release.
    ///
    /// # Safety
    /// Names and values must live during the run, and no tensor may be both read and written.
    pub unsafe fn run(&mut self, arguments: &mut Arguments, stays: impl Iterator<Item = bool>) -> Result<(), String> {
        // SAFETY: the caller promises the same.
        let ran = unsafe { self.bind_and_run(arguments, stays) };
        // Otherwise the binding would keep the tensors until the next run.
        // SAFETY: the binding is alive; `ran` has its own references to the outputs.
        unsafe {
            (ort::api().ClearBoundInputs)(self.binding.0);
            (ort::api().ClearBoundOutputs)(self.binding.0);
        }
        for (output, value) in arguments.output_values.iter_mut().zip(ran?) {
            if output.is_null() {
                *output = value;
            } else {
                // SAFETY: this reference is ours, and the tensor's owner has another one.
                unsafe { (ort::api().ReleaseValue)(value) };
            }
        }
        Ok(())
    }

    /// Returns all outputs, each with a reference that we own.
    ///
    /// # Safety
    /// As for [`BoundRun::run`].
    unsafe fn bind_and_run(
        &self,
        arguments: &Arguments,
        stays: impl Iterator<Item = bool>,
    ) -> Result<Vec<*mut OrtValue>, String> {
        let (api, binding) = (ort::api(), self.binding.0);
        let (mut allocator, mut values, mut count) = (ptr::null_mut(), ptr::null_mut::<*mut OrtValue>(), 0);
        // SAFETY: the binding is alive, and the caller promises the rest. The array of the outputs is copied, and given
        // back to the allocator that it is from.
        unsafe {
            for (&name, &value) in arguments.input_names.iter().zip(&arguments.input_values) {
                check((api.BindInput)(binding, name, value))?;
            }
            for ((&name, &value), stays) in arguments.output_names.iter().zip(&arguments.output_values).zip(stays) {
                check(if value.is_null() {
                    let memory = if stays { self.device } else { MemoryKind::Host };
                    (api.BindOutputToDevice)(binding, name, memory.info()?)
                } else {
                    (api.BindOutput)(binding, name, value)
                })?;
            }
            check((api.RunWithBinding)(self.session.as_ptr(), self.session.run_options(), binding))?;
            check((api.GetAllocatorWithDefaultOptions)(&mut allocator))?;
            check((api.GetBoundOutputValues)(binding, allocator, &mut values, &mut count))?;
            if values.is_null() {
                return Ok(Vec::new());
            }
            let copied = std::slice::from_raw_parts(values, count).to_vec();
            check((api.AllocatorFree)(allocator, values.cast()))?;
            Ok(copied)
        }
    }
}

impl Drop for IoBinding {
    fn drop(&mut self) {
        // SAFETY: made in `BoundRun::new`, released once, before its session.
        unsafe { (ort::api().ReleaseIoBinding)(self.0) }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GraphKey {
    pub rows: usize,
    /// Addresses of the tensors that the caller gives.
    pub given: Vec<usize>,
}

pub struct Graphs {
    rows: Vec<usize>,
    made: HashMap<(ThreadId, GraphKey), Graph>,
    next_id: i32,
}

enum Graph {
    Captured(RunOptions),
    /// The number of captures that have failed although the run itself has not.
    Failed(u32),
}

/// After this many failed captures, runs use no graph. A single failure may come from something else that used the GPU.
const MOST_FAILURES: u32 = 3;

impl Graphs {
    pub fn new(rows: Vec<usize>) -> Self {
        Self { rows, made: HashMap::new(), next_id: 1 }
    }

    /// Calls `run` with the options of a run. If no graph can be captured, calls it again for a run without a graph.
    /// Without a key, the run gets no graph.
    pub fn run(
        &mut self,
        session: &Session,
        key: Option<GraphKey>,
        mut run: impl FnMut(*const ort::sys::OrtRunOptions) -> Result<(), SessionError>,
    ) -> Result<(), SessionError> {
        let key = key.filter(|key| self.rows.contains(&key.rows)).map(|key| (thread::current().id(), key));
        let failures = match key.as_ref().and_then(|key| self.made.get(key)) {
            Some(Graph::Captured(graph)) => {
                let _no_capture = for_run();
                return run(graph.as_ptr());
            }
            Some(Graph::Failed(failures)) => *failures,
            None => 0,
        };
        if let Some(key) = key.filter(|_| failures < MOST_FAILURES)
            && let Some(_alone) = for_capture()
        {
            let graph = session.graph_options(self.next_id)?;
            self.next_id += 1;
            let Err(error) = run(graph.as_ptr()) else {
                session.has_captured()?;
                self.made.insert(key, Graph::Captured(graph));
                return Ok(());
            };
            let failures = failures + 1;
            let from_now_on = if failures < MOST_FAILURES { "this time" } else { "from now on" };
            log::warn!(
                "no CUDA graph could be made for {} rows, so they run without one {from_now_on}: {error}",
                key.1.rows
            );
            // Counted before the capture is ended, because that can also fail.
            self.made.insert(key, Graph::Failed(failures));
            session.end_capture()?;
            return run(session.run_options());
        }
        let _no_capture = for_run();
        run(session.run_options())
    }
}

/// Ends the runs of a step once the time has passed, unless it is dropped first.
pub struct TimeLimit {
    ends_at: Instant,
    stop: mpsc::Sender<()>,
    thread: Option<JoinHandle<()>>,
}

impl TimeLimit {
    pub(super) fn new(options: Arc<RunOptions>, limit: Duration) -> std::io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let wait = move || {
            if stopped.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                options.terminate();
            }
        };
        let ends_at = Instant::now() + limit;
        // The thread of the run is inside ONNX Runtime, so another one has to end the run.
        let thread = thread::Builder::new().name("time limit".to_owned()).spawn(wait)?;
        Ok(Self { ends_at, stop, thread: Some(thread) })
    }

    /// Whether runs fail because of it.
    pub fn is_over(&self) -> bool {
        Instant::now() >= self.ends_at
    }
}

impl Drop for TimeLimit {
    fn drop(&mut self) {
        // It has ended if the time has passed. It doesn't panic.
        let _ = self.stop.send(());
        // Core may unload this library when the load fails, so no thread may outlive it.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

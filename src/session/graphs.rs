//! Runs as CUDA graphs: captured once for each number of rows and set of given tensors, and replayed from then on.
//!
//! Rules: a graph is bound to addresses, so the buffers of a step with graphs are never replaced. It is also bound to
//! the thread that captured it, because ONNX Runtime keeps it there. Triton loads a model on another thread, so graphs are
//! captured while requests are served. While one is captured, nothing else of this backend may allocate or run on a GPU.
//! A capture waits for the runs under way.
//! While a session is opened or another graph is captured, runs go without a graph, and the next one tries again.

use std::collections::HashMap;
use std::thread::{self, ThreadId};

use super::error::SessionError;
use super::open::{RunOptions, Session};
use gpu_rows::{for_capture, for_run};

/// What a graph is bound to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GraphKey {
    /// Number of rows.
    pub rows: usize,
    /// Addresses of the tensors that the caller gives.
    pub given: Vec<usize>,
}

/// The graphs of a step.
pub struct Graphs {
    /// The numbers of rows that get graphs.
    rows: Vec<usize>,
    made: HashMap<(ThreadId, GraphKey), Graph>,
    next_id: i32,
}

enum Graph {
    Captured(RunOptions),
    /// So many captures have failed, but the run itself has not.
    Failed(u32),
}

/// After so many failed captures, the runs go without a graph. A single failure may come from something else that used
/// the GPU.
const MOST_FAILURES: u32 = 3;

impl Graphs {
    /// For runs of these numbers of rows; no graph is captured yet.
    pub fn new(rows: Vec<usize>) -> Self {
        Self { rows, made: HashMap::new(), next_id: 1 }
    }

    /// Calls `run` with the options of a run; and once more, for a run without a graph, if none can be captured.
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

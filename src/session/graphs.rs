//! Runs as CUDA graphs: captured once for each number of rows and set of given tensors, and replayed from then on.
//!
//! Rules: a graph is bound to addresses, so the buffers of a step with graphs are never replaced, and to the thread
//! that captured it, as ONNX Runtime keeps it there. While one is captured nothing else of this process may allocate or
//! run on a GPU ([`CAPTURE`]): who cannot have that at once runs without, and tries again the next time.

use std::collections::HashMap;
use std::thread::{self, ThreadId};

use super::open::{RunOptions, Session, SessionError};
use crate::memory::device::{CAPTURE, while_nothing_is_captured};

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
    /// Numbers of rows that there are to be graphs of.
    rows: Vec<usize>,
    made: HashMap<(ThreadId, GraphKey), Graph>,
    next_id: i32,
}

enum Graph {
    Captured(RunOptions),
    /// So many captures of it have failed, though the run itself does not.
    Failed(u32),
}

/// Captures of a graph that may fail before its runs are left without. One alone may be another's doing.
const MOST_FAILURES: u32 = 3;

impl Graphs {
    /// None yet, for runs of these numbers of rows.
    pub fn new(rows: Vec<usize>) -> Self {
        Self { rows, made: HashMap::new(), next_id: 1 }
    }

    /// Runs: `run` is called with the options to run with, and is called again, without a graph, if one cannot be
    /// captured. No key: this run is not to be a graph.
    pub fn run(
        &mut self,
        session: &Session,
        key: Option<GraphKey>,
        mut run: impl FnMut(*const ort::sys::OrtRunOptions) -> Result<(), SessionError>,
    ) -> Result<(), SessionError> {
        let key = key.filter(|key| self.rows.contains(&key.rows)).map(|key| (thread::current().id(), key));
        let failures = match key.as_ref().and_then(|key| self.made.get(key)) {
            Some(Graph::Captured(graph)) => {
                let _no_capture = while_nothing_is_captured();
                return run(graph.as_ptr());
            }
            Some(Graph::Failed(failures)) => *failures,
            None => 0,
        };
        if let Some(key) = key.filter(|_| failures < MOST_FAILURES)
            && let Some(_alone) = CAPTURE.try_write()
        {
            let graph = session.graph_options(self.next_id)?;
            self.next_id += 1;
            let Err(error) = run(graph.as_ptr()) else {
                self.made.insert(key, Graph::Captured(graph));
                return Ok(());
            };
            run(session.run_options())?;
            let failures = failures + 1;
            let from_now_on = if failures < MOST_FAILURES { "this time" } else { "from now on" };
            log::warn!("no CUDA graph of {} rows, which run without {from_now_on}: {error}", key.1.rows);
            self.made.insert(key, Graph::Failed(failures));
            return Ok(());
        }
        let _no_capture = while_nothing_is_captured();
        run(session.run_options())
    }
}

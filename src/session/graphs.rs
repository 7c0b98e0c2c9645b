//! Runs as CUDA graphs: captured once for each number of rows and pair of batch buffers, and replayed from then on.
//!
//! Rules: a graph is bound to addresses, so the buffers of a step with graphs are never replaced, and to the thread that
//! captured it, as ONNX Runtime keeps it there. While one is captured nothing else of this process may allocate or run on
//! a GPU ([`CAPTURE`]): who cannot have that at once runs without, and tries again the next time.

use std::collections::HashMap;
use std::thread::{self, ThreadId};

use super::open::{RunOptions, Session, SessionError};
use crate::memory::device::CAPTURE;

/// What a graph is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GraphKey {
    /// Number of rows.
    pub rows: usize,
    /// The batch buffer that is read.
    pub from: usize,
    /// The batch buffer that is written.
    pub into: usize,
}

/// The graphs of a step.
pub struct Graphs {
    /// Numbers of rows that there are to be graphs of.
    rows: Vec<usize>,
    /// `None` for one that could not be captured.
    made: HashMap<(ThreadId, GraphKey), Option<RunOptions>>,
    next_id: i32,
}

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
        let plain = session.run_options();
        let Some(key) = key.filter(|key| self.rows.contains(&key.rows)) else {
            let _no_capture = CAPTURE.read();
            return run(plain);
        };
        let of_thread = (thread::current().id(), key);
        match self.made.get(&of_thread) {
            Some(graph) => {
                let _no_capture = CAPTURE.read();
                run(graph.as_ref().map_or(plain, RunOptions::as_ptr))
            }
            None => match CAPTURE.try_write() {
                Some(_alone) => {
                    let graph = session.graph_options(self.next_id)?;
                    self.next_id += 1;
                    let captured = run(graph.as_ptr());
                    self.made.insert(of_thread, captured.is_ok().then_some(graph));
                    captured.or_else(|error| {
                        log::warn!("no CUDA graph of {} rows, which run without: {error}", key.rows);
                        run(plain)
                    })
                }
                None => {
                    let _no_capture = CAPTURE.read();
                    run(plain)
                }
            },
        }
    }
}

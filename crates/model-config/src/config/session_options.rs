//! How ONNX Runtime runs a model. The parameters have the names that Triton's onnxruntime backend gives them, so that a
//! configuration works with both.

use std::fmt;

use super::error::{ConfigError, bad, field};
use super::parameters::{Parameters, SESSION_PREFIX};
use super::raw::Optimization;

/// The parameter for arenas that shrink.
pub(super) const ARENA_SHRINKAGE: &str = "memory.enable_memory_arena_shrinkage";

/// How ONNX Runtime runs the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionOptions {
    /// Threads that work on one operator; 0 for one per core. The default is 1 (the onnxruntime backend's is 0),
    /// because small steps are fastest with one thread, and batches and instances run in parallel.
    pub intra_op_threads: usize,
    /// Threads that run operators side by side, with parallel execution; 0 for one per core.
    pub inter_op_threads: usize,
    /// Whether operators that do not depend on each other run side by side.
    pub parallel_execution: bool,
    /// How far ONNX Runtime may rewrite the model's graph.
    pub graph_optimization: GraphOptimization,
    /// Whether memory on the CPU comes from an arena.
    pub mem_arena: bool,
    /// Whether the configuration asks for an arena, or for one that shrinks.
    pub mem_arena_is_written: bool,
    /// Whether large tensors on the CPU have pages of their own and there is no arena. That depends on the model's
    /// states, so it is set when the model is bound.
    pub pages: bool,
    /// Whether ONNX Runtime plans the memory of a run from the last one.
    pub mem_pattern: bool,
    /// Arenas that shrink after each run, such as `cpu:0`.
    pub arena_shrinkage: Option<String>,
    /// Further entries of the session's configuration, by ONNX Runtime's names.
    pub entries: Vec<(String, String)>,
}

/// ONNX Runtime's graph optimisation levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GraphOptimization {
    /// `level: 2`
    None,
    /// `level: -1`
    Basic,
    /// `level: 1`
    Extended,
    /// `level: 0`, the default.
    All,
}

impl SessionOptions {
    pub(super) fn new(parameters: &Parameters, optimization: &Optimization) -> Result<Self, ConfigError> {
        let threads = |name| parameters.number(name, 0usize..=1024, "a number of threads from 0 to 1024");
        let level = optimization.graph.level.0;
        let graph_optimization = match level {
            0 => GraphOptimization::All,
            -1 => GraphOptimization::Basic,
            1 => GraphOptimization::Extended,
            2 => GraphOptimization::None,
            _ => {
                let allowed = "0 (all), -1 (basic), 1 (extended) or 2 (none) is expected";
                return Err(field("optimization.graph.level", level.to_string(), allowed));
            }
        };
        check_accelerators(optimization)?;
        let arena_shrinkage = parameters.text(ARENA_SHRINKAGE).map(str::to_owned);
        if let Some(arenas) =
            arena_shrinkage.as_deref().filter(|arenas| !arenas.split(';').all(|arena| arena.contains(':')))
        {
            return Err(bad(ARENA_SHRINKAGE, arenas, "arenas such as 'cpu:0', separated by ';', are expected"));
        }
        let entries = parameters.passed_on(SESSION_PREFIX);
        let mem_arena = parameters.switch("enable_mem_arena", true)?;
        Ok(Self {
            intra_op_threads: threads("intra_op_thread_count")?.unwrap_or(1),
            inter_op_threads: threads("inter_op_thread_count")?.unwrap_or(1),
            parallel_execution: parameters.switch("execution_mode", false)?,
            graph_optimization,
            mem_arena,
            mem_arena_is_written: arena_shrinkage.is_some()
                || (mem_arena && parameters.text("enable_mem_arena").is_some()),
            pages: false,
            mem_pattern: parameters.switch("enable_mem_pattern", true)?,
            arena_shrinkage,
            entries: entries.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
        })
    }
}

impl fmt::Display for SessionOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "intra_op_thread_count {}, inter_op_thread_count {}, execution_mode {}, graph optimization {}, \
             enable_mem_arena {}, enable_mem_pattern {}",
            self.intra_op_threads,
            self.inter_op_threads,
            u8::from(self.parallel_execution),
            self.graph_optimization,
            u8::from(self.mem_arena && !self.pages),
            u8::from(self.mem_pattern)
        )?;
        if let Some(arenas) = &self.arena_shrinkage {
            write!(f, ", memory.enable_memory_arena_shrinkage {arenas}")?;
        }
        self.entries.iter().try_for_each(|(name, value)| write!(f, ", {name} {value}"))
    }
}

impl fmt::Display for GraphOptimization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Basic => "basic",
            Self::Extended => "extended",
            Self::All => "all",
        })
    }
}

fn check_accelerators(optimization: &Optimization) -> Result<(), ConfigError> {
    let accelerators = &optimization.execution_accelerators;
    if let Some(accelerator) = accelerators.cpu_execution_accelerator.first() {
        return Err(field(
            "optimization.execution_accelerators.cpu_execution_accelerator",
            format!("'{}'", accelerator.name),
            "this backend has no accelerator for the CPU: remove it",
        ));
    }
    Ok(())
}

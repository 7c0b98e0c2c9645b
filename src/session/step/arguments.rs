//! The arguments of a call of ONNX Runtime.

use std::ffi::c_char;

use crate::session::output::Output;

/// What ONNX Runtime is called with: pointers to names and tensors that the step owns, or that are lent to it for a
/// run.
#[derive(Default)]
pub(super) struct Arguments {
    pub(super) input_names: Vec<*const c_char>,
    pub(super) output_names: Vec<*const c_char>,
    pub(super) input_values: Vec<*const ort::sys::OrtValue>,
    pub(super) output_values: Vec<*mut ort::sys::OrtValue>,
}

// SAFETY: only a run of the step that owns the lists follows the pointers. It has just listed what it owns or is lent,
// and none of that is bound to a thread.
unsafe impl Send for Arguments {}

impl Arguments {
    /// For a model with so many inputs and these outputs, which have to live as long.
    pub fn new(inputs: usize, outputs: &[Output]) -> Self {
        Self {
            input_names: Vec::with_capacity(inputs),
            output_names: outputs.iter().map(|output| output.name.as_ptr()).collect(),
            input_values: Vec::with_capacity(inputs),
            output_values: Vec::with_capacity(outputs.len()),
        }
    }
}

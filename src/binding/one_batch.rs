//! Whether all tensors of a model have the same batch, as far as the names of dimensions and the graph can say. Where one
//! tensor's batch is another's steps, sequences that share a run change each other's answers, without an error.

use prost::bytes::Bytes;
use rows::tensor::Dims;
use stateful_convert::{is_batch_name, rows_meet_others};

use super::feeds::find;
use super::{Binding, BindingError, BoundInput, Source};
use crate::config::{Config, StateDims, StatePair, TensorConfig, state_dims_line};
use crate::session::{Signature, TensorInfo};

/// A tensor, and which of its dimensions is the batch. If two disagree, the tensor of the later kind is more likely the
/// wrong one.
#[derive(Clone, Copy)]
struct Batched<'a> {
    kind: Kind,
    info: &'a TensorInfo,
    axis: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    State,
    Input,
    Output,
}

impl Binding {
    /// Refuses a configuration with which the batch of two tensors would be dimensions with different names.
    pub fn check_one_batch(
        &self,
        config: &Config,
        pairs: &[StatePair],
        signature: &Signature,
    ) -> Result<(), BindingError> {
        // A batch axis in 'state_dims' overrides the name of the dimension.
        let is_written = |name: &str| config.states.written_dims(name).is_some();
        let of_input = |input: &BoundInput| {
            let infos = signature.inputs.iter().chain(&signature.defaults);
            let info = infos.into_iter().find(|info| info.name == input.name)?;
            let kind = if matches!(input.source, Source::State(_)) { Kind::State } else { Kind::Input };
            let batched = Batched { kind, info, axis: input.batch_axis? };
            (kind != Kind::State || !is_written(&info.name)).then_some(batched)
        };
        let of_output = |tensor: &TensorConfig| {
            let output = self.outputs.iter().find(|output| output.name == tensor.name)?;
            let (_, info) = find(&signature.outputs, &tensor.name, "'output'", "output").ok()?;
            let is_state = pairs.iter().any(|pair| pair.output == tensor.name);
            let axis = output.batch_axis.filter(|_| !is_state && !info.dims.is_empty())?;
            Some(Batched { kind: Kind::Output, info, axis })
        };
        let inputs = self.inputs.iter().filter_map(of_input);
        let mut tensors: Vec<Batched> = inputs.chain(config.outputs.iter().filter_map(of_output)).collect();
        tensors.sort_by_key(|tensor| tensor.kind);
        let is_declared = |info: &TensorInfo| config.states.is_declared(&info.name);
        let found = tensors.iter().find_map(|tensor| {
            tensor.against(&tensors).or_else(|| tensor.against_usual_names()).or_else(|| {
                let may_differ = tensor.kind != Kind::State || is_declared(tensor.info);
                if may_differ { None } else { tensor.against_requests(&tensors) }
            })
        });
        found.map_or(Ok(()), Err)
    }

    /// Refuses dims that give a length to a dimension which the model leaves open, and mark another one as the batch, if
    /// the graph then brings rows together with that dimension. Dims say both in this form: the steps in front of the
    /// batch, and, wrongly, a batch of one. Reads `model`, the ONNX file, only if there are such dims.
    pub fn check_marked_batch<E: From<BindingError>>(
        &self,
        config: &Config,
        signature: &Signature,
        model: impl FnOnce() -> Result<Bytes, E>,
    ) -> Result<(), E> {
        let marked = |tensor: &&TensorConfig| {
            let info = signature.inputs.iter().find(|info| info.name == tensor.name)?;
            let is_fixed = |axis: &usize| tensor.dims[*axis] >= 0 && info.dims[*axis] < 0;
            let has_all = info.dims.len() == tensor.dims.len();
            let fixed = (0..info.dims.len()).find(|axis| has_all && is_fixed(axis))?;
            let axis = self.inputs.iter().find(|input| input.name == info.name)?.batch_axis?;
            Some((Batched { kind: Kind::Input, info, axis }, fixed))
        };
        let Some((tensor, fixed)) = config.inputs.iter().find_map(|tensor| marked(&tensor)) else { return Ok(()) };
        let met = rows_meet_others(model()?, &self.row_axes(), &self.output_axes());
        met.map_or(Ok(()), |node| {
            let what = format!("{}, and {node} brings it together with another dimension", tensor.place());
            Err(refusal(what, &tensor.line(fixed)).into())
        })
    }
}

impl Batched<'_> {
    fn symbol(&self) -> &str {
        self.info.symbol(self.axis)
    }

    /// The dimension with a name that is not the batch of this tensor.
    fn other(&self, name: &str) -> Option<usize> {
        let mut axes = 0..self.info.dims.len();
        axes.find(|&axis| axis != self.axis && self.info.dims[axis] < 0 && self.info.symbol(axis) == name)
    }

    /// One of the tensors has the name of this batch for another dimension, and another batch.
    fn against(&self, all: &[Self]) -> Option<BindingError> {
        let name = self.symbol();
        let differs = |other: &&Self| !name.is_empty() && other.symbol() != name && other.other(name).is_some();
        let other = all.iter().find(differs)?;
        // Trusts the tensor whose batch has a usual name; if that doesn't decide, the one of the earlier kind.
        let is_right = |tensor: &Self| is_batch_name(tensor.symbol());
        let (right, wrong) = match (is_right(self), is_right(other)) {
            (false, true) => (other, self),
            (true, false) => (self, other),
            _ if self.kind <= other.kind => (self, other),
            _ => (other, self),
        };
        let what = format!("{}, and {}", right.place(), wrong.place());
        Some(refusal(what, &wrong.other(right.symbol()).map_or_else(String::new, |axis| wrong.line(axis))))
    }

    /// Another dimension of this tensor has a usual name of the batch.
    fn against_usual_names(&self) -> Option<BindingError> {
        let is_usual = |&axis: &usize| self.info.dims[axis] < 0 && is_batch_name(self.info.symbol(axis));
        let usual = (0..self.info.dims.len()).find(is_usual).filter(|_| !is_batch_name(self.symbol()))?;
        let what = format!("{}, though dimension {usual} is named '{}'", self.place(), self.info.symbol(usual));
        Some(refusal(what, &self.line(usual)))
    }

    /// This state has a name for the batch that neither requests have nor is usual. A name with a number may be one that
    /// an exporter made up for each tensor; `Binding::warnings` says so.
    fn against_requests(&self, all: &[Self]) -> Option<BindingError> {
        let name = self.symbol();
        let is_word = !name.is_empty() && !is_batch_name(name) && !ends_with_digit(name);
        let named = |other: &&Self| other.kind == Kind::Input && !other.symbol().is_empty();
        let of_requests = all.iter().find(named).filter(|other| is_word && other.symbol() != name)?;
        if ends_with_digit(of_requests.symbol()) {
            return None;
        }
        let dims = |batch_axis| StateDims { name: self.info.name.clone(), dims: self.info.dims.clone(), batch_axis };
        let what = format!("{}, and {}", of_requests.place(), self.place());
        let line = format!(
            "if both are the batch, write {}; if the second one varies, write {}",
            state_dims_line([dims(Some(self.axis))]),
            state_dims_line([dims(None)])
        );
        Some(refusal(what, &line))
    }

    /// As `dimension 1 of input 'x', 'time'`.
    fn place(&self) -> String {
        let kind = match self.kind {
            Kind::State => "state",
            Kind::Input => "input",
            Kind::Output => "output",
        };
        let place = format!("dimension {} of {kind} '{}'", self.axis, self.info.name);
        if self.symbol().is_empty() { place } else { format!("{place}, '{}'", self.symbol()) }
    }

    /// What to write so that the batch is another dimension.
    fn line(&self, axis: usize) -> String {
        let mut dims = self.info.dims.clone();
        if self.kind == Kind::State {
            let dims = StateDims { name: self.info.name.clone(), dims, batch_axis: Some(axis) };
            return format!("if dimension {axis} is the batch, write {}", state_dims_line([dims]));
        }
        let how = if axis == 0 {
            dims.remove(0);
            "leave it out of the dims"
        } else {
            "write the model's dims"
        };
        format!("if dimension {axis} of '{}' is the batch, {how}: dims: {}", self.info.name, spaced(&dims))
    }
}

/// Dims as a configuration has them.
fn spaced(dims: &[i64]) -> String {
    let listed = Dims(dims).to_string();
    format!("[ {} ]", listed.trim_matches(['[', ']']))
}

fn ends_with_digit(name: &str) -> bool {
    name.ends_with(|last: char| last.is_ascii_digit())
}

fn refusal(what: String, line: &str) -> BindingError {
    let line = if line.is_empty() { String::new() } else { format!("{line}; ") };
    BindingError::OtherBatch {
        what,
        help: format!(
            "{line}with parameter 'max_rows_per_run' of 1, each sequence runs alone, and the dims stay as written"
        ),
    }
}

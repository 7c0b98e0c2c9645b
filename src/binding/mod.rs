//! The model's signature held against its configuration: what feeds each input, what each output is for.
//!
//! Rules: every input of the model is fed by exactly one thing; every mismatch is an error at load that names the
//! tensor, what the configuration says and what the model says. The batch axis of each tensor is found here and may
//! stand anywhere. Not for: running anything.

#![forbid(unsafe_code)]

mod error;
mod fixed;
mod shapes;
mod states;

use std::fmt;

pub use error::BindingError;
use fixed::{constant_input, control_input};
use shapes::{request_input, response_output};
use states::{batch_symbol, check_state_ends, state_input, state_layout, state_output};

use crate::config::{Config, StatePair};
use crate::memory::SlotSize;
use crate::session::{InputSpec, OutputSpec, Signature, StepSpec, TensorInfo};
use crate::state::layout::SlotLayout;
use crate::tensor::{DataType, Dims, RowLayout};

/// What a step of this model feeds and fetches, and how states and requests map to it.
#[derive(Clone, Debug)]
pub struct Binding {
    /// The model's inputs, in its order.
    pub inputs: Vec<BoundInput>,
    /// The outputs that are fetched: those of states and those that responses may carry.
    pub outputs: Vec<BoundOutput>,
    /// The states, in the order of `state_pairs`.
    pub states: Vec<BoundState>,
    /// Where each state lies in a slot.
    pub slot: SlotLayout,
}

/// An input of the model.
#[derive(Clone, Debug)]
pub struct BoundInput {
    /// Name in the model and in requests.
    pub name: String,
    /// Element type.
    pub data_type: DataType,
    /// Dimensions in the model; -1 is open.
    pub dims: Vec<i64>,
    /// Which dimension is the number of rows.
    pub batch_axis: Option<usize>,
    /// What fills it.
    pub source: Source,
}

/// What fills an input.
#[derive(Clone, Debug)]
pub enum Source {
    /// The requests; how their shape relates to the model's.
    Request(ShapeForm),
    /// The state of this number.
    State(usize),
    /// A control.
    Control(BoundControl),
    /// Always these bytes (of one row, where there is a batch axis).
    Constant(Vec<u8>),
}

/// A control, in the type that the model takes.
#[derive(Clone, Debug)]
pub enum BoundControl {
    /// One of these two elements, by a flag of the request.
    Flag {
        /// Which flag.
        flag: Flag,
        /// The element that says no.
        no: Vec<u8>,
        /// The element that says yes.
        yes: Vec<u8>,
    },
    /// The sequence id.
    CorrelationId(DataType),
}

/// What a request can say of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flag {
    /// It starts a sequence.
    Start,
    /// It ends its sequence.
    End,
    /// It is one.
    Ready,
}

/// How a request's shape relates to the shape in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShapeForm {
    /// As in the model, with 1 for the batch axis, which is the first: what Triton does.
    Plain,
    /// The configuration's dims are the model's, with -1 for the batch axis wherever it stands; requests have Triton's
    /// batch dimension in front of them, responses have not: what NVIDIA's stateful_backend does.
    BatchInside,
}

/// An output that is fetched.
#[derive(Clone, Debug)]
pub struct BoundOutput {
    /// Name in the model and in responses.
    pub name: String,
    /// Element type.
    pub data_type: DataType,
    /// Which dimension is the number of rows.
    pub batch_axis: Option<usize>,
    /// Dimensions, where all but the batch axis are known.
    pub dims: Option<Vec<i64>>,
    /// Whether responses may carry it.
    pub is_response: bool,
    /// Its shape in a response without elements: 0 for the batch axis and for open dimensions.
    pub empty_dims: Vec<i64>,
}

/// A state: which input and output of the binding are its ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoundState {
    /// Index in [`Binding::inputs`].
    pub input: usize,
    /// Index in [`Binding::outputs`].
    pub output: usize,
    /// A row of it in a batch.
    pub layout: RowLayout,
    /// How its slot keeps it.
    pub stored: Stored,
}

/// How a slot keeps a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// As the model has it.
    Exact,
    /// TYPE_FP32 as TYPE_FP16, rounded to nearest even.
    Fp16,
    /// Strings, beside the slot's bytes, as this string state. The layout then counts elements.
    Strings(usize),
}

impl BoundState {
    /// Bytes of the state in its slot.
    pub const fn stored_bytes(&self) -> usize {
        match self.stored {
            Stored::Exact => self.layout.row_bytes(),
            Stored::Fp16 => self.layout.row_bytes() / 2,
            Stored::Strings(_) => 0,
        }
    }
}

impl Binding {
    /// Finds what feeds what, or the first thing that does not fit.
    pub fn new(config: &Config, state_pairs: &[StatePair], signature: &Signature) -> Result<Self, BindingError> {
        let mut inputs: Vec<Option<BoundInput>> = signature.inputs.iter().map(|_| None).collect();
        let mut place = |index: usize, input: BoundInput| match &inputs[index] {
            Some(known) => Err(BindingError::FedTwice {
                name: input.name,
                first: known.source.noun(),
                second: input.source.noun(),
            }),
            None => {
                inputs[index] = Some(input);
                Ok(())
            }
        };
        for tensor in &config.inputs {
            let (index, info) = find(&signature.inputs, &tensor.name, "'input'", "input")?;
            place(index, request_input(config, tensor, info)?)?;
        }
        let mut outputs = Vec::new();
        for tensor in &config.outputs {
            let (_, info) = find(&signature.outputs, &tensor.name, "'output'", "output")?;
            outputs.push(response_output(config, tensor, info)?);
        }
        let batch_symbol = batch_symbol(config, signature);
        let mut states = Vec::new();
        for (number, pair) in state_pairs.iter().enumerate() {
            let (input, info) = find(&signature.inputs, &pair.input, "'state_pairs'", "input")?;
            let (_, output_info) = find(&signature.outputs, &pair.output, "'state_pairs'", "output")?;
            let bound = state_input(config, number, info, batch_symbol)?;
            check_state_ends(&bound, info, output_info)?;
            let layout = state_layout(&bound)?;
            let output = state_output(&mut outputs, &bound, output_info);
            place(input, bound)?;
            let string_states = states.iter().filter(|state: &&BoundState| matches!(state.stored, Stored::Strings(_)));
            let stored = match info.data_type {
                DataType::Bytes => Stored::Strings(string_states.count()),
                DataType::Fp32 if config.store_states_as_fp16 => Stored::Fp16,
                _ => Stored::Exact,
            };
            states.push(BoundState { input, output, layout, stored });
        }
        for control in &config.controls {
            // A control that the model does not take is Triton's business only.
            if let Some((index, info)) = signature.inputs.iter().enumerate().find(|(_, info)| info.name == control.name)
            {
                place(index, control_input(config, control, info)?)?;
            }
        }
        for (name, values) in &config.constants {
            let (index, info) = find(&signature.inputs, name, "'constant_inputs'", "input")?;
            place(index, constant_input(config, info, values)?)?;
        }
        let inputs = inputs.into_iter().zip(&signature.inputs).map(|(input, info)| input.ok_or_else(|| unfed(info)));
        let slot = SlotLayout::new(&states.iter().map(BoundState::stored_bytes).collect::<Vec<_>>());
        let slot = slot.ok_or(BindingError::StatesOverflow)?;
        Ok(Self { inputs: inputs.collect::<Result<_, _>>()?, outputs, states, slot })
    }

    /// What a slot of the pool holds.
    pub fn slot_size(&self) -> SlotSize {
        let strings = self.states.iter().filter(|state| matches!(state.stored, Stored::Strings(_))).count();
        SlotSize { bytes: self.slot.slot_bytes(), strings }
    }

    /// What the step needs to know.
    pub fn step_spec(&self) -> StepSpec {
        let inputs = self.inputs.iter().map(|input| InputSpec {
            name: input.name.clone(),
            data_type: input.data_type,
            batch_axis: input.batch_axis,
        });
        let outputs = self.outputs.iter().map(|output| OutputSpec {
            name: output.name.clone(),
            data_type: output.data_type,
            batch_axis: output.batch_axis,
            dims: output.dims.clone(),
        });
        StepSpec { inputs: inputs.collect(), outputs: outputs.collect() }
    }
}

impl Source {
    const fn noun(&self) -> &'static str {
        match self {
            Self::Request(_) => "'input'",
            Self::State(_) => "'state_pairs'",
            Self::Control(_) => "'control_input'",
            Self::Constant(_) => "'constant_inputs'",
        }
    }
}

fn find<'a>(
    infos: &'a [TensorInfo],
    name: &str,
    named_by: &'static str,
    side: &'static str,
) -> Result<(usize, &'a TensorInfo), BindingError> {
    infos.iter().enumerate().find(|(_, info)| info.name == name).ok_or_else(|| BindingError::Missing {
        named_by,
        name: name.to_owned(),
        side,
        has: infos.iter().map(|info| info.name.clone()).collect(),
    })
}

fn describe(data_type: DataType, dims: &[i64]) -> String {
    format!("{data_type} {}", Dims(dims))
}

fn unfed(info: &TensorInfo) -> BindingError {
    BindingError::Unfed { name: info.name.clone(), data_type: info.data_type, dims: Dims(&info.dims).to_string() }
}

fn check_type(what: String, configured: DataType, model: DataType) -> Result<(), BindingError> {
    match configured == model {
        true => Ok(()),
        false => Err(BindingError::DataType { what, configured, model }),
    }
}

/// Whether two dimensions can be the same; an open one can be any.
const fn agree(a: i64, b: i64) -> bool {
    a == b || a < 0 || b < 0
}

/// Whether the model's batch dimension takes every batch that may come.
const fn batches(dim: i64, config: &Config) -> bool {
    dim < 0 || (dim == 1 && config.max_batch_size == 1)
}

fn all_agree(a: &[i64], b: &[i64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(&a, &b)| agree(a, b))
}

impl fmt::Display for Binding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for input in &self.inputs {
            let from = match &input.source {
                Source::Request(_) => "requests".to_owned(),
                Source::State(number) => {
                    let output = &self.outputs[self.states[*number].output].name;
                    format!(
                        "state, from output {output}, {} bytes, initially zeros",
                        self.states[*number].stored_bytes()
                    )
                }
                Source::Control(_) => "control".to_owned(),
                Source::Constant(_) => "constant".to_owned(),
            };
            let axis = input.batch_axis.map_or("none".to_owned(), |axis| axis.to_string());
            writeln!(
                f,
                "model input {} {} batch axis {axis}: {from}",
                input.name,
                describe(input.data_type, &input.dims)
            )?;
        }
        for output in &self.outputs {
            let dims = output.dims.as_ref().map_or("dims left open".to_owned(), |dims| Dims(dims).to_string());
            let to = if output.is_response { "responses" } else { "state only" };
            writeln!(f, "model output {} {} {dims}: {to}", output.name, output.data_type)?;
        }
        write!(f, "state: {} bytes a sequence, {} with alignment", self.slot.state_bytes(), self.slot.slot_bytes())
    }
}

#[cfg(test)]
mod tests;

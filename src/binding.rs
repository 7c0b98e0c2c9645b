//! The model's signature held against its configuration: what feeds each input, what each output is for.
//!
//! Rules: every input of the model is fed by exactly one thing; every mismatch is an error at load that names the
//! tensor, what the configuration says and what the model says. The batch axis of each tensor is found here and may
//! stand anywhere. Not for: running anything.

#![forbid(unsafe_code)]

use std::fmt;

use crate::config::{Config, Control, ControlKind, FalseTrue, StatePair, TensorConfig};
use crate::memory::SlotSize;
use crate::session::{InputSpec, OutputSpec, Signature, StepSpec, TensorInfo};
use crate::state::layout::SlotLayout;
use crate::tensor::{DataType, Dims, RowLayout, element_count};

/// Why a model does not fit its configuration.
#[derive(Debug, thiserror::Error)]
pub enum BindingError {
    /// The configuration names a tensor that the model does not have.
    #[error("{named_by} names '{name}', but the model has no such {side} (it has {})", has.join(", "))]
    Missing {
        /// Which part of the configuration.
        named_by: &'static str,
        /// The tensor.
        name: String,
        /// `input` or `output`.
        side: &'static str,
        /// What there is.
        has: Vec<String>,
    },
    /// Two data types that should be one.
    #[error("{what} is {configured}, but in the model it is {model}")]
    DataType {
        /// The tensor and who names it.
        what: String,
        /// What the configuration says.
        configured: DataType,
        /// What the model says.
        model: DataType,
    },
    /// Dimensions that do not agree.
    #[error("{what} has dims {configured}, but in the model {model}: {rule}")]
    Dims {
        /// The tensor and who names it.
        what: String,
        /// What the configuration says.
        configured: String,
        /// What the model says.
        model: String,
        /// What would agree.
        rule: String,
    },
    /// An input that nothing feeds.
    #[error(
        "nothing feeds the model's input '{name}' ({data_type} {dims}): list it under 'input', in 'state_pairs', as a 'control_input' or in 'constant_inputs'"
    )]
    Unfed {
        /// The input.
        name: String,
        /// Its type.
        data_type: DataType,
        /// Its dimensions.
        dims: String,
    },
    /// An input that two things feed.
    #[error("the model's input '{name}' is fed by {first} and by {second}; one of them has to go")]
    FedTwice {
        /// The input.
        name: String,
        /// One.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// The two ends of a state pair differ.
    #[error(
        "the state pair <<<{input}, {output}>>> has {input_is} as input and {output_is} as output; they must agree"
    )]
    StateEnds {
        /// Name of the input.
        input: String,
        /// Name of the output.
        output: String,
        /// Type and dimensions of the input.
        input_is: String,
        /// Type and dimensions of the output.
        output_is: String,
    },
    /// A state whose batch axis cannot be told, or that cannot be kept in a slot of fixed size.
    #[error("state '{name}' has {dims} in the model: {why}")]
    State {
        /// Name of the input.
        name: String,
        /// Type and dimensions.
        dims: String,
        /// What is wrong.
        why: String,
    },
    /// A control value that the model's input cannot hold.
    #[error("control_input '{name}' has the value {value}, which the model's input of {model} cannot hold")]
    Control {
        /// The input.
        name: String,
        /// The value.
        value: f64,
        /// What the model takes.
        model: DataType,
    },
    /// A constant that does not fit its input.
    #[error("constant_inputs gives '{name}' the value {value}, but {why}")]
    Constant {
        /// The input.
        name: String,
        /// The value as written.
        value: String,
        /// What the model wants.
        why: String,
    },
}

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

/// How a request's or response's shape relates to the shape in the model.
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
    /// Whether responses may carry it, and in which form.
    pub response: Option<ShapeForm>,
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

/// Holds the dims of an `input` or `output` against the model's. Returns the batch axis and the form of the shape.
fn match_dims(
    config: &Config,
    list: &'static str,
    tensor: &TensorConfig,
    model: &[i64],
) -> Result<(Option<usize>, ShapeForm), BindingError> {
    let error = |rule: String| BindingError::Dims {
        what: format!("{list} '{}'", tensor.name),
        configured: Dims(&tensor.dims).to_string(),
        model: Dims(model).to_string(),
        rule,
    };
    if !config.is_batched() {
        return match all_agree(&tensor.dims, model) {
            true => Ok((None, ShapeForm::Plain)),
            false => Err(error("with max_batch_size 0 they must be the same".to_owned())),
        };
    }
    if tensor.dims.len() == model.len() && !model.is_empty() {
        let open: Vec<usize> = (0..model.len()).filter(|&axis| tensor.dims[axis] < 0 && model[axis] < 0).collect();
        return match (open.as_slice(), all_agree(&tensor.dims, model)) {
            (&[axis], true) => Ok((Some(axis), ShapeForm::BatchInside)),
            _ => Err(error(
                "either leave the batch dimension out, or mark it, and only it, with -1 where the model has it open"
                    .to_owned(),
            )),
        };
    }
    let Some((&batch, behind)) = model.split_first() else {
        return Err(error("the model's tensor has no batch dimension; set max_batch_size to 0".to_owned()));
    };
    if !batches(batch, config) {
        return Err(error(format!(
            "its batch dimension is fixed to {batch}, but max_batch_size is {}",
            config.max_batch_size
        )));
    }
    match all_agree(&tensor.dims, behind) {
        true => Ok((Some(0), ShapeForm::Plain)),
        false => Err(error(format!("without the batch dimension they must be {}", Dims(behind)))),
    }
}

fn request_input(config: &Config, tensor: &TensorConfig, info: &TensorInfo) -> Result<BoundInput, BindingError> {
    check_type(format!("input '{}'", tensor.name), tensor.data_type, info.data_type)?;
    let (batch_axis, form) = match_dims(config, "input", tensor, &info.dims)?;
    let mut input = bound(info, batch_axis, Source::Request(form));
    // Where only the configuration fixes a dimension, Triton holds requests to it.
    let behind = input.dims.len() - tensor.dims.len();
    for (dim, &configured) in input.dims[behind..].iter_mut().zip(&tensor.dims) {
        if *dim < 0 {
            *dim = configured;
        }
    }
    Ok(input)
}

fn bound(info: &TensorInfo, batch_axis: Option<usize>, source: Source) -> BoundInput {
    BoundInput { name: info.name.clone(), data_type: info.data_type, dims: info.dims.clone(), batch_axis, source }
}

fn response_output(config: &Config, tensor: &TensorConfig, info: &TensorInfo) -> Result<BoundOutput, BindingError> {
    check_type(format!("output '{}'", tensor.name), tensor.data_type, info.data_type)?;
    // A model may say nothing at all about an output's shape, not even its rank.
    let (batch_axis, form) = match info.dims.is_empty() && config.is_batched() {
        true => (Some(0), ShapeForm::Plain),
        false => match_dims(config, "output", tensor, &info.dims)?,
    };
    let known = known_dims(&info.dims, batch_axis).filter(|_| !info.dims.is_empty() || !config.is_batched());
    // ONNX Runtime allocates strings itself.
    let dims = known.filter(|_| info.data_type != DataType::Bytes);
    let empty_dims = empty_dims(&info.dims, batch_axis);
    let (name, data_type, response) = (info.name.clone(), info.data_type, Some(form));
    Ok(BoundOutput { name, data_type, batch_axis, dims, response, empty_dims })
}

/// The shape of an output without elements.
fn empty_dims(dims: &[i64], batch_axis: Option<usize>) -> Vec<i64> {
    let is_batch = |axis: usize| Some(axis) == batch_axis;
    let empty = |(axis, &dim): (usize, &i64)| if is_batch(axis) { 0 } else { dim.max(0) };
    let mut dims: Vec<i64> = dims.iter().enumerate().map(empty).collect();
    if dims.is_empty() {
        return vec![0];
    }
    if !dims.contains(&0) {
        dims[0] = 0;
    }
    dims
}

/// The dims, if all but the batch axis are known.
fn known_dims(dims: &[i64], batch_axis: Option<usize>) -> Option<Vec<i64>> {
    let known = dims.iter().enumerate().all(|(axis, &dim)| dim >= 0 || Some(axis) == batch_axis);
    known.then(|| dims.to_vec())
}

/// The name that the model gives its batch dimension, where an input of requests has it.
fn batch_symbol<'a>(config: &Config, signature: &'a Signature) -> Option<&'a str> {
    let is_request = |info: &&TensorInfo| config.inputs.iter().any(|tensor| tensor.name == info.name);
    let first = signature.inputs.iter().find(is_request)?;
    first.symbols.first().map(String::as_str).filter(|symbol| !symbol.is_empty())
}

fn state_input(
    config: &Config,
    number: usize,
    info: &TensorInfo,
    batch_symbol: Option<&str>,
) -> Result<BoundInput, BindingError> {
    let error = |why: &str| BindingError::State {
        name: info.name.clone(),
        dims: describe(info.data_type, &info.dims),
        why: why.to_owned(),
    };
    let open: Vec<usize> = (0..info.dims.len()).filter(|&axis| info.dims[axis] < 0).collect();
    let named: Vec<usize> =
        open.iter().copied().filter(|&axis| batch_symbol == Some(info.symbols[axis].as_str())).collect();
    let batch_axis = match (config.max_batch_size, open.as_slice(), named.as_slice()) {
        (_, &[axis], _) | (1.., _, &[axis]) => Some(axis),
        (0 | 1, [], _) => None,
        (_, [], _) => {
            return Err(error(
                "no dimension is open for the batch; set max_batch_size to 0 or 1, or export the model with a dynamic batch dimension",
            ));
        }
        (_, [..], _) => return Err(error("more than one dimension is open; which one is the batch cannot be told")),
    };
    if open.iter().any(|&axis| Some(axis) != batch_axis) {
        return Err(error(
            "another dimension than the batch is open; states that change their size are not supported yet",
        ));
    }
    Ok(bound(info, batch_axis, Source::State(number)))
}

fn describe(data_type: DataType, dims: &[i64]) -> String {
    format!("{data_type} {}", Dims(dims))
}

fn check_state_ends(input: &BoundInput, input_info: &TensorInfo, output_info: &TensorInfo) -> Result<(), BindingError> {
    // Exporters leave the dims of state outputs open, or say nothing about them; a run checks them.
    let dims_agree = output_info.dims.is_empty() || all_agree(&input.dims, &output_info.dims);
    match input.data_type == output_info.data_type && dims_agree {
        true => Ok(()),
        false => Err(BindingError::StateEnds {
            input: input.name.clone(),
            output: output_info.name.clone(),
            input_is: describe(input_info.data_type, &input_info.dims),
            output_is: describe(output_info.data_type, &output_info.dims),
        }),
    }
}

fn state_layout(input: &BoundInput) -> Result<RowLayout, BindingError> {
    let layout = match input.data_type {
        DataType::Bytes => RowLayout::of_elements(&input.dims, input.batch_axis),
        data_type => RowLayout::new(data_type, &input.dims, input.batch_axis),
    };
    layout.ok_or_else(|| BindingError::State {
        name: input.name.clone(),
        dims: describe(input.data_type, &input.dims),
        why: "its size overflows".to_owned(),
    })
}

/// The output end of a state; one that responses carry too is fetched once.
fn state_output(outputs: &mut Vec<BoundOutput>, input: &BoundInput, info: &TensorInfo) -> usize {
    let index = outputs.iter().position(|output| output.name == info.name).unwrap_or_else(|| {
        let (name, data_type) = (info.name.clone(), info.data_type);
        outputs.push(BoundOutput {
            name,
            data_type,
            batch_axis: None,
            dims: None,
            response: None,
            empty_dims: Vec::new(),
        });
        outputs.len() - 1
    });
    let output = &mut outputs[index];
    output.batch_axis = input.batch_axis;
    // ONNX Runtime allocates strings itself.
    output.dims = Some(input.dims.clone()).filter(|_| input.data_type != DataType::Bytes);
    output.empty_dims = empty_dims(&input.dims, input.batch_axis);
    // Where the model leaves the output's dims open, the input tells where its batch stands.
    if input.batch_axis.is_some_and(|axis| axis > 0) {
        output.response = output.response.map(|_| ShapeForm::BatchInside);
    }
    index
}

fn control_input(config: &Config, control: &Control, info: &TensorInfo) -> Result<BoundInput, BindingError> {
    let what = format!("control_input '{}'", control.name);
    let flag = |flag: Flag, values: FalseTrue| {
        let element = |value: f64| {
            flag_element(info.data_type, value).ok_or_else(|| BindingError::Control {
                name: control.name.clone(),
                value,
                model: info.data_type,
            })
        };
        Ok(BoundControl::Flag { flag, no: element(values.no)?, yes: element(values.yes)? })
    };
    let source = match control.kind {
        ControlKind::Start(values) => flag(Flag::Start, values)?,
        ControlKind::End(values) => flag(Flag::End, values)?,
        ControlKind::Ready(values) => flag(Flag::Ready, values)?,
        ControlKind::CorrelationId(data_type) => {
            check_type(what.clone(), data_type, info.data_type)?;
            BoundControl::CorrelationId(data_type)
        }
    };
    let error = |rule: &str| BindingError::Dims {
        what: what.clone(),
        configured: "[1]".to_owned(),
        model: Dims(&info.dims).to_string(),
        rule: rule.to_owned(),
    };
    let batch_axis = (config.is_batched() && !info.dims.is_empty()).then_some(0);
    let one_element = info.dims.iter().enumerate().all(|(axis, &dim)| dim <= 1 || Some(axis) == batch_axis);
    let fits = one_element && batch_axis.is_none_or(|axis| batches(info.dims[axis], config));
    if !fits || (config.max_batch_size > 1 && batch_axis.is_none()) {
        return Err(error("a control has one element a row: [batch] or [batch, 1]"));
    }
    let mut input = bound(info, batch_axis, Source::Control(source));
    for (axis, dim) in input.dims.iter_mut().enumerate() {
        if Some(axis) != batch_axis {
            *dim = 1;
        }
    }
    Ok(input)
}

fn constant_input(config: &Config, info: &TensorInfo, values: &[String]) -> Result<BoundInput, BindingError> {
    let error = |why: String| BindingError::Constant { name: info.name.clone(), value: values.join(", "), why };
    let open: Vec<usize> = (0..info.dims.len()).filter(|&axis| info.dims[axis] < 0).collect();
    let batch_axis = match open.as_slice() {
        [] => None,
        &[axis] if config.is_batched() => Some(axis),
        _ => return Err(error(format!("the model's dims {} are open", Dims(&info.dims)))),
    };
    let mut row = info.dims.clone();
    if let Some(axis) = batch_axis {
        row[axis] = 1;
    }
    let wanted = element_count(&row).unwrap_or(usize::MAX);
    if values.len() != wanted {
        return Err(error(format!("the model wants {wanted} elements, {}", Dims(&info.dims))));
    }
    let mut bytes = Vec::new();
    for value in values {
        let element = element_bytes(info.data_type, value);
        bytes.extend(element.ok_or_else(|| error(format!("the model wants {}", info.data_type)))?);
    }
    Ok(bound(info, batch_axis, Source::Constant(bytes)))
}

/// A flag's value as an element of the type that the model takes; `None` where the type cannot say it.
fn flag_element(data_type: DataType, value: f64) -> Option<Vec<u8>> {
    match data_type {
        DataType::Bool => Some(vec![u8::from(value != 0.0)]),
        _ => element_bytes(data_type, &value.to_string()),
    }
}

/// One element, read from text.
fn element_bytes(data_type: DataType, text: &str) -> Option<Vec<u8>> {
    macro_rules! number {
        ($type:ty) => {
            text.parse::<$type>().ok().map(|number| number.to_ne_bytes().to_vec())
        };
    }
    match data_type {
        DataType::Bool => match text {
            "true" | "1" => Some(vec![1]),
            "false" | "0" => Some(vec![0]),
            _ => None,
        },
        DataType::Uint8 => number!(u8),
        DataType::Uint16 => number!(u16),
        DataType::Uint32 => number!(u32),
        DataType::Uint64 => number!(u64),
        DataType::Int8 => number!(i8),
        DataType::Int16 => number!(i16),
        DataType::Int32 => number!(i32),
        DataType::Int64 => number!(i64),
        DataType::Fp16 => text.parse().ok().map(|number| half::f16::from_f32(number).to_ne_bytes().to_vec()),
        DataType::Bf16 => text.parse().ok().map(|number| half::bf16::from_f32(number).to_ne_bytes().to_vec()),
        DataType::Fp32 => number!(f32),
        DataType::Fp64 => number!(f64),
        DataType::Bytes => None,
    }
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
            let to = if output.response.is_some() { "responses" } else { "state only" };
            writeln!(f, "model output {} {} {dims}: {to}", output.name, output.data_type)?;
        }
        write!(f, "state: {} bytes a sequence, {} with alignment", self.slot.state_bytes(), self.slot.slot_bytes())
    }
}

#[cfg(test)]
#[path = "binding_tests.rs"]
mod tests;

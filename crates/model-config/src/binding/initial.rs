//! What a state is when its sequence starts: a value that is given, or what a second ONNX model computes for each START.

use std::collections::BTreeMap;

use rows::strings::{self, Strings};
use rows::tensor::{DataType, Dims, element_count};

use super::bound::{BoundState, Initial, InitialContent, RequestInput};
use super::elements::{element_bytes, read_npz};
use super::error::{BindingError, names};
use super::model::{Binding, OutputSpec, StepSpec, input_spec};
use super::shapes::{check_type, describe};
use crate::config::{Config, DeclaredState, InitialSources, InitialValue};
use crate::onnx::{Signature, TensorInfo, agree, all_agree};

impl Initial {
    /// The value that the configuration gives for a state whose rows have `dims`, else that of the model, else zeros. For
    /// zeros, an open dimension is 1 if the state is declared in `sequence_batching.state`, as in Triton, and else 0.
    pub(super) fn new(
        name: &str,
        data_type: DataType,
        dims: &[i64],
        declared: Option<&DeclaredState>,
        config: &Config,
        sources: &InitialSources,
    ) -> Result<Self, BindingError> {
        // The model fixes the size of the other states.
        let limit = if dims.contains(&-1) { config.states.limits.per_sequence } else { usize::MAX };
        let file = |file: &str| sources.files.get(file).map(Vec::as_slice).unwrap_or_default();
        let value = |from: String| Value { name, from, data_type };
        if let Some(declaration) = declared
            && let Some(initial) = &declaration.initial
        {
            let row = dims;
            let dims = declared_dims(row, &initial.dims);
            let source = value("its initial_state".to_owned());
            if !all_agree(row, &dims) {
                let why = format!("its dims {} are not those of one sequence, {}", Dims(&initial.dims), Dims(row));
                return Err(source.error(why));
            }
            // A string takes at least the 4 bytes of its length.
            let bytes = element_count(&dims).and_then(|count| count.checked_mul(data_type.byte_size().unwrap_or(4)));
            if bytes.is_none_or(|bytes| bytes > limit) {
                return Err(source.error(format!(
                    "with dims {} it is larger than a state may be (max_state_bytes_per_sequence, {})",
                    Dims(&initial.dims),
                    config.states.limits.per_sequence
                )));
            }
            let Some(name_of_file) = &initial.file else { return Ok(Self { dims, content: InitialContent::Zeros }) };
            return value(format!("file '{name_of_file}'")).read_bytes(&dims, file(name_of_file));
        }
        match config.states.initial.iter().find(|(of, _)| of == name) {
            Some((_, InitialValue::File(from))) => value(format!("file '{from}'")).read_bytes(dims, file(from)),
            Some((_, InitialValue::Array { file: from, name: array })) => {
                let of = array.as_ref().map_or(String::new(), |array| format!(", array '{array}'"));
                value(format!("file '{from}'{of}")).read_array(dims, file(from), array.as_deref(), limit)
            }
            Some((_, InitialValue::Metadata { keys, then_zeros })) => {
                let source = value(format!("the model's metadata '{}'", keys.join("+")));
                source.read_metadata(dims, keys, *then_zeros, &sources.metadata)
            }
            Some((_, InitialValue::List(values))) => value(INITIAL_STATES.to_owned()).read_list(dims, values),
            Some((_, InitialValue::Fill(text))) => value(INITIAL_STATES.to_owned()).fill(dims, text),
            None if sources.defaults.contains_key(name) => {
                let values: Vec<String> = sources.defaults[name].iter().map(f64::to_string).collect();
                value("the model's initializer".to_owned()).read_list(dims, &values)
            }
            None => {
                let open = if declared.is_some() { 1 } else { 0 };
                let dims = dims.iter().map(|&dim| if dim < 0 { open } else { dim }).collect();
                Ok(Self { dims, content: InitialContent::Zeros })
            }
        }
    }
}

const INITIAL_STATES: &str = "parameter 'initial_states'";

/// The dims of a row, from those of the declared initial state, which may leave the batch axis out.
fn declared_dims(row: &[i64], initial: &[i64]) -> Vec<i64> {
    let fits = |row: &[i64]| {
        row.len() == initial.len() && row.iter().zip(initial).all(|(&row, &initial)| row < 0 || row == initial)
    };
    if fits(row) {
        return initial.to_vec();
    }
    // The dims agree without the batch axis. If that holds for several axes, each of them is 1.
    let without = |axis: &usize| {
        let mut rest = row.to_vec();
        rest.remove(*axis);
        fits(&rest)
    };
    let mut dims = initial.to_vec();
    if let Some(axis) = (0..row.len()).filter(|&axis| row[axis] == 1).find(without) {
        dims.insert(axis, 1);
    }
    dims
}

/// A value to be read.
struct Value<'a> {
    name: &'a str,
    from: String,
    data_type: DataType,
}

impl Value<'_> {
    fn error(&self, why: String) -> BindingError {
        BindingError::Initial { name: self.name.to_owned(), from: self.from.clone(), why }
    }

    fn read_bytes(&self, dims: &[i64], bytes: &[u8]) -> Result<Initial, BindingError> {
        let Some(size) = self.data_type.byte_size() else {
            let elements = strings::read(bytes)
                .map_err(|error| self.error(error.to_string()))?
                .ok_or_else(|| self.error("it is not a list of strings, each after its length".to_owned()))?;
            let dims = self.close(dims, elements.len())?;
            return Ok(Initial { dims, content: InitialContent::Strings(elements) });
        };
        if !bytes.len().is_multiple_of(size) {
            let size = format!("it has {} bytes, but an element of {} has {size}", bytes.len(), self.data_type);
            return Err(self.error(size));
        }
        let closed = self.close(dims, bytes.len() / size)?;
        Ok(Initial { dims: closed, content: InitialContent::Bytes(bytes.to_vec()) })
    }

    fn read_list(&self, dims: &[i64], values: &[String]) -> Result<Initial, BindingError> {
        let dims = self.close(dims, values.len())?;
        if self.data_type == DataType::Bytes {
            let elements = values.iter().collect();
            return Ok(Initial { dims, content: InitialContent::Strings(elements) });
        }
        Ok(Initial { dims, content: InitialContent::Bytes(self.elements(values)?) })
    }

    fn read_array(
        &self,
        dims: &[i64],
        bytes: &[u8],
        array: Option<&str>,
        limit: usize,
    ) -> Result<Initial, BindingError> {
        let fits = |shape: &[i64]| {
            let closed = declared_dims(dims, shape);
            if all_agree(dims, &closed) {
                return Ok(closed);
            }
            Err(format!("its shape {} is not that of one sequence, {}", Dims(shape), Dims(dims)))
        };
        let content = read_npz(bytes, array, self.name, self.data_type, fits, limit);
        content.map(|(dims, content)| Initial { dims, content }).map_err(|why| self.error(why))
    }

    /// Numbers that are separated by a comma, spaces or line breaks, with or without the brackets of a list around them.
    fn read_metadata(
        &self,
        dims: &[i64],
        keys: &[String],
        then_zeros: bool,
        metadata: &BTreeMap<String, String>,
    ) -> Result<Initial, BindingError> {
        let mut values = Vec::new();
        for key in keys {
            let Some(text) = metadata.get(key) else {
                let known: Vec<String> = metadata.keys().map(|key| format!("'{key}'")).collect();
                return Err(self.error(format!("the model has no metadata '{key}' (it has {})", names(&known))));
            };
            if has_gap(text) {
                return Err(self.error(format!("metadata '{key}' has a comma without a number before it")));
            }
            let is_between = |letter: char| letter.is_whitespace() || [',', '[', ']'].contains(&letter);
            values.extend(text.split(is_between).filter(|value| !value.is_empty()).map(str::to_owned));
        }
        let wanted = element_count(dims).filter(|_| then_zeros).unwrap_or(0);
        if self.data_type == DataType::Bytes || values.len() >= wanted {
            return self.read_list(dims, &values);
        }
        let given = self.elements(&values)?;
        let mut bytes = self.repeated(&self.element("0")?, wanted)?;
        bytes[..given.len()].copy_from_slice(&given);
        Ok(Initial { dims: dims.to_vec(), content: InitialContent::Bytes(bytes) })
    }

    fn fill(&self, dims: &[i64], value: &str) -> Result<Initial, BindingError> {
        let count = element_count(dims).ok_or_else(|| {
            let dims = Dims(dims);
            self.error(format!("'{value}' does not say how long the open dimension of {dims} is: list the elements"))
        })?;
        let content = match self.data_type {
            DataType::Bytes => InitialContent::Strings(
                Strings::repeated(value.as_bytes(), count).map_err(|error| self.error(error.to_string()))?,
            ),
            _ => InitialContent::Bytes(self.repeated(&self.element(value)?, count)?),
        };
        Ok(Initial { dims: dims.to_vec(), content })
    }

    /// An element `count` times.
    fn repeated(&self, element: &[u8], count: usize) -> Result<Vec<u8>, BindingError> {
        let room = rows::reserve(element.len().saturating_mul(count));
        let mut bytes = room.map_err(|error| self.error(error.to_string()))?;
        (0..count).for_each(|_| bytes.extend_from_slice(element));
        Ok(bytes)
    }

    fn elements(&self, values: &[String]) -> Result<Vec<u8>, BindingError> {
        let elements = values.iter().map(|value| self.element(value)).collect::<Result<Vec<_>, _>>()?;
        Ok(elements.concat())
    }

    fn element(&self, value: &str) -> Result<Vec<u8>, BindingError> {
        element_bytes(self.data_type, value).map_err(|why| self.error(why))
    }

    /// The dims of a row with `count` elements, which decide the one open dimension.
    fn close(&self, dims: &[i64], count: usize) -> Result<Vec<i64>, BindingError> {
        let wrong = |wanted: String| {
            let unit = self.data_type.byte_size().map_or(String::new(), |size| format!(" ({} bytes)", count * size));
            self.error(format!("it has {count} elements{unit}, but {wanted}"))
        };
        let open: Vec<usize> = (0..dims.len()).filter(|&axis| dims[axis] < 0).collect();
        match open.as_slice() {
            [] => match element_count(dims) {
                Some(wanted) if wanted == count => Ok(dims.to_vec()),
                wanted => Err(wrong(format!("a row of {} has {}", Dims(dims), wanted.unwrap_or(usize::MAX)))),
            },
            &[axis] => {
                let mut closed = dims.to_vec();
                closed[axis] = 1;
                let step = element_count(&closed).unwrap_or(0);
                match count.checked_rem(step) {
                    Some(0) => {
                        closed[axis] = (count / step) as i64;
                        Ok(closed)
                    }
                    _ => Err(wrong(format!("a row of {} has a multiple of {step}", Dims(dims)))),
                }
            }
            _ => Err(wrong(format!("more than one dimension of {} is open", Dims(dims)))),
        }
    }
}

/// Whether a comma of a list has nothing in front of it. One after the last element is fine.
fn has_gap(text: &str) -> bool {
    let mut before = ',';
    text.chars().filter(|letter| !letter.is_whitespace()).any(|letter| {
        let after_nothing = matches!(before, ',' | '[');
        before = letter;
        letter == ',' && after_nothing
    })
}

/// How the model for initial states fits the binding. It runs for one row at a time.
#[derive(Clone, Debug)]
pub struct InitialModel {
    /// In the order of the model's inputs.
    pub inputs: Vec<InitialInput>,
    /// In the order of the model's outputs.
    pub outputs: Vec<InitialOutput>,
    /// What a step of it feeds and fetches.
    pub step: StepSpec,
}

/// An input of the model for initial states.
#[derive(Clone, Debug)]
pub struct InitialInput {
    /// The input of requests that it takes: its index in the binding.
    pub input: usize,
    pub request: RequestInput,
}

/// An output of the model for initial states.
#[derive(Clone, Copy, Debug)]
pub struct InitialOutput {
    /// Number of the state.
    pub state: usize,
    /// Whether it has the state's batch axis.
    pub has_batch: bool,
}

impl InitialModel {
    /// Finds the input of requests for each input, and the state for each output.
    pub fn new(binding: &Binding, signature: &Signature) -> Result<Self, BindingError> {
        let inputs = signature.inputs.iter().map(|info| bind_input(binding, info)).collect::<Result<Vec<_>, _>>()?;
        let outputs = signature.outputs.iter().map(|info| bind_output(binding, info)).collect::<Result<Vec<_>, _>>()?;
        let input_specs = inputs.iter().map(|bound| input_spec(&binding.inputs[bound.input]));
        let output_specs = signature.outputs.iter().map(|info| OutputSpec {
            name: info.name.clone(),
            data_type: info.data_type,
            batch_axis: None,
            dims: None,
            is_read: true,
            stays: false,
        });
        let step = StepSpec {
            inputs: input_specs.collect(),
            outputs: output_specs.collect(),
            most_rows: 1,
            graph_rows: Vec::new(),
        };
        Ok(Self { inputs, outputs, step })
    }
}

fn model_error(info: &TensorInfo, why: String) -> BindingError {
    BindingError::InitialModel { name: info.name.clone(), why }
}

fn bind_input(binding: &Binding, info: &TensorInfo) -> Result<InitialInput, BindingError> {
    let found = binding.inputs.iter().enumerate().find(|(_, input)| input.name == info.name);
    let found = found.and_then(|(index, input)| Some((index, input, input.request()?.clone())));
    let Some((index, input, request)) = found.filter(|(_, _, request)| !request.optional) else {
        let names: Vec<_> = binding.request_inputs().map(|(input, _)| input.name.as_str()).collect();
        return Err(model_error(
            info,
            format!("is no input that each request carries (those are {})", names.join(", ")),
        ));
    };
    check_type(format!("the initial_state_model's '{}'", info.name), info.data_type, input.data_type)?;
    let is_context = |axis: usize| request.context.is_some_and(|context| context.axis == axis);
    let fits = |(axis, (&theirs, &ours)): (usize, (&i64, &i64))| match input.batch_axis {
        Some(batch) if batch == axis => theirs < 0 || theirs == 1,
        _ => is_context(axis) || agree(theirs, ours),
    };
    if info.dims.len() == input.dims.len() && info.dims.iter().zip(&input.dims).enumerate().all(fits) {
        return Ok(InitialInput { input: index, request });
    }
    let (theirs, ours) = (describe(info.data_type, &info.dims), describe(input.data_type, &input.dims));
    Err(model_error(info, format!("is {theirs}, but requests carry {ours}, one row of it")))
}

fn bind_output(binding: &Binding, info: &TensorInfo) -> Result<InitialOutput, BindingError> {
    let is_state = |&number: &usize| binding.inputs[binding.states[number].input].name == info.name;
    let Some(number) = (0..binding.states.len()).find(is_state) else {
        let name = |state: &BoundState| binding.inputs[state.input].name.clone();
        let names: Vec<_> = binding.states.iter().map(name).collect();
        return Err(model_error(info, format!("is no state's input (those are {})", names.join(", "))));
    };
    let state = &binding.states[number];
    check_type(format!("the initial_state_model's '{}'", info.name), info.data_type, state.data_type)?;
    let mut without_batch = state.dims.clone();
    if let Some(axis) = state.batch_axis {
        without_batch.remove(axis);
    }
    // A tensor whose rank the model leaves open is checked when the model has run.
    let has_batch = all_agree(&state.dims, &info.dims)
        || info.dims.is_empty() && !state.dims.is_empty() && !without_batch.is_empty();
    if has_batch || all_agree(&without_batch, &info.dims) {
        return Ok(InitialOutput { state: number, has_batch });
    }
    let (theirs, ours) = (describe(info.data_type, &info.dims), describe(state.data_type, &state.dims));
    Err(model_error(info, format!("is {theirs}, but a row of that state is {ours}")))
}

impl Binding {
    /// Makes the model for initial states give the initial value of its states at each START.
    pub fn set_initial_from_model(&mut self, model: &InitialModel) {
        for output in &model.outputs {
            self.states[output.state].initial.content = InitialContent::Model;
        }
    }
}

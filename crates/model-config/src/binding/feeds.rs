//! Collects what feeds each input of the model, and binds those that no request carries: controls, constants, lengths.

use rows::tensor::{DataType, Dims, element_count};

use super::bound::{BoundControl, BoundInput, BoundState, Counter, Flag, RequestInput, Source, row_dims};
use super::elements::element_bytes;
use super::error::BindingError;
use super::requests::lengths_input;
use super::shapes::{batch_of_elements, check_type, find};
use crate::config::{Config, Control, ControlKind, FalseTrue};
use crate::onnx::{Signature, TensorInfo};

/// The model's inputs, required ones first and then those with a default, and what feeds each so far.
pub(super) struct Feeds<'a> {
    infos: Vec<&'a TensorInfo>,
    required: usize,
    fed: Vec<Option<BoundInput>>,
}

impl<'a> Feeds<'a> {
    pub(super) fn new(signature: &'a Signature) -> Self {
        let infos: Vec<_> = signature.inputs.iter().chain(&signature.defaults).collect();
        Self { required: signature.inputs.len(), fed: infos.iter().map(|_| None).collect(), infos }
    }

    pub(super) fn find(&self, name: &str, named_by: &'static str) -> Result<(usize, &'a TensorInfo), BindingError> {
        find(self.infos.iter().copied(), name, named_by, "input")
    }

    /// The name of the batch dimension, from an input that is fed. If Triton puts no batch dimension in front, it is
    /// the name of the first dimension.
    pub(super) fn batch_symbol(&self, config: &Config) -> Option<&'a str> {
        let of_input = |(fed, info): (&Option<BoundInput>, &&'a TensorInfo)| {
            let axis = fed.as_ref()?.batch_axis.or((!config.is_batched()).then_some(0))?;
            Some(info.symbol(axis)).filter(|symbol| !symbol.is_empty())
        };
        self.fed.iter().zip(&self.infos).find_map(of_input)
    }

    /// What feeds an input so far.
    pub(super) fn fed(&self, index: usize) -> Option<&BoundInput> {
        self.fed[index].as_ref()
    }

    /// The inputs that requests carry.
    pub(super) fn of_requests(&self) -> impl Iterator<Item = (&BoundInput, &RequestInput)> {
        self.fed.iter().flatten().filter_map(|input| Some((input, input.request()?)))
    }

    /// Whether an input of requests has an open batch dimension. If Triton puts no batch dimension in front, that is the
    /// first.
    pub(super) fn batch_is_open(&self, config: &Config) -> bool {
        self.fed.iter().zip(&self.infos).any(|(fed, info)| {
            let axis = fed.as_ref().and_then(|input| input.batch_axis.or((!config.is_batched()).then_some(0)));
            axis.and_then(|axis| info.dims.get(axis)).is_some_and(|&dim| dim < 0)
        })
    }

    pub(super) const fn has_default(&self, index: usize) -> bool {
        index >= self.required
    }

    pub(super) fn add(&mut self, index: usize, input: BoundInput) -> Result<(), BindingError> {
        if let Some(known) = &self.fed[index] {
            let (first, second) = (known.source.noun(), input.source.noun());
            return Err(BindingError::FedTwice { name: input.name, first, second });
        }
        self.fed[index] = Some(input);
        Ok(())
    }

    /// The inputs that are fed. Every input without a default must be. The indices of the others move up.
    pub(super) fn into_inputs(
        self,
        states: &mut [BoundState],
        counters: &mut [Counter],
    ) -> Result<Vec<BoundInput>, BindingError> {
        let is_missing = |(index, fed): &(usize, &Option<BoundInput>)| *index < self.required && fed.is_none();
        if let Some((index, _)) = self.fed.iter().enumerate().find(is_missing) {
            return Err(unfed(self.infos[index]));
        }
        let moved: Vec<_> = (0..self.fed.len()).map(|index| self.fed[..index].iter().flatten().count()).collect();
        states.iter_mut().for_each(|state| state.input = moved[state.input]);
        counters.iter_mut().for_each(|counter| counter.move_inputs(&moved));
        let place = |mut input: BoundInput| {
            match &mut input.source {
                Source::Lengths { of } => *of = moved[*of],
                Source::Generated(generated) => generated.move_inputs(&moved),
                _ => {}
            }
            input
        };
        Ok(self.fed.into_iter().flatten().map(place).collect())
    }
}

/// Feeds the inputs that no request carries and that are no states: controls, constants, lengths.
pub(super) fn feed_without_requests(config: &Config, feeds: &mut Feeds) -> Result<(), BindingError> {
    for control in &config.controls {
        // Triton may have controls that the model does not take.
        if let Ok((index, info)) = feeds.find(&control.name, "'control_input'") {
            feeds.add(index, control_input(config, control, info)?)?;
        }
    }
    for (name, values) in &config.constants {
        let (index, info) = feeds.find(name, "'constant_inputs'")?;
        feeds.add(index, constant_input(config, info, values)?)?;
    }
    for padded in &config.ragged.inputs {
        let (of, _) = feeds.find(&padded.input, "'padded_inputs'")?;
        let (index, info) = feeds.find(&padded.lengths, "'padded_inputs'")?;
        feeds.add(index, lengths_input(config, info, of)?)?;
    }
    Ok(())
}

fn unfed(info: &TensorInfo) -> BindingError {
    BindingError::Unfed { name: info.name.clone(), data_type: info.data_type, dims: Dims(&info.dims).to_string() }
}

impl Source {
    const fn noun(&self) -> &'static str {
        match self {
            Self::Request(_) => "'input'",
            Self::Lengths { .. } => "'padded_inputs'",
            Self::State(_) => "'state_pairs' or 'sequence_batching.state'",
            Self::Control(_) => "'control_input'",
            Self::Constant(_) => "'constant_inputs'",
            Self::Generated(_) => "'generated_inputs'",
        }
    }
}

fn control_input(config: &Config, control: &Control, info: &TensorInfo) -> Result<BoundInput, BindingError> {
    let what = format!("control_input '{}'", control.name);
    let flag = |flag: Flag, values: FalseTrue| {
        let element = |value: f64| {
            let name = control.name.clone();
            flag_element(info.data_type, value).map_err(|why| BindingError::Control { name, why })
        };
        let (no, yes) = (element(values.no)?, element(values.yes)?);
        if no == yes || values.no == values.yes {
            let (name, model) = (control.name.clone(), info.data_type);
            return Err(BindingError::EqualControls { name, no: values.no, yes: values.yes, model });
        }
        Ok(BoundControl::Flag { flag, no, yes })
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
    let batch_axis = batch_of_elements(config, info).ok_or_else(|| BindingError::Dims {
        what,
        configured: "[1]".to_owned(),
        model: Dims(&info.dims).to_string(),
        rule: "a control has one element a row: [batch] or [batch, 1]".to_owned(),
    })?;
    Ok(BoundInput::of_elements(info, batch_axis, Source::Control(source)))
}

fn constant_input(config: &Config, info: &TensorInfo, values: &[String]) -> Result<BoundInput, BindingError> {
    let error = |why: String| BindingError::Constant { name: info.name.clone(), value: values.join(", "), why };
    let open: Vec<usize> = (0..info.dims.len()).filter(|&axis| info.dims[axis] < 0).collect();
    let batch_axis = match open.as_slice() {
        [] => None,
        &[axis] if config.is_batched() => Some(axis),
        _ => return Err(error(format!("the model's dims {} are open", Dims(&info.dims)))),
    };
    let wanted = element_count(&row_dims(&info.dims, batch_axis)).unwrap_or(usize::MAX);
    if values.len() != wanted {
        return Err(error(format!("the model wants {wanted} elements, {}", Dims(&info.dims))));
    }
    let mut bytes = Vec::new();
    for value in values {
        bytes.extend(element_bytes(info.data_type, value).map_err(error)?);
    }
    Ok(BoundInput::new(info, batch_axis, Source::Constant(bytes)))
}

/// A flag's value as an element of the type that the model takes, or why the type does not have that value.
fn flag_element(data_type: DataType, value: f64) -> Result<Vec<u8>, String> {
    match data_type {
        // Any number except 0 is true. `element_bytes` would refuse -1.
        DataType::Bool => Ok(vec![u8::from(value != 0.0)]),
        _ => element_bytes(data_type, &value.to_string()),
    }
}

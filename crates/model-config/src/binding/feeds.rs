//! Collects what feeds each input of the model, and binds those that no request carries: controls, constants, lengths.

use rows::tensor::{DataType, Dims, element_count};

use super::bound::{BoundControl, BoundInput, Source, row_dims};
use super::elements::element_bytes;
use super::error::{BindingError, Result, wrong_dims};
use super::requests::lengths_axis;
use super::shapes::{batch_of_elements, check_type, missing};
use crate::config::{Config, Control, ControlKind, StatePair};
use crate::onnx::{Signature, TensorInfo, open_axes};

/// The model's inputs, required ones first and then those with a default that the configuration names, and what feeds each
/// so far.
pub(super) struct Feeds<'a> {
    signature: &'a Signature,
    infos: Vec<&'a TensorInfo>,
    pub fed: Vec<Option<BoundInput>>,
}

impl<'a> Feeds<'a> {
    pub(super) fn new(config: &Config, pairs: &[StatePair], signature: &'a Signature) -> Self {
        // The others are left out from the beginning, so that an index here is the one in the binding.
        let taken = config.taken();
        let is_named = |name: &str| {
            config.inputs.iter().any(|input| input.name == name)
                || pairs.iter().any(|pair| pair.input == name)
                || taken.contains(&name)
        };
        let named = signature.defaults.iter().filter(|info| is_named(&info.name));
        let infos: Vec<_> = signature.inputs.iter().chain(named).collect();
        Self { signature, fed: infos.iter().map(|_| None).collect(), infos }
    }

    pub(super) fn find(&self, name: &str, named_by: &'static str) -> Result<(usize, &'a TensorInfo)> {
        let found = self.infos.iter().copied().enumerate().find(|(_, info)| info.name == name);
        found.ok_or_else(|| missing(named_by, name, "input", self.signature.input_names()))
    }

    /// The inputs that are fed, with the batch axis of each.
    fn batches(&self, config: &Config) -> impl Iterator<Item = (&'a TensorInfo, usize)> {
        // If Triton adds no batch dimension, the first dimension counts as the batch.
        let first = (!config.is_batched()).then_some(0);
        let fed = self.fed.iter().zip(&self.infos);
        fed.filter_map(move |(fed, info)| Some((*info, fed.as_ref()?.batch_axis.or(first)?)))
    }

    /// The name of the batch dimension, from an input that is fed.
    pub(super) fn batch_symbol(&self, config: &Config) -> Option<&'a str> {
        self.batches(config).map(|(info, axis)| info.symbol(axis)).find(|symbol| !symbol.is_empty())
    }

    pub(super) fn batch_is_open(&self, config: &Config) -> bool {
        self.batches(config).any(|(info, axis)| info.dims.get(axis).is_some_and(|&dim| dim < 0))
    }

    pub(super) fn add(&mut self, index: usize, input: BoundInput) -> Result<()> {
        if let Some(known) = &self.fed[index] {
            let (first, second) = (known.source.noun(), input.source.noun());
            return Err(BindingError::FedTwice { name: input.name, first, second });
        }
        self.fed[index] = Some(input);
        Ok(())
    }

    pub(super) fn into_inputs(self) -> Result<Vec<BoundInput>> {
        let unfed = |info: &TensorInfo| {
            let TensorInfo { name, data_type, dims, .. } = info.clone();
            BindingError::Unfed { name, data_type, dims: Dims(&dims).to_string() }
        };
        self.fed.into_iter().zip(self.infos).map(|(fed, info)| fed.ok_or_else(|| unfed(info))).collect()
    }
}

pub(super) fn feed_without_requests(config: &Config, feeds: &mut Feeds) -> Result<()> {
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
        let batch_axis = lengths_axis(config, info, "padded_inputs", "input")?;
        feeds.add(index, BoundInput::of_elements(info, batch_axis, Source::Lengths { of }))?;
    }
    Ok(())
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

fn control_input(config: &Config, control: &Control, info: &TensorInfo) -> Result<BoundInput> {
    let what = format!("control_input '{}'", control.name);
    let element = |value: f64| {
        let read = match info.data_type {
            // Any number except 0 is true. `element_bytes` would refuse -1.
            DataType::Bool => Ok(vec![u8::from(value != 0.0)]),
            data_type => element_bytes(data_type, &value.to_string()),
        };
        read.map_err(|why| BindingError::Control { name: control.name.clone(), why })
    };
    let source = match control.kind {
        ControlKind::Flag(flag, values) => {
            let (no, yes) = (element(values.no)?, element(values.yes)?);
            // Both are compared: 2048 and 2049 are one number of TYPE_FP16, and 0 and -0 have different bytes.
            if no == yes || values.no == values.yes {
                let (name, model) = (control.name.clone(), info.data_type);
                return Err(BindingError::EqualControls { name, no: values.no, yes: values.yes, model });
            }
            BoundControl::Flag { flag, no, yes }
        }
        ControlKind::CorrelationId(data_type) => {
            check_type(what.clone(), data_type, info.data_type)?;
            BoundControl::CorrelationId(data_type)
        }
    };
    let rule = "a control has one element a row: [batch] or [batch, 1]";
    let batch_axis = batch_of_elements(config, info).ok_or_else(|| wrong_dims(what, &[1], &info.dims, rule))?;
    Ok(BoundInput::of_elements(info, batch_axis, Source::Control(source)))
}

fn constant_input(config: &Config, info: &TensorInfo, values: &[String]) -> Result<BoundInput> {
    let error = |why: String| BindingError::Constant { name: info.name.clone(), value: values.join(", "), why };
    let batch_axis = match open_axes(&info.dims, None).as_slice() {
        [] => None,
        // Every row gets the same values.
        &[axis] if config.is_batched() => Some(axis),
        _ => return Err(error(format!("the model's dims {} are open", Dims(&info.dims)))),
    };
    let wanted = element_count(&row_dims(&info.dims, batch_axis)).unwrap_or(usize::MAX);
    if values.len() != wanted {
        return Err(error(format!("the model wants {wanted} elements, {}", Dims(&info.dims))));
    }
    let elements = values.iter().map(|value| element_bytes(info.data_type, value)).collect::<Result<Vec<_>, _>>();
    Ok(BoundInput::new(info, batch_axis, Source::Constant(elements.map_err(error)?.concat())))
}

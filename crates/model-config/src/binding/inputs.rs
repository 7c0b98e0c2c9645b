//! What feeds each input of the model: requests, with contexts in front and padding behind, controls, constants and
//! lengths. States and generated inputs are added to the same [`Feeds`].

use rows::tensor::{DataType, Dims, WindowLayout, element_count};

use super::bound::{BoundContext, BoundControl, BoundInput, RequestInput, Source, row_dims};
use super::elements::element_bytes;
use super::error::{BindingError, Result, bad, wrong_dims};
use super::fit::{INPUT, Listed, ShapeForm, batch_of_elements, check_type, describe, is_batch, lengths_axis, missing};
use super::steps::{WrittenWindow, opened};
use crate::config::{
    Config, Context, Control, ControlKind, FirstRequest, PaddedInput, StatePair, TensorConfig, context_line,
};
use crate::onnx::{Signature, TensorInfo, open_axes};

/// The model's inputs, required ones first and then those with a default that the configuration names, and what feeds
/// each so far.
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

/// Binds an input of requests; `has_default` says that the model has a value for it.
pub(super) fn request_input(listed: Listed, has_default: bool) -> Result<BoundInput> {
    let Listed { config, tensor, info, .. } = listed;
    check_type(format!("input '{}'", tensor.name), tensor.data_type, info.data_type)?;
    let is_held = config.held_inputs.contains(&tensor.name);
    if tensor.optional && !has_default && !is_held && config.state_api.is_none() {
        return Err(BindingError::Optional { name: tensor.name.clone() });
    }
    let window = WrittenWindow::find(listed)?;
    let of_window = window.as_ref().map(|window| window.apply(config, info));
    let listed = of_window.as_ref().map_or(listed, |(config, info)| Listed { config, info, ..listed });
    let Listed { config, info, .. } = listed;
    let context = WrittenContext::find(listed)?;
    if context.is_some() && is_held {
        let why = "the input has an input_context, which would prepend the end of the kept elements to those elements: \
                   take the input out of one of the two parameters";
        return Err(bad("held_inputs", &tensor.name, why));
    }
    // The model's dims without the context, as clients send them.
    let mut dims = info.dims.clone();
    if let Some(context) = &context {
        context.take_off(&mut dims);
    }
    let sent = window.as_ref().map_or_else(|| dims.clone(), |window| opened(&dims, window.axis));
    let (batch_axis, form) = listed.match_dims(INPUT, &sent)?;
    if context.is_some() && form == ShapeForm::Unbatched && config.max_batch_size > 1 {
        let why = "the input has no batch dimension, so sequences that share a batch cannot each have a context: set \
                   max_batch_size to 1";
        return Err(bad("input_context", &tensor.name, why));
    }
    // Triton checks requests against a dimension that only the configuration fixes.
    open_axes(&dims, None).into_iter().for_each(|axis| dims[axis] = listed.configured(axis).unwrap_or(-1));
    let padded = config.ragged.inputs.iter().find(|padded| padded.input == tensor.name);
    let ragged_axis = padded.map(|padded| ragged_axis(padded, &dims, batch_axis)).transpose()?;
    if let Some(context) = &context {
        context.check_padding(ragged_axis)?;
        context.put_back(&mut dims);
    }
    let context = context.map(|context| context.bind(&dims, batch_axis)).transpose()?;
    let window = window.map(|window| window.bind(listed, &dims, (batch_axis, form), is_held)).transpose()?;
    let source = Source::Request(RequestInput {
        // Numbered when the slot is laid out, after all inputs are bound.
        position: 0,
        form,
        // With the State API, Triton lets a request leave every input out, and this backend checks what is missing.
        optional: tensor.optional && has_default,
        is_held,
        context,
        window,
        ragged_axis,
        is_padded: ragged_axis.is_some(),
        steps_multiple: None,
    });
    Ok(BoundInput { dims, ..BoundInput::new(info, batch_axis, source) })
}

/// The axis along which rows may have different lengths: the one that is written, else the only open one.
fn ragged_axis(padded: &PaddedInput, sent: &[i64], batch_axis: Option<usize>) -> Result<usize> {
    let error = |why: String| bad("padded_inputs", &padded.input, why);
    let dims = Dims(sent);
    match (padded.axis, open_axes(sent, batch_axis).as_slice()) {
        (Some(axis), open) if open.contains(&axis) => Ok(axis),
        (Some(axis), _) => Err(error(format!("axis {axis} of {dims} is not open"))),
        (None, &[axis]) => Ok(axis),
        (None, []) => Err(error(format!("none of {dims} is open beside the batch"))),
        (None, _) => {
            Err(error(format!("more than one dimension of {dims} is open: write the axis after it, 'LENGTHS@AXIS'")))
        }
    }
}

/// An entry of `input_context` whose axis is found.
struct WrittenContext<'a> {
    listed: Listed<'a>,
    written: &'a Context,
    axis: usize,
}

impl<'a> WrittenContext<'a> {
    fn find(listed: Listed<'a>) -> Result<Option<Self>> {
        let Some(written) = listed.config.context_of(&listed.tensor.name) else { return Ok(None) };
        Ok(Some(Self { listed, written, axis: Search { listed, written }.axis()? }))
    }

    /// Takes the context off the model's dims.
    fn take_off(&self, dims: &mut [i64]) {
        take_off(dims, self.axis, self.written);
    }

    /// Undoes [`WrittenContext::take_off`] in dims that the configuration may have fixed meanwhile.
    fn put_back(&self, dims: &mut [i64]) {
        if self.written.first == FirstRequest::Whole {
            dims[self.axis] = self.written.window(self.listed.info.dims[self.axis]);
        } else if dims[self.axis] >= 0 {
            dims[self.axis] += self.written.length as i64;
        }
    }

    /// Refuses padding along another axis: only one axis of a row can have more than the request.
    fn check_padding(&self, ragged_axis: Option<usize>) -> Result<()> {
        let Some(axis) = ragged_axis.filter(|&axis| axis != self.axis) else { return Ok(()) };
        let why =
            format!("it is axis {axis}, and its input_context is along axis {}: they must be the same", self.axis);
        Err(bad("padded_inputs", &self.written.input, why))
    }

    /// The context of an input with these dims in the model.
    fn bind(&self, model: &[i64], batch_axis: Option<usize>) -> Result<BoundContext> {
        let (tensor, axis, length, first) = (self.listed.tensor, self.axis, self.written.length, self.written.first);
        let mut row = model.to_vec();
        row[axis] = length as i64;
        let why = if tensor.optional {
            "the input is optional, but a context needs an input that each request carries".to_owned()
        } else if tensor.data_type == DataType::Bytes {
            format!("the input is {}, but a context needs an input of numbers", describe(tensor.data_type, model))
        } else if let Some(open) = open_axes(&row, batch_axis).first() {
            format!(
                "a context along axis {axis} needs a length for each other dimension except the batch, but axis {open} of \
                 {} is open: write its length in the dims of input '{}'",
                Dims(model),
                tensor.name
            )
        } else if let Some(layout) = WindowLayout::new(tensor.data_type, &row, batch_axis, axis) {
            let bytes = layout.window_bytes(length) + usize::from(first != FirstRequest::Zeros);
            // The entry is numbered when the slot is laid out, after all inputs are bound.
            return Ok(BoundContext { axis, length, first, bytes, slot_entry: 0 });
        } else {
            format!("it has more bytes than an address can count, with {} in the model", Dims(model))
        };
        Err(self.written.error(why))
    }
}

impl Context {
    fn error(&self, why: String) -> BindingError {
        bad("input_context", self.to_string(), why)
    }
}

/// Takes a context off the model's dims along `axis`; false if it cannot stand there.
fn take_off(dims: &mut [i64], axis: usize, context: &Context) -> bool {
    let sent = context.sent(dims[axis]);
    dims[axis] = sent.unwrap_or(0);
    sent.is_some()
}

/// The search for a context's axis: the one that is written, else the one along which the configuration's dims differ
/// from the model's by the context's length, else the only open one.
struct Search<'a> {
    listed: Listed<'a>,
    written: &'a Context,
}

impl Search<'_> {
    fn axis(&self) -> Result<usize> {
        let Listed { config, info, .. } = self.listed;
        if let Some(axis) = self.written.axis {
            return self.check(axis);
        }
        let (fixed, open): (Vec<usize>, Vec<usize>) =
            (0..info.dims.len()).filter(|&axis| self.fits(axis)).partition(|&axis| info.dims[axis] >= 0);
        let model = Dims(&info.dims);
        match (fixed.as_slice(), open.as_slice()) {
            (&[], &[axis]) if !config.is_batched() => self.check_only_open(axis),
            (&[axis], _) | (&[], &[axis]) => Ok(axis),
            (&[], &[]) => Err(self.does_not_make(0..info.dims.len())),
            (fixed, open) => {
                let lines = fixed.iter().chain(open).map(|&axis| self.line(axis)).collect::<Vec<_>>().join(" or ");
                Err(self.written.error(format!("it fits more than one axis of the model's {model}: write {lines}")))
            }
        }
    }

    /// Checks the only open axis of a model without a batch. It may be a batch that is not called so, and the context
    /// may belong to an axis of fixed length.
    fn check_only_open(&self, axis: usize) -> Result<usize> {
        let dims = &self.listed.info.dims;
        let can_be = |&other: &usize| self.written.sent(dims[other]).is_some();
        let others: Vec<usize> = (0..dims.len()).filter(|&other| other != axis).filter(can_be).collect();
        if others.is_empty() {
            return Ok(axis);
        }
        let with_dims = |&axis: &usize| {
            let mut sent = dims.clone();
            take_off(&mut sent, axis, self.written);
            // A context needs the lengths of the other dimensions.
            open_axes(&sent, Some(axis)).into_iter().for_each(|open| sent[open] = 1);
            format!("{} with dims {} of the input", self.line(axis), Dims(&sent))
        };
        let with_dims = others.iter().map(with_dims).collect::<Vec<_>>().join(", or ");
        let (length, model, line) = (self.written.length, Dims(dims), self.line(axis));
        Err(self.written.error(format!(
            "{length} elements can stand along more than one axis of the model's {model}: write {line}, or {with_dims}"
        )))
    }

    /// The line that gives the context this axis.
    fn line(&self, axis: usize) -> String {
        context_line(&self.listed.config.contexts, &self.written.input, axis)
    }

    fn check(&self, axis: usize) -> Result<usize> {
        let dims = &self.listed.info.dims;
        let model = Dims(dims);
        if axis >= dims.len() {
            Err(self.written.error(format!("the model's dims {model} have no axis {axis}")))
        } else if self.batch_axis(axis) == Some(Some(axis)) || self.is_batch(axis) {
            Err(self.written.error(format!("axis {axis} of the model's {model} is the batch: write another")))
        } else if !self.fits(axis) {
            Err(self.does_not_make(axis..=axis))
        } else {
            Ok(axis)
        }
    }

    fn is_batch(&self, axis: usize) -> bool {
        is_batch(&self.listed.info.symbols[axis], self.listed.batch_symbol)
    }

    /// The batch axis of the input if the context is kept along `axis`; `None` if the dims do not fit then.
    fn batch_axis(&self, axis: usize) -> Option<Option<usize>> {
        let mut sent = self.listed.info.dims.clone();
        // The first request and later ones have different lengths.
        let allows_both_lengths = self.written.first != FirstRequest::Whole || self.listed.configured(axis) == Some(-1);
        if !take_off(&mut sent, axis, self.written) || !allows_both_lengths {
            return None;
        }
        self.listed.match_dims(INPUT, &sent).ok().map(|(batch, _)| batch)
    }

    fn fits(&self, axis: usize) -> bool {
        self.batch_axis(axis).is_some_and(|batch| batch != Some(axis))
    }

    /// Says that the configuration's dims do not fit a context along any of these axes, and which dims would.
    fn does_not_make(&self, axes: impl Iterator<Item = usize>) -> BindingError {
        let TensorConfig { name, data_type, dims, .. } = self.listed.tensor;
        let (written, model, length) = (Dims(dims), Dims(&self.listed.info.dims), self.written.length);
        let wrong = match self.written.first {
            FirstRequest::Whole => format!(
                "with ':whole', the first request carries {length} elements more than later ones, and dims {written} of \
                 the configuration do not allow both for the model's {model}"
            ),
            _ => format!(
                "with {length} elements in front, dims {written} of the configuration do not make the model's {model}"
            ),
        };
        let entries: Vec<String> = axes
            .filter(|&axis| !self.is_batch(axis))
            .filter_map(|axis| self.dims_to_write(axis))
            .map(|dims| format!("{{ name: '{name}' data_type: {data_type} dims: {} }}", Dims(&dims)))
            .collect();
        self.written.error(if entries.is_empty() {
            let wanted = self.written.wanted();
            format!("{wrong}: the dimension that the context stands along must be {wanted}")
        } else {
            format!("{wrong}: write input {}", entries.join(" or "))
        })
    }

    /// The dims to write for a context along `axis`; `None` if there are none.
    fn dims_to_write(&self, axis: usize) -> Option<Vec<i64>> {
        let mut whole = self.listed.info.dims.clone();
        take_off(&mut whole, axis, self.written);
        let mut behind = whole.clone();
        behind.remove(0);
        let written = |dims: Vec<i64>| {
            let tensor = TensorConfig { dims, ..self.listed.tensor.clone() };
            let search = Search { listed: Listed { tensor: &tensor, ..self.listed }, ..*self };
            search.fits(axis).then_some(tensor.dims)
        };
        // Triton's own form, which leaves the batch out, comes first.
        written(behind).or_else(|| written(whole))
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

//! Contexts, and elements that windows leave over: the parts of an input that a sequence keeps from one request to the next.
//! Finds the axis of a context, and the dims that it leaves for requests.

use rows::tensor::{DataType, Dims, WindowLayout};

use super::error::{BindingError, Result, bad};
use super::shapes::{INPUT, Listed, describe, is_batch};
use crate::config::{Context, FirstRequest, TensorConfig, context_line};
use crate::onnx::open_axes;

/// The end of a sequence's last request, kept for the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoundContext {
    pub axis: usize,
    /// Steps along it.
    pub length: usize,
    pub first: FirstRequest,
    /// Bytes that are kept: the steps, and one more byte if an absent context differs from zeros. That byte says whether the
    /// context is there.
    pub bytes: usize,
    /// Its number in the slot (`Binding::slot`).
    pub slot_entry: usize,
}

impl BoundContext {
    /// Whether a sequence without a context differs from one whose context is zeros.
    pub fn can_be_absent(&self) -> bool {
        self.first != FirstRequest::Zeros
    }

    /// The fewest steps that a request must carry, and the exact number, if it is known. `of_model`: the model's dimension.
    /// Decoding has checked what is the same for all requests.
    pub fn lengths(&self, of_model: i64, is_first: bool) -> (usize, Option<usize>) {
        match (self.first, is_first) {
            (FirstRequest::Zeros, _) | (FirstRequest::Repeat, false) => (0, None),
            // There must be an element to repeat.
            (FirstRequest::Repeat, true) => (1, None),
            (FirstRequest::Whole, is_first) => {
                let in_front = self.in_front(is_first);
                (self.length - in_front, usize::try_from(of_model).ok().map(|dim| dim - in_front))
            }
        }
    }

    pub fn in_front(&self, is_first: bool) -> usize {
        if is_first && self.first == FirstRequest::Whole { 0 } else { self.length }
    }

    /// The steps in the kept bytes; `None` if they are absent, as at the start of a sequence.
    pub fn steps<'a>(&self, kept: &'a [u8]) -> Option<&'a [u8]> {
        if !self.can_be_absent() {
            return Some(kept);
        }
        kept.split_last().and_then(|(&is_there, steps)| (is_there != 0).then_some(steps))
    }

    /// Marks in the kept bytes that the steps are there.
    pub fn mark(&self, kept: &mut [u8]) {
        if let Some(is_there) = kept.last_mut().filter(|_| self.can_be_absent()) {
            *is_there = 1;
        }
    }
}

/// The windows of an input that requests bring in any length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoundWindow {
    pub axis: usize,
    /// New elements of a window along it.
    pub length: usize,
    pub element_bytes: usize,
    /// Whether zeros fill up the last window at END.
    pub pads: bool,
}

impl BoundWindow {
    /// The number of elements that a window takes from requests. `is_first`: no window of the sequence has left a context.
    pub fn taken(&self, context: Option<BoundContext>, is_first: bool) -> usize {
        // With ':whole', the first window also takes the elements in the place where a later window has its context.
        self.length + context.map_or(0, |context| context.length - context.in_front(is_first))
    }
}

/// An entry of `input_context` whose axis is found.
pub(super) struct WrittenContext<'a> {
    listed: Listed<'a>,
    written: &'a Context,
    axis: usize,
}

impl<'a> WrittenContext<'a> {
    pub fn find(listed: Listed<'a>) -> Result<Option<Self>> {
        let Some(written) = listed.config.context_of(&listed.tensor.name) else { return Ok(None) };
        Ok(Some(Self { listed, written, axis: Search { listed, written }.axis()? }))
    }

    /// Takes the context off the model's dims.
    pub fn take_off(&self, dims: &mut [i64]) {
        take_off(dims, self.axis, self.written);
    }

    /// Undoes [`WrittenContext::take_off`] in dims that the configuration may have fixed meanwhile.
    pub fn put_back(&self, dims: &mut [i64]) {
        if self.written.first == FirstRequest::Whole {
            dims[self.axis] = self.written.window(self.listed.info.dims[self.axis]);
        } else if dims[self.axis] >= 0 {
            dims[self.axis] += self.written.length as i64;
        }
    }

    /// Refuses padding along another axis: only one axis of a row can have more than the request.
    pub fn check_padding(&self, ragged_axis: Option<usize>) -> Result<()> {
        let Some(axis) = ragged_axis.filter(|&axis| axis != self.axis) else { return Ok(()) };
        let why =
            format!("it is axis {axis}, and its input_context is along axis {}: they must be the same", self.axis);
        Err(bad("padded_inputs", &self.written.input, why))
    }

    /// The context of an input with these dims in the model.
    pub fn bind(&self, model: &[i64], batch_axis: Option<usize>) -> Result<BoundContext> {
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

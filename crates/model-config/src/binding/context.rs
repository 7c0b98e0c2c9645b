//! Contexts: along which axis they are kept, and which dims they leave for requests.

use rows::tensor::{DataType, Dims, WindowLayout};

use super::chunks::BoundContext;
use super::error::{BindingError, bad};
use super::shapes::{INPUT, describe, is_batch, match_dims};
use crate::config::{Config, Context, FirstRequest, TensorConfig, context_line};
use crate::onnx::TensorInfo;

/// An entry of `input_context` whose axis is found.
pub(super) struct WrittenContext<'a> {
    written: &'a Context,
    axis: usize,
    /// The model's window there; -1 is open.
    window: i64,
}

impl<'a> WrittenContext<'a> {
    /// The context of an input, if it has one.
    pub fn find(
        config: &'a Config,
        tensor: &TensorConfig,
        info: &TensorInfo,
        batch_symbol: Option<&str>,
    ) -> Result<Option<Self>, BindingError> {
        let written = config.contexts.iter().find(|context| context.input == tensor.name);
        let Some(written) = written else { return Ok(None) };
        let axis = Search { config, tensor, info, batch_symbol, written }.axis()?;
        Ok(Some(Self { written, axis, window: written.window(info.dims[axis]) }))
    }

    /// Takes the context off the model's dims.
    pub fn take_off(&self, dims: &mut [i64]) {
        take_off(dims, self.axis, self.written);
    }

    /// Undoes [`WrittenContext::take_off`].
    pub fn put_back(&self, dims: &mut [i64]) {
        if self.written.first == FirstRequest::Whole {
            dims[self.axis] = self.window;
        } else if dims[self.axis] >= 0 {
            dims[self.axis] += self.written.length as i64;
        }
    }

    /// Refuses padding along another axis: only one axis of a row can have more than the request.
    pub fn check_padding(&self, ragged_axis: Option<usize>) -> Result<(), BindingError> {
        let Some(axis) = ragged_axis.filter(|&axis| axis != self.axis) else { return Ok(()) };
        let why =
            format!("it is axis {axis}, and its input_context is along axis {}: they must be the same", self.axis);
        Err(bad("padded_inputs", &self.written.input, why))
    }

    /// The context of an input with these dims in the model.
    pub fn bind(
        &self,
        tensor: &TensorConfig,
        model: &[i64],
        batch_axis: Option<usize>,
    ) -> Result<BoundContext, BindingError> {
        let (axis, length) = (self.axis, self.written.length);
        let mut row = model.to_vec();
        row[axis] = length as i64;
        let bytes =
            WindowLayout::new(tensor.data_type, &row, batch_axis, axis).map(|layout| layout.window_bytes(length));
        match bytes {
            Some(bytes) if !tensor.optional && tensor.data_type != DataType::Bytes => {
                Ok(BoundContext::new(axis, length, self.written.first, bytes))
            }
            _ => Err(self.written.error(self.cannot_be_kept(tensor, model, batch_axis))),
        }
    }

    /// Why no slot can hold this context, and what to write where something can be done.
    fn cannot_be_kept(&self, tensor: &TensorConfig, model: &[i64], batch_axis: Option<usize>) -> String {
        let is_open = |&axis: &usize| model[axis] < 0 && axis != self.axis && Some(axis) != batch_axis;
        if tensor.optional {
            "the input is optional, but a context needs an input that each request carries".to_owned()
        } else if tensor.data_type == DataType::Bytes {
            format!("the input is {}, but a context needs an input of numbers", describe(tensor.data_type, model))
        } else if let Some(open) = (0..model.len()).find(is_open) {
            format!(
                "a context along axis {} needs a length for each other dimension except the batch, but axis {open} of \
                 {} is open: write its length in the dims of input '{}'",
                self.axis,
                Dims(model),
                tensor.name
            )
        } else {
            format!("it has more bytes than an address can count, with {} in the model", Dims(model))
        }
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
    config: &'a Config,
    tensor: &'a TensorConfig,
    info: &'a TensorInfo,
    batch_symbol: Option<&'a str>,
    written: &'a Context,
}

impl Search<'_> {
    fn axis(&self) -> Result<usize, BindingError> {
        if let Some(axis) = self.written.axis {
            return self.check(axis);
        }
        let (fixed, open): (Vec<usize>, Vec<usize>) =
            (0..self.info.dims.len()).filter(|&axis| self.fits(axis)).partition(|&axis| self.info.dims[axis] >= 0);
        let model = Dims(&self.info.dims);
        match (fixed.as_slice(), open.as_slice()) {
            (&[], &[axis]) if !self.config.is_batched() => self.check_only_open(axis),
            (&[axis], _) | (&[], &[axis]) => Ok(axis),
            (&[], &[]) => Err(self.written.error(self.does_not_make(&(0..self.info.dims.len()).collect::<Vec<_>>()))),
            (fixed, open) => {
                let line = |&axis: &usize| context_line(&self.config.contexts, &self.written.input, axis);
                let lines: Vec<_> = fixed.iter().chain(open).map(line).collect();
                let lines = lines.join(" or ");
                Err(self.written.error(format!("it fits more than one axis of the model's {model}: write {lines}")))
            }
        }
    }

    /// Checks the only open axis of a model without a batch. It may be a batch that is not called so, and the context
    /// may belong to an axis of fixed length.
    fn check_only_open(&self, axis: usize) -> Result<usize, BindingError> {
        let dims = &self.info.dims;
        let can_be = |&other: &usize| self.written.sent(dims[other]).is_some();
        let others: Vec<usize> = (0..dims.len()).filter(|&other| other != axis).filter(can_be).collect();
        if others.is_empty() {
            return Ok(axis);
        }
        let line = |axis| context_line(&self.config.contexts, &self.written.input, axis);
        let with_dims = |&axis: &usize| {
            let mut sent = dims.clone();
            take_off(&mut sent, axis, self.written);
            // A context needs the lengths of the other dimensions.
            sent.iter_mut()
                .enumerate()
                .filter(|(other, dim)| *other != axis && **dim < 0)
                .for_each(|(_, dim)| *dim = 1);
            format!("{} with dims {} of the input", line(axis), Dims(&sent))
        };
        let with_dims: Vec<String> = others.iter().map(with_dims).collect();
        Err(self.written.error(format!(
            "{} elements can stand along more than one axis of the model's {}: write {}, or {}",
            self.written.length,
            Dims(dims),
            line(axis),
            with_dims.join(", or ")
        )))
    }

    /// Checks an axis that is written.
    fn check(&self, axis: usize) -> Result<usize, BindingError> {
        let model = Dims(&self.info.dims);
        let is_batch =
            |axis| self.batch_axis(axis) == Some(Some(axis)) || is_batch(&self.info.symbols[axis], self.batch_symbol);
        if axis >= self.info.dims.len() {
            Err(self.written.error(format!("the model's dims {model} have no axis {axis}")))
        } else if is_batch(axis) {
            Err(self.written.error(format!("axis {axis} of the model's {model} is the batch: write another")))
        } else if !self.fits(axis) {
            Err(self.written.error(self.does_not_make(&[axis])))
        } else {
            Ok(axis)
        }
    }

    /// The batch axis of the input if the context is kept along `axis`; `None` if the dims do not fit then.
    fn batch_axis(&self, axis: usize) -> Option<Option<usize>> {
        let mut sent = self.info.dims.clone();
        // The first request and later ones have different lengths.
        let allows_both_lengths = self.written.first != FirstRequest::Whole || self.configured(axis) == Some(-1);
        if !take_off(&mut sent, axis, self.written) || !allows_both_lengths {
            return None;
        }
        let (batch, _) =
            match_dims(self.config, INPUT, self.tensor, &sent, &self.info.symbols, self.batch_symbol).ok()?;
        Some(batch)
    }

    /// The configuration's dimension for an axis of the model; dims that leave the batch out leave out the first one.
    fn configured(&self, axis: usize) -> Option<i64> {
        let left_out = self.info.dims.len().checked_sub(self.tensor.dims.len())?;
        self.tensor.dims.get(axis.checked_sub(left_out)?).copied()
    }

    fn fits(&self, axis: usize) -> bool {
        self.batch_axis(axis).is_some_and(|batch| batch != Some(axis))
    }

    /// Says that the configuration's dims do not fit a context along any of these axes, and which dims would.
    fn does_not_make(&self, axes: &[usize]) -> String {
        let TensorConfig { name, data_type, dims, .. } = self.tensor;
        let (written, model, length) = (Dims(dims), Dims(&self.info.dims), self.written.length);
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
            .iter()
            .filter(|&&axis| !is_batch(&self.info.symbols[axis], self.batch_symbol))
            .filter_map(|&axis| self.dims_to_write(axis))
            .map(|dims| format!("{{ name: '{name}' data_type: {data_type} dims: {} }}", Dims(&dims)))
            .collect();
        if entries.is_empty() {
            let wanted = self.written.wanted();
            return format!("{wrong}: the dimension that the context stands along must be {wanted}");
        }
        format!("{wrong}: write input {}", entries.join(" or "))
    }

    /// The dims to write for a context along `axis`; `None` if there are none.
    fn dims_to_write(&self, axis: usize) -> Option<Vec<i64>> {
        let mut whole = self.info.dims.clone();
        take_off(&mut whole, axis, self.written);
        let mut behind = whole.clone();
        behind.remove(0);
        let written = |dims: Vec<i64>| {
            let tensor = TensorConfig { dims, ..self.tensor.clone() };
            let search = Search { tensor: &tensor, ..*self };
            search.fits(axis).then_some(tensor.dims)
        };
        // Triton's own form, which leaves the batch out, comes first.
        written(behind).or_else(|| written(whole))
    }
}

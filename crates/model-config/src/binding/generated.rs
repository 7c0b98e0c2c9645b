//! Inputs that this backend fills with counters, lengths and masks: what they count, and along which axis they have a
//! value for each element.

use rows::tensor::DataType;
use stateful_convert::is_batch_name;

use super::bound::{
    BoundInput, BoundState, Counter, Generated, GeneratedValue, GrowingAxis, InputAxis, NewLength, RequestInput,
    Source, StatePlace,
};
use super::elements::element_bytes;
use super::error::{BindingError, bad, names};
use super::feeds::Feeds;
use super::shapes::{describe, is_batch};
use crate::config::{Config, GENERATED_INPUTS, GeneratedInput, GeneratedKind, NamedAxis, NamedCounter, NewElements};
use crate::onnx::TensorInfo;

/// Feeds the generated inputs. Returns what has to be counted for them.
pub(super) fn feed_generated(
    config: &Config,
    feeds: &mut Feeds,
    states: &[BoundState],
    batch_symbol: Option<&str>,
) -> Result<Vec<Counter>, BindingError> {
    let mut counters = Vec::new();
    for generated in &config.generated {
        let (index, info) = feeds.find(&generated.input, "'generated_inputs'")?;
        let binder = Binder { config, feeds, states, batch_symbol, generated, info };
        let input = binder.bind(&mut counters)?;
        feeds.add(index, input)?;
    }
    Ok(counters)
}

struct Binder<'a> {
    config: &'a Config,
    feeds: &'a Feeds<'a>,
    states: &'a [BoundState],
    batch_symbol: Option<&'a str>,
    generated: &'a GeneratedInput,
    /// The input to be filled.
    info: &'a TensorInfo,
}

/// How many values a row of the input has.
enum ValuesPerRow {
    One,
    /// As many as the elements of another tensor; `None` if that varies.
    Of(Option<i64>),
}

impl Binder<'_> {
    fn bind(&self, counters: &mut Vec<Counter>) -> Result<BoundInput, BindingError> {
        let (value, values) = match &self.generated.kind {
            GeneratedKind::Count(count) => {
                (GeneratedValue::Count { counter: numbered(counters, self.counter(count)?) }, ValuesPerRow::One)
            }
            GeneratedKind::Positions(of) => {
                let (of, length) = self.whole_input_axis(of)?;
                let counter = numbered(counters, Counter::Elements(of));
                (GeneratedValue::Positions { counter, of }, ValuesPerRow::Of(length))
            }
            GeneratedKind::Length(state) => (GeneratedValue::Length(self.growing_axis(state)?), ValuesPerRow::One),
            GeneratedKind::Mask { state, new } => {
                let state = self.growing_axis(state)?;
                let new = match new {
                    NewElements::Number(number) => NewLength::Fixed(*number as usize),
                    NewElements::Of(input) => NewLength::Of(self.whole_input_axis(input)?.0),
                };
                (GeneratedValue::Mask { state, new }, ValuesPerRow::Of(None))
            }
            GeneratedKind::Last { count, length } => {
                let fixed = self.info.dims.iter().copied().rfind(|&dim| dim > 1);
                let length = length.map(i64::from).or(fixed).ok_or_else(|| self.length_is_open())?;
                let counter = numbered(counters, self.counter(count)?);
                (GeneratedValue::Last { counter, length: length as usize }, ValuesPerRow::Of(Some(length)))
            }
        };
        let is_mask = matches!(value, GeneratedValue::Mask { .. } | GeneratedValue::Last { .. });
        if self.info.data_type == DataType::Bytes || (self.info.data_type == DataType::Bool && !is_mask) {
            let kinds = if is_mask { "a mask has numbers or TYPE_BOOL" } else { "its values are numbers" };
            return Err(self.error(format!("the input is {}, and {kinds}", self.described())));
        }
        let (batch_axis, axis) = self.axes(&values)?;
        let is_open = axis.is_some_and(|axis| self.info.dims[axis] < 0);
        if is_open && matches!(self.generated.kind, GeneratedKind::Last { length: None, .. }) {
            return Err(self.length_is_open());
        }
        let GeneratedInput { factor, addend, written, .. } = self.generated.clone();
        let one = element_bytes(self.info.data_type, "1").map_err(|why| self.error(why))?;
        let mut input = BoundInput::new(
            self.info,
            batch_axis,
            Source::Generated(Generated { value, factor, addend, axis, one, written }),
        );
        for (at, dim) in input.dims.iter_mut().enumerate() {
            if *dim < 0 && Some(at) != batch_axis && Some(at) != axis {
                *dim = 1;
            }
        }
        Ok(input)
    }

    /// The batch axis of the input to be filled, and the axis along which a row has several values.
    fn axes(&self, values: &ValuesPerRow) -> Result<(Option<usize>, Option<usize>), BindingError> {
        let (dims, symbols) = (&self.info.dims, &self.info.symbols);
        let open: Vec<usize> = (0..dims.len()).filter(|&axis| dims[axis] < 0).collect();
        let has_one_value = matches!(values, ValuesPerRow::One | ValuesPerRow::Of(Some(1)));
        let length_is_behind =
            |axis: usize| matches!(*values, ValuesPerRow::Of(Some(length)) if dims[axis + 1..].contains(&length));
        let named = open.iter().copied().find(|&axis| is_batch(&symbols[axis], self.batch_symbol));
        // Names such as `n` are usual for the batch, but a number of elements can have them, too.
        let named = named.filter(|_| has_one_value || open.len() > 1 || self.batch_symbol.is_some());
        // A dimension with a name of its own is no batch that requests share.
        let may_be_batch = |axis: usize| self.info.symbol(axis).is_empty() || (!self.config.is_batched() && axis == 0);
        let batch = match *open.as_slice() {
            _ if named.is_some() => named,
            [only] if may_be_batch(only) && (has_one_value || length_is_behind(only)) => Some(only),
            [first, _, ..] if may_be_batch(first) => Some(first),
            _ => None,
        };
        let others: Vec<usize> = open.into_iter().filter(|&axis| Some(axis) != batch).collect();
        let batch = batch.filter(|_| self.config.is_batched());
        let axis = match *values {
            ValuesPerRow::One => return Ok((batch, None)),
            ValuesPerRow::Of(length) => match (others.as_slice(), length) {
                (&[axis], _) => axis,
                ([], Some(1)) => return Ok((batch, None)),
                ([], Some(length)) => dims.iter().rposition(|&dim| dim == length).ok_or_else(|| {
                    self.error(format!("it has {length} values a row, and the input is {}", self.described()))
                })?,
                ([], None) => {
                    let why = "its number of values varies, and no dimension beside the batch is open";
                    return Err(self.error(format!("{why} in the input, {}", self.described())));
                }
                _ => {
                    let why = "more than one dimension beside the batch is open";
                    let names = self.other_names(batch);
                    return Err(self.error(format!("{why} in the input, {}: only one can be{names}", self.described())));
                }
            },
        };
        if (axis + 1..dims.len()).any(|behind| dims[behind] > 1) {
            let why = format!("its values stand along axis {axis}, and all later dimensions must be 1");
            return Err(self.error(format!("{why}; the input is {}{}", self.described(), self.other_names(batch))));
        }
        Ok((batch, Some(axis)))
    }

    /// The names of open dimensions, where none is the batch.
    fn other_names(&self, batch: Option<usize>) -> String {
        let names: Vec<_> = (0..self.info.dims.len())
            .filter(|&axis| !self.info.symbol(axis).is_empty())
            .map(|axis| format!("axis {axis} is '{}'", self.info.symbol(axis)))
            .collect();
        match self.batch_symbol {
            Some(symbol) if batch.is_none() && !names.is_empty() => {
                format!(" ({}; the batch of requests is '{symbol}')", names.join(", "))
            }
            _ => String::new(),
        }
    }

    fn counter(&self, count: &NamedCounter) -> Result<Counter, BindingError> {
        Ok(match count {
            NamedCounter::Steps => Counter::Steps,
            NamedCounter::Elements(of) => Counter::Elements(self.input_axis(of)?.0),
        })
    }

    /// An axis of an input that requests carry, with its length unless that varies.
    fn input_axis(&self, of: &NamedAxis) -> Result<(InputAxis, Option<i64>), BindingError> {
        let found = self.feeds.find(&of.name, "'generated_inputs'").ok();
        let found = found.and_then(|(input, info)| Some((input, info, self.request_input(input)?.0)));
        let Some((input, info, fed)) = found else {
            let known: Vec<&str> = self.feeds.of_requests().map(|(input, _)| input.name.as_str()).collect();
            let known = names(&known);
            return Err(self.error(format!("'{}' is no input that requests carry (there is {known})", of.name)));
        };
        // A model that Triton does not batch may have a batch dimension all the same.
        let named = || info.symbols.iter().position(|symbol| is_batch_name(symbol)).filter(|_| info.dims.len() > 1);
        let batch = fed.batch_axis.or_else(named);
        let beside: Vec<usize> = (0..fed.dims.len()).filter(|&axis| Some(axis) != batch).collect();
        let open: Vec<usize> = beside.iter().copied().filter(|&axis| fed.dims[axis] < 0).collect();
        let axis = self.one_axis(of, fed, &open, &beside, "beside the batch")?;
        Ok((InputAxis { input, axis }, Some(fed.dims[axis]).filter(|&dim| dim >= 0)))
    }

    /// As [`Self::input_axis`], of an input for whose every element the model sees there is a value.
    fn whole_input_axis(&self, of: &NamedAxis) -> Result<(InputAxis, Option<i64>), BindingError> {
        let (found, length) = self.input_axis(of)?;
        let request = self.request_input(found.input).map(|(_, request)| request);
        if request.is_some_and(|request| request.optional) {
            return Err(self.error(format!(
                "requests may leave '{}' out, and the length of the model's default for it is not known",
                of.name
            )));
        }
        if request.is_some_and(|request| request.context.is_some_and(|context| context.axis == found.axis)) {
            return Err(self.error(format!("'{}' has an input_context along axis {}", of.name, found.axis)));
        }
        Ok((found, length))
    }

    /// The axis along which a state grows.
    fn growing_axis(&self, of: &NamedAxis) -> Result<GrowingAxis, BindingError> {
        let input = |state: &BoundState| self.feeds.fed(state.input);
        let found = self.states.iter().position(|state| input(state).is_some_and(|input| input.name == of.name));
        let Some((number, state)) = found.map(|number| (number, &self.states[number])) else {
            let known: Vec<&str> = self.states.iter().filter_map(|state| Some(input(state)?.name.as_str())).collect();
            let has = if known.is_empty() {
                "there is no state".to_owned()
            } else {
                format!("states have {}", known.join(", "))
            };
            return Err(self.error(format!("no state has the input '{}' ({has})", of.name)));
        };
        let open: Vec<usize> = (0..state.dims.len()).filter(|&axis| state.dims[axis] < 0).collect();
        let (StatePlace::Beside(beside), false, Some(input)) = (state.place, open.is_empty(), input(state)) else {
            let why = format!("state '{}' is {}, which does not grow", of.name, describe(state.data_type, &state.dims));
            return Err(self.error(why));
        };
        let axis = self.one_axis(of, input, &open, &open, "of the state")?;
        if state.dims[axis] >= 0 {
            return Err(
                self.error(format!("axis {axis} of state '{}' is {}, which does not grow", of.name, state.dims[axis]))
            );
        }
        Ok(GrowingAxis { state: number, beside, axis })
    }

    /// The axis that is written, else the only open one, else the only one.
    fn one_axis(
        &self,
        of: &NamedAxis,
        input: &BoundInput,
        open: &[usize],
        all: &[usize],
        which: &str,
    ) -> Result<usize, BindingError> {
        let described = describe(input.data_type, &input.dims);
        match (of.axis, open, all) {
            (Some(axis), ..) if axis >= input.dims.len() => {
                Err(self.error(format!("'{}' is {described}, which has no axis {axis}", of.name)))
            }
            (Some(axis), ..) if input.batch_axis == Some(axis) => {
                Err(self.error(format!("axis {axis} of '{}', {described}, is the batch", of.name)))
            }
            (Some(axis), ..) | (None, &[axis], _) | (None, [], &[axis]) => Ok(axis),
            (None, [], []) => Err(self.error(format!("'{}' is {described}, which has no axis {which}", of.name))),
            (None, open, all) => {
                let axes = if open.is_empty() { all } else { open };
                let names: Vec<String> = axes.iter().map(|axis| format!("'{}@{axis}'", of.name)).collect();
                Err(self.error(format!(
                    "'{}' is {described}, which has more than one axis {which}: write {}",
                    of.name,
                    names.join(" or ")
                )))
            }
        }
    }

    fn request_input(&self, index: usize) -> Option<(&BoundInput, &RequestInput)> {
        let input = self.feeds.fed(index)?;
        Some((input, input.request()?))
    }

    fn length_is_open(&self) -> BindingError {
        let written = self.generated.written.trim_end();
        let known = format!("'{}, LENGTH)'", written.strip_suffix(')').unwrap_or(written));
        self.error(format!("the length of the input, {}, is not known: write {known}", self.described()))
    }

    fn described(&self) -> String {
        describe(self.info.data_type, &self.info.dims)
    }

    fn error(&self, why: String) -> BindingError {
        bad(GENERATED_INPUTS, format!("{}={}", self.generated.input, self.generated.written), why)
    }
}

/// The number of a counter, which is counted from now on.
fn numbered(counters: &mut Vec<Counter>, counter: Counter) -> usize {
    counters.iter().position(|known| *known == counter).unwrap_or_else(|| {
        counters.push(counter);
        counters.len() - 1
    })
}

//! Inputs that this backend fills with counters, lengths and masks: what they count, along which axis they have a value
//! for each element, and the values of a row.

use rows::tensor::{DataType, Gap};
use stateful_convert::is_batch_name;

use super::bound::{
    BoundInput, BoundState, Counter, Generated, GeneratedValue, GrowingAxis, InputAxis, NewLength, RequestInput,
    Source, StatePlace,
};
use super::elements::element_bytes;
use super::error::{BindingError, Result, bad, names};
use super::fit::{describe, is_batch};
use super::inputs::Feeds;
use crate::config::{Config, GENERATED_INPUTS, GeneratedInput, GeneratedKind, NamedAxis, NamedCounter, NewElements};
use crate::onnx::{TensorInfo, open_axes};

/// Feeds the generated inputs. Returns what has to be counted for them.
pub(super) fn feed_generated(
    config: &Config,
    feeds: &mut Feeds,
    states: &[BoundState],
    batch_symbol: Option<&str>,
) -> Result<Vec<Counter>> {
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
    info: &'a TensorInfo,
}

enum ValuesPerRow {
    One,
    /// A list of values, with its length if that is fixed.
    Of(Option<i64>),
}

impl Binder<'_> {
    fn bind(&self, counters: &mut Vec<Counter>) -> Result<BoundInput> {
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
                // All dimensions after the values must be 1, so the last dimension above 1 is the number of values.
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
        let source = Source::Generated(Generated { value, factor, addend, axis, one, written });
        let mut input = BoundInput::new(self.info, batch_axis, source);
        let others = open_axes(&input.dims, batch_axis).into_iter().filter(|&other| Some(other) != axis);
        others.for_each(|other| input.dims[other] = 1);
        Ok(input)
    }

    /// The batch axis of the input to be filled, and the axis along which a row has several values.
    fn axes(&self, values: &ValuesPerRow) -> Result<(Option<usize>, Option<usize>)> {
        let (dims, symbols) = (&self.info.dims, &self.info.symbols);
        let open = open_axes(dims, None);
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
        let others = open_axes(dims, batch);
        let batch = batch.filter(|_| self.config.is_batched());
        let input = self.described();
        let axis = match (values, others.as_slice()) {
            (ValuesPerRow::One, _) | (ValuesPerRow::Of(Some(1)), []) => return Ok((batch, None)),
            (_, &[axis]) => axis,
            (ValuesPerRow::Of(Some(length)), []) => dims
                .iter()
                .rposition(|dim| dim == length)
                .ok_or_else(|| self.error(format!("it has {length} values a row, and the input is {input}")))?,
            (ValuesPerRow::Of(None), []) => {
                let why = "its number of values varies, and no dimension beside the batch is open";
                return Err(self.error(format!("{why} in the input, {input}")));
            }
            _ => {
                let (why, names) = ("more than one dimension beside the batch is open", self.other_names(batch));
                return Err(self.error(format!("{why} in the input, {input}: only one can be{names}")));
            }
        };
        if (axis + 1..dims.len()).any(|behind| dims[behind] > 1) {
            let (why, names) = ("and all later dimensions must be 1", self.other_names(batch));
            return Err(self.error(format!("its values stand along axis {axis}, {why}; the input is {input}{names}")));
        }
        Ok((batch, Some(axis)))
    }

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

    fn counter(&self, count: &NamedCounter) -> Result<Counter> {
        Ok(match count {
            NamedCounter::Steps => Counter::Steps,
            NamedCounter::Elements(of) => Counter::Elements(self.input_axis(of)?.0),
        })
    }

    /// An axis of an input that requests carry, with its length unless that varies.
    fn input_axis(&self, of: &NamedAxis) -> Result<(InputAxis, Option<i64>, &RequestInput)> {
        let found = self.feeds.find(&of.name, "'generated_inputs'").ok().and_then(|(index, info)| {
            let fed = self.feeds.fed[index].as_ref()?;
            Some((index, info, fed, fed.request()?))
        });
        let Some((input, info, fed, request)) = found else {
            let known = self.feeds.fed.iter().flatten().filter(|input| input.request().is_some());
            let known: Vec<&str> = known.map(|input| input.name.as_str()).collect();
            let known = names(&known);
            return Err(self.error(format!("'{}' is no input that requests carry (there is {known})", of.name)));
        };
        // A model that Triton does not batch may still have a batch dimension.
        let named = || info.symbols.iter().position(|symbol| is_batch_name(symbol)).filter(|_| info.dims.len() > 1);
        let batch = fed.batch_axis.or_else(named);
        let beside: Vec<usize> = (0..fed.dims.len()).filter(|&axis| Some(axis) != batch).collect();
        let axis = self.one_axis(of, fed, &beside, "beside the batch")?;
        Ok((InputAxis { input, axis }, Some(fed.dims[axis]).filter(|&dim| dim >= 0), request))
    }

    /// As [`Self::input_axis`], of an input for whose every element the model sees there is a value.
    fn whole_input_axis(&self, of: &NamedAxis) -> Result<(InputAxis, Option<i64>)> {
        let (found, length, request) = self.input_axis(of)?;
        let name = &of.name;
        if request.optional {
            let why = "and the length of the model's default for it is not known";
            return Err(self.error(format!("requests may leave '{name}' out, {why}")));
        }
        // The model sees more elements than the request brings, and only the request's are counted.
        if request.context.is_some_and(|context| context.axis == found.axis) {
            return Err(self.error(format!("'{name}' has an input_context along axis {}", found.axis)));
        }
        Ok((found, length))
    }

    fn growing_axis(&self, of: &NamedAxis) -> Result<GrowingAxis> {
        let input = |state: &BoundState| self.feeds.fed[state.input].as_ref();
        let found = self.states.iter().position(|state| input(state).is_some_and(|input| input.name == of.name));
        let Some((number, state)) = found.map(|number| (number, &self.states[number])) else {
            let known: Vec<&str> = self.states.iter().filter_map(|state| Some(input(state)?.name.as_str())).collect();
            let known = known.join(", ");
            let has = if known.is_empty() { "there is no state".to_owned() } else { format!("states have {known}") };
            return Err(self.error(format!("no state has the input '{}' ({has})", of.name)));
        };
        let open = open_axes(&state.dims, None);
        // A state of strings is beside the slot even if no dimension is open.
        let (StatePlace::Beside(beside), false, Some(input)) = (state.place, open.is_empty(), input(state)) else {
            let why = format!("state '{}' is {}, which does not grow", of.name, describe(state.data_type, &state.dims));
            return Err(self.error(why));
        };
        let axis = self.one_axis(of, input, &open, "of the state")?;
        if state.dims[axis] >= 0 {
            let why = format!("axis {axis} of state '{}' is {}, which does not grow", of.name, state.dims[axis]);
            return Err(self.error(why));
        }
        Ok(GrowingAxis { state: number, beside, axis })
    }

    /// The axis that is written, else the only open one, else the only one.
    fn one_axis(&self, of: &NamedAxis, input: &BoundInput, all: &[usize], which: &str) -> Result<usize> {
        let (name, described) = (&of.name, describe(input.data_type, &input.dims));
        let open: Vec<usize> = all.iter().copied().filter(|&axis| input.dims[axis] < 0).collect();
        match (of.axis, open.as_slice(), all) {
            (Some(axis), ..) if axis >= input.dims.len() => {
                Err(self.error(format!("'{name}' is {described}, which has no axis {axis}")))
            }
            (Some(axis), ..) if input.batch_axis == Some(axis) => {
                Err(self.error(format!("axis {axis} of '{name}', {described}, is the batch")))
            }
            (Some(axis), ..) | (None, &[axis], _) | (None, [], &[axis]) => Ok(axis),
            (None, [], []) => Err(self.error(format!("'{name}' is {described}, which has no axis {which}"))),
            (None, open, all) => {
                let axes = if open.is_empty() { all } else { open };
                let names: Vec<String> = axes.iter().map(|axis| format!("'{name}@{axis}'")).collect();
                let names = names.join(" or ");
                Err(self.error(format!("'{name}' is {described}, which has more than one axis {which}: write {names}")))
            }
        }
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

fn numbered(counters: &mut Vec<Counter>, counter: Counter) -> usize {
    counters.iter().position(|known| *known == counter).unwrap_or_else(|| {
        counters.push(counter);
        counters.len() - 1
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowValues {
    /// `count` numbers from `first` up, before the factor and the addend.
    Numbers { first: u64, count: usize },
    /// `ones` ones, then `zeros` zeros, then `more` ones.
    Mask { ones: usize, zeros: usize, more: usize },
}

impl RowValues {
    /// The values of a row. They follow from the counts of the sequence, and from the elements of growing states and of
    /// inputs. `gap`: the padding in the padded states of the row.
    pub fn new(
        generated: &Generated,
        states: &[BoundState],
        counted: impl Fn(usize) -> u64,
        past: impl Fn(GrowingAxis) -> usize,
        new: impl Fn(InputAxis) -> usize,
        gap: Gap,
    ) -> Self {
        match generated.value {
            GeneratedValue::Count { counter } => Self::Numbers { first: counted(counter), count: 1 },
            GeneratedValue::Positions { counter, of } => Self::Numbers { first: counted(counter), count: new(of) },
            GeneratedValue::Length(state) => Self::Numbers { first: past(state) as u64, count: 1 },
            GeneratedValue::Mask { state, new: elements } => {
                let new = match elements {
                    NewLength::Fixed(number) => number,
                    NewLength::Of(input) => new(input),
                };
                let is_padded = states[state.state].padded_axis == Some(state.axis);
                Self::mask(past(state) + new, if is_padded { gap } else { Gap::NONE })
            }
            GeneratedValue::Last { counter, length } => {
                // A count that does not fit a usize is larger than the mask.
                let ones = usize::try_from(generated_value(generated, counted(counter))).unwrap_or(length).min(length);
                Self::Mask { ones: 0, zeros: length - ones, more: ones }
            }
        }
    }

    /// As many ones as a state has after the run, with zeros for its padding.
    const fn mask(valid: usize, gap: Gap) -> Self {
        Self::Mask { ones: gap.from, zeros: gap.length, more: valid - gap.from }
    }

    pub const fn count(self) -> usize {
        match self {
            Self::Numbers { count, .. } => count,
            Self::Mask { ones, zeros, more } => ones + zeros + more,
        }
    }

    /// Appends a row of an input of `row_bytes` bytes: the values, and zeros up to the `longest` row of the run. The
    /// same bytes repeat for each index of the dimensions before the axis. The type can hold the values.
    pub fn append_row(
        self,
        generated: &Generated,
        data_type: DataType,
        longest: usize,
        row_bytes: usize,
        to: &mut Vec<u8>,
    ) {
        let from = to.len();
        self.append(generated, data_type, to);
        to.resize(from + longest * data_type.byte_size().unwrap_or(1), 0);
        // A row without elements has no bytes to repeat.
        let once = to.len() - from;
        (1..row_bytes / once.max(1)).for_each(|_| to.extend_from_within(from..from + once));
    }

    fn append(self, generated: &Generated, data_type: DataType, to: &mut Vec<u8>) {
        match self {
            Self::Numbers { first, count } => {
                // A request with a value that the type of the input cannot hold has been refused.
                let in_64_bits = |value: i128| i64::try_from(value).unwrap_or(i64::MAX);
                let values = (first..).take(count).map(|number| in_64_bits(generated_value(generated, number)));
                values.for_each(|value| append_whole(data_type, value, to));
            }
            Self::Mask { ones, zeros, more } => {
                to.extend(generated.one.repeat(ones));
                to.resize(to.len() + zeros * generated.one.len(), 0);
                to.extend(generated.one.repeat(more));
            }
        }
    }
}

/// A number with its factor and addend, which 64 bits may not hold.
pub const fn generated_value(generated: &Generated, number: u64) -> i128 {
    number as i128 * generated.factor as i128 + generated.addend as i128
}

/// The largest number up to which a type has every whole number.
pub const fn largest_whole(data_type: DataType) -> i64 {
    match data_type {
        DataType::Bool => 1,
        DataType::Int8 => i8::MAX as i64,
        DataType::Int16 => i16::MAX as i64,
        DataType::Int32 => i32::MAX as i64,
        // A number is appended as an i64.
        DataType::Int64 | DataType::Uint64 => i64::MAX,
        DataType::Uint8 => u8::MAX as i64,
        DataType::Uint16 => u16::MAX as i64,
        DataType::Uint32 => u32::MAX as i64,
        DataType::Bf16 => 1 << 8,
        DataType::Fp16 => 1 << 11,
        DataType::Fp32 => 1 << 24,
        DataType::Fp64 => 1 << 53,
        DataType::Bytes => 0,
    }
}

fn append_whole(data_type: DataType, value: i64, to: &mut Vec<u8>) {
    match data_type {
        DataType::Fp16 => to.extend(half::f16::from_f64(value as f64).to_ne_bytes()),
        DataType::Bf16 => to.extend(half::bf16::from_f64(value as f64).to_ne_bytes()),
        DataType::Fp32 => to.extend((value as f32).to_ne_bytes()),
        DataType::Fp64 => to.extend((value as f64).to_ne_bytes()),
        _ => to.extend(&value.to_le_bytes()[..data_type.byte_size().unwrap_or(0)]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generated(value: GeneratedValue, factor: i64, addend: i64) -> Generated {
        Generated { value, factor, addend, axis: None, one: 1_i32.to_ne_bytes().to_vec(), written: String::new() }
    }

    fn appended(values: RowValues, generated: &Generated) -> Vec<i32> {
        let mut bytes = Vec::new();
        values.append(generated, DataType::Int32, &mut bytes);
        assert_eq!(bytes.len(), values.count() * 4);
        bytes.chunks_exact(4).map(|four| i32::from_ne_bytes(four.try_into().unwrap())).collect()
    }

    #[test]
    fn numbers_count_up_from_the_first_and_have_factor_and_addend() {
        let of = generated(GeneratedValue::Count { counter: 0 }, 16, 64);
        assert_eq!(appended(RowValues::Numbers { first: 3, count: 1 }, &of), [112]);
        assert_eq!(appended(RowValues::Numbers { first: 0, count: 3 }, &of), [64, 80, 96]);
        assert_eq!(appended(RowValues::Numbers { first: 9, count: 0 }, &of), [0; 0]);
    }

    #[test]
    fn a_mask_has_zeros_for_the_padding_of_the_past() {
        let state = GrowingAxis { state: 0, beside: 0, axis: 2 };
        let of = generated(GeneratedValue::Mask { state, new: NewLength::Fixed(0) }, 1, 0);
        let mask =
            |valid: usize, from, length, new: usize| appended(RowValues::mask(valid + new, Gap { from, length }), &of);
        assert_eq!(mask(3, 0, 0, 2), [1, 1, 1, 1, 1]);
        assert_eq!(mask(1, 0, 2, 1), [0, 0, 1, 1]);
        assert_eq!(mask(1, 1, 2, 1), [1, 0, 0, 1]);
        assert_eq!(mask(3, 1, 2, 1), [1, 0, 0, 1, 1, 1]);
        assert_eq!(mask(0, 0, 2, 1), [0, 0, 1]);
        assert_eq!(mask(0, 0, 0, 0), [0; 0]);
    }

    #[test]
    fn the_last_elements_are_ones_until_all_are() {
        let of = generated(GeneratedValue::Last { counter: 0, length: 5 }, 2, 1);
        let values = |of: &Generated, count| RowValues::new(of, &[], |_| count, |_| 0, |_| 0, Gap::NONE);
        let last = |count| appended(values(&of, count), &of);
        assert_eq!(last(0), [0, 0, 0, 0, 1]);
        assert_eq!(last(1), [0, 0, 1, 1, 1]);
        assert_eq!(last(2), [1; 5]);
        assert_eq!(last(3), [1; 5]);
        assert_eq!(last(u64::MAX), [1; 5]);
        let nothing = generated(GeneratedValue::Last { counter: 0, length: 2 }, 1, 0);
        assert_eq!(appended(values(&nothing, 0), &nothing), [0, 0]);
    }

    #[test]
    fn a_type_holds_the_whole_numbers_up_to_its_largest_exactly() {
        for data_type in [DataType::Fp16, DataType::Bf16] {
            let most = largest_whole(data_type);
            let read = |value: i64| {
                let mut bytes = Vec::new();
                append_whole(data_type, value, &mut bytes);
                let bytes = [bytes[0], bytes[1]];
                match data_type {
                    DataType::Fp16 => half::f16::from_ne_bytes(bytes).to_f64(),
                    _ => half::bf16::from_ne_bytes(bytes).to_f64(),
                }
            };
            assert!((0..=most).all(|value| read(value) == value as f64), "{data_type}");
            assert!(read(most + 1) != (most + 1) as f64, "{data_type}");
        }
        assert_eq!(largest_whole(DataType::Fp32) as f32 + 1.0, largest_whole(DataType::Fp32) as f32);
        assert_eq!(largest_whole(DataType::Fp64) as f64 + 1.0, largest_whole(DataType::Fp64) as f64);
    }

    #[test]
    fn a_number_that_64_bits_cannot_hold_is_told_as_it_is() {
        let of = generated(GeneratedValue::Count { counter: 0 }, 2, 1);
        assert_eq!(generated_value(&of, 20), 41);
        assert_eq!(generated_value(&of, u64::MAX), 2 * i128::from(u64::MAX) + 1);
        let largest = generated(GeneratedValue::Count { counter: 0 }, i64::MAX, i64::MAX);
        assert_eq!(generated_value(&largest, u64::MAX), (1 << 64) * i128::from(i64::MAX));
    }
}

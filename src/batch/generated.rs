//! Generated inputs: the values of a row, and how they stand in the tensor of a batch.

use super::Row;
use crate::binding::{
    Binding, BoundInput, Counter, Generated, GeneratedValue, GrowingAxis, InputAxis, NewLength, RequestInput, Source,
};
use crate::error::RequestError;
use crate::memory::rows;
use crate::session::Step;
use crate::tensor::{DataType, Gap, RowAt, RowLayout};

/// What a row has in a generated input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowValues {
    /// `count` numbers from `first` up, before the factor and the addend.
    Numbers { first: u64, count: usize },
    /// 1 for the elements of a state, then for `new` elements.
    Mask { past: Past, new: usize },
    /// `ones` at the end of `length` elements, and 0 in front of them.
    Last { ones: usize, length: usize },
}

/// The elements of a growing state of a row, in the tensor that a run reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Past {
    /// The row's own elements.
    pub valid: usize,
    /// The padding among them.
    pub gap: Gap,
}

/// What generated inputs need of the sequence of a row, before the run.
#[derive(Clone, Debug)]
pub struct Counted {
    /// In the order of [`Binding::counters`]; empty for zeros.
    counts: Vec<u64>,
    /// What the row has in the generated inputs that the whole batch shares.
    shared_values: Vec<RowValues>,
}

impl Counted {
    fn count(&self, counter: usize) -> u64 {
        self.counts.get(counter).copied().unwrap_or(0)
    }
}

impl RowValues {
    /// The values of a row whose counters and lengths are known. `gap` is the padding of its padded states.
    pub fn of(generated: &Generated, binding: &Binding, row: &Row, gap: Gap) -> Self {
        let count = |counter: usize| row.counted.as_ref().map_or(0, |counted| counted.count(counter));
        let past = |of: GrowingAxis| {
            let dims = row.state.dims.get(of.beside).map_or(&[][..], Vec::as_slice);
            dims.get(of.axis).map_or(0, |&dim| usize::try_from(dim).unwrap_or(0))
        };
        let new = |of: InputAxis| own_length(binding, row, of);
        Self::new(generated, binding, count, past, new, gap)
    }

    /// The values of a row of zeros that starts a sequence, in which open dimensions are 1.
    pub fn of_warm_up(generated: &Generated, binding: &Binding) -> Self {
        let past = |of: GrowingAxis| {
            let dims = &binding.states[of.state].initial.dims;
            dims.get(of.axis).map_or(0, |&dim| usize::try_from(dim).unwrap_or(0))
        };
        let new = |of: InputAxis| usize::try_from(binding.inputs[of.input].dims[of.axis]).unwrap_or(1);
        Self::new(generated, binding, |_| 0, past, new, Gap::NONE)
    }

    pub(super) fn new(
        generated: &Generated,
        binding: &Binding,
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
                let is_padded = binding.states[state.state].padded_axis == Some(state.axis);
                let past = Past { valid: past(state), gap: if is_padded { gap } else { Gap::NONE } };
                Self::Mask { past, new }
            }
            GeneratedValue::Last { counter, length } => Self::last(generated, counted(counter), length),
        }
    }

    /// Ones up to all of `length` elements.
    fn last(generated: &Generated, count: u64, length: usize) -> Self {
        let ones = usize::try_from(value(generated, count)).unwrap_or(length).min(length);
        Self::Last { ones, length }
    }

    /// How many values these are.
    const fn len(self) -> usize {
        match self {
            Self::Numbers { count, .. } => count,
            Self::Mask { past, new } => past.valid + past.gap.length + new,
            Self::Last { length, .. } => length,
        }
    }

    /// Appends the values, which the type can hold.
    fn append(self, generated: &Generated, data_type: DataType, to: &mut Vec<u8>) {
        let zeros = |to: &mut Vec<u8>, count: usize| to.resize(to.len() + count * generated.one.len(), 0);
        let ones = |to: &mut Vec<u8>, count: usize| to.extend(generated.one.repeat(count));
        match self {
            Self::Numbers { first, count } => {
                let in_64_bits = |value: i128| i64::try_from(value).unwrap_or(i64::MAX);
                let values = (first..).take(count).map(|number| in_64_bits(value(generated, number)));
                values.for_each(|value| append_whole(data_type, value, to));
            }
            Self::Mask { past, new } => {
                ones(to, past.gap.from);
                zeros(to, past.gap.length);
                ones(to, past.valid - past.gap.from + new);
            }
            Self::Last { ones: last, length } => {
                zeros(to, length - last);
                ones(to, last);
            }
        }
    }
}

/// Notes what the sequence of a row has counted. Fails if the type of a generated input cannot hold the row's values.
pub fn note_counts(binding: &Binding, row: &mut Row, counts: Vec<u64>) -> Result<(), RequestError> {
    row.counted = Some(Box::new(Counted { counts, shared_values: Vec::new() }));
    let shared = binding.generated().filter(|(input, _)| input.batch_axis.is_none());
    let values = shared.map(|(_, generated)| RowValues::of(generated, binding, row, Gap::NONE)).collect();
    if let Some(counted) = &mut row.counted {
        counted.shared_values = values;
    }
    check(binding, row)
}

/// What a row has in the generated inputs that the whole batch shares.
pub fn shared_values(row: &Row) -> &[RowValues] {
    row.counted.as_ref().map_or(&[], |counted| &counted.shared_values)
}

fn check(binding: &Binding, row: &Row) -> Result<(), RequestError> {
    for (input, generated) in binding.generated() {
        let RowValues::Numbers { first, count } = RowValues::of(generated, binding, row, Gap::NONE) else { continue };
        let Some(last) = (count as u64).checked_sub(1).map(|behind| first.saturating_add(behind)) else { continue };
        let (value, most) = (value(generated, last), largest_whole(input.data_type));
        if value > i128::from(most) {
            let (name, written, data_type) = (input.name.clone(), generated.written.clone(), input.data_type);
            return Err(RequestError::GeneratedTooLarge { name, written, value, data_type, most });
        }
    }
    Ok(())
}

/// What the counters of a row's sequence have if its inference counts.
pub fn counts_after(binding: &Binding, row: &Row) -> Vec<u64> {
    let after = |(number, counter): (usize, &Counter)| {
        let before = row.counted.as_ref().map_or(0, |counted| counted.count(number));
        before.saturating_add(match *counter {
            Counter::Steps => 1,
            Counter::Elements(of) => own_length(binding, row, of) as u64,
        })
    };
    binding.counters.iter().enumerate().map(after).collect()
}

/// Fills a generated input with the values of each row.
pub fn fill(
    step: &mut Step,
    index: usize,
    input: &BoundInput,
    generated: &Generated,
    values: &[RowValues],
) -> Result<(), RequestError> {
    // Without a batch axis, all rows have the same values.
    let values = if input.batch_axis.is_some() { values } else { &values[..values.len().min(1)] };
    let mut dims = input.dims.clone();
    let longest = values.iter().map(|values| values.len()).max().unwrap_or(0);
    if let Some(axis) = generated.axis {
        dims[axis] = longest as i64;
    }
    let layout = RowLayout::new(input.data_type, &dims, input.batch_axis).ok_or_else(|| RequestError::InputShape {
        name: input.name.clone(),
        came: dims.clone(),
        wanted: input.dims.clone(),
    })?;
    let rows = values.len();
    let buffer = step.input(index, &dims, rows)?;
    let element = input.data_type.byte_size().unwrap_or(1);
    let mut row = Vec::with_capacity(layout.row_bytes());
    for (position, values) in values.iter().enumerate() {
        row.clear();
        values.append(generated, input.data_type, &mut row);
        row.resize(longest * element, 0);
        // Dimensions before the axis have the same values again.
        let once = row.len();
        (1..layout.row_bytes() / once.max(1)).for_each(|_| row.extend_from_within(..once));
        rows::put(layout, &row, buffer, RowAt { position, rows });
    }
    Ok(())
}

/// The elements of a request along an axis of an input; 0 if it leaves the input out.
fn own_length(binding: &Binding, row: &Row, of: InputAxis) -> usize {
    let length = |request: &RequestInput| {
        row.request.input(request.position).map_or(0, |sent| request.own_length(sent.dims(), of.axis))
    };
    match &binding.inputs[of.input].source {
        Source::Request(request) => length(request),
        _ => 0,
    }
}

/// A number with its factor and addend, which 64 bits may not hold.
const fn value(generated: &Generated, number: u64) -> i128 {
    number as i128 * generated.factor as i128 + generated.addend as i128
}

/// The largest number up to which a type has every whole number.
const fn largest_whole(data_type: DataType) -> i64 {
    match data_type {
        DataType::Bool => 1,
        DataType::Int8 => i8::MAX as i64,
        DataType::Int16 => i16::MAX as i64,
        DataType::Int32 => i32::MAX as i64,
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

/// Appends a whole number that the type can hold.
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
        assert_eq!(bytes.len(), values.len() * 4);
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
        let mask = |valid, from, length, new| {
            appended(RowValues::Mask { past: Past { valid, gap: Gap { from, length } }, new }, &of)
        };
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
        let last = |count| appended(RowValues::last(&of, count, 5), &of);
        assert_eq!(last(0), [0, 0, 0, 0, 1]);
        assert_eq!(last(1), [0, 0, 1, 1, 1]);
        assert_eq!(last(2), [1; 5]);
        assert_eq!(last(3), [1; 5]);
        assert_eq!(last(u64::MAX), [1; 5]);
        let nothing = generated(GeneratedValue::Last { counter: 0, length: 2 }, 1, 0);
        assert_eq!(appended(RowValues::last(&nothing, 0, 2), &nothing), [0, 0]);
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
        assert_eq!(value(&of, 20), 41);
        assert_eq!(value(&of, u64::MAX), 2 * i128::from(u64::MAX) + 1);
        let largest = generated(GeneratedValue::Count { counter: 0 }, i64::MAX, i64::MAX);
        assert_eq!(value(&largest, u64::MAX), (1 << 64) * i128::from(i64::MAX));
    }
}

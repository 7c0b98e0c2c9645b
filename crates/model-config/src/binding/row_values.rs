//! The values of one row in a generated input.

use rows::tensor::{DataType, Gap};

use super::bound::{Generated, GeneratedValue, GrowingAxis, InputAxis, NewLength};
use super::model::Binding;

/// What a row has in a generated input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the sentences name the fields")]
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

impl RowValues {
    /// The values, for what the sequence has counted, the elements of growing states and those of inputs.
    pub fn new(
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
        let ones = usize::try_from(generated_value(generated, count)).unwrap_or(length).min(length);
        Self::Last { ones, length }
    }

    /// How many values these are.
    pub const fn count(self) -> usize {
        match self {
            Self::Numbers { count, .. } => count,
            Self::Mask { past, new } => past.valid + past.gap.length + new,
            Self::Last { length, .. } => length,
        }
    }

    /// Appends a row of an input of `row_bytes` bytes: the values, and zeros up to the `longest` row of the run. Dimensions in
    /// front of the axis have the same again. The type can hold the values.
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
        let once = to.len() - from;
        (1..row_bytes / once.max(1)).for_each(|_| to.extend_from_within(from..from + once));
    }

    /// Appends the values, which the type can hold.
    fn append(self, generated: &Generated, data_type: DataType, to: &mut Vec<u8>) {
        let zeros = |to: &mut Vec<u8>, count: usize| to.resize(to.len() + count * generated.one.len(), 0);
        let ones = |to: &mut Vec<u8>, count: usize| to.extend(generated.one.repeat(count));
        match self {
            Self::Numbers { first, count } => {
                let in_64_bits = |value: i128| i64::try_from(value).unwrap_or(i64::MAX);
                let values = (first..).take(count).map(|number| in_64_bits(generated_value(generated, number)));
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
        assert_eq!(generated_value(&of, 20), 41);
        assert_eq!(generated_value(&of, u64::MAX), 2 * i128::from(u64::MAX) + 1);
        let largest = generated(GeneratedValue::Count { counter: 0 }, i64::MAX, i64::MAX);
        assert_eq!(generated_value(&largest, u64::MAX), (1 << 64) * i128::from(i64::MAX));
    }
}

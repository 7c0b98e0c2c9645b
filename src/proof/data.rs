//! Random elements of rows, and whether two results of a row are the same.

use rows::tensor::{DataType, Dims};

/// The result of a row in one output.
#[derive(Clone, Debug)]
pub struct Answer {
    pub name: String,
    pub data_type: DataType,
    /// With 1 for the batch axis.
    pub dims: Vec<i64>,
    /// Row-major.
    pub bytes: Vec<u8>,
}

/// How large random numbers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    Zero,
    /// From -0.1 to 0.1.
    Small,
    /// From -1 to 1.
    One,
    /// Of both signs in turn, up to 8 or 8,000, so that limits of any size are passed.
    Large,
    /// The same with the other signs.
    Negated,
}

impl Scale {
    /// A number of this scale for `value`, which is from -1 to 1. `index`: of the element.
    fn scaled(self, value: f64, index: usize) -> f64 {
        match self {
            Self::Zero => 0.0,
            Self::Small => 0.1 * value,
            Self::One => value,
            Self::Negated => -Self::Large.scaled(value, index),
            Self::Large => {
                let largest = if index % 4 < 2 { 8000.0 } else { 8.0 };
                largest * value.abs() * if index.is_multiple_of(2) { 1.0 } else { -1.0 }
            }
        }
    }
}

/// Random elements: numbers, or whole numbers that are 0 or 1, which are valid indices of most tables. Equal seeds give
/// equal elements.
pub fn random(data_type: DataType, count: usize, scale: Scale, seed: &[usize]) -> Vec<u8> {
    let mut state = seed.iter().fold(0, |state: u64, &part| mixed(state.wrapping_add(part as u64)));
    let mut bytes = Vec::with_capacity(count * data_type.byte_size().unwrap_or(0));
    for index in 0..count {
        state = mixed(state);
        // From -1 to 1, with 53 random bits: an `f64` holds no more.
        let value = scale.scaled((state >> 11) as f64 / (1_u64 << 52) as f64 - 1.0, index);
        match data_type {
            DataType::Fp64 => bytes.extend(value.to_ne_bytes()),
            DataType::Fp32 => bytes.extend((value as f32).to_ne_bytes()),
            DataType::Fp16 => bytes.extend(half::f16::from_f64(value).to_ne_bytes()),
            DataType::Bf16 => bytes.extend(half::bf16::from_f64(value).to_ne_bytes()),
            _ if scale == Scale::Zero => bytes.extend(&[0; 8][..data_type.byte_size().unwrap_or(0)]),
            _ => bytes.extend(&u64::to_le_bytes(state >> 63)[..data_type.byte_size().unwrap_or(0)]),
        }
    }
    bytes
}

/// The next state of a SplitMix64 generator, mixed.
const fn mixed(state: u64) -> u64 {
    let mut mixed = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

pub const fn is_float(data_type: DataType) -> bool {
    matches!(data_type, DataType::Fp16 | DataType::Bf16 | DataType::Fp32 | DataType::Fp64)
}

/// How much values of a type may differ, as a share of the largest; and however small they are, as a share of the numbers that
/// they were computed from.
const fn rounding(data_type: DataType) -> (f64, f64) {
    match data_type {
        DataType::Fp64 | DataType::Fp32 => (1e-3, 1e-6),
        DataType::Fp16 => (1e-2, 1e-3),
        DataType::Bf16 => (5e-2, 1e-2),
        _ => (0.0, 0.0),
    }
}

/// The first difference of more than rounding between the results of a row in a run of its own and in one that it shared.
/// `largest_input` is the largest number of what the row brought: where such numbers cancel, their rounding is left.
pub fn difference(alone: &[Answer], shared: &[Answer], largest_input: f64) -> Option<String> {
    alone.iter().zip(shared).find_map(|(alone, shared)| alone.difference(shared, largest_input))
}

impl Answer {
    fn difference(&self, shared: &Self, largest_input: f64) -> Option<String> {
        let Self { name, data_type, dims, .. } = self;
        if *dims != shared.dims {
            return Some(format!("'{name}' is {} instead of {}", Dims(&shared.dims), Dims(dims)));
        }
        if self.bytes == shared.bytes {
            return None;
        }
        let (of_largest, of_input) = rounding(*data_type);
        let limit = (of_largest * largest(*data_type, &self.bytes)).max(of_input * largest_input.max(1.0));
        let (alone, shared) = (numbers(*data_type, &self.bytes), numbers(*data_type, &shared.bytes));
        let differs = |(alone, shared): (&f64, &f64)| {
            // Not `>`: the difference of a number and of NaN, or of two infinities, is NaN.
            let is_close = (alone - shared).abs() <= limit;
            !is_close && alone != shared && !(alone.is_nan() && shared.is_nan())
        };
        let (at, (alone, shared)) = alone.iter().zip(&shared).enumerate().find(|(_, pair)| differs(*pair))?;
        Some(format!("element {at} of '{name}' is {shared} instead of {alone}"))
    }

    /// The first element, or 0.
    pub fn first_number(&self) -> f64 {
        numbers(self.data_type, &self.bytes).first().copied().unwrap_or(0.0)
    }

    /// Leaves the first `length` elements along an axis.
    pub fn cut(&mut self, axis: usize, length: i64) {
        let Some(&dim) = self.dims.get(axis) else { return };
        let length = length.clamp(0, dim);
        let inner: i64 = self.dims[axis + 1..].iter().product();
        let size = self.data_type.byte_size().unwrap_or(1) * inner as usize;
        let (whole, kept) = (size * dim as usize, size * length as usize);
        self.bytes = self.bytes.chunks_exact(whole.max(1)).flat_map(|part| &part[..kept]).copied().collect();
        self.dims[axis] = length;
    }
}

/// The largest finite number of a type in these bytes; 0 for whole numbers.
pub fn largest(data_type: DataType, bytes: &[u8]) -> f64 {
    let numbers = if is_float(data_type) { numbers(data_type, bytes) } else { Vec::new() };
    numbers.into_iter().filter(|value| value.is_finite()).fold(0.0, |most: f64, value| most.max(value.abs()))
}

fn numbers(data_type: DataType, bytes: &[u8]) -> Vec<f64> {
    let size = data_type.byte_size().unwrap_or(1);
    let number = |bytes: &[u8]| {
        let mut eight = [0; 8];
        eight[..size].copy_from_slice(bytes);
        match data_type {
            DataType::Fp64 => f64::from_le_bytes(eight),
            DataType::Fp32 => f64::from(f32::from_bits(u32::from_le_bytes([eight[0], eight[1], eight[2], eight[3]]))),
            DataType::Fp16 => half::f16::from_le_bytes([eight[0], eight[1]]).to_f64(),
            DataType::Bf16 => half::bf16::from_le_bytes([eight[0], eight[1]]).to_f64(),
            _ => u64::from_le_bytes(eight) as f64,
        }
    };
    bytes.chunks_exact(size).map(number).collect()
}

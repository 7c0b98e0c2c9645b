//! The inputs of the rows of a run: random values of requests, states, and the inputs that the binding generates. Also
//! compares two results of a row.

use rows::tensor::{DataType, Dims, Gap, element_count};

use crate::binding::{
    Binding, BoundControl, BoundInput, BoundState, Flag, Generated, InitialContent, InputAxis, RowValues, Source,
};
use crate::memory::Bytes;
use crate::session::Given;

pub const SEQUENCES: usize = 3;
pub const INFERENCES: usize = 3;
/// The values of the rows of a run.
const SCALES: [Scale; SEQUENCES] = [Scale::Small, Scale::Zero, Scale::Large];

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

/// The allowed difference of two values: a share of the largest value, and a share of the largest input.
const fn rounding(data_type: DataType) -> (f64, f64) {
    match data_type {
        DataType::Fp64 | DataType::Fp32 => (1e-3, 1e-6),
        DataType::Fp16 => (1e-2, 1e-3),
        DataType::Bf16 => (5e-2, 1e-2),
        _ => (0.0, 0.0),
    }
}

/// The first difference of more than rounding between the results of a row in a run of its own and in one that it
/// shared. `largest_input` is the largest number of what the row brought: where such numbers cancel, their rounding is
/// left.
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
            // A `>` would be wrong: the difference of a number and NaN, or of two infinities, is NaN.
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

/// One row of an input: dims with 1 for the batch axis, and row-major elements.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub dims: Vec<i64>,
    pub bytes: Vec<u8>,
}

/// A sequence and its progress.
pub struct Sequence {
    pub number: usize,
    pub inferences: usize,
    pub states: Vec<Tensor>,
    pub counts: Vec<u64>,
}

impl Sequence {
    pub fn new(binding: &Binding, number: usize) -> Self {
        let first = |(index, state): (usize, &BoundState)| {
            let dims = state.initial.dims.clone();
            let count = element_count(&dims).unwrap_or(0);
            let bytes = match &state.initial.content {
                InitialContent::Bytes(bytes) => bytes.clone(),
                InitialContent::Model if is_float(state.data_type) => {
                    random(state.data_type, count, Scale::One, &[0, index, number])
                }
                InitialContent::Zeros | InitialContent::Strings(_) | InitialContent::Model => {
                    vec![0; count * state.data_type.byte_size().unwrap_or(0)]
                }
            };
            Tensor { dims, bytes }
        };
        let states = binding.states.iter().enumerate().map(first).collect();
        Self { number, inferences: 0, states, counts: vec![0; binding.counters.len()] }
    }
}

impl Tensor {
    /// The rows, for a run.
    pub fn lent(&self) -> Given<'_> {
        Given::Lent { dims: &self.dims, bytes: Bytes::Host(&self.bytes) }
    }

    /// Fills a row up with zeros after its elements.
    pub fn fill_up(&mut self, data_type: DataType, dims: &[i64]) {
        let size = data_type.byte_size().unwrap_or(1);
        for (axis, &to) in dims.iter().enumerate() {
            let from = self.dims[axis];
            if from == to {
                continue;
            }
            let inner = element_count(&self.dims[axis + 1..]).unwrap_or(0) * size;
            let mut bytes = Vec::new();
            for part in self.bytes.chunks_exact((inner * from as usize).max(1)) {
                bytes.extend_from_slice(part);
                bytes.resize(bytes.len() + inner * (to - from) as usize, 0);
            }
            (self.bytes, self.dims[axis]) = (bytes, to);
        }
    }
}

/// The scale of an inference, if each sequence begins `delay` rounds after the one before. The rows of a round have
/// different scales. Large values come late, because a state that has become large hides what small values do to it.
const fn scale_of(number: usize, inference: usize, delay: usize) -> Scale {
    SCALES[(inference + number * (1 - delay)) % SCALES.len()]
}

pub struct Inputs<'a> {
    binding: &'a Binding,
    /// Elements along open dimensions of requests.
    pub length: i64,
    /// Large values have the opposite signs, so that a condition on all rows is true once and false once. Small values
    /// are larger, so that limits for values of usual size are passed once and not passed once.
    pub is_second: bool,
}

impl<'a> Inputs<'a> {
    pub const fn new(binding: &'a Binding) -> Self {
        Self { binding, length: 0, is_second: false }
    }

    /// How many rounds a sequence begins after the one before.
    pub fn delay(&self) -> usize {
        usize::from(!self.binding.has_varying_states())
    }

    /// An input of one row; `None` if the model has a value of its own.
    pub fn of_row(&self, index: usize, row: &Sequence) -> Option<Tensor> {
        let input = &self.binding.inputs[index];
        let mut dims: Vec<i64> = input.dims.iter().map(|&dim| if dim < 0 { 1 } else { dim }).collect();
        if let Some(axis) = input.batch_axis {
            dims[axis] = 1;
        }
        let repeated = |dims: Vec<i64>, element: &[u8]| {
            let bytes = element.repeat(element_count(&dims).unwrap_or(0));
            Tensor { dims, bytes }
        };
        let size = input.data_type.byte_size().unwrap_or(1);
        Some(match &input.source {
            Source::State(state) => row.states[*state].clone(),
            Source::Request(request) if request.optional => return None,
            Source::Request(_) => self.random(index, row),
            Source::Constant(bytes) => Tensor { dims, bytes: bytes.clone() },
            Source::Lengths { of } => repeated(dims, &self.ragged_length(*of, row)?.to_le_bytes()[..size.min(8)]),
            Source::Control(BoundControl::Flag { flag, no, yes }) => {
                let is_set = match flag {
                    Flag::Start => row.inferences == 0,
                    Flag::End => row.inferences == INFERENCES - 1,
                    Flag::Ready => true,
                };
                repeated(dims, if is_set { yes } else { no })
            }
            Source::Control(BoundControl::CorrelationId(_)) => {
                repeated(dims, &(row.number as u64 + 1).to_le_bytes()[..size.min(8)])
            }
            Source::Generated(generated) => self.generated(input, generated, row, dims),
        })
    }

    fn generated(&self, input: &BoundInput, generated: &Generated, row: &Sequence, mut dims: Vec<i64>) -> Tensor {
        let dim = |dims: &[i64], axis: usize| dims.get(axis).map_or(0, |&dim| usize::try_from(dim).unwrap_or(0));
        let values = RowValues::new(
            generated,
            &self.binding.states,
            |counter| row.counts.get(counter).copied().unwrap_or(0),
            |of| dim(&row.states[of.state].dims, of.axis),
            |of| self.own_length(row, of),
            Gap::NONE,
        );
        if let Some(axis) = generated.axis {
            dims[axis] = values.count() as i64;
        }
        let mut bytes = Vec::new();
        let row_bytes = element_count(&dims).unwrap_or(0) * input.data_type.byte_size().unwrap_or(1);
        values.append_row(generated, input.data_type, values.count(), row_bytes, &mut bytes);
        Tensor { dims, bytes }
    }

    /// Dims of what a row brings, with its context.
    pub fn random_dims(&self, index: usize, row: &Sequence) -> Vec<i64> {
        let input = &self.binding.inputs[index];
        let Source::Request(request) = &input.source else { return input.dims.clone() };
        let length = |axis: usize| {
            let multiple = request.steps_multiple.filter(|of| of.axis == axis).map_or(1, |of| of.multiple.get() as i64);
            // Rows that may have different lengths have them. One is long, so that wide filters reach the padding.
            let more = if request.is_padded && request.ragged_axis == Some(axis) { [7, 0, 38][row.number] } else { 0 };
            let context = request.context.filter(|of| of.axis == axis).map_or(0, |of| of.length as i64);
            context + multiple * (self.length + more)
        };
        let dim = |(axis, &dim): (usize, &i64)| match dim {
            _ if Some(axis) == input.batch_axis => 1,
            dim if dim < 0 => length(axis),
            dim => dim,
        };
        input.dims.iter().enumerate().map(dim).collect()
    }

    /// The length of a row's input along its ragged axis. `None` if requests don't bring the input.
    pub fn ragged_length(&self, index: usize, row: &Sequence) -> Option<i64> {
        let Source::Request(request) = &self.binding.inputs[index].source else { return None };
        Some(self.random_dims(index, row)[request.ragged_axis.unwrap_or(0)])
    }

    fn random(&self, index: usize, row: &Sequence) -> Tensor {
        let input = &self.binding.inputs[index];
        let dims = self.random_dims(index, row);
        // Without a batch axis, the rows share the value.
        let (number, inference) = if input.batch_axis.is_some() { (row.number, row.inferences) } else { (0, 0) };
        let scale = match scale_of(number, inference, self.delay()) {
            _ if input.batch_axis.is_none() => Scale::One,
            Scale::Large if self.is_second => Scale::Negated,
            Scale::Small if self.is_second => Scale::One,
            scale => scale,
        };
        let count = element_count(&dims).unwrap_or(0);
        let bytes = random(input.data_type, count, scale, &[1, index, number, inference]);
        Tensor { dims, bytes }
    }

    /// What a request brings along an axis of an input.
    pub fn own_length(&self, row: &Sequence, of: InputAxis) -> usize {
        let dim = self.random_dims(of.input, row).get(of.axis).copied().unwrap_or(0);
        let context = match &self.binding.inputs[of.input].source {
            Source::Request(request) => request.context.filter(|context| context.axis == of.axis),
            _ => None,
        };
        usize::try_from(dim).unwrap_or(0).saturating_sub(context.map_or(0, |context| context.length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rows_of_a_run_have_different_scales() {
        for delay in [0, 1] {
            for round in 0..INFERENCES + (SEQUENCES - 1) * delay {
                let live = (0..SEQUENCES).filter_map(|number| Some((number, round.checked_sub(number * delay)?)));
                let live = live.filter(|(_, inference)| *inference < INFERENCES);
                let scales: Vec<Scale> = live.map(|(number, of)| scale_of(number, of, delay)).collect();
                let is_first =
                    |(at, scale): (usize, &Scale)| scales.iter().position(|other| other == scale) == Some(at);
                assert!(scales.iter().enumerate().all(is_first), "round {round}, delay {delay}: {scales:?}");
                assert!(scales.len() < SEQUENCES || scales.contains(&Scale::Large));
            }
        }
    }
}

//! What the rows of a run read: random values of requests, states, and what the binding generates.

use rows::tensor::{DataType, Gap, element_count};

use super::data::{Scale, is_float, random};
use crate::binding::{
    Binding, BoundControl, BoundInput, BoundState, Flag, Generated, InitialContent, InputAxis, RowValues, Source,
};
use crate::memory::Bytes;
use crate::session::Given;

pub const SEQUENCES: usize = 3;
pub const INFERENCES: usize = 3;
/// The values of the rows of a run.
const SCALES: [Scale; SEQUENCES] = [Scale::Small, Scale::Zero, Scale::Large];

/// One row of an input: dims with 1 for the batch axis, and row-major elements.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub dims: Vec<i64>,
    pub bytes: Vec<u8>,
}

/// A sequence, as far as it has come.
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

    /// Fills a row up with zeros behind its elements.
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

/// The scale of an inference, if each sequence begins `delay` rounds after the one before. The rows of a round have different
/// ones. Large values come late, because a state that has become large hides what small values do to it.
const fn scale_of(number: usize, inference: usize, delay: usize) -> Scale {
    SCALES[(inference + number * (1 - delay)) % SCALES.len()]
}

pub struct Inputs<'a> {
    binding: &'a Binding,
    /// Elements along open dimensions of requests.
    pub length: i64,
    /// Large values have the other signs, so that a condition on all rows is once true and once false; and small ones are
    /// larger, so that limits for values of usual size are passed once and not passed once.
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
            Source::Lengths { of } => repeated(dims, &self.ragged_length(*of, row).to_le_bytes()[..size.min(8)]),
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

    /// What a row brings of an input along the axis in which rows may differ.
    pub fn ragged_length(&self, index: usize, row: &Sequence) -> i64 {
        let axis = match &self.binding.inputs[index].source {
            Source::Request(request) => request.ragged_axis.unwrap_or(0),
            _ => 0,
        };
        self.random_dims(index, row)[axis]
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

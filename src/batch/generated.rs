//! Generated inputs: the values of a row, and how they stand in the tensor of a batch.

use rows::copies;
use rows::tensor::{Gap, RowAt, RowLayout, StorageType};

use super::{Counted, Row};
use crate::binding::{
    Binding, BoundInput, Counter, Generated, GrowingAxis, InputAxis, RowValues, Source, generated_value, largest_whole,
};
use crate::error::{InputError, RequestError};
use crate::session::Step;

/// The values of a row whose counters and lengths are known. `gap` is the padding of its padded states.
pub fn row_values(generated: &Generated, binding: &Binding, row: &Row, gap: Gap) -> RowValues {
    let count = |counter: usize| row.counted.as_ref().map_or(0, |counted| counted.count(counter));
    let past = |of: GrowingAxis| {
        let dims = row.state.dims.get(of.beside).map_or(&[][..], Vec::as_slice);
        dims.get(of.axis).map_or(0, |&dim| usize::try_from(dim).unwrap_or(0))
    };
    let new = |of: InputAxis| own_length(binding, row, of);
    RowValues::new(generated, &binding.states, count, past, new, gap)
}

/// Notes what the sequence of a row has counted. Fails if the type of a generated input cannot hold the row's values.
pub fn note_counts(binding: &Binding, row: &mut Row, counts: Vec<u64>) -> Result<(), InputError> {
    row.counted = Some(Box::new(Counted { counts, shared_values: Vec::new() }));
    let shared = binding.generated().filter(|(input, _)| input.batch_axis.is_none());
    let values = shared.map(|(_, generated)| row_values(generated, binding, row, Gap::NONE)).collect();
    if let Some(counted) = &mut row.counted {
        counted.shared_values = values;
    }
    for (input, generated) in binding.generated() {
        let RowValues::Numbers { first, count } = row_values(generated, binding, row, Gap::NONE) else { continue };
        let Some(last) = (count as u64).checked_sub(1).map(|behind| first.saturating_add(behind)) else { continue };
        let (value, most) = (generated_value(generated, last), largest_whole(input.data_type));
        if value > i128::from(most) {
            let (name, written, data_type) = (input.name.clone(), generated.written.clone(), input.data_type);
            return Err(InputError::GeneratedTooLarge { name, written, value, data_type, most });
        }
    }
    Ok(())
}

/// What a row has in the generated inputs that the whole batch shares.
pub fn shared_values(row: &Row) -> &[RowValues] {
    row.counted.as_ref().map_or(&[], |counted| &counted.shared_values)
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
    let longest = values.iter().map(|values| values.count()).max().unwrap_or(0);
    if let Some(axis) = generated.axis {
        dims[axis] = longest as i64;
    }
    let layout = layout(input, &dims)?;
    let rows = values.len();
    let buffer = step.input(index, &dims, rows)?;
    let mut row = Vec::with_capacity(layout.row_bytes());
    for (position, values) in values.iter().enumerate() {
        row.clear();
        values.append_row(generated, input.data_type, longest, layout.row_bytes(), &mut row);
        copies::put(&layout.row(RowAt { position, rows }), StorageType::Exact, &row, buffer);
    }
    Ok(())
}

pub(super) fn layout(input: &BoundInput, dims: &[i64]) -> Result<RowLayout, InputError> {
    RowLayout::new(input.data_type, dims, input.batch_axis).ok_or_else(|| wrong_shape(input, dims))
}

pub(super) fn wrong_shape(input: &BoundInput, dims: &[i64]) -> InputError {
    InputError::Shape { name: input.name.clone(), came: dims.to_vec(), wanted: input.dims.clone() }
}

/// The elements of a request along an axis of an input; 0 if it leaves the input out.
fn own_length(binding: &Binding, row: &Row, of: InputAxis) -> usize {
    let Source::Request(request) = &binding.inputs[of.input].source else { return 0 };
    row.request.input(request.position).map_or(0, |sent| request.own_length(sent.dims(), of.axis))
}

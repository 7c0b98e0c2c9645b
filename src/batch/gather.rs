//! Rows into the inputs of a step.

use super::Row;
use crate::binding::{Binding, BoundControl, BoundInput, Flag, ShapeForm, Source, Stored};
use crate::error::Error;
use crate::memory::rows::{self, RowWriter};
use crate::memory::strings::{self, Strings};
use crate::sequence::SequenceId;
use crate::session::Step;
use crate::tensor::{DataType, RowLayout};

/// Fills every input of the step, for `places` rows, from the rows of the batch, which all have the same shapes. Places
/// beyond the batch repeat its first row, so that padding cannot fail where the rows do not.
pub fn gather(binding: &Binding, batch: &[Row], places: usize, step: &mut Step) -> Result<(), Error> {
    let mut request_input = 0;
    let batch = Padded { batch, places };
    for (index, input) in binding.inputs.iter().enumerate() {
        match &input.source {
            Source::Request(form) => {
                requests(step, index, input, *form, batch, request_input)?;
                request_input += 1;
            }
            Source::State(number) => states(step, index, input, binding, *number, batch)?,
            Source::Control(kind) => controls(step, index, input, kind, batch)?,
            Source::Constant(bytes) => constant(step, index, input, bytes, places)?,
        }
    }
    Ok(())
}

#[derive(Clone, Copy)]
struct Padded<'a> {
    batch: &'a [Row],
    places: usize,
}

impl<'a> Padded<'a> {
    fn rows(self) -> impl Iterator<Item = &'a Row> {
        self.batch.iter().chain(std::iter::repeat(&self.batch[0])).take(self.places)
    }
}

/// Whether two rows can run together: the same shape in every input.
pub fn same_shapes(a: &Row, b: &Row, inputs: usize) -> bool {
    (0..inputs).all(|index| a.request.input(index).dims() == b.request.input(index).dims())
}

fn requests(
    step: &mut Step,
    index: usize,
    input: &BoundInput,
    form: ShapeForm,
    batch: Padded,
    position: usize,
) -> Result<(), Error> {
    let dims = match form {
        ShapeForm::Plain => batch.batch[0].request.input(position).dims(),
        ShapeForm::BatchInside => &batch.batch[0].request.input(position).dims()[1..],
    };
    let rows = batch.places;
    let layout = layout(input, dims)?;
    if input.data_type == DataType::Bytes {
        let mut all = Strings::new();
        for (place, row) in batch.rows().enumerate() {
            // Decoding has read them once already.
            let elements = strings::read(row.request.input(position).pieces()).unwrap_or_default();
            strings::put(layout, &elements, &mut all, place, rows);
        }
        return Ok(step.set_strings(index, dims, rows, &all)?);
    }
    let buffer = step.input(index, dims, rows)?;
    for (place, row) in batch.rows().enumerate() {
        let mut writer = RowWriter::new(layout, buffer, place, rows);
        row.request.input(position).pieces().for_each(|piece| writer.write(piece));
        writer.finish();
    }
    Ok(())
}

fn states(
    step: &mut Step,
    index: usize,
    input: &BoundInput,
    binding: &Binding,
    number: usize,
    batch: Padded,
) -> Result<(), Error> {
    let (state, layout) = (&binding.states[number], binding.states[number].layout);
    let (offset, rows) = (binding.slot.offset(number), batch.places);
    if let Stored::Strings(kept) = state.stored {
        let mut all = vec![Vec::new(); layout.row_bytes() * rows];
        for (place, row) in batch.rows().enumerate() {
            if let Some(lease) = row.lease.as_ref().filter(|_| !row.is_fresh()) {
                strings::put(layout, &lease.strings()[kept], &mut all, place, rows);
            }
        }
        return Ok(step.set_strings(index, &input.dims, rows, &all)?);
    }
    let buffer = step.input(index, &input.dims, rows)?;
    for (place, row) in batch.rows().enumerate() {
        let Some(lease) = row.lease.as_ref().filter(|_| !row.is_fresh()) else {
            rows::zero(layout, buffer, place, rows);
            continue;
        };
        let kept = &lease.state()[offset..offset + state.stored_bytes()];
        match state.stored {
            Stored::Fp16 => rows::put_widened(layout, kept, buffer, place, rows),
            Stored::Exact | Stored::Strings(_) => rows::put(layout, kept, buffer, place, rows),
        }
    }
    Ok(())
}

fn controls(
    step: &mut Step,
    index: usize,
    input: &BoundInput,
    control: &BoundControl,
    batch: Padded,
) -> Result<(), Error> {
    if input.data_type == DataType::Bytes {
        let ids = batch.rows().map(|row| row.key.as_ref().map(|key| key.id.to_bytes()).unwrap_or_default());
        return Ok(step.set_strings(index, &input.dims, batch.places, &ids.collect::<Strings>())?);
    }
    let buffer = step.input(index, &input.dims, batch.places)?;
    let element = buffer.len() / batch.places;
    for (place, row) in buffer.chunks_exact_mut(element).zip(batch.rows()) {
        match control {
            BoundControl::Flag { flag, no, yes } => {
                let says_yes = match flag {
                    // A request without a sequence runs as the start of one.
                    Flag::Start => row.is_fresh(),
                    Flag::End => row.end,
                    Flag::Ready => true,
                };
                place.copy_from_slice(if says_yes { yes } else { no });
            }
            BoundControl::CorrelationId(_) => {
                place.copy_from_slice(&correlation_id(row.key.as_ref().map(|key| &key.id))[..element])
            }
        }
    }
    Ok(())
}

/// The sequence id as little-endian bytes; 32-bit types take the lower half, as from Triton itself. Strings were
/// refused when they were decoded.
fn correlation_id(id: Option<&SequenceId>) -> [u8; 8] {
    match id {
        Some(SequenceId::Number(number)) => number.to_le_bytes(),
        Some(SequenceId::Name(_)) | None => [0; 8],
    }
}

fn constant(step: &mut Step, index: usize, input: &BoundInput, bytes: &[u8], rows: usize) -> Result<(), Error> {
    let buffer = step.input(index, &input.dims, rows)?;
    match input.batch_axis {
        None => buffer.copy_from_slice(bytes),
        Some(_) => {
            let layout = layout(input, &input.dims)?;
            (0..rows).for_each(|place| rows::put(layout, bytes, buffer, place, rows));
        }
    }
    Ok(())
}

fn layout(input: &BoundInput, dims: &[i64]) -> Result<RowLayout, Error> {
    RowLayout::new(input.data_type, dims, input.batch_axis).ok_or_else(|| Error::InputShape {
        name: input.name.clone(),
        came: dims.to_vec(),
        wanted: input.dims.clone(),
    })
}

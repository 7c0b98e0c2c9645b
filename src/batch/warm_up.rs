//! A batch of no requests: what ONNX Runtime does once for each shape is done before the first client waits for it.

use rows::tensor::DataType;

use super::gather::constant;
use super::generated;
use crate::binding::{Binding, BoundControl, Flag, Source};
use crate::error::RequestError;
use crate::session::{Run, SessionError, Step};
use crate::store::{RowState, StateStore};

/// Runs the step over `rows` rows of zeros, each the start of a sequence. Open dimensions are 1, but for the context's
/// part.
pub fn warm_up(binding: &Binding, rows: usize, store: &mut StateStore, step: &mut Step) -> Result<(), RequestError> {
    let mut starts: Vec<_> = std::iter::repeat_with(RowState::default).take(rows).collect();
    store.load(&mut starts, rows)?;
    for (index, input) in binding.inputs.iter().enumerate() {
        match &input.source {
            Source::State(_) => {}
            Source::Constant(bytes) => constant(step, index, input, bytes, rows)?,
            Source::Generated(generated) => {
                let values = vec![generated::warm_up_values(generated, binding); rows];
                generated::fill(step, index, input, generated, &values)?;
            }
            Source::Control(BoundControl::Flag { flag, no, yes }) => {
                let element = if *flag == Flag::End { no } else { yes };
                step.input(index, &input.dims, rows)?
                    .chunks_exact_mut(element.len())
                    .for_each(|row| row.copy_from_slice(element));
            }
            Source::Request(request) if request.optional => step.omit(index),
            Source::Request(request) => {
                let context = request.context.map_or(0, |context| context.length);
                let open = |axis: usize| 1 + request.context.filter(|of| of.axis == axis).map_or(0, |_| context as i64);
                let dims: Vec<i64> =
                    input.dims.iter().enumerate().map(|(axis, &dim)| if dim < 0 { open(axis) } else { dim }).collect();
                zeros(step, index, input.data_type, &dims, rows)?;
            }
            Source::Lengths { of } => lengths(binding, *of, index, rows, step)?,
            Source::Control(BoundControl::CorrelationId(_)) => zeros(step, index, input.data_type, &input.dims, rows)?,
        }
    }
    // A graph is bound to the thread that captures it, and Triton loads a model on another thread.
    Ok(step.run(Run { as_graph: false, ..store.run(&starts, rows, &[]) })?)
}

fn zeros(step: &mut Step, index: usize, data_type: DataType, dims: &[i64], rows: usize) -> Result<(), SessionError> {
    if data_type != DataType::Bytes {
        step.input(index, dims, rows)?.fill(0);
        return Ok(());
    }
    step.set_strings(index, dims, rows, std::iter::empty())
}

/// Every row is as long as the input that the lengths are of.
fn lengths(binding: &Binding, of: usize, index: usize, rows: usize, step: &mut Step) -> Result<(), SessionError> {
    let (input, measured) = (&binding.inputs[index], &binding.inputs[of]);
    let Source::Request(request) = &measured.source else { return Ok(()) };
    let length = request.ragged_axis.map_or(0, |axis| match (measured.dims[axis], request.context) {
        (-1, Some(context)) => 1 + context.length as u64,
        (-1, None) => 1,
        (dim, _) => dim as u64,
    });
    let element = input.data_type.byte_size().unwrap_or(1);
    let bytes = length.to_le_bytes();
    step.input(index, &input.dims, rows)?
        .chunks_exact_mut(element)
        .for_each(|row| row.copy_from_slice(&bytes[..element]));
    Ok(())
}

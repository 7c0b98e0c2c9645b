//! Rows of the outputs into responses, and into the slots.

use std::ffi::CString;

use super::Row;
use crate::binding::{Binding, BoundOutput, Stored};
use crate::error::Error;
use crate::memory::{rows, strings};
use crate::session::{OutputView, Step};
use crate::tensor::{DataType, RowLayout};
use crate::triton::{Request, Response, c_name};

/// The outputs of a run, taken apart into rows.
pub struct Answers<'a> {
    outputs: Vec<Answer<'a>>,
    rows: usize,
}

struct Answer<'a> {
    bound: &'a BoundOutput,
    name: CString,
    view: OutputView<'a>,
    layout: RowLayout,
    /// Shape of the output in a response.
    dims: Vec<i64>,
}

impl<'a> Answers<'a> {
    /// Reads the outputs of a run over `rows` rows.
    pub fn new(binding: &'a Binding, step: &'a Step, rows: usize) -> Result<Self, Error> {
        let outputs =
            binding.outputs.iter().enumerate().map(|(index, bound)| Answer::new(bound, step.output(index)?, rows));
        let outputs = outputs.collect::<Result<Vec<Answer>, _>>()?;
        // Where the model left a state's shape open, this is the first time to see it.
        match binding.states.iter().find(|state| outputs[state.output].layout != state.layout) {
            None => Ok(Self { outputs, rows }),
            Some(state) => Err(outputs[state.output].uneven(rows)),
        }
    }

    /// The response for the row at `place`, with the outputs that its request wants.
    pub fn response(&self, place: usize, request: &Request) -> Result<Response, Error> {
        let mut response = request.response()?;
        for index in 0..request.output_count()? {
            let name = request.output_name(index)?;
            let wanted = self.outputs.iter().find(|answer| answer.bound.name == name && answer.bound.is_response);
            let answer = wanted.ok_or_else(|| Error::UnknownOutput(name.to_owned()))?;
            if answer.bound.data_type == DataType::Bytes {
                let bytes = strings::write(&strings::take(answer.layout, answer.view.strings, place, self.rows));
                let buffer = response.output(&answer.name, DataType::Bytes, &answer.dims, bytes.len())?;
                buffer.copy_from_slice(&bytes);
                continue;
            }
            let bytes = answer.layout.row_bytes();
            let buffer = response.output(&answer.name, answer.bound.data_type, &answer.dims, bytes)?;
            rows::take(answer.layout, answer.view.bytes, place, self.rows, buffer);
        }
        Ok(response)
    }

    /// Keeps the new state of the row at `place` in its slot.
    pub fn keep_state(&self, binding: &Binding, place: usize, row: &mut Row) {
        let Some(lease) = &mut row.lease else { return };
        if lease.ends() {
            return;
        }
        lease.advance(|slot| {
            for (number, state) in binding.states.iter().enumerate() {
                let offset = binding.slot.offset(number);
                let view = &self.outputs[state.output].view;
                let kept = offset..offset + state.stored_bytes();
                match state.stored {
                    Stored::Exact => {
                        rows::take(state.layout, view.bytes, place, self.rows, &mut slot.bytes_mut()[kept])
                    }
                    Stored::Fp16 => {
                        rows::take_narrowed(state.layout, view.bytes, place, self.rows, &mut slot.bytes_mut()[kept])
                    }
                    Stored::Strings(kept) => {
                        slot.strings_mut()[kept] = strings::take(state.layout, view.strings, place, self.rows)
                    }
                }
            }
        });
    }
}

/// A response with the outputs that the request wants, none of them with an element.
pub fn empty_response(binding: &Binding, request: &Request) -> Result<Response, Error> {
    let mut response = request.response()?;
    for index in 0..request.output_count()? {
        let name = request.output_name(index)?;
        let wanted = binding.outputs.iter().find(|output| output.name == name && output.is_response);
        let output = wanted.ok_or_else(|| Error::UnknownOutput(name.to_owned()))?;
        response.output(&c_name(name), output.data_type, &output.empty_dims, 0)?;
    }
    Ok(response)
}

impl<'a> Answer<'a> {
    fn new(bound: &'a BoundOutput, view: OutputView<'a>, rows: usize) -> Result<Self, Error> {
        let uneven = || Error::OutputRows { name: bound.name.clone(), dims: view.dims.to_vec(), rows };
        if bound.batch_axis.is_some_and(|axis| view.dims.get(axis) != Some(&(rows as i64))) {
            return Err(uneven());
        }
        let layout = RowLayout::new(bound.data_type, view.dims, bound.batch_axis).ok_or_else(uneven)?;
        let mut dims = view.dims.to_vec();
        if let Some(axis) = bound.batch_axis {
            dims[axis] = 1;
        }
        Ok(Self { name: c_name(&bound.name), bound, view, layout, dims })
    }

    fn uneven(&self, rows: usize) -> Error {
        Error::OutputRows { name: self.bound.name.clone(), dims: self.view.dims.to_vec(), rows }
    }
}

//! Reads a request's id, START and END, if this backend schedules the sequences: from Triton's request parameters, or
//! from the special inputs of OpenVINO Model Server (`sequence_id` and `sequence_control_input`).

use std::ffi::CString;

use sequences::SequenceId;
use sequences::scheduler::{Control, Origin};
use smallvec::SmallVec;

use crate::config::{CONTROL_INPUT, ID_TENSOR, TakesIds};
use crate::error::{AdmissionError, InputError, RequestError};
use crate::triton::{Request, c_name};

pub struct ControlReader {
    /// The special inputs that the configuration lists, the id first.
    names: Vec<CString>,
    takes: TakesIds,
    /// Most inputs that a request can have without a special one.
    inputs: usize,
}

/// The ids and the controls in a request's special inputs, by row; `None` if it doesn't have the input.
type Special = (Option<Vec<u64>>, Option<Vec<u32>>);

impl ControlReader {
    /// `inputs`: number of the other inputs that every request must carry.
    pub fn new(takes: TakesIds, inputs: usize) -> Self {
        let names = [(takes.id, ID_TENSOR), (takes.control, CONTROL_INPUT)];
        Self { names: names.into_iter().filter(|(is, _)| *is).map(|(_, name)| c_name(name)).collect(), takes, inputs }
    }

    /// The control of each row of a request. Checks in the order of OpenVINO Model Server: the special inputs, the
    /// control value, the id.
    pub fn read(&self, request: &mut Request) -> Result<SmallVec<[Control; 1]>, RequestError> {
        let (start, end) = request.start_and_end()?;
        let id = request.sequence_id()?;
        // Looking for the special inputs costs an error object of core's for each one that isn't there.
        let is_plain = id.is_some() && request.input_count()? as usize <= self.inputs;
        let (ids, controls) = if is_plain { Special::default() } else { self.special(request)? };
        let rows = ids.as_ref().map(Vec::len).or(controls.as_ref().map(Vec::len)).unwrap_or(1);
        let parameters = Control { id, start, end, origin: Origin::Own };
        let row = |row: usize| {
            let id = ids.as_ref().map(|ids| ids.get(row).copied().unwrap_or(0));
            let control = controls.as_ref().map(|controls| controls.get(row).copied().unwrap_or(0));
            of_row(&parameters, id.filter(|&id| id != 0), control)
        };
        Ok((0..rows).map(row).collect::<Result<_, _>>()?)
    }

    fn special(&self, request: &mut Request) -> Result<Special, RequestError> {
        if self.names.is_empty() {
            return Ok(Special::default());
        }
        request.bind_inputs(&self.names)?;
        let (mut ids, mut controls) = Special::default();
        if self.takes.id {
            ids = elements(request, 0, ID_TENSOR)?.map(|ids| ids.into_iter().map(u64::from_ne_bytes).collect());
        }
        if self.takes.control {
            let read = elements(request, usize::from(self.takes.id), CONTROL_INPUT)?;
            controls = read.map(|read| read.into_iter().map(u32::from_ne_bytes).collect());
        }
        match controls.iter().flatten().find(|&&control| control > 2) {
            Some(&control) => Err(AdmissionError::Control(control).into()),
            None => Ok((ids, controls)),
        }
    }
}

/// Joins the request parameters with the special inputs of a row. Fails if they differ.
fn of_row(parameters: &Control, id: Option<u64>, control: Option<u32>) -> Result<Control, AdmissionError> {
    let id = id.map(SequenceId::Number);
    if let (Some(by_parameter), Some(by_input)) = (&parameters.id, &id)
        && by_parameter != by_input
    {
        let (parameter, input) = (by_parameter.to_string(), by_input.to_string());
        return Err(AdmissionError::IdConflict { what: ID_TENSOR, parameter, input });
    }
    let by_parameters = (parameters.start, parameters.end);
    let (start, end) = control.map_or(by_parameters, |control| (control == 1, control == 2));
    if by_parameters != (false, false) && by_parameters != (start, end) {
        let parameter = match by_parameters {
            (true, true) => "START and END",
            (true, false) => "START",
            _ => "END",
        };
        let (parameter, input) = (parameter.to_owned(), control.unwrap_or(0).to_string());
        return Err(AdmissionError::IdConflict { what: CONTROL_INPUT, parameter, input });
    }
    let id = parameters.id.clone().or(id);
    if id.is_none() && !start {
        return Err(AdmissionError::IdNotProvided);
    }
    Ok(Control { id, start, end, origin: Origin::Own })
}

/// The elements of bound input number `index`, one for each row; `None` if the request doesn't have it. Core has
/// checked its type against the configuration, whose type was checked at load.
fn elements<const N: usize>(
    request: &mut Request,
    index: usize,
    name: &'static str,
) -> Result<Option<Vec<[u8; N]>>, RequestError> {
    let Some(input) = request.input(index) else { return Ok(None) };
    let came = input.dims().to_vec();
    let bytes = input.bytes();
    if bytes == 0 || came.first() != Some(&((bytes / N) as i64)) {
        return Err(AdmissionError::TensorShape { name, came }.into());
    }
    // The client may have it in memory of a GPU.
    request.copy_input(index).map_err(|error| InputError::not_copied(name, error))?;
    let mut copied = Vec::with_capacity(bytes);
    request.input(index).into_iter().flat_map(|input| input.pieces()).for_each(|piece| piece.append_to(&mut copied));
    Ok(Some(copied.chunks_exact(N).map(|chunk| chunk.try_into().unwrap_or([0; N])).collect()))
}

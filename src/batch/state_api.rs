//! What a request asks of the State API: its parameters and tensors, read and checked.

use std::borrow::Cow;
use std::ffi::CString;

use rows::reserve;
use rows::tensor::{DataType, dims_fit, element_count};
use sequences::SequenceId;
use serde_json::json;

use super::outputs::deliver;
use crate::binding::{Binding, BoundState, Initial, InitialContent, StateApi, StateTensor};
use crate::config::{STATE_INFO, STATE_PREFIX, STATE_SNAPSHOT};
use crate::error::{InputError, RequestError, StateApiError};
use crate::snapshot::{self, Snapshot};
use crate::triton::{HeldElements, Input, ParameterValue, Request, Response, echo};

/// Reads the value of a parameter, whose name is given too, into what a request asks for.
type Read = fn(&mut StateRequest, &StateApi, &str, ParameterValue) -> Result<(), StateApiError>;

const PARAMETERS: [(&str, Read); 11] = [
    ("clone_of", |asked, _, name, value| sequence(name, value).map(|id| asked.clone_of = Some(id))),
    ("commit", |asked, _, name, value| flag(name, value).map(|commits| asked.discards = !commits)),
    ("delete", |asked, _, name, value| flag(name, value).map(|deletes| asked.delete = deletes)),
    // Without START and id, `StateReader::drains` reads it.
    (DRAIN, |_, _, _, _| {
        Err(conflict(
            "'drain' concerns all sequences of a model that this backend schedules: leave out START and the sequence id",
        ))
    }),
    ("get_state", |asked, api, name, value| states(api, name, value).map(|states| asked.get = states)),
    ("query_state", |asked, _, name, value| flag(name, value).map(|queries| asked.query = queries)),
    ("reset_state", |asked, api, name, value| {
        asked.reset = states(api, name, value)?;
        asked.resets_all = matches!(flag(name, value), Ok(true));
        Ok(())
    }),
    ("resume", |asked, _, name, value| flag(name, value).map(|resumes| asked.resume = resumes)),
    ("sequence_left", |asked, _, name, value| {
        number(name, value, "a number of elements, 0 or more, is expected").map(|left| asked.left = Some(left))
    }),
    ("sequence_step", |asked, _, name, value| {
        number(name, value, "a number of steps, 0 or more, is expected").map(|step| asked.step = Some(step))
    }),
    ("snapshot", |asked, _, name, value| flag(name, value).map(|snapshot| asked.snapshot = snapshot)),
];

/// A parameter of a request that concerns all sequences of the model, and no single one.
const DRAIN: &str = "drain";

/// Digits of the largest number of steps.
const MOST_DIGITS: usize = 20;

#[derive(Default)]
pub struct StateRequest {
    pub get: Vec<usize>,
    pub query: bool,
    pub snapshot: bool,
    pub reset: Vec<usize>,
    /// All states are reset, and with them the contexts.
    pub resets_all: bool,
    /// New values, by state; empty if there are none.
    pub set: Vec<Option<Initial>>,
    pub restore: Option<Box<Snapshot>>,
    /// Whose state the sequence begins with.
    pub clone_of: Option<SequenceId>,
    pub resume: bool,
    pub discards: bool,
    pub delete: bool,
    /// How many steps the sequence must have made.
    pub step: Option<u64>,
    /// How many elements of the first input that is cut the sequence must have left over.
    pub left: Option<u64>,
    pub progress: Progress,
}

/// What becomes of a request of the State API on its way.
#[derive(Default)]
pub struct Progress {
    /// The request carries inputs of the model, so it runs.
    pub runs: bool,
    /// The lane of [`StateRequest::clone_of`], if this backend schedules the sequences.
    pub clone_lane: Option<u32>,
    /// It is a START whose sequence had its state before the run.
    pub began: bool,
    /// It is a START, but its sequence goes on from the state of another one, or from states that the request brings.
    pub goes_on: bool,
    /// The run begins the sequence again: all states are reset.
    pub restarts: bool,
    /// The sequence ends when the state has been read.
    pub ends: bool,
}

pub struct StateReader {
    api: Option<StateApi>,
    /// The tensors that requests may carry: those of states, and behind them the snapshot.
    names: Vec<CString>,
    inputs: usize,
}

impl StateReader {
    pub fn new(api: Option<StateApi>, binding: &Binding) -> Self {
        let names = api.iter().flat_map(|api| {
            let states = api.states.iter().map(|state| state.c_name.clone());
            states.chain(std::iter::once(api.snapshot.clone()))
        });
        Self { names: names.collect(), inputs: binding.request_inputs().count(), api }
    }

    /// Whether a request asks that all sequences leave the server; `None` if it has no such parameter.
    pub fn drains(&self, request: &Request) -> Option<Result<bool, StateApiError>> {
        let (name, value) = request.parameters(&[DRAIN]).next()?;
        Some(if self.api.is_some() { flag(name, value) } else { Err(StateApiError::Off(name.to_owned())) })
    }

    pub fn parameters(&self, request: &Request) -> Result<Option<Box<StateRequest>>, StateApiError> {
        let mut asked: Option<Box<StateRequest>> = None;
        let names = PARAMETERS.map(|(name, _)| name);
        for (name, value) in request.parameters(&names) {
            let Some(api) = &self.api else { return Err(StateApiError::Off(name.to_owned())) };
            if let Some((_, read)) = PARAMETERS.iter().find(|(known, _)| *known == name) {
                read(asked.get_or_insert_default(), api, name, value)?;
            }
        }
        Ok(asked)
    }

    /// Reads the tensors of the State API, after the inputs of the model have been bound. Binds them again as
    /// `inputs` says, if it had to look for others.
    pub fn tensors(
        &self,
        request: &mut Request,
        asked: &mut Option<Box<StateRequest>>,
        binding: &Binding,
        inputs: &[CString],
        start: bool,
    ) -> Result<(), RequestError> {
        let Some(api) = &self.api else { return Ok(()) };
        let bound = (0..self.inputs).filter(|&index| request.input(index).is_some()).count();
        // Core counts all inputs: those beyond the model's own may be the State API's.
        if request.input_count()? as usize > bound {
            request.bind_inputs(&self.names)?;
            let mut set: Vec<Option<Initial>> = Vec::new();
            for (index, state) in binding.states.iter().enumerate() {
                if let Some(value) = read_state(api, index, state, request)? {
                    set.resize(binding.states.len(), None);
                    set[index] = Some(value);
                }
            }
            let restore = read_snapshot(request, api.states.len(), binding)?;
            if !set.is_empty() || restore.is_some() {
                let asked = asked.get_or_insert_default();
                (asked.set, asked.restore) = (set, restore);
            }
            request.bind_inputs(inputs)?;
        }
        if let Some(asked) = asked {
            asked.progress.runs = (bound > 0 || !asked.is_operation()) && !asked.delete;
        }
        match asked {
            Some(_) if request.is_part() => Err(several_rows().into()),
            Some(asked) => Ok(asked.check(api, start)?),
            None => Ok(()),
        }
    }
}

impl StateRequest {
    /// Whether the sequence's state changes before the run, or without one.
    pub const fn changes(&self) -> bool {
        !self.set.is_empty() || !self.reset.is_empty() || self.resets_all || self.restore.is_some()
    }

    /// Whether it asks for something that takes no run.
    const fn is_operation(&self) -> bool {
        self.changes() || self.reads() || self.clone_of.is_some() || self.resume || self.delete
    }

    /// Whether the answer carries something of the state after the request.
    pub const fn reads(&self) -> bool {
        !self.get.is_empty() || self.query || self.snapshot
    }

    fn check(&self, api: &StateApi, start: bool) -> Result<(), StateApiError> {
        let set = |index: &&usize| self.set.get(**index).is_some_and(Option::is_some);
        if let Some(&both) = self.reset.iter().find(set) {
            let name = &api.states[both].name;
            return Err(conflict(format!("'reset_state' names state '{name}', but the request also sends its value")));
        }
        let origins = [self.restore.is_some(), self.clone_of.is_some(), self.resume];
        if origins.iter().filter(|is| **is).count() > 1 {
            return Err(conflict(format!(
                "a request can have only one of 'clone_of', 'resume' and input '{STATE_SNAPSHOT}'"
            )));
        }
        if !start && (self.clone_of.is_some() || self.resume) {
            return Err(conflict("'clone_of' and 'resume' need sequence_start"));
        }
        if self.delete && (self.changes() || self.clone_of.is_some() || self.discards) {
            return Err(conflict("'delete' ends the sequence, so the request cannot change its state"));
        }
        let unlisted = |name: &str, list| {
            let name = name.to_owned();
            Err(StateApiError::NotListed { name, list })
        };
        if let Some(state) = self.get.iter().map(|&index| &api.states[index]).find(|state| !state.is_output) {
            return unlisted(&state.name, "output");
        }
        if self.snapshot && !api.gives_snapshots {
            return unlisted(STATE_SNAPSHOT, "output");
        }
        if self.query && !api.gives_info {
            return unlisted(STATE_INFO, "output");
        }
        Ok(())
    }
}

pub struct StateAnswer<'a> {
    pub id: Option<&'a SequenceId>,
    pub steps: u64,
    /// Elements that are left over, if the model cuts windows.
    pub left: Option<u64>,
    /// The states that are asked for, in the order of [`StateRequest::get`].
    pub states: Vec<Initial>,
    /// The dims and the bytes of each state, if they are asked for.
    pub info: Option<Vec<(Vec<i64>, usize)>>,
    pub snapshot: Option<Snapshot>,
}

impl StateAnswer<'_> {
    pub fn answer(
        &self,
        asked: &StateRequest,
        api: &StateApi,
        binding: &Binding,
        response: &Response,
    ) -> Result<(), RequestError> {
        for (&index, value) in asked.get.iter().zip(&self.states) {
            let (bound, tensor) = (&binding.states[index], &api.states[index]);
            let dims = tensor.tensor_dims(bound, &value.dims);
            let bytes = snapshot::value_bytes(bound.data_type, value);
            let memory = response.output(&tensor.c_name, bound.data_type, &dims, bytes)?;
            // A state may be large, so its elements are copied only if they are not in this form yet.
            let elements = match &value.content {
                InitialContent::Bytes(elements) => Cow::Borrowed(elements),
                _ => {
                    let mut written = reserve(bytes)?;
                    snapshot::append(&mut written, bound.data_type, value);
                    Cow::Owned(written)
                }
            };
            deliver(&tensor.name, memory, std::iter::once(elements.as_slice()))?;
        }
        if let Some(info) = &self.info {
            let text = self.info_text(info, api, binding);
            send_element(response, STATE_INFO, &api.info, &api.one, text.as_bytes())?;
        }
        if let Some(snapshot) = &self.snapshot {
            send_element(response, STATE_SNAPSHOT, &api.snapshot, &api.one, &snapshot.encode(binding)?)?;
        }
        Ok(())
    }

    fn info_text(&self, info: &[(Vec<i64>, usize)], api: &StateApi, binding: &Binding) -> String {
        let states = binding.states.iter().zip(info).zip(&api.states);
        let state = |((bound, (dims, bytes)), tensor): ((&BoundState, &(Vec<i64>, usize)), &StateTensor)| {
            json!({
                "name": &tensor.name[STATE_PREFIX.len()..],
                "datatype": bound.data_type.protocol_name(),
                "shape": tensor.tensor_dims(bound, dims),
                "byte_size": bytes,
            })
        };
        let id = self.id.map(|id| match id {
            SequenceId::Number(number) => json!(number),
            SequenceId::Name(name) => json!(String::from_utf8_lossy(name)),
        });
        let states: Vec<_> = states.map(state).collect();
        let mut info = json!({ "sequence_id": id, "steps": self.steps, "states": states });
        if let Some(left) = self.left {
            info["left"] = json!(left);
        }
        info.to_string()
    }
}

fn send_element(
    response: &Response,
    name: &str,
    c_name: &CString,
    dims: &[i64],
    element: &[u8],
) -> Result<(), RequestError> {
    let Ok(length) = u32::try_from(element.len()) else {
        let why = format!("'{name}' would have {} bytes, but a string must be smaller than 4 GiB", element.len());
        return Err(conflict(why).into());
    };
    // In Triton's form, the length of a string is in the four bytes before it.
    let memory = response.output(c_name, DataType::Bytes, dims, element.len() + 4)?;
    Ok(deliver(name, memory, [&length.to_le_bytes()[..], element].into_iter())?)
}

fn read_state(
    api: &StateApi,
    index: usize,
    state: &BoundState,
    request: &mut Request,
) -> Result<Option<Initial>, InputError> {
    let Some(input) = request.input(index) else { return Ok(None) };
    let tensor = &api.states[index];
    let name = || tensor.name.clone();
    check_type(input, state.data_type, name)?;
    let came = input.dims().to_vec();
    if !dims_fit(&came, &tensor.dims) || !snapshot::fit_runtime(&came) {
        return Err(InputError::Shape { name: name(), came, wanted: tensor.dims.clone() });
    }
    let count = element_count(&came).unwrap_or(usize::MAX);
    if state.data_type == DataType::Bytes {
        check_strings(request, index, count, name)?;
    }
    let held = request.hold_input(index).map_err(|error| InputError::not_copied(&tensor.name, error))?;
    let content = match held.map(|held| held.elements) {
        Some(HeldElements::Strings(elements)) => InitialContent::Strings((*elements).clone()),
        Some(HeldElements::Bytes(bytes)) => {
            let wanted = count.saturating_mul(state.data_type.byte_size().unwrap_or(1));
            if bytes.len() != wanted {
                return Err(InputError::Bytes { name: name(), came: bytes.len(), wanted });
            }
            InitialContent::Bytes(bytes.to_vec())
        }
        None => return Ok(None),
    };
    Ok(Some(Initial { dims: tensor.row_dims(state, &came), content }))
}

pub(super) fn check_type(input: Input, wanted: DataType, name: impl FnOnce() -> String) -> Result<(), InputError> {
    match input.data_type() {
        Some(came) if came == wanted => Ok(()),
        came => {
            let came = came.map_or("of an unknown type".to_owned(), |data_type| data_type.to_string());
            Err(InputError::Type { name: name(), came, wanted })
        }
    }
}

pub(super) fn check_strings(
    request: &mut Request,
    index: usize,
    wanted: usize,
    name: impl Fn() -> String,
) -> Result<(), InputError> {
    match request.read_strings(index).map_err(|error| InputError::not_copied(&name(), error))? {
        Some(came) if came == wanted => Ok(()),
        came => Err(InputError::Strings { name: name(), came, wanted }),
    }
}

fn read_snapshot(
    request: &mut Request,
    index: usize,
    binding: &Binding,
) -> Result<Option<Box<Snapshot>>, RequestError> {
    let Some(input) = request.input(index) else { return Ok(None) };
    let count = element_count(input.dims()).unwrap_or(0);
    let not_copied = |error| InputError::not_copied(STATE_SNAPSHOT, error);
    let came = request.read_strings(index).map_err(not_copied)?;
    let strings = request.input(index).and_then(|input| input.strings());
    let (1, Some(1), Some(strings)) = (count, came, strings) else {
        return Err(InputError::Strings { name: STATE_SNAPSHOT.to_owned(), came, wanted: 1 }.into());
    };
    Ok(Some(Box::new(Snapshot::decode(strings.get(0), binding)?)))
}

/// The states that a parameter names: all for true, none for false. Each may be named once, so a list has a greatest
/// length.
fn states(api: &StateApi, name: &str, value: ParameterValue) -> Result<Vec<usize>, StateApiError> {
    if let Ok(all) = flag(name, value) {
        return Ok(if all { (0..api.states.len()).collect() } else { Vec::new() });
    }
    let ParameterValue::Text(text) = value else {
        return Err(bad(name, value, "true, or names of states separated by commas, are expected"));
    };
    let known = api.names();
    let unknown = |state: &[u8]| {
        let (parameter, state, known) = (name.to_owned(), echo(state), known.clone());
        StateApiError::UnknownState { parameter, state, known }
    };
    if text.len() > api.states.iter().map(|state| state.name.len() + ", ".len()).sum() {
        return Err(unknown(text));
    }
    let mut named = Vec::new();
    for name_of_state in text.split(|&byte| byte == b',').map(<[u8]>::trim_ascii).filter(|name| !name.is_empty()) {
        let short = name_of_state.strip_prefix(STATE_PREFIX.as_bytes()).unwrap_or(name_of_state);
        let is_named = |known: &String| known.as_bytes() == name_of_state || known.as_bytes() == short;
        match known.iter().position(is_named) {
            Some(index) if named.contains(&index) => {}
            Some(index) => named.push(index),
            None => return Err(unknown(name_of_state)),
        }
    }
    named.sort_unstable();
    Ok(named)
}

fn flag(name: &str, value: ParameterValue) -> Result<bool, StateApiError> {
    match value {
        ParameterValue::Bool(value) => Ok(value),
        ParameterValue::Int(0) => Ok(false),
        ParameterValue::Int(1) => Ok(true),
        ParameterValue::Text(text) if text.eq_ignore_ascii_case(b"true") => Ok(true),
        ParameterValue::Text(text) if text.eq_ignore_ascii_case(b"false") => Ok(false),
        _ => Err(bad(name, value, "true or false is expected")),
    }
}

fn number(name: &str, value: ParameterValue, allowed: &'static str) -> Result<u64, StateApiError> {
    let number = match value {
        ParameterValue::Int(number) => u64::try_from(number).ok(),
        ParameterValue::Text(text) if text.len() <= MOST_DIGITS => {
            std::str::from_utf8(text).ok().and_then(|text| text.parse().ok())
        }
        _ => None,
    };
    number.ok_or_else(|| bad(name, value, allowed))
}

fn sequence(name: &str, value: ParameterValue) -> Result<SequenceId, StateApiError> {
    match value {
        ParameterValue::Int(number) if number != 0 => Ok(SequenceId::Number(number.cast_unsigned())),
        ParameterValue::Text(text) if (1..=SequenceId::MOST_BYTES).contains(&text.len()) => {
            Ok(SequenceId::Name(text.into()))
        }
        _ => Err(bad(name, value, "the id of a live sequence is expected, a number or a string of at most 128 bytes")),
    }
}

fn bad(name: &str, value: ParameterValue, allowed: &'static str) -> StateApiError {
    StateApiError::Parameter { name: name.to_owned(), value: written(value), allowed }
}

/// A value as errors show it.
pub(super) fn written(value: ParameterValue) -> String {
    match value {
        ParameterValue::Text(text) => format!("'{}'", echo(text)),
        ParameterValue::Int(number) => number.to_string(),
        ParameterValue::Bool(value) => value.to_string(),
        ParameterValue::Other => "of another type".to_owned(),
    }
}

pub fn several_rows() -> StateApiError {
    conflict("a request of several rows cannot use the State API: send each row in its own request")
}

pub fn conflict(why: impl Into<String>) -> StateApiError {
    StateApiError::Conflict(why.into())
}

//! Reads snapshots, and refuses those that are damaged or of another model.

use rows::tensor::{DataType, Dims, dims_fit, element_count};
use rows::{reserve, strings};

use super::{Entry, Header, MAGIC, PREFIX_BYTES, Snapshot, VERSION, fit_runtime, left_over};
use crate::binding::{Binding, Initial, InitialContent};
use crate::error::SnapshotError;
use crate::model::Extras;
use crate::store::SequenceState;
use crate::triton::{HeldElements, HeldInput};

const OTHER_SIZE: SnapshotError = SnapshotError::Damaged("a tensor has another size than its shape needs");

impl Snapshot {
    pub fn decode(bytes: &[u8], binding: &Binding) -> Result<Self, SnapshotError> {
        let (header, data) = read_header(bytes, Header::most_bytes(binding))?;
        let mut data = Data(data);
        let state = SequenceState {
            states: read_states(&header.states, &mut data, binding)?,
            contexts: read_contexts(&header.contexts, &mut data, binding)?,
        };
        let held = read_held(&header.held_inputs, &mut data, binding)?;
        let left = read_left_over(&header.left_over, &mut data, binding)?;
        if !data.0.is_empty() {
            return Err(SnapshotError::Damaged("it has more data than its header says"));
        }
        let of_model: Vec<_> = binding.counters.iter().map(|&counter| binding.counter_name(counter)).collect();
        same("counters", header.counters.iter().map(|of| &of.name), &of_model)?;
        let counts = header.counters.iter().map(|of| of.count).collect();
        Ok(Self { state, extras: Extras { held, steps: header.steps, counts, left } })
    }
}

/// The data that no entry of the header has taken yet.
struct Data<'a>(&'a [u8]);

impl<'a> Data<'a> {
    fn take(&mut self, entry: &Entry) -> Result<&'a [u8], SnapshotError> {
        let damaged = SnapshotError::Damaged("it has less data than its header says");
        let (taken, rest) = self.0.split_at_checked(entry.byte_size).ok_or(damaged)?;
        self.0 = rest;
        Ok(taken)
    }
}

fn read_states(entries: &[Entry], data: &mut Data<'_>, binding: &Binding) -> Result<Vec<Initial>, SnapshotError> {
    let of_model: Vec<_> = binding.states.iter().map(|state| binding.inputs[state.input].name.clone()).collect();
    same("states", names(entries), &of_model)?;
    let states = entries.iter().zip(&binding.states);
    states.map(|(entry, state)| value(entry, state.data_type, &state.dims, data.take(entry)?)).collect()
}

fn read_contexts(entries: &[Entry], data: &mut Data<'_>, binding: &Binding) -> Result<Vec<Vec<u8>>, SnapshotError> {
    let of_model: Vec<_> = binding.contexts().map(|(input, _, of)| binding.context_name(input, of)).collect();
    same("contexts", names(entries), &of_model)?;
    let mut contexts = Vec::new();
    for (entry, (input, _, of)) in entries.iter().zip(binding.contexts()) {
        let bound = &binding.inputs[input];
        let (data_type, dims) = (bound.data_type, bound.dims_of_part(of.axis, of.length as i64));
        if entry.datatype != data_type.protocol_name() || entry.shape != dims {
            return Err(is_other(entry, data_type, &dims));
        }
        if entry.byte_size != of.bytes {
            return Err(OTHER_SIZE);
        }
        contexts.push(data.take(entry)?.to_vec());
    }
    Ok(contexts)
}

fn read_held(
    entries: &[Entry],
    data: &mut Data<'_>,
    binding: &Binding,
) -> Result<Vec<Option<HeldInput>>, SnapshotError> {
    let mut held: Vec<Option<HeldInput>> = binding.request_inputs().map(|_| None).collect();
    for entry in entries {
        let found = binding.request_inputs().find(|(input, of)| of.is_held && input.name == entry.name);
        let Some((input, of)) = found else {
            let of_model = binding.request_inputs().filter(|(_, of)| of.is_held);
            let of_model: Vec<_> = of_model.map(|(input, _)| input.name.clone()).collect();
            return Err(differ("held inputs", names(entries), &of_model));
        };
        if held[of.position].is_some() {
            return Err(SnapshotError::Damaged("it has a held input twice"));
        }
        let Initial { content, .. } = value(entry, input.data_type, &of.request_dims(input), data.take(entry)?)?;
        let elements = match content {
            InitialContent::Strings(read) => HeldElements::Strings(read.into()),
            InitialContent::Bytes(bytes) => HeldElements::Bytes(bytes.into()),
            InitialContent::Zeros | InitialContent::Model => HeldElements::Bytes(Vec::new().into()),
        };
        let dims = entry.shape.as_slice().into();
        held[of.position] = Some(HeldInput { data_type: input.data_type, dims, elements, charge: None });
    }
    Ok(held)
}

fn read_left_over(entries: &[Entry], data: &mut Data<'_>, binding: &Binding) -> Result<Vec<Vec<u8>>, SnapshotError> {
    let of_model: Vec<_> = left_over(binding, &[]).map(|(entry, _)| entry.name).collect();
    same("left-over elements", names(entries), &of_model)?;
    let mut left = Vec::new();
    for (entry, (input, request, window)) in entries.iter().zip(binding.windows()) {
        let dims = input.dims_of_part(window.axis, -1);
        let elements = entry.shape.get(window.axis).and_then(|&dim| usize::try_from(dim).ok()).unwrap_or(usize::MAX);
        // As much as a window needs would have made a step.
        let is_window = elements >= window.taken(request.context, true);
        if entry.datatype != input.data_type.protocol_name() || !dims_fit(&entry.shape, &dims) || is_window {
            return Err(is_other(entry, input.data_type, &dims));
        }
        if elements.checked_mul(window.element_bytes) != Some(entry.byte_size) {
            return Err(OTHER_SIZE);
        }
        left.push(data.take(entry)?.to_vec());
    }
    Ok(left)
}

/// The header of a snapshot, which may have `most` bytes, and the data behind it.
fn read_header(bytes: &[u8], most: usize) -> Result<(Header, &[u8]), SnapshotError> {
    let damaged = SnapshotError::Damaged;
    let (prefix, rest) = bytes.split_first_chunk::<PREFIX_BYTES>().ok_or(damaged("it is too short"))?;
    let word = |at: usize| u32::from_le_bytes([prefix[at], prefix[at + 1], prefix[at + 2], prefix[at + 3]]);
    if &prefix[..8] != MAGIC {
        return Err(damaged("it does not begin with 'TRTSTATE'"));
    }
    if word(8) != VERSION {
        return Err(SnapshotError::Version { came: word(8), known: VERSION });
    }
    let header_bytes = word(16) as usize;
    // Before the header is parsed, because a client decides how long it is.
    if header_bytes > most {
        let text = format!("its header has {header_bytes} bytes, and the model's at most {most}");
        return Err(SnapshotError::Foreign(text));
    }
    if crc32fast::hash(&bytes[PREFIX_BYTES - 4..]) != word(12) {
        return Err(damaged("its checksum is wrong"));
    }
    let (header, data) =
        rest.split_at_checked(header_bytes).ok_or(damaged("its header is longer than the snapshot"))?;
    let header = serde_json::from_slice(header).map_err(|_| damaged("its header cannot be read"))?;
    Ok((header, data))
}

/// Reads a tensor whose dims must be `dims`, where -1 is any.
fn value(entry: &Entry, data_type: DataType, dims: &[i64], bytes: &[u8]) -> Result<Initial, SnapshotError> {
    let Entry { datatype, shape, .. } = entry;
    if datatype != data_type.protocol_name() || !dims_fit(shape, dims) {
        return Err(is_other(entry, data_type, dims));
    }
    let Some(count) = element_count(shape).filter(|_| fit_runtime(shape)) else { return Err(OTHER_SIZE) };
    let content = match data_type.byte_size() {
        Some(size) if count.checked_mul(size) == Some(bytes.len()) => {
            let mut elements = reserve(bytes.len())?;
            elements.extend_from_slice(bytes);
            InitialContent::Bytes(elements)
        }
        None => match strings::read(bytes)? {
            Some(elements) if elements.len() == count => InitialContent::Strings(elements),
            _ => return Err(OTHER_SIZE),
        },
        Some(_) => return Err(OTHER_SIZE),
    };
    Ok(Initial { dims: shape.clone(), content })
}

fn is_other(entry: &Entry, data_type: DataType, dims: &[i64]) -> SnapshotError {
    let Entry { name, datatype, shape, .. } = entry;
    SnapshotError::Foreign(format!(
        "its '{name}' is {datatype} {}, and the model's {} {}",
        Dims(shape),
        data_type.protocol_name(),
        Dims(dims)
    ))
}

fn names(entries: &[Entry]) -> impl Iterator<Item = &String> + Clone {
    entries.iter().map(|entry| &entry.name)
}

fn same<'a>(
    what: &str,
    has: impl Iterator<Item = &'a String> + Clone,
    of_model: &[String],
) -> Result<(), SnapshotError> {
    if has.clone().eq(of_model) { Ok(()) } else { Err(differ(what, has, of_model)) }
}

fn differ<'a>(what: &str, has: impl Iterator<Item = &'a String>, of_model: &[String]) -> SnapshotError {
    let list = |names: &[&str]| if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    let (has, of_model) = (has.map(String::as_str), of_model.iter().map(String::as_str));
    let (has, of_model) = (list(&has.collect::<Vec<_>>()), list(&of_model.collect::<Vec<_>>()));
    SnapshotError::Foreign(format!("its {what} are {has}, and the model's {of_model}"))
}

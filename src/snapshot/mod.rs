//! The state of a sequence as bytes, in the format that `docs/state-api.md` describes.
//!
//! Rules: whatever the bytes are, reading never panics, and takes at most a few times as much memory as the snapshot
//! has bytes. What it returns fits the model. Not for: keeping a state ([`crate::store`]).

#![forbid(unsafe_code)]

use rows::tensor::{DataType, Dims, dims_fit, element_count};
use rows::{reserve, strings};
use serde::{Deserialize, Serialize};

use crate::binding::{Binding, BoundInput, BoundState, Initial, InitialContent};
use crate::error::SnapshotError;
use crate::memory::MemoryError;
use crate::model::Extras;
use crate::store::SequenceState;
use crate::triton::{HeldElements, HeldInput};

const MAGIC: &[u8; 8] = b"TRTSTATE";
const VERSION: u32 = 1;
/// Magic, version, checksum and the length of the header.
const PREFIX_BYTES: usize = 20;
const OTHER_SIZE: SnapshotError = SnapshotError::Damaged("a tensor has another size than its shape needs");

#[derive(Clone, Debug)]
pub struct Snapshot {
    pub state: SequenceState,
    pub extras: Extras,
}

#[derive(Serialize, Deserialize)]
struct Header {
    states: Vec<Entry>,
    contexts: Vec<Entry>,
    held_inputs: Vec<Entry>,
    steps: u64,
    /// What is counted for generated inputs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    counters: Vec<CounterEntry>,
    /// What is left over of windows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    left_over: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
struct CounterEntry {
    name: String,
    count: u64,
}

/// A tensor of the data. The names of the fields are those of Triton's protocol.
#[derive(Serialize, Deserialize)]
pub struct Entry {
    pub name: String,
    pub datatype: String,
    pub shape: Vec<i64>,
    pub byte_size: usize,
}

impl Snapshot {
    pub fn encode(&self, binding: &Binding) -> Result<Vec<u8>, MemoryError> {
        self.encode_after(b"", binding)
    }

    pub fn encode_after(&self, before: &[u8], binding: &Binding) -> Result<Vec<u8>, MemoryError> {
        let states = binding.states.iter().zip(&self.state.states);
        let state = |(state, value): (&BoundState, &Initial)| {
            let name = binding.inputs[state.input].name.clone();
            entry(name, state.data_type, &value.dims, value_bytes(state.data_type, value))
        };
        let contexts = contexts_of(binding).zip(&self.state.contexts);
        let context = |(entry, bytes): (Entry, &Vec<u8>)| Entry { byte_size: bytes.len(), ..entry };
        let inputs = binding.request_inputs().zip(&self.extras.held);
        let held = inputs.filter_map(|((input, _), held)| Some((input.name.clone(), held.as_ref()?)));
        let held_entry =
            |(name, held): (String, &HeldInput)| entry(name, held.data_type, &held.dims, held.elements.byte_len());
        let counts = self.extras.counts.iter().copied().chain(std::iter::repeat(0));
        let counters = binding.counters.iter().map(|&counter| binding.counter_name(counter)).zip(counts);
        let header = Header {
            states: states.clone().map(state).collect(),
            contexts: contexts.map(context).collect(),
            held_inputs: held.clone().map(held_entry).collect(),
            steps: self.extras.steps,
            counters: counters.map(|(name, count)| CounterEntry { name, count }).collect(),
            left_over: left_over(binding, &self.extras.left).map(|(entry, _)| entry).collect(),
        };
        let tensors = header.states.iter().chain(&header.contexts).chain(&header.held_inputs);
        let data: usize = tensors.chain(&header.left_over).map(|entry| entry.byte_size).sum();
        let json = serde_json::to_vec(&header).unwrap_or_default();
        let from = before.len();
        // A state may be large, so too little memory is an error here, where `Vec` would end the process.
        let mut bytes = reserve(from + PREFIX_BYTES + json.len() + data)?;
        bytes.extend_from_slice(before);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&(json.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&json);
        for (state, value) in states {
            append(&mut bytes, state.data_type, value);
        }
        self.state.contexts.iter().for_each(|context| bytes.extend_from_slice(context));
        for (_, held) in held {
            match &held.elements {
                HeldElements::Bytes(elements) => bytes.extend_from_slice(elements),
                HeldElements::Strings(elements) => append_strings(&mut bytes, elements.iter()),
            }
        }
        for (_, left) in left_over(binding, &self.extras.left) {
            bytes.extend_from_slice(left);
        }
        let checksum = crc32fast::hash(&bytes[from + PREFIX_BYTES - 4..]);
        bytes[from + 12..from + 16].copy_from_slice(&checksum.to_le_bytes());
        Ok(bytes)
    }

    pub fn decode(bytes: &[u8], binding: &Binding) -> Result<Self, SnapshotError> {
        let (header, mut data) = read_header(bytes, Header::most_bytes(binding))?;
        let state = SequenceState {
            states: read_states(&header.states, &mut data, binding)?,
            contexts: read_contexts(&header.contexts, &mut data, binding)?,
        };
        let held = read_held(&header.held_inputs, &mut data, binding)?;
        let left = read_left_over(&header.left_over, &mut data, binding)?;
        if !data.is_empty() {
            return Err(SnapshotError::Damaged("it has more data than its header says"));
        }
        let of_model: Vec<_> = binding.counters.iter().map(|&counter| binding.counter_name(counter)).collect();
        same("counters", header.counters.iter().map(|of| &of.name), &of_model)?;
        let counts = header.counters.iter().map(|of| of.count).collect();
        Ok(Self { state, extras: Extras { held, steps: header.steps, counts, left } })
    }
}

impl Header {
    /// The most bytes that the header of a snapshot of this model needs, also one that was written with spaces. So a
    /// client cannot make the server read a header of any length.
    fn most_bytes(binding: &Binding) -> usize {
        let largest = |of: Entry| Entry { shape: vec![i64::MIN; of.shape.len()], byte_size: usize::MAX, ..of };
        let counter = |&counter| CounterEntry { name: binding.counter_name(counter), count: u64::MAX };
        let held = binding.request_inputs().filter(|(_, of)| of.is_held);
        let header = Self {
            states: states_of(binding).map(largest).collect(),
            contexts: contexts_of(binding).map(largest).collect(),
            held_inputs: held.map(|(input, of)| entry_of(input, &of.request_dims(input))).map(largest).collect(),
            steps: u64::MAX,
            counters: binding.counters.iter().map(counter).collect(),
            left_over: left_over(binding, &[]).map(|(entry, _)| largest(entry)).collect(),
        };
        serde_json::to_vec_pretty(&header).map_or(0, |json| json.len())
    }
}

/// Whether ONNX Runtime can have a tensor of these dims. A huge dim overflows there even if another one is 0.
pub fn fit_runtime(dims: &[i64]) -> bool {
    dims.iter().all(|&dim| dim <= i64::from(i32::MAX))
}

fn left_over<'a>(binding: &'a Binding, left: &'a [Vec<u8>]) -> impl Iterator<Item = (Entry, &'a [u8])> {
    let left = left.iter().map(Vec::as_slice).chain(std::iter::repeat(&[][..]));
    binding.windows().zip(left).map(|((input, _, window), bytes)| {
        let elements = bytes.len() / window.element_bytes.max(1);
        let dims = input.dims_of_part(window.axis, elements as i64);
        (entry(binding.window_name(input, window), input.data_type, &dims, bytes.len()), bytes)
    })
}

/// The states of a model. Their sizes are not known.
fn states_of(binding: &Binding) -> impl Iterator<Item = Entry> {
    binding.states.iter().map(|state| entry_of(&binding.inputs[state.input], &state.dims))
}

fn contexts_of(binding: &Binding) -> impl Iterator<Item = Entry> {
    binding.contexts().map(|(input, _, of)| {
        let bound = &binding.inputs[input];
        let dims = bound.dims_of_part(of.axis, of.length as i64);
        entry(binding.context_name(input, of), bound.data_type, &dims, of.bytes)
    })
}

fn entry_of(input: &BoundInput, dims: &[i64]) -> Entry {
    entry(input.name.clone(), input.data_type, dims, 0)
}

pub fn entry(name: String, data_type: DataType, shape: &[i64], byte_size: usize) -> Entry {
    Entry { name, datatype: data_type.protocol_name().to_owned(), shape: shape.to_vec(), byte_size }
}

/// The bytes that a value has in a tensor of a response.
pub fn value_bytes(data_type: DataType, value: &Initial) -> usize {
    let count = element_count(&value.dims).unwrap_or(0);
    match (&value.content, data_type.byte_size()) {
        (InitialContent::Strings(elements), _) => strings::written_bytes(elements.iter()),
        (_, None) => strings::written_bytes(std::iter::repeat_n(&[][..], count)),
        (_, Some(size)) => count.saturating_mul(size),
    }
}

/// Appends a value as it is in a tensor of a response.
pub fn append(bytes: &mut Vec<u8>, data_type: DataType, value: &Initial) {
    match &value.content {
        InitialContent::Bytes(elements) => bytes.extend_from_slice(elements),
        InitialContent::Strings(elements) => append_strings(bytes, elements.iter()),
        // A string of no bytes is four zeros, too.
        InitialContent::Zeros | InitialContent::Model => bytes.resize(bytes.len() + value_bytes(data_type, value), 0),
    }
}

fn append_strings<'a>(bytes: &mut Vec<u8>, elements: impl Iterator<Item = &'a [u8]> + Clone) {
    let from = bytes.len();
    bytes.resize(from + strings::written_bytes(elements.clone()), 0);
    strings::write(elements, &mut bytes[from..]);
}

/// Takes the bytes of an entry from the data that no entry has taken yet.
fn take<'a>(data: &mut &'a [u8], entry: &Entry) -> Result<&'a [u8], SnapshotError> {
    data.split_off(..entry.byte_size).ok_or(SnapshotError::Damaged("it has less data than its header says"))
}

fn read_states(entries: &[Entry], data: &mut &[u8], binding: &Binding) -> Result<Vec<Initial>, SnapshotError> {
    let of_model: Vec<_> = states_of(binding).map(|entry| entry.name).collect();
    same("states", names(entries), &of_model)?;
    let states = entries.iter().zip(&binding.states);
    states.map(|(entry, state)| value(entry, state.data_type, &state.dims, take(data, entry)?)).collect()
}

fn read_contexts(entries: &[Entry], data: &mut &[u8], binding: &Binding) -> Result<Vec<Vec<u8>>, SnapshotError> {
    let of_model: Vec<_> = contexts_of(binding).collect();
    same("contexts", names(entries), &names(&of_model).cloned().collect::<Vec<_>>())?;
    let context = |(entry, wanted): (&Entry, &Entry)| {
        if entry.datatype != wanted.datatype || entry.shape != wanted.shape {
            return Err(is_other(entry, &wanted.datatype, &wanted.shape));
        }
        if entry.byte_size != wanted.byte_size {
            return Err(OTHER_SIZE);
        }
        Ok(take(data, entry)?.to_vec())
    };
    entries.iter().zip(&of_model).map(context).collect()
}

fn read_held(entries: &[Entry], data: &mut &[u8], binding: &Binding) -> Result<Vec<Option<HeldInput>>, SnapshotError> {
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
        let Initial { content, .. } = value(entry, input.data_type, &of.request_dims(input), take(data, entry)?)?;
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

fn read_left_over(entries: &[Entry], data: &mut &[u8], binding: &Binding) -> Result<Vec<Vec<u8>>, SnapshotError> {
    let of_model: Vec<_> = left_over(binding, &[]).map(|(entry, _)| entry.name).collect();
    same("left-over elements", names(entries), &of_model)?;
    let mut left = Vec::new();
    for (entry, (input, request, window)) in entries.iter().zip(binding.windows()) {
        let dims = input.dims_of_part(window.axis, -1);
        let elements = entry.shape.get(window.axis).and_then(|&dim| usize::try_from(dim).ok()).unwrap_or(usize::MAX);
        // With as many elements as a window needs, a step would have been made.
        let is_window = elements >= window.taken(request.context, true);
        if entry.datatype != input.data_type.protocol_name() || !dims_fit(&entry.shape, &dims) || is_window {
            return Err(is_other(entry, input.data_type.protocol_name(), &dims));
        }
        if elements.checked_mul(window.element_bytes) != Some(entry.byte_size) {
            return Err(OTHER_SIZE);
        }
        left.push(take(data, entry)?.to_vec());
    }
    Ok(left)
}

/// The header of a snapshot, which may have `most` bytes, and the data after it.
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
        return Err(is_other(entry, data_type.protocol_name(), dims));
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

fn is_other(entry: &Entry, wanted: &str, dims: &[i64]) -> SnapshotError {
    let Entry { name, datatype, shape, .. } = entry;
    let (came, dims) = (Dims(shape), Dims(dims));
    SnapshotError::Foreign(format!("its '{name}' is {datatype} {came}, and the model's {wanted} {dims}"))
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

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod samples {
    use super::*;
    use rows::strings::Strings;

    /// A snapshot of a model with [`crate::store::test_binding`].
    pub fn snapshot() -> Snapshot {
        let value =
            |dims: &[i64], bytes: Vec<u8>| Initial { dims: dims.to_vec(), content: InitialContent::Bytes(bytes) };
        let strings: Strings = ["", "a", "bcd"].iter().collect();
        let states = vec![
            value(&[1, 2], (0..8).collect()),
            value(&[1, 4], vec![0; 16]),
            value(&[1, 3], (0..12).collect()),
            Initial { dims: vec![1, 3], content: InitialContent::Strings(strings) },
        ];
        let bytes = HeldElements::Bytes(vec![1; 24].into());
        let held = HeldInput { data_type: DataType::Fp32, dims: [1, 6].into(), elements: bytes, charge: None };
        let extras = Extras { held: vec![Some(held)], steps: 9, ..Extras::default() };
        Snapshot { state: SequenceState { states, contexts: vec![vec![5; 8]] }, extras }
    }

    /// A snapshot with this header and data, whose checksum is right.
    pub fn sealed(header: impl AsRef<[u8]>, data: &[u8]) -> Vec<u8> {
        let header = header.as_ref();
        let length = (header.len() as u32).to_le_bytes();
        let checked = [&length[..], header, data].concat();
        [&MAGIC[..], &VERSION.to_le_bytes(), &crc32fast::hash(&checked).to_le_bytes(), &checked].concat()
    }
}

#[cfg(test)]
mod tests;

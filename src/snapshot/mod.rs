//! The state of a sequence as bytes, in the format that `docs/state-api.md` describes.
//!
//! Rules: whatever the bytes are, reading never panics, and takes at most a few times as much memory as the snapshot has
//! bytes. What it returns fits the model. Not for: keeping a state ([`crate::store`]).

#![forbid(unsafe_code)]

use rows::tensor::{DataType, Dims, element_count};
use rows::{reserve, strings};
use serde::{Deserialize, Serialize};

use crate::binding::{Binding, BoundContext, BoundInput, BoundState, Initial, InitialContent};
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

/// What a sequence has.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub state: SequenceState,
    pub extras: Extras,
}

/// Describes the data behind it.
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

/// A counter of a generated input.
#[derive(Serialize, Deserialize)]
struct CounterEntry {
    name: String,
    count: u64,
}

/// A tensor of the data. The names of the fields are those of Triton's protocol.
#[derive(Serialize, Deserialize)]
struct Entry {
    name: String,
    datatype: String,
    shape: Vec<i64>,
    byte_size: usize,
}

impl Snapshot {
    /// The bytes of the snapshot.
    pub fn encode(&self, binding: &Binding) -> Result<Vec<u8>, MemoryError> {
        let states = binding.states.iter().zip(&self.state.states);
        let state = |(state, value): (&BoundState, &Initial)| {
            let name = binding.inputs[state.input].name.clone();
            entry(name, state.data_type, &value.dims, value_bytes(state.data_type, value))
        };
        let contexts = binding.contexts().zip(&self.state.contexts);
        let context = |((input, _, of), bytes): ((usize, _, BoundContext), &Vec<u8>)| {
            let data_type = binding.inputs[input].data_type;
            entry(binding.context_name(input, of), data_type, &binding.context_dims(input, of), bytes.len())
        };
        let inputs = binding.request_inputs().zip(&self.extras.held);
        let held = inputs.filter_map(|((input, _), held)| Some((input.name.clone(), held.as_ref()?)));
        let held_entry = |(name, held): (String, &HeldInput)| entry(name, held.data_type, &held.dims, held.byte_len());
        let counts = self.extras.counts.iter().copied().chain(std::iter::repeat(0));
        let counters = binding.counters.iter().map(|&counter| binding.counter_name(counter)).zip(counts);
        let header = Header {
            states: states.clone().map(state).collect(),
            contexts: contexts.clone().map(context).collect(),
            held_inputs: held.clone().map(held_entry).collect(),
            steps: self.extras.steps,
            counters: counters.map(|(name, count)| CounterEntry { name, count }).collect(),
            left_over: left_over(binding, &self.extras.left).map(|(entry, _)| entry).collect(),
        };
        let tensors = || header.states.iter().chain(&header.contexts).chain(&header.held_inputs);
        let entries = || tensors().chain(&header.left_over);
        let data: usize = entries().map(|entry| entry.byte_size).sum();
        let json = serde_json::to_vec(&header).unwrap_or_default();
        let mut bytes = reserve(PREFIX_BYTES + json.len() + data)?;
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
        let checksum = crc32fast::hash(&bytes[PREFIX_BYTES - 4..]);
        bytes[12..16].copy_from_slice(&checksum.to_le_bytes());
        Ok(bytes)
    }

    /// Reads a snapshot for a sequence of this model.
    pub fn decode(bytes: &[u8], binding: &Binding) -> Result<Self, SnapshotError> {
        let damaged = SnapshotError::Damaged;
        let (header, mut data) = read_header(bytes, Header::most_bytes(binding))?;
        let mut take = |entry: &Entry| {
            let (taken, behind) =
                data.split_at_checked(entry.byte_size).ok_or(damaged("it has less data than its header says"))?;
            data = behind;
            Ok::<_, SnapshotError>(taken)
        };
        let names = |entries: &[Entry]| entries.iter().map(|entry| entry.name.clone()).collect::<Vec<_>>();
        let of_model: Vec<_> = binding.states.iter().map(|state| binding.inputs[state.input].name.clone()).collect();
        same("states", &names(&header.states), &of_model)?;
        let mut states = Vec::new();
        for (entry, state) in header.states.iter().zip(&binding.states) {
            states.push(value(entry, state.data_type, &state.dims, take(entry)?)?);
        }
        let of_model: Vec<_> = binding.contexts().map(|(input, _, of)| binding.context_name(input, of)).collect();
        same("contexts", &names(&header.contexts), &of_model)?;
        let mut contexts = Vec::new();
        for (entry, (input, _, of)) in header.contexts.iter().zip(binding.contexts()) {
            let (data_type, dims) = (binding.inputs[input].data_type, binding.context_dims(input, of));
            if entry.datatype != data_type.protocol_name() || entry.shape != dims {
                return Err(is_other(entry, data_type, &dims));
            }
            if entry.byte_size != of.bytes {
                return Err(OTHER_SIZE);
            }
            contexts.push(take(entry)?.to_vec());
        }
        let held_names: Vec<_> =
            binding.request_inputs().filter(|(_, of)| of.is_held).map(|(input, _)| input.name.clone()).collect();
        let mut held: Vec<Option<HeldInput>> = binding.request_inputs().map(|_| None).collect();
        for entry in &header.held_inputs {
            let found = binding.request_inputs().find(|(input, of)| of.is_held && input.name == entry.name);
            let Some((input, of)) = found else {
                return Err(differ("held inputs", &names(&header.held_inputs), &held_names));
            };
            if held[of.position].is_some() {
                return Err(damaged("it has a held input twice"));
            }
            let wanted = of.request_dims(input);
            let Initial { content, .. } = value(entry, input.data_type, &wanted, take(entry)?)?;
            let elements = match content {
                InitialContent::Strings(read) => HeldElements::Strings(read.into()),
                InitialContent::Bytes(bytes) => HeldElements::Bytes(bytes.into()),
                InitialContent::Zeros | InitialContent::Model => HeldElements::Bytes(Vec::new().into()),
            };
            let shape = entry.shape.as_slice().into();
            held[of.position] = Some(HeldInput { data_type: input.data_type, dims: shape, elements, charge: None });
        }
        let of_model: Vec<_> = left_over(binding, &[]).map(|(entry, _)| entry.name).collect();
        same("left-over elements", &names(&header.left_over), &of_model)?;
        let mut left = Vec::new();
        for (entry, (input, request, window)) in header.left_over.iter().zip(binding.windows()) {
            let dims = binding.left_dims(input, window, -1);
            let fits = entry.shape.len() == dims.len()
                && entry.shape.iter().zip(&dims).all(|(&has, &wanted)| has == wanted || (wanted < 0 && has >= 0));
            let elements =
                entry.shape.get(window.axis).and_then(|&dim| usize::try_from(dim).ok()).unwrap_or(usize::MAX);
            // As much as a window needs would have made a step.
            if entry.datatype != input.data_type.protocol_name()
                || !fits
                || elements >= window.taken(request.context, true)
            {
                return Err(is_other(entry, input.data_type, &dims));
            }
            if elements.checked_mul(window.element_bytes) != Some(entry.byte_size) {
                return Err(OTHER_SIZE);
            }
            left.push(take(entry)?.to_vec());
        }
        if !data.is_empty() {
            return Err(damaged("it has more data than its header says"));
        }
        let of_model: Vec<_> = binding.counters.iter().map(|&counter| binding.counter_name(counter)).collect();
        same("counters", &header.counters.iter().map(|of| of.name.clone()).collect::<Vec<_>>(), &of_model)?;
        let counts = header.counters.iter().map(|of| of.count).collect();
        let extras = Extras { held, steps: header.steps, counts, left };
        Ok(Self { state: SequenceState { states, contexts }, extras })
    }
}

/// Whether ONNX Runtime can have a tensor of these dims. A huge dim overflows there even if another one is 0.
pub fn fit_runtime(dims: &[i64]) -> bool {
    dims.iter().all(|&dim| dim <= i64::from(i32::MAX))
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

impl Header {
    /// The most bytes that the header of a snapshot of this model needs, also one that was written with spaces. So a
    /// client cannot make the server read a header of any length.
    fn most_bytes(binding: &Binding) -> usize {
        let largest = |name: String, data_type, rank| entry(name, data_type, &vec![i64::MIN; rank], usize::MAX);
        let of_input = |input: &BoundInput, rank| largest(input.name.clone(), input.data_type, rank);
        let state = |state: &BoundState| of_input(&binding.inputs[state.input], state.dims.len());
        let context = |(input, _, of): (usize, _, BoundContext)| {
            largest(binding.context_name(input, of), binding.inputs[input].data_type, binding.inputs[input].dims.len())
        };
        let counter = |&counter| CounterEntry { name: binding.counter_name(counter), count: u64::MAX };
        let held = binding.request_inputs().filter(|(_, of)| of.is_held);
        let header = Self {
            states: binding.states.iter().map(state).collect(),
            contexts: binding.contexts().map(context).collect(),
            held_inputs: held.map(|(input, of)| of_input(input, of.request_dims(input).len())).collect(),
            steps: u64::MAX,
            counters: binding.counters.iter().map(counter).collect(),
            left_over: binding
                .windows()
                .map(|(input, _, of)| largest(binding.window_name(input, of), input.data_type, input.dims.len()))
                .collect(),
        };
        serde_json::to_vec_pretty(&header).map_or(0, |json| json.len())
    }
}

/// What is left over of each input that is cut.
fn left_over<'a>(binding: &'a Binding, left: &'a [Vec<u8>]) -> impl Iterator<Item = (Entry, &'a [u8])> {
    let left = left.iter().map(Vec::as_slice).chain(std::iter::repeat(&[][..]));
    binding.windows().zip(left).map(|((input, _, window), bytes)| {
        let elements = bytes.len() / window.element_bytes.max(1);
        let dims = binding.left_dims(input, window, elements as i64);
        (entry(binding.window_name(input, window), input.data_type, &dims, bytes.len()), bytes)
    })
}

fn entry(name: String, data_type: DataType, shape: &[i64], byte_size: usize) -> Entry {
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

/// Reads a tensor whose dims must be `dims`, where -1 is any.
fn value(entry: &Entry, data_type: DataType, dims: &[i64], bytes: &[u8]) -> Result<Initial, SnapshotError> {
    let Entry { datatype, shape, .. } = entry;
    let fits = |(&has, &wanted): (&i64, &i64)| has >= 0 && (has == wanted || wanted < 0);
    if datatype != data_type.protocol_name() || shape.len() != dims.len() || !shape.iter().zip(dims).all(fits) {
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

fn same(what: &str, has: &[String], wanted: &[String]) -> Result<(), SnapshotError> {
    if has == wanted { Ok(()) } else { Err(differ(what, has, wanted)) }
}

fn differ(what: &str, has: &[String], wanted: &[String]) -> SnapshotError {
    let list = |names: &[String]| if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    SnapshotError::Foreign(format!("its {what} are {}, and the model's {}", list(has), list(wanted)))
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
mod tests {
    #![allow(clippy::unwrap_used, reason = "all of this is a test")]

    use proptest::prelude::*;

    use super::samples::{sealed, snapshot};
    use super::*;
    use crate::binding::{BoundWindow, Counter, InputAxis, Source};
    use crate::config::FirstRequest;
    use crate::store::test_binding;

    fn why(bytes: &[u8]) -> String {
        Snapshot::decode(bytes, &test_binding(true)).unwrap_err().to_string()
    }

    #[test]
    fn what_is_written_is_read() {
        let binding = test_binding(true);
        let written = snapshot();
        let read = Snapshot::decode(&written.encode(&binding).unwrap(), &binding).unwrap();
        assert_eq!((read.state, read.extras.steps), (written.state, 9));
        let [Some(HeldInput { dims, elements: HeldElements::Bytes(bytes), .. })] = read.extras.held.as_slice() else {
            panic!()
        };
        assert_eq!((&**dims, bytes.as_slice()), (&[1, 6][..], &[1; 24][..]));
    }

    #[test]
    fn counters_are_kept_by_their_names() {
        let with_counters = |counters: &[Counter]| {
            let mut binding = (*test_binding(true)).clone();
            binding.counters = counters.to_vec();
            binding
        };
        let of_x = Counter::Elements(InputAxis { input: 4, axis: 1 });
        let binding = with_counters(&[Counter::Steps, of_x]);
        let mut written = snapshot();
        written.extras.counts = vec![3, 44];
        let bytes = written.encode(&binding).unwrap();
        assert_eq!(Snapshot::decode(&bytes, &binding).unwrap().extras.counts, [3, 44]);
        let other = Snapshot::decode(&bytes, &with_counters(&[of_x])).unwrap_err().to_string();
        assert_eq!(other, "is of another model: its counters are steps, elements(X@1), and the model's elements(X@1)");
        let none = Snapshot::decode(&snapshot().encode(&test_binding(true)).unwrap(), &binding).unwrap_err();
        assert!(none.to_string().contains("its counters are none"), "{none}");
    }

    #[test]
    fn what_is_left_over_of_a_window_is_kept_and_is_less_than_one() {
        let with_window = |length: usize| {
            let mut binding = (*test_binding(true)).clone();
            let (input, ..) = binding.contexts().next().unwrap();
            let Source::Request(request) = &mut binding.inputs[input].source else { panic!() };
            request.window = Some(BoundWindow { axis: 1, length, element_bytes: 4, pads: false });
            binding
        };
        let binding = with_window(4);
        let mut written = snapshot();
        for left in [vec![], vec![7; 8]] {
            written.extras.left = vec![left.clone()];
            let bytes = written.encode(&binding).unwrap();
            assert_eq!(Snapshot::decode(&bytes, &binding).unwrap().extras.left, [left]);
        }
        let bytes = written.encode(&binding).unwrap();
        let refused = |binding: &Binding| Snapshot::decode(&bytes, binding).unwrap_err().to_string();
        assert_eq!(
            refused(&with_window(5)),
            "is of another model: its left-over elements are X=4@1, and the model's X=5@1"
        );
        assert!(refused(&test_binding(true)).contains("its left-over elements are X=4@1, and the model's none"));
        // As many would have made a step.
        written.extras.left = vec![vec![7; 16]];
        let whole = written.encode(&binding).unwrap();
        let error = Snapshot::decode(&whole, &binding).unwrap_err().to_string();
        assert_eq!(error, "is of another model: its 'X=4@1' is FP32 [1, 4], and the model's FP32 [1, -1]");
    }

    #[test]
    fn a_context_of_the_same_size_along_another_axis_is_refused() {
        let with_context = |axis: usize, length: usize, first: FirstRequest| {
            let mut binding = (*test_binding(true)).clone();
            let (input, _, of) = binding.contexts().next().unwrap();
            binding.inputs[input].dims = vec![-1, length as i64, length as i64];
            let Source::Request(request) = &mut binding.inputs[input].source else { panic!() };
            request.context = Some(BoundContext { axis, length, first, ..of });
            binding
        };
        let bytes = snapshot().encode(&with_context(1, 2, FirstRequest::Zeros)).unwrap();
        for (axis, length, first, name) in [
            (2, 2, FirstRequest::Zeros, "X=2@2"),
            (1, 3, FirstRequest::Zeros, "X=3@1"),
            (1, 2, FirstRequest::Whole, "X=2@1:whole"),
        ] {
            let refused = Snapshot::decode(&bytes, &with_context(axis, length, first)).unwrap_err().to_string();
            assert_eq!(refused, format!("is of another model: its contexts are X=2@1, and the model's {name}"));
        }
        let mut wider = with_context(1, 2, FirstRequest::Zeros);
        let (input, ..) = wider.contexts().next().unwrap();
        wider.inputs[input].dims = vec![-1, 2, 5];
        let refused = Snapshot::decode(&bytes, &wider).unwrap_err().to_string();
        assert_eq!(refused, "is of another model: its 'X=2@1' is FP32 [1, 2, 2], and the model's FP32 [1, 2, 5]");
    }

    #[test]
    fn zeros_are_written_as_such() {
        let binding = test_binding(true);
        let zeros = |dims: &[i64]| Initial { dims: dims.to_vec(), content: InitialContent::Zeros };
        let states = vec![zeros(&[1, 2]), zeros(&[1, 4]), zeros(&[1, 0]), zeros(&[1, 2])];
        let state = SequenceState { states, contexts: vec![vec![0; 8]] };
        let written = Snapshot { state, extras: Extras::default() };
        let read = Snapshot::decode(&written.encode(&binding).unwrap(), &binding).unwrap().state.states;
        assert_eq!(read[0].content, InitialContent::Bytes(vec![0; 8]));
        assert_eq!(read[3].content, InitialContent::Strings(["", ""].iter().collect()));
    }

    #[test]
    fn a_damaged_one_is_refused_wherever_the_damage_is() {
        let whole = snapshot().encode(&test_binding(true)).unwrap();
        for length in 0..whole.len() {
            why(&whole[..length]);
        }
        for at in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[at] ^= 1 << (at % 8);
            why(&flipped);
        }
        let mut newer = whole.clone();
        newer[8] = 2;
        assert_eq!(why(&newer), "has format 2, and this server reads format 1");
        assert!(why(&[whole, vec![0]].concat()).contains("checksum"));
    }

    #[test]
    fn a_header_longer_than_the_model_needs_is_refused_unread() {
        let whole = snapshot().encode(&test_binding(true)).unwrap();
        let header =
            &whole[PREFIX_BYTES..PREFIX_BYTES + u32::from_le_bytes(whole[16..20].try_into().unwrap()) as usize];
        let data = &whole[PREFIX_BYTES + header.len()..];
        let value: serde_json::Value = serde_json::from_slice(header).unwrap();
        let spaced = serde_json::to_vec_pretty(&value).unwrap();
        assert!(Snapshot::decode(&sealed(spaced, data), &test_binding(true)).is_ok());
        let mut long = sealed([header, &vec![b' '; 1_000_000]].concat(), data);
        let refused = why(&long);
        assert!(refused.starts_with("is of another model: its header has 100"), "{refused}");
        long[12] ^= 1;
        assert_eq!(why(&long), refused, "not even the checksum is computed");
    }

    #[test]
    fn one_of_another_model_is_refused_with_what_differs() {
        let other = Snapshot { extras: Extras::default(), ..snapshot() };
        let without = test_binding(false);
        let of_two = SequenceState { states: other.state.states[..2].to_vec(), ..other.state.clone() };
        let bytes = Snapshot { state: of_two, ..other }.encode(&without).unwrap();
        assert_eq!(why(&bytes), "is of another model: its states are S0, S1, and the model's S0, S1, S2, S3");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]
        #[test]
        fn a_header_that_lies_is_refused_or_read_as_what_it_says(
            sizes in prop::collection::vec(prop_oneof![0usize..40, Just(usize::MAX), Just(1 << 40)], 6),
            dims in prop::collection::vec(prop_oneof![-2i64..9, Just(i64::MAX)], 4), data in 0usize..120,
        ) {
            let entry = |name: &str, datatype: &str, shape: &[i64], size: usize| {
                serde_json::json!({ "name": name, "datatype": datatype, "shape": shape, "byte_size": size })
            };
            let header = serde_json::json!({
                "states": [
                    entry("S0", "FP32", &[1, dims[0]], sizes[0]), entry("S1", "FP32", &[1, 4], sizes[1]),
                    entry("S2", "FP32", &[1, dims[1]], sizes[2]), entry("S3", "BYTES", &[1, dims[2]], sizes[3]),
                ],
                "contexts": [entry("X=2@1", "FP32", &[1, 2], sizes[4])],
                "held_inputs": [entry("X", "FP32", &[1, dims[3]], sizes[5])],
                "steps": 3,
            });
            let bytes = sealed(header.to_string(), &vec![0; data]);
            if let Ok(read) = Snapshot::decode(&bytes, &test_binding(true)) {
                prop_assert_eq!(read.state.states.iter().map(|state| state.dims.len()).collect::<Vec<_>>(), vec![2; 4]);
            }
        }

        #[test]
        fn random_bytes_are_refused(header in ".{0,60}", data in prop::collection::vec(any::<u8>(), 0..60)) {
            why(&sealed(&header, &data));
            why(&data);
        }
    }
}

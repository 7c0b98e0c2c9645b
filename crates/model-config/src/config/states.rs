//! States: their pairs, their dims, where they start, and how much memory those that vary in size may have.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path};

use rows::reserve;
use rows::tensor::{DataType, Dims, PaddingSide, element_count};
use stateful_convert::StatePair;
use stateful_convert::report::{StartsAt, State};

use super::parameters::{self, Assigned, PairPattern, Parameters};
use super::raw::{self, ConfigError, Result, bad, data_type, dims, field};

pub const GROWING_PADDING: &str = "growing_padding";

#[derive(Clone, Debug)]
pub struct States {
    pub pairs: StatePairs,
    pub patterns: Vec<PairPattern>,
    pub declared: Vec<DeclaredState>,
    /// `initial_states`: the name of a state's input, and its value.
    pub initial: Vec<(String, InitialValue)>,
    /// `initial_state_model`: a file in the version folder.
    pub initial_model: Option<String>,
    pub dims: Vec<StateDims>,
    pub limits: StateLimits,
    /// `growing_padding`: where states are padded so that rows of different lengths share a run; `None` if they don't.
    pub growing_padding: Option<PaddingSide>,
}

/// An entry of `state_dims`: the dims of a state as the model has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateDims {
    /// The state's input.
    pub name: String,
    /// -1 for the batch and for what varies.
    pub dims: Vec<i64>,
    /// Which of them is the batch, if one is written as such.
    pub batch_axis: Option<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StatePairs {
    Absent,
    /// `auto`: the states are found by their names.
    Auto,
    /// [`BY_SHAPE`]: as `Auto`, and where names say nothing, by types and dims.
    AutoByShape,
    Listed(Vec<StatePair>),
    /// The states of a model that was converted at load.
    Converted(Vec<StatePair>),
}

/// The value of `state_pairs` that confirms pairs that are found by types and dims.
pub const BY_SHAPE: &str = "auto-by-shape";

/// Where the states come from that are not declared in `sequence_batching.state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairsFrom {
    Parameter,
    Description,
    Names,
    /// Their names, and where those say nothing, their types and dims.
    Shapes,
    Conversion,
}

/// An entry of `sequence_batching.state`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeclaredState {
    pub pair: StatePair,
    pub data_type: DataType,
    /// Without the batch axis, or with -1 in its place; -1 is open.
    pub dims: Vec<i64>,
    pub initial: Option<DeclaredInitial>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeclaredInitial {
    /// As the state's, with no open dimension.
    pub dims: Vec<i64>,
    /// `data_file`; `None` for zeros.
    pub file: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InitialValue {
    /// Each element.
    Fill(String),
    /// The elements of a row.
    List(Vec<String>),
    /// The elements of a row as raw bytes, in this file.
    File(String),
    /// An array of this .npz file: the one with this name, else the one with the state's name or the only one.
    Array { file: String, name: Option<String> },
    /// Numbers in the model's metadata, under these keys one behind the other.
    Metadata { keys: Vec<String>, then_zeros: bool },
}

/// Most bytes of the states that vary in size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateLimits {
    pub per_sequence: usize,
    pub total: usize,
    /// Whether the configuration has one of the two.
    pub are_written: bool,
}

impl States {
    pub(super) fn new(parameters: &Parameters, declared: &[raw::State]) -> Result<Self> {
        let pairs = match parameters.text("state_pairs") {
            None => StatePairs::Absent,
            Some("auto") => StatePairs::Auto,
            Some(BY_SHAPE) => StatePairs::AutoByShape,
            Some(text) => StatePairs::Listed(parameters::state_pairs(text)?),
        };
        let patterns = parameters.text("state_pair_patterns").map(parameters::pair_patterns).transpose()?;
        let declared = declared.iter().map(DeclaredState::new).collect::<Result<Vec<_>, _>>()?;
        let initial = initial_states(parameters)?;
        let initial_model = parameters.text("initial_state_model").map(str::to_owned);
        let dims = state_dims(parameters)?;
        // If the two differed, nothing would say which of them is right.
        let twice = |state: &&StateDims| declared.iter().any(|other: &DeclaredState| other.pair.input == state.name);
        if let Some(StateDims { name, .. }) = dims.iter().find(twice) {
            let rule = format!("'{name}' has its dims in 'sequence_batching.state': write them in one place");
            return Err(bad("state_dims", name, rule));
        }
        let sides = [("left", PaddingSide::Left), ("right", PaddingSide::Right)];
        let growing_padding = parameters.choice(GROWING_PADDING, &sides)?;
        let limits = StateLimits::new(parameters)?;
        let patterns = patterns.unwrap_or_default();
        Ok(Self { pairs, patterns, declared, initial, initial_model, dims, limits, growing_padding })
    }

    /// All states: those declared, and those in `state_pairs`. Without `state_pairs`, those in the model's graph
    /// description; if it names none, those that `find` finds in the signature.
    pub fn all_pairs<E: From<ConfigError>>(
        &self,
        graph_description: Option<&str>,
        find: impl FnOnce() -> Result<Vec<StatePair>, E>,
    ) -> Result<(Vec<StatePair>, PairsFrom), E> {
        let (found, from) = match &self.pairs {
            StatePairs::Listed(pairs) => (pairs.clone(), PairsFrom::Parameter),
            StatePairs::Converted(pairs) => (pairs.clone(), PairsFrom::Conversion),
            StatePairs::Auto => (find()?, PairsFrom::Names),
            StatePairs::AutoByShape => (find()?, PairsFrom::Shapes),
            // Triton keeps only declared states, so a configuration for it declares all of them.
            StatePairs::Absent if !self.declared.is_empty() => (Vec::new(), PairsFrom::Names),
            // NVIDIA's stateful_backend reads the pairs from that description.
            StatePairs::Absent => {
                let described = parameters::described_state_pairs(graph_description.unwrap_or_default())?;
                if described.is_empty() { (find()?, PairsFrom::Names) } else { (described, PairsFrom::Description) }
            }
        };
        Ok((self.union(&found)?, from))
    }

    /// Takes the states of a converted model. `computes_initial`: the conversion made a model that computes where they
    /// start.
    pub fn set_converted(&mut self, states: &[State], computes_initial: bool) -> Result<()> {
        if let Some(file) = self.initial_model.as_ref().filter(|_| computes_initial) {
            let rule = "the converted model computes where its states start: leave it out, or write \
                        'use_const_initializer' 'true'";
            return Err(bad("initial_state_model", file, rule));
        }
        for State { pair, starts_at, .. } in states {
            // What the configuration says comes first.
            let is_written = self.initial.iter().any(|(name, _)| *name == pair.input);
            if let StartsAt::Value(value) = starts_at
                && !is_written
            {
                self.initial.push((pair.input.clone(), InitialValue::Fill(value.to_string())));
            }
        }
        if !states.is_empty() {
            self.pairs = StatePairs::Converted(states.iter().map(|state| state.pair.clone()).collect());
        }
        Ok(())
    }

    /// The pairs that are `found` and those that are declared. A name may be in one pair only.
    fn union(&self, found: &[StatePair]) -> Result<Vec<StatePair>> {
        let mut all: Vec<StatePair> = Vec::new();
        // A state may be both listed and declared. Of two pairs that share one end, one is a mistake.
        for pair in found.iter().chain(self.declared.iter().map(|state| &state.pair)) {
            match all.iter().find(|known| known.input == pair.input || known.output == pair.output) {
                None => all.push(pair.clone()),
                Some(known) if known == pair => {}
                Some(known) => {
                    let name = if known.input == pair.input { &pair.input } else { &pair.output };
                    let why = format!(
                        "'{name}' is also in <<<{}, {}>>>; a name may stand in one pair only, of 'state_pairs' and \
                         'sequence_batching.state' together",
                        known.input, known.output
                    );
                    return Err(field(format!("the state {pair}"), "in conflict", why));
                }
            }
        }
        Ok(all)
    }

    /// The files of initial states: the name of a state's input, and the file in the folder `initial_state`.
    pub fn initial_files(&self) -> impl Iterator<Item = (&str, &str)> {
        let declared = self.declared.iter().filter_map(|state| {
            let file = state.initial.as_ref()?.file.as_deref()?;
            Some((state.pair.input.as_str(), file))
        });
        let named = self.initial.iter().filter_map(|(state, value)| match value {
            InitialValue::File(file) | InitialValue::Array { file, .. } => Some((state.as_str(), file.as_str())),
            _ => None,
        });
        declared.chain(named)
    }

    pub fn written_dims(&self, input: &str) -> Option<&StateDims> {
        self.dims.iter().find(|state| state.name == input)
    }

    /// The dimensions that may be the batch of a state with so many: the one that `state_dims` says, or all.
    pub fn batch_axes(&self, input: &str, rank: usize) -> Vec<usize> {
        match self.written_dims(input) {
            Some(written) => written.batch_axis.into_iter().filter(|&axis| axis < rank).collect(),
            None => (0..rank).collect(),
        }
    }

    pub fn is_declared(&self, input: &str) -> bool {
        self.declared.iter().any(|state| state.pair.input == input)
    }

    /// A state that has no batch dimension according to `state_dims`. Then sequences can't share a run.
    pub fn without_batch(&self) -> Option<&StateDims> {
        self.dims.iter().find(|state| state.batch_axis.is_none())
    }

    pub fn declaration(&self, pair: &StatePair) -> Option<&DeclaredState> {
        self.declared.iter().find(|state| state.pair == *pair)
    }
}

impl DeclaredState {
    fn new(raw: &raw::State) -> Result<Self> {
        let path = format!("sequence_batching.state '{}'", raw.input_name);
        for (name, value) in [("input_name", &raw.input_name), ("output_name", &raw.output_name)] {
            if value.is_empty() {
                return Err(field(format!("{path}.{name}"), "empty", "the name of the model's tensor is expected"));
            }
        }
        let data_type = data_type(&format!("{path}.data_type"), &raw.data_type)?;
        let dims = dims(&raw.dims);
        let initial = match raw.initial_state.as_slice() {
            [] => None,
            [initial] => Some(DeclaredInitial::new(&format!("{path}.initial_state"), initial, data_type, &dims)?),
            _ => return Err(field(format!("{path}.initial_state"), "given more than once", "a state has one")),
        };
        let pair = StatePair { input: raw.input_name.clone(), output: raw.output_name.clone() };
        Ok(Self { pair, data_type, dims, initial })
    }
}

const BATCH: &str = "batch";

fn state_dims(parameters: &Parameters) -> Result<Vec<StateDims>> {
    const FORM: &str = "'name=[dims]' is expected, separated by spaces or commas: 'batch' at most once for the batch \
                        dimension, -1 for a dimension that varies, else its length";
    let dim = |word: &String| match word.as_str() {
        BATCH => Ok(-1),
        word => word.parse().ok().filter(|&dim| dim >= -1).ok_or(FORM),
    };
    parameters.assigned("state_dims", FORM, None, |name, written| {
        let Assigned::List(words) = written else { return Err(FORM.to_owned()) };
        let batch_axes: Vec<usize> = (0..words.len()).filter(|&axis| words[axis] == BATCH).collect();
        if batch_axes.len() > 1 {
            return Err(FORM.to_owned());
        }
        let dims = words.iter().map(dim).collect::<Result<_, _>>()?;
        Ok(StateDims { name, dims, batch_axis: batch_axes.first().copied() })
    })
}

/// The line of config.pbtxt that gives the dims of states: each with its batch axis.
pub fn state_dims_line(states: impl IntoIterator<Item = StateDims>) -> String {
    parameters::parameter_line("state_dims", &state_dims_text(states))
}

pub fn state_dims_text(states: impl IntoIterator<Item = StateDims>) -> String {
    let entry = |state: StateDims| {
        let dim = |(axis, dim): (usize, &i64)| {
            if Some(axis) == state.batch_axis { BATCH.to_owned() } else { dim.to_string() }
        };
        format!("{}=[{}]", state.name, state.dims.iter().enumerate().map(dim).collect::<Vec<_>>().join(", "))
    };
    states.into_iter().map(entry).collect::<Vec<_>>().join(" ")
}

impl StateLimits {
    fn new(parameters: &Parameters) -> Result<Self> {
        let bytes = |name| parameters.number(name, 1usize.., "a number of bytes, 1 or more,");
        let written = (bytes("max_state_bytes")?, bytes("max_state_bytes_per_sequence")?);
        // A run needs memory beside that, and so do other models.
        let total = written.0.unwrap_or_else(|| machine_memory() / 4);
        let per_sequence = written.1.unwrap_or_else(|| total.min(machine_memory() / 64));
        if per_sequence > total {
            let rule = format!("it must not be larger than max_state_bytes, {total}");
            return Err(bad("max_state_bytes_per_sequence", per_sequence, rule));
        }
        Ok(Self { per_sequence, total, are_written: written != (None, None) })
    }
}

/// Triton's name for the folder beside a model's versions that holds initial states.
const FOLDER: &str = "initial_state";

#[derive(Clone, Debug, Default)]
pub struct InitialSources {
    /// Contents of files, by the name that the configuration gives them.
    pub files: BTreeMap<String, Vec<u8>>,
    /// The model's metadata, as far as it is text.
    pub metadata: BTreeMap<String, String>,
    /// The values that the model itself has for inputs which are states, by input.
    pub defaults: BTreeMap<String, Vec<f64>>,
}

impl InitialSources {
    /// Reads files in a model's folder `initial_state`. `files`: the name of each file, after the name of its state,
    /// which errors show.
    pub fn read<'a>(
        repository: &Path,
        files: impl Iterator<Item = (&'a str, &'a str)>,
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self> {
        let folder = repository.join(FOLDER);
        let mut contents = BTreeMap::new();
        for (state, file) in files {
            let failed =
                |why| ConfigError::InitialFile { state: state.into(), file: file.into(), dir: folder.clone(), why };
            contents.insert(file.to_owned(), read_file(&folder, file).map_err(failed)?);
        }
        Ok(Self { files: contents, metadata: metadata.clone(), defaults: BTreeMap::new() })
    }
}

impl DeclaredInitial {
    fn new(path: &str, raw: &raw::InitialState, of: DataType, state_dims: &[i64]) -> Result<Self> {
        if data_type(&format!("{path}.data_type"), &raw.data_type)? != of {
            return Err(field(format!("{path}.data_type"), &raw.data_type, format!("the state has {of}")));
        }
        let dims = dims(&raw.dims);
        let fits = dims.len() == state_dims.len()
            && dims.iter().zip(state_dims).all(|(&dim, &state)| dim == state || (state < 0 && dim >= 0));
        let wrong = |rule: String| Err(field(format!("{path}.dims"), Dims(&dims).to_string(), rule));
        if !fits {
            return wrong(format!("it must agree with the state's dims, {}", Dims(state_dims)));
        }
        if dims.iter().any(|&dim| dim < 0) {
            let closed: Vec<i64> = dims.iter().map(|&dim| if dim < 0 { 1 } else { dim }).collect();
            let closed = Dims(&closed);
            return wrong(format!("at START no dimension is open: write each one's length, such as dims: {closed}"));
        }
        if element_count(&dims).is_none() {
            return wrong("it has more elements than an address can count".to_owned());
        }
        let file = raw.data_file.clone().filter(|file| !file.is_empty());
        if file.is_none() && raw.zero_data.is_none() {
            return Err(field(path, "without data", "'zero_data: true' or a 'data_file' is expected"));
        }
        Ok(Self { dims, file })
    }
}

/// Reads `name=value`, `name=[value, value]`, `name=file:FILE`, `name=npz:FILE:ARRAY` and `name=metadata:KEY+KEY`.
fn initial_states(parameters: &Parameters) -> Result<Vec<(String, InitialValue)>> {
    let form = "'name=value', 'name=[value, value]', 'name=file:FILE', 'name=npz:FILE:ARRAY' or 'name=metadata:KEY', \
                separated by spaces or commas, is expected";
    parameters.assigned("initial_states", form, None, |name, value| {
        let Assigned::One(value) = value else { return Ok((name, InitialValue::List(value.values(form)?))) };
        let value = match value.split_once(':') {
            Some(("file", file)) => InitialValue::File(file.to_owned()),
            Some(("npz", rest)) => {
                let (file, array) = rest.split_once(':').map_or((rest, None), |(file, array)| (file, Some(array)));
                InitialValue::Array { file: file.to_owned(), name: array.map(str::to_owned) }
            }
            Some(("metadata", rest)) => {
                // `KEY+zeros`: zeros fill the rest of the row. Alone, `zeros` is a key.
                let keys = rest.strip_suffix("+zeros");
                let then_zeros = keys.is_some();
                InitialValue::Metadata {
                    keys: keys.unwrap_or(rest).split('+').map(str::to_owned).collect(),
                    then_zeros,
                }
            }
            _ => InitialValue::Fill(value),
        };
        Ok((name, value))
    })
}

/// Whether a path stays inside the folder that it starts from.
pub(super) fn is_inside(name: &str) -> bool {
    // A configuration may name files in the model's folder, and no others (SECURITY.md).
    Path::new(name).components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir))
}

fn read_file(folder: &Path, name: &str) -> Result<Vec<u8>, String> {
    if !is_inside(name) {
        return Err("it must lie in that folder".to_owned());
    }
    let text = |error: io::Error| error.to_string();
    // Without O_NONBLOCK, opening a pipe waits until something writes to it.
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(folder.join(name)).map_err(text)?;
    let metadata = file.metadata().map_err(text)?;
    // A pipe or a device may never end.
    if !metadata.is_file() {
        return Err("it is no regular file".to_owned());
    }
    let bytes = metadata.len();
    if bytes > machine_memory() as u64 / 2 {
        return Err(format!("it has {bytes} bytes, more than half of the machine's memory"));
    }
    let mut content = reserve(bytes as usize).map_err(|error| error.to_string())?;
    // A file may grow while it is read. What was there at first is read.
    file.take(bytes).read_to_end(&mut content).map_err(text)?;
    Ok(content)
}

/// Bytes of memory that this process may use: the machine's, or what its control group allows.
fn machine_memory() -> usize {
    let system = sysinfo::System::new_with_specifics(
        sysinfo::RefreshKind::nothing().with_memory(sysinfo::MemoryRefreshKind::nothing().with_ram()),
    );
    // A container often gets less than its machine has.
    let group = system.cgroup_limits().map_or(u64::MAX, |limits| limits.total_memory);
    usize::try_from(system.total_memory().min(group)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use serde_json::{Value, json};

    fn config(state: Value, parameters: &[(&str, &str)]) -> Result<Config> {
        let batching = json!({ "direct": {}, "state": state });
        let config = json!({ "name": "m", "max_batch_size": 4, "sequence_batching": batching });
        Config::for_tests(&config, parameters)
    }

    fn state(input: &str, output: &str) -> Value {
        json!({ "input_name": input, "output_name": output, "data_type": "TYPE_FP32", "dims": [2, -1] })
    }

    fn pair(input: &str, output: &str) -> StatePair {
        StatePair { input: input.to_owned(), output: output.to_owned() }
    }

    #[test]
    fn the_states_are_the_union_of_both_lists_and_a_name_is_in_one_pair_only() {
        let states = config(json!([state("b", "b2"), state("a", "a2")]), &[("state_pairs", "<<<c, c2>>> <<<a, a2>>>")]);
        let states = states.unwrap().written.states;
        let StatePairs::Listed(pairs) = &states.pairs else { panic!("pairs are written") };
        assert_eq!(states.union(pairs).unwrap(), [pair("c", "c2"), pair("a", "a2"), pair("b", "b2")]);
        for other in [pair("a", "x"), pair("x", "a2")] {
            let error = states.union(std::slice::from_ref(&other)).unwrap_err().to_string();
            for part in ["<<<a, a2>>>", &other.input, &other.output, "one pair only"] {
                assert!(error.contains(part), "{error}");
            }
        }
    }

    #[test]
    fn the_dims_of_states_are_read_and_written() {
        let text = "k=[batch, 17, -1, 512] att=[2, 4, -1, 8], n=[]";
        let written = config(json!([]), &[("state_dims", text)]).unwrap().written.states.dims;
        let of =
            |name: &str, dims: &[i64], batch_axis| StateDims { name: name.to_owned(), dims: dims.to_vec(), batch_axis };
        let expected = [of("k", &[-1, 17, -1, 512], Some(0)), of("att", &[2, 4, -1, 8], None), of("n", &[], None)];
        assert_eq!(written, expected);
        assert_eq!(
            state_dims_line(expected),
            "parameters { key: 'state_dims' value { string_value: 'k=[batch, 17, -1, 512] att=[2, 4, -1, 8] n=[]' } }"
        );
        for text in ["k=3", "k=[x]", "k=[batch, batch]", "k=[-2]", "k=[1", "k", "k=[1] k=[1]"] {
            let error = config(json!([]), &[("state_dims", text)]).unwrap_err().to_string();
            assert!(error.contains("'state_dims'") && error.contains(text), "{error}");
        }
        let error = config(json!([state("a", "a2")]), &[("state_dims", "a=[2, batch]")]).unwrap_err().to_string();
        assert!(error.contains("'a'") && error.contains("sequence_batching.state"), "{error}");
    }

    #[test]
    fn a_state_without_a_batch_has_runs_of_its_own() {
        let with = |parameters: &[(&str, &str)]| {
            let parameters = [&[("state_dims", "att=[2, 4, -1, 8]")], parameters].concat();
            config(json!([]), &parameters)
        };
        let config = with(&[]).unwrap();
        assert_eq!((config.max_batch_size, config.max_rows_per_run, config.most_rows()), (4, 1, 1));
        assert_eq!(with(&[("max_rows_per_run", "1")]).unwrap().max_rows_per_run, 1);
        let error = with(&[("max_rows_per_run", "2")]).unwrap_err().to_string();
        assert!(error.contains("'max_rows_per_run'") && error.contains("'att'"), "{error}");
    }

    #[test]
    fn dims_are_read_as_numbers_and_as_strings() {
        let mut declared = state("a", "a2");
        declared["initial_state"] =
            json!([{ "name": "i", "data_type": "TYPE_FP32", "dims": ["2", "3"], "data_file": "f" }]);
        let written = "x=file:g, y=1 z=[1,2] v=npz:h.npz w=npz:h.npz:a:0 m=metadata:k+l n=metadata:k+zeros";
        let states = config(json!([declared]), &[("initial_states", written)]).unwrap().written.states;
        let expected = DeclaredInitial { dims: vec![2, 3], file: Some("f".to_owned()) };
        assert_eq!(states.declared[0].initial, Some(expected));
        let files = [("a", "f"), ("x", "g"), ("v", "h.npz"), ("w", "h.npz")];
        assert_eq!(states.initial_files().collect::<Vec<_>>(), files);
        let array =
            |name: Option<&str>| InitialValue::Array { file: "h.npz".to_owned(), name: name.map(str::to_owned) };
        assert_eq!((&states.initial[3].1, &states.initial[4].1), (&array(None), &array(Some("a:0"))));
        let metadata = |keys: &[&str], then_zeros| InitialValue::Metadata {
            keys: keys.iter().map(|&key| key.to_owned()).collect(),
            then_zeros,
        };
        assert_eq!(
            (&states.initial[5].1, &states.initial[6].1),
            (&metadata(&["k", "l"], false), &metadata(&["k"], true))
        );
        assert_eq!(states.initial[1], ("y".to_owned(), InitialValue::Fill("1".to_owned())));
        assert_eq!(states.initial[2].1, InitialValue::List(vec!["1".to_owned(), "2".to_owned()]));
    }

    #[test]
    fn an_initial_state_that_does_not_fit_its_state_is_refused() {
        for (initial, words) in [
            (json!([{ "data_type": "TYPE_INT8", "dims": [2, 3], "zero_data": true }]), ["data_type", "TYPE_INT8"]),
            (json!([{ "data_type": "TYPE_FP32", "dims": [3, 3], "zero_data": true }]), ["dims", "[3, 3]"]),
            (json!([{ "data_type": "TYPE_FP32", "dims": [2], "zero_data": true }]), ["dims", "[2]"]),
            (
                json!([{ "data_type": "TYPE_FP32", "dims": [2, -1], "zero_data": true }]),
                ["[2, -1]", "such as dims: [2, 1]"],
            ),
            (json!([{ "data_type": "TYPE_FP32", "dims": [2, 3] }]), ["initial_state", "zero_data"]),
            (json!([{}, {}]), ["initial_state", "more than once"]),
        ] {
            let mut declared = state("a", "a2");
            declared["initial_state"] = initial;
            let error = config(json!([declared]), &[]).unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)) && error.contains("'a'"), "{error}");
        }
    }

    #[test]
    fn the_limits_are_read_and_have_an_order() {
        let limits = |parameters: &[(&str, &str)]| config(json!([]), parameters).map(|config| config.states.limits);
        let default = limits(&[]).unwrap();
        assert_eq!((default.total, default.per_sequence), (machine_memory() / 4, machine_memory() / 64));
        assert_eq!(limits(&[("max_state_bytes", "1000")]).unwrap().per_sequence, 1000);
        let given = limits(&[("max_state_bytes", "1000"), ("max_state_bytes_per_sequence", "10")]).unwrap();
        assert_eq!(given, StateLimits { per_sequence: 10, total: 1000, are_written: true });
        for (name, value) in [("max_state_bytes", "0"), ("max_state_bytes_per_sequence", "-1")] {
            let error = limits(&[(name, value)]).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(value), "{error}");
        }
        let error = limits(&[("max_state_bytes", "5"), ("max_state_bytes_per_sequence", "6")]).unwrap_err();
        assert!(error.to_string().contains("max_state_bytes, 5"), "{error}");
    }

    #[test]
    fn files_come_from_the_models_folder_of_initial_states_and_nowhere_else() {
        let repository = std::env::temp_dir().join(format!("triton-stateful-initial-files-{}", std::process::id()));
        std::fs::create_dir_all(repository.join(FOLDER)).unwrap();
        std::fs::write(repository.join(FOLDER).join("a"), "abc").unwrap();
        std::fs::write(repository.join("secret"), "abc").unwrap();
        let read = |name: &str| InitialSources::read(&repository, std::iter::once(("state", name)), &BTreeMap::new());
        assert_eq!(read("a").unwrap().files["a"], b"abc");
        std::fs::File::create(repository.join(FOLDER).join("huge")).unwrap().set_len(1 << 42).unwrap();
        std::os::unix::fs::symlink("/dev/zero", repository.join(FOLDER).join("endless")).unwrap();
        let pipe = std::process::Command::new("mkfifo").arg(repository.join(FOLDER).join("pipe")).status().unwrap();
        assert!(pipe.success());
        for name in ["b", "../secret", "/etc/passwd", "", ".", "huge", "endless", "pipe"] {
            let error = read(name).unwrap_err().to_string();
            assert!(error.contains(&format!("'{name}' of state 'state'")) && error.contains(FOLDER), "{error}");
        }
        std::fs::remove_dir_all(repository).unwrap();
    }
}

//! Prepares a model: reads weights that are in files of their own (`external_data`) into it, and puts it in order, so
//! that each node follows those that it reads from, and each layer has time in front. Also the reasons why a model
//! isn't converted ([`ConvertError`]).
//!
//! Only files in the model's folder are read: a path or a link out of it could name any file of the machine.

use std::collections::HashSet;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Component, Path, PathBuf};

use bytes::Bytes;
use prost::Message;

use crate::batch::BatchError;
use crate::graph::{Names, in_a_circle, sort};
use crate::infer::tensor::MOST_ELEMENTS;
use crate::names::{BadPairs, StatePair};
use crate::onnx::schema::{GraphProto, ModelProto, NodeProto, TensorProto, tensor_proto::DataLocation};
use crate::onnx::{self, ReadError, element_count, function_like_operator, type_bytes};
use crate::time::{CHECKER, Hint, Refusals, refuse};

#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error("{0}")]
    Refused(Refusals),
    #[error(
        "the model has a function '{0}' with the name and the domain of an operator, so it isn't known what its nodes do; \
         inline the functions, as onnx.inliner does"
    )]
    Function(String),
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// No recurrence was found. `alike` are pairs that may be states, and `stopped` says for each axis what is in the
    /// way. `like_states` are inputs that may be states of a graph that makes a single step.
    #[error("{}", nothing(alike, like_states, stopped))]
    Nothing { alike: Vec<StatePair>, like_states: Vec<String>, stopped: Vec<String> },
    /// The graph's description names states in another form than the backend reads.
    #[error("the graph's description names states as '{}': '<<<input, output>>>' is expected", .0.text)]
    Description(BadPairs),
    #[error("{0}")]
    Option(String),
}

impl ConvertError {
    pub fn hints(&self) -> Vec<Hint> {
        match self {
            Self::Nothing { .. } => vec![Hint::States, Hint::Time],
            Self::Refused(refusals) => {
                let hinted = |hint: &Hint| refusals.iter().any(|refusal| refusal.hint == Some(*hint));
                [Hint::States, Hint::Time].into_iter().filter(hinted).collect()
            }
            Self::Read(_) | Self::Function(_) | Self::Batch(_) | Self::Description(_) | Self::Option(_) => Vec::new(),
        }
    }
}

fn nothing(alike: &[StatePair], like_states: &[String], stopped: &[String]) -> String {
    let pairs: Vec<String> = alike.iter().map(StatePair::to_string).collect();
    let states = if pairs.is_empty() { format!("the inputs {}", like_states.join(", ")) } else { pairs.join(" ") };
    let mut text = String::new();
    if !like_states.is_empty() {
        text += &format!(
            "by their types and dims, {states} may be states that the model has: then this graph makes one step and needs \
             no conversion; serve it as it is, with its pairs in 'state_pairs'; else, "
        );
    } else if !alike.is_empty() {
        text += &format!("by their types and dims, {states} may be states that the model has; else, ");
    }
    text += "no axis of the inputs leads to a recurrence or a causal convolution";
    // For a single step, it says nothing what stopped each axis: there are no steps to follow.
    for line in stopped.iter().filter(|_| like_states.is_empty()) {
        text += &format!("\n  {line}");
    }
    text
}

/// A model in which each node follows those that it reads from, also in inner graphs.
pub struct Prepared {
    pub model: ModelProto,
    pub graph: GraphProto,
    /// Layers had the batch in front.
    pub had_batch_in_front: bool,
}

pub fn prepared(bytes: Bytes) -> Result<Prepared, ConvertError> {
    in_order(onnx::read(bytes)?)
}

pub fn in_order(mut model: ModelProto) -> Result<Prepared, ConvertError> {
    // Nodes of such a function would be followed by the rules of the operator.
    if let Some(name) = function_like_operator(&model) {
        return Err(ConvertError::Function(name.to_owned()));
    }
    let mut graph = model.graph.take().unwrap_or_default();
    // Names in bodies hide those outside, so new names must differ from both.
    let names = &mut Names::of(&graph);
    let had_batch_in_front = put_time_in_front(&mut graph, names);
    sort_all(&mut graph)?;
    Ok(Prepared { model, graph, had_batch_in_front })
}

/// Sorts a graph and its inner graphs. Refuses nodes that wait for each other, and two nodes that make one tensor.
pub fn sort_all(graph: &mut GraphProto) -> Result<(), ConvertError> {
    let refused = |node: &NodeProto, why: String| Err(ConvertError::Refused(refuse(node, why, CHECKER).into()));
    // Two makers of one name would make every look-up by name ambiguous.
    let mut made = HashSet::new();
    for node in &graph.node {
        if let Some(twice) = node.named_outputs().find(|name| !made.insert(*name)) {
            return refused(node, format!("makes '{twice}', which another node makes too"));
        }
    }
    if let Some(node) = in_a_circle(graph) {
        return refused(node, "waits for its own output, or for a node that does".to_owned());
    }
    // All that follows walks the nodes once, from front to back.
    sort(graph);
    graph.node.iter_mut().flat_map(NodeProto::graphs_mut).try_for_each(sort_all)
}

/// Puts transposes around each layer with the batch in front (`layout` 1), which ONNX Runtime doesn't run. Answers
/// whether there was one.
fn put_time_in_front(graph: &mut GraphProto, names: &mut Names) -> bool {
    let mut found = false;
    for index in 0..graph.node.len() {
        for inner in graph.node[index].graphs_mut() {
            found |= put_time_in_front(inner, names);
        }
        let node = &graph.node[index];
        if node.is_recurrent() && node.int("layout") == Some(1) {
            transpose_around(graph, index, names);
            found = true;
        }
    }
    found
}

fn transpose_around(graph: &mut GraphProto, index: usize, names: &mut Names) {
    let mut node = graph.node[index].clone();
    node.remove("layout");
    let mut fresh =
        |tensor: &str| (names.fresh(&format!("{tensor}/by_time")), names.fresh(&format!("{tensor}/Transpose")));
    // The input and the initial states.
    for input in [0, 5, 6] {
        let Some(given) = node.input_at(input).map(str::to_owned) else { continue };
        let (by_time, name) = fresh(&given);
        let transpose = NodeProto::make("Transpose", &name, &[&given], &[&by_time]);
        graph.node.push(transpose.with_ints("perm", &[1, 0, 2]));
        node.set_input(input, &by_time);
    }
    // With layout 1, the batch comes first in each output, and the directions after the steps.
    for (output, order) in [(0, &[2, 0, 1, 3][..]), (1, &[1, 0, 2]), (2, &[1, 0, 2])] {
        let Some(wanted) = node.output_at(output).map(str::to_owned) else { continue };
        let (by_time, name) = fresh(&wanted);
        graph.node.push(NodeProto::make("Transpose", &name, &[&by_time], &[&wanted]).with_ints("perm", order));
        node.set_output(output, &by_time);
    }
    graph.node[index] = node;
}

/// Weights whose contents a conversion looks at, such as shapes, have at most so many bytes.
pub const SMALL_WEIGHT_BYTES: u64 = MOST_ELEMENTS as u64 * 8;
// Protobuf can't write a model of more bytes.
const MOST_BYTES: u64 = 1 << 31;

#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    #[error(transparent)]
    Model(#[from] ReadError),
    #[error(
        "it has weights in the file '{0}', which isn't in the model's folder: ONNX requires a path relative to that \
         folder, without '..'"
    )]
    Outside(String),
    #[error("it has weights in the file '{0}', which isn't there")]
    Absent(String),
    #[error("its weights in the file '{file}' can't be read: {why}")]
    Unreadable { file: String, why: std::io::Error },
    #[error("its weight '{weight}' can't be in the file '{file}': {why}")]
    Place { weight: String, file: String, why: String },
    #[error(
        "its weights have {0} bytes or more, and a model in memory can have 2 GiB: convert it with stateful-convert, which \
         leaves them in their files"
    )]
    TooLarge(u64),
}

/// The model with its weights inside, so that it needs no files.
pub fn with_weights(model: Bytes, folder: &Path) -> Result<Bytes, WeightsError> {
    read_all(model, folder, false)
}

/// The model with small weights read in, for [`convert`](crate::convert()), which looks at their values. The references
/// to their files stay, and only these are written.
pub fn with_small_weights_shown(model: Bytes, folder: &Path) -> Result<Bytes, WeightsError> {
    read_all(model, folder, true)
}

fn read_all(model: Bytes, folder: &Path, stay: bool) -> Result<Bytes, WeightsError> {
    let mut read = onnx::read(model.clone())?;
    if onnx::external_files(&read).is_empty() {
        return Ok(model);
    }
    let mut reader = Reader { folder, stay, total: model.len() as u64 };
    if let Some(graph) = &mut read.graph {
        onnx::each_external(graph, &mut |tensor| reader.read(tensor))?;
    }
    Ok(read.encode_to_vec().into())
}

/// The path of a file of weights; an error if it isn't in the model's folder.
pub fn path_in(folder: &Path, file: &str) -> Result<PathBuf, WeightsError> {
    let is_inside = |part: Component| matches!(part, Component::Normal(_) | Component::CurDir);
    let outside = || WeightsError::Outside(file.to_owned());
    if !Path::new(file).components().all(is_inside) {
        return Err(outside());
    }
    // The parent of a bare file name is an empty path, which cannot be made canonical.
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let path = folder.join(file);
    let (Ok(here), Ok(real)) = (folder.canonicalize(), path.canonicalize()) else {
        return Err(WeightsError::Absent(file.to_owned()));
    };
    // A link is followed before it is judged: only the file behind it counts.
    if !real.starts_with(here) {
        return Err(outside());
    }
    if real.is_file() { Ok(path) } else { Err(WeightsError::Absent(file.to_owned())) }
}

struct Reader<'a> {
    folder: &'a Path,
    /// The weights stay in their files. Only small ones are read.
    stay: bool,
    total: u64,
}

impl Reader<'_> {
    fn read(&mut self, tensor: &mut TensorProto) -> Result<(), WeightsError> {
        let entry = |key: &str| tensor.external_data.iter().find(|entry| entry.key() == key).map(|entry| entry.value());
        let file = entry("location").unwrap_or_default().to_owned();
        let place = |why: String| WeightsError::Place { weight: tensor.name().to_owned(), file: file.clone(), why };
        let number = |key: &str| {
            let wrong = |text: &str| place(format!("'{key}' is '{text}', and a number of bytes is wanted"));
            entry(key).map(|text| text.parse::<u64>().map_err(|_| wrong(text))).transpose()
        };
        let (offset, written) = (number("offset")?.unwrap_or(0), number("length")?);
        // A negative dimension has no count, and then only the written length can be used.
        let of_type = u64::try_from(element_count(&tensor.dims)).ok();
        let of_type = of_type.and_then(|count| count.checked_mul(type_bytes(tensor.data_type()) as u64));
        // Types of less than a byte count 0 bytes here.
        let of_type = of_type.filter(|&bytes| bytes > 0 || element_count(&tensor.dims) == 0);
        let length = match (written, of_type) {
            (Some(written), Some(of_type)) if written != of_type => {
                return Err(place(format!("its length is {written} bytes, and its type and dims need {of_type}")));
            }
            (Some(length), _) | (None, Some(length)) => length,
            (None, None) => return Err(place("it has no length".to_owned())),
        };
        if self.stay && length > SMALL_WEIGHT_BYTES {
            return Ok(());
        }
        // Checked before the file is opened, so that a model that is too large costs no reading.
        self.total = self.total.saturating_add(length);
        if self.total >= MOST_BYTES {
            return Err(WeightsError::TooLarge(self.total));
        }
        let path = path_in(self.folder, &file)?;
        let unreadable = |why| WeightsError::Unreadable { file: file.clone(), why };
        let mut opened = File::open(path).map_err(unreadable)?;
        let size = opened.metadata().map_err(unreadable)?.len();
        // Reading to the end of a short file would fail with less to say.
        if offset.checked_add(length).is_none_or(|end| end > size) {
            return Err(place(format!("it would be {length} bytes at {offset}, and the file has {size}")));
        }
        let mut bytes = vec![0; usize::try_from(length).unwrap_or_default()];
        opened.seek(SeekFrom::Start(offset)).map_err(unreadable)?;
        opened.read_exact(&mut bytes).map_err(unreadable)?;
        tensor.raw_data = Some(bytes.into());
        if !self.stay {
            tensor.data_location = Some(DataLocation::Default.into());
            tensor.external_data.clear();
        }
        Ok(())
    }
}

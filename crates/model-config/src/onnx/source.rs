//! Where a model is read from, and reading it without large weights.
//!
//! Rule of [`without_weights`]: no large weight is read or copied, however the file holds it. A model of many gigabytes takes
//! no longer to look at than its nodes do.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};

use prost::Message;
use prost::bytes::{Buf, Bytes};
use prost::encoding::{WireType, decode_key, decode_varint, encode_key, encode_varint};
use stateful_convert::SMALL_WEIGHT_BYTES;
use stateful_convert::onnx::schema::ModelProto;

/// A model's file, or what was made of it or of several.
#[derive(Clone, Debug)]
pub struct ModelSource {
    file: PathBuf,
    made: Option<Made>,
}

#[derive(Clone, Debug)]
struct Made {
    what: &'static str,
    /// Kept as long as the model, because each instance on a GPU opens a session. Clones share them.
    bytes: Bytes,
}

impl ModelSource {
    /// The model that was made of a file.
    pub fn converted(file: PathBuf, bytes: Vec<u8>) -> Self {
        Self { file, made: Some(Made { what: "converted", bytes: bytes.into() }) }
    }

    /// The model of initial states that was made of a file.
    pub fn initial_states(file: PathBuf, bytes: Vec<u8>) -> Self {
        Self { file, made: Some(Made { what: "its initial states", bytes: bytes.into() }) }
    }

    /// The model that was made of the graphs in a folder.
    pub fn joined(folder: PathBuf, bytes: Vec<u8>) -> Self {
        Self { file: folder, made: Some(Made { what: "joined", bytes: bytes.into() }) }
    }

    /// The file, also of a converted model. Of a joined one, the folder of its graphs.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Reads the whole model, weights too.
    pub fn read(&self) -> io::Result<Bytes> {
        match &self.made {
            Some(made) => Ok(made.bytes.clone()),
            None => Ok(std::fs::read(&self.file)?.into()),
        }
    }

    /// Bytes of the model, without weights in files of their own.
    pub fn byte_len(&self) -> u64 {
        match &self.made {
            Some(made) => made.bytes.len() as u64,
            None => std::fs::metadata(&self.file).map_or(0, |file| file.len()),
        }
    }

    /// What is read in place of the file.
    pub fn bytes(&self) -> Option<&[u8]> {
        self.made.as_ref().map(|made| &*made.bytes)
    }
}

impl From<PathBuf> for ModelSource {
    fn from(file: PathBuf) -> Self {
        Self { file, made: None }
    }
}

impl fmt::Display for ModelSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        self.made.as_ref().map_or(Ok(()), |made| write!(f, " ({})", made.what))
    }
}

/// Reads a model. Large weights come out empty.
pub fn without_weights(path: &Path) -> io::Result<ModelProto> {
    let mut file = FileBytes::open(path)?;
    let mut copied = Vec::new();
    let is_copied = copy(&mut file, Part::Model, 0, MOST_DEPTH, &mut copied).is_some();
    file.error.take().map_or(Ok(()), Err)?;
    if is_copied {
        return ModelProto::decode(Bytes::from(copied)).map_err(io::Error::other);
    }
    // The decoder knows what is wrong with the file.
    let mut file = FileBytes::open(path)?;
    let decoded = ModelProto::decode(&mut file);
    file.error.take().map_or(Ok(()), Err)?;
    decoded.map_err(io::Error::other)
}

/// Graphs in graphs, as deep as the decoder goes.
const MOST_DEPTH: usize = 100;

/// Parts of a model that hold weights, or parts with weights.
#[derive(Clone, Copy)]
enum Part {
    Model,
    Graph,
    Node,
    Function,
    Attribute,
    SparseTensor,
    Tensor,
    Training,
}

impl Part {
    /// The part in a field, by its number in ONNX's schema.
    const fn inside(self, field: u32) -> Option<Self> {
        match (self, field) {
            (Self::Model, 7) | (Self::Attribute, 6 | 11) | (Self::Training, 1 | 2) => Some(Self::Graph),
            (Self::Model, 20) => Some(Self::Training),
            (Self::Model, 25) => Some(Self::Function),
            (Self::Graph, 1) | (Self::Function, 7) => Some(Self::Node),
            (Self::Node, 5) => Some(Self::Attribute),
            (Self::Graph, 15) | (Self::Attribute, 22 | 23) => Some(Self::SparseTensor),
            (Self::Graph, 5) | (Self::Attribute, 5 | 10) | (Self::SparseTensor, 1 | 2) => Some(Self::Tensor),
            _ => None,
        }
    }

    /// Whether a field of so many bytes is a large weight. Elements may be bytes (`raw_data`), or numbers of a type. An
    /// integer has up to 10 bytes there, and 8 as bytes.
    const fn is_large_weight(self, field: u32, bytes: u64) -> bool {
        match (self, field) {
            (Self::Tensor, 9) => bytes > SMALL_WEIGHT_BYTES,
            (Self::Tensor, 4 | 5 | 7 | 10 | 11) => bytes > SMALL_WEIGHT_BYTES / 8 * 10,
            _ => false,
        }
    }
}

/// Copies the fields up to where `end` bytes remain, without large weights. `None` if they are malformed.
fn copy(from: &mut FileBytes, part: Part, end: usize, depth: usize, to: &mut Vec<u8>) -> Option<()> {
    while from.remaining() > end {
        let (field, kind) = decode_key(from).ok()?;
        encode_key(field, kind, to);
        let bytes = match kind {
            WireType::Varint => {
                encode_varint(decode_varint(from).ok()?, to);
                continue;
            }
            WireType::SixtyFourBit => 8,
            WireType::ThirtyTwoBit => 4,
            WireType::LengthDelimited => decode_varint(from).ok()?,
            // ONNX has no groups.
            WireType::StartGroup | WireType::EndGroup => return None,
        };
        let size = usize::try_from(bytes).ok()?;
        let rest = from.remaining().checked_sub(size).filter(|&rest| rest >= end)?;
        if let (Some(inside), true) = (part.inside(field), kind == WireType::LengthDelimited) {
            let mut copied = Vec::new();
            copy(from, inside, rest, depth.checked_sub(1)?, &mut copied)?;
            encode_varint(copied.len() as u64, to);
            to.append(&mut copied);
        } else if kind == WireType::LengthDelimited && part.is_large_weight(field, bytes) {
            from.advance(size);
            encode_varint(0, to);
        } else {
            if kind == WireType::LengthDelimited {
                encode_varint(bytes, to);
            }
            let start = to.len();
            to.resize(start + size, 0);
            from.copy_to_slice(&mut to[start..]);
        }
    }
    (from.remaining() == end).then_some(())
}

/// A file that protobuf's decoder reads from. Bytes that it skips are not read from the disk. After an error, the rest of
/// the file is zeros.
struct FileBytes {
    file: File,
    chunk: Vec<u8>,
    /// Bytes of the chunk that have been taken.
    taken: usize,
    /// Bytes of the file behind the chunk.
    behind: usize,
    error: Option<io::Error>,
}

impl FileBytes {
    const CHUNK_BYTES: usize = 16 * 1024;

    fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let behind = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        let mut bytes = Self { file, chunk: Vec::new(), taken: 0, behind, error: None };
        bytes.read_chunk(0);
        Ok(bytes)
    }

    fn read_chunk(&mut self, skipped: usize) {
        self.behind -= skipped;
        self.taken = 0;
        self.chunk.resize(self.behind.min(Self::CHUNK_BYTES), 0);
        self.behind -= self.chunk.len();
        let sought = if skipped > 0 { self.file.seek_relative(skipped as i64) } else { Ok(()) };
        if let Err(error) = sought.and_then(|()| self.file.read_exact(&mut self.chunk)) {
            // `Buf` can't return an error, so whoever has the file asks for it at the end.
            self.chunk.fill(0);
            self.error.get_or_insert(error);
        }
    }
}

impl Buf for FileBytes {
    fn remaining(&self) -> usize {
        self.chunk.len() - self.taken + self.behind
    }

    fn chunk(&self) -> &[u8] {
        &self.chunk[self.taken..]
    }

    fn advance(&mut self, count: usize) {
        let left = self.chunk.len() - self.taken;
        if count < left {
            self.taken += count;
        } else {
            self.read_chunk(count - left);
        }
    }
}

#[cfg(test)]
mod tests {
    use stateful_convert::onnx::schema::{
        AttributeProto, FunctionProto, GraphProto, NodeProto, SparseTensorProto, TensorProto, TrainingInfoProto,
    };

    use super::*;

    /// A model with a tensor at each place that may have one.
    fn model(of_weight: impl Fn() -> TensorProto) -> ModelProto {
        let sparse = || SparseTensorProto { values: Some(of_weight()), ..SparseTensorProto::default() };
        let inner =
            GraphProto { initializer: vec![of_weight()], sparse_initializer: vec![sparse()], ..GraphProto::default() };
        let attribute = AttributeProto {
            t: Some(of_weight()),
            tensors: vec![of_weight()],
            sparse_tensor: Some(sparse()),
            sparse_tensors: vec![sparse()],
            g: Some(inner.clone()),
            graphs: vec![inner.clone()],
            ..AttributeProto::default()
        };
        let node = NodeProto { attribute: vec![attribute], ..NodeProto::make("If", "node", &["x"], &["y"]) };
        ModelProto {
            producer_name: Some("p".repeat(20_000)),
            graph: Some(GraphProto { node: vec![node.clone()], ..inner.clone() }),
            functions: vec![FunctionProto { node: vec![node], ..FunctionProto::default() }],
            training_info: vec![TrainingInfoProto { algorithm: Some(inner), ..TrainingInfoProto::default() }],
            ..ModelProto::default()
        }
    }

    #[test]
    fn large_weights_come_out_empty_and_all_else_as_it_is() {
        let path = std::env::temp_dir().join(format!("triton-stateful-weights-{}.onnx", std::process::id()));
        let raw = |bytes: usize| TensorProto { raw_data: Some(vec![1; bytes].into()), ..TensorProto::default() };
        let typed = |count: usize| TensorProto {
            float_data: vec![0.5; count],
            int32_data: vec![-1; count],
            int64_data: vec![-1; count],
            double_data: vec![0.5; count],
            uint64_data: vec![u64::MAX; count],
            name: Some("w".to_owned()),
            ..TensorProto::default()
        };
        for (weight, expected) in [
            (raw(200_000), raw(0)),
            (raw(1000), raw(1000)),
            (typed(50_000), TensorProto { name: Some("w".to_owned()), ..TensorProto::default() }),
            (typed(1000), typed(1000)),
        ] {
            std::fs::write(&path, model(|| weight.clone()).encode_to_vec()).unwrap();
            assert!(without_weights(&path).unwrap() == model(|| expected.clone()));
        }
        let _ = std::fs::remove_file(&path);
    }
}

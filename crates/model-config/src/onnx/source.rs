//! Where a model is read from, and reading it without large weights.
//!
//! Rule of [`ModelSource::without_weights`]: no large weight is read or copied, however the file holds it. A model of many
//! gigabytes takes no longer to read than its nodes do.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use prost::Message;
use prost::bytes::{Buf, Bytes};
use prost::encoding::{WireType, decode_key, decode_varint, encode_key, encode_varint};
use stateful_convert::SMALL_WEIGHT_BYTES;
use stateful_convert::onnx::schema::ModelProto;

/// A model's file, or what was made of it or of several.
#[derive(Clone, Debug)]
pub struct ModelSource {
    /// The model's file, even if the model is converted. For a joined model, the folder of its graphs.
    pub file: PathBuf,
    /// If the model is converted or joined, what was done, and the model that is read instead of the file.
    made: Option<(&'static str, Bytes)>,
}

impl ModelSource {
    pub fn made(what: &'static str, file: PathBuf, model: Vec<u8>) -> Self {
        // Kept as long as the model, because each instance on a GPU opens a session. Clones share the bytes.
        Self { file, made: Some((what, model.into())) }
    }

    /// Reads the whole model, weights too.
    pub fn read(&self) -> io::Result<Bytes> {
        self.bytes().map_or_else(|| Ok(std::fs::read(&self.file)?.into()), |bytes| Ok(bytes.clone()))
    }

    /// Bytes of the model, without weights in files of their own.
    pub fn byte_len(&self) -> u64 {
        let of_file = || std::fs::metadata(&self.file).map_or(0, |file| file.len());
        self.bytes().map_or_else(of_file, |bytes| bytes.len() as u64)
    }

    /// What is read in place of the file.
    pub fn bytes(&self) -> Option<&Bytes> {
        self.made.as_ref().map(|(_, bytes)| bytes)
    }

    /// Reads the model. Large weights of a file come out empty; of a model in memory, they are slices of its bytes.
    pub fn without_weights(&self) -> io::Result<ModelProto> {
        if let Some(bytes) = self.bytes() {
            return ModelProto::decode(bytes.clone()).map_err(io::Error::other);
        }
        let mut file = FileBytes::open(&self.file)?;
        // The decoder keeps what it reads, so the weights are taken out first.
        let mut copied = Vec::new();
        let decoded = match copy(&mut file, Part::Model, 0, MOST_DEPTH, &mut copied) {
            None if file.error.is_none() => {
                // The decoder knows what is wrong with the file.
                file = FileBytes::open(&self.file)?;
                ModelProto::decode(&mut file)
            }
            _ => ModelProto::decode(Bytes::from(copied)),
        };
        file.error.map_or(decoded.map_err(io::Error::other), Err)
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
        self.made.as_ref().map_or(Ok(()), |(what, _)| write!(f, " ({what})"))
    }
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
    /// `field`: its number in ONNX's schema.
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

    const fn is_large_weight(self, field: u32, bytes: u64) -> bool {
        match (self, field) {
            // `raw_data`: the elements as bytes.
            (Self::Tensor, 9) => bytes > SMALL_WEIGHT_BYTES,
            // Numbers of a type. An integer has up to 10 bytes here, and 8 as bytes.
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
    file: BufReader<File>,
    left: usize,
    error: Option<io::Error>,
}

impl FileBytes {
    fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let left = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        let mut bytes = Self { file: BufReader::with_capacity(16 * 1024, file), left, error: None };
        bytes.advance(0);
        Ok(bytes)
    }
}

impl Buf for FileBytes {
    fn remaining(&self) -> usize {
        self.left
    }

    fn chunk(&self) -> &[u8] {
        let chunk = if self.error.is_some() { &[0; 1024] } else { self.file.buffer() };
        &chunk[..chunk.len().min(self.left)]
    }

    fn advance(&mut self, count: usize) {
        self.left -= count;
        if self.left == 0 || self.error.is_some() {
            return;
        }
        let sought = self.file.seek_relative(count as i64);
        // `Buf` can't return an error, so the owner of the file asks for the error at the end.
        self.error = match sought.and_then(|()| self.file.fill_buf()) {
            Ok([]) => Some(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => None,
            Err(error) => Some(error),
        };
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
            assert!(ModelSource::from(path.clone()).without_weights().unwrap() == model(|| expected.clone()));
        }
        let _ = std::fs::remove_file(&path);
    }
}

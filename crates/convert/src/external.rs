//! Weights in files of their own (`external_data`): reads them into the model.
//!
//! Only files in the model's folder are read: a path or a link that leaves the folder could name any file of the machine.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Component, Path, PathBuf};

use bytes::Bytes;
use prost::Message;

use crate::infer::tensor::MOST_ELEMENTS;
use crate::onnx::schema::{TensorProto, tensor_proto::DataLocation};
use crate::onnx::{self, ReadError, element_count, type_bytes};

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

/// The model with small weights read in, for [`convert`](crate::convert()), which looks at their values. The references to
/// their files stay, and only these are written.
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

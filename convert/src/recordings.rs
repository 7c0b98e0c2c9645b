//! Recordings in NumPy's .npz files: an array for each input, of its name.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use npyz::{NpyHeader, Order};
use stateful_convert::onnx::{DataType, element_count, type_bytes};
use stateful_convert::verify::Recording;
use zip::ZipArchive;

/// What NumPy adds to an array's name in an archive.
const EXTENSION: &str = ".npy";

/// The arrays of a file.
pub fn read(file: &Path) -> Result<Vec<Recording>, String> {
    let opened = File::open(file).map_err(|error| error.to_string())?;
    let mut archive = ZipArchive::new(opened).map_err(|error| format!("it is no .npz file: {error}"))?;
    let mut recordings = Vec::new();
    for index in 0..archive.len() {
        let mut entry = archive.by_index(index).map_err(|error| error.to_string())?;
        let name = entry.name().map_err(|error| error.to_string())?.into_owned();
        let input = name.strip_suffix(EXTENSION).unwrap_or(&name).to_owned();
        let array = read_array(&mut entry, &input);
        recordings.push(array.map_err(|error| format!("its array '{input}' cannot be read: {error}"))?);
    }
    Ok(recordings)
}

fn read_array(entry: &mut impl Read, input: &str) -> io::Result<Recording> {
    let refused = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
    let header = NpyHeader::from_reader(&mut *entry)?;
    let stored = header.dtype().descr();
    let elem: i32 =
        data_type(stored.trim_matches('\'')).ok_or_else(|| refused(format!("its type is {stored}")))?.into();
    if header.order() == Order::Fortran {
        return Err(refused("its elements are in Fortran's order: save numpy.ascontiguousarray(array)".to_owned()));
    }
    let dims: Vec<i64> = header.shape().iter().map(|&dim| dim as i64).collect();
    let mut bytes = Vec::new();
    entry.read_to_end(&mut bytes)?;
    if usize::try_from(element_count(&dims)).ok() != Some(bytes.len() / type_bytes(elem)) {
        return Err(refused(format!("its shape is {dims:?}, and it has {} bytes", bytes.len())));
    }
    Ok(Recording { input: input.to_owned(), elem, dims, bytes })
}

/// The data type for NumPy's, of those that can be compared.
fn data_type(stored: &str) -> Option<DataType> {
    Some(match stored {
        "<f2" => DataType::Float16,
        "<f4" => DataType::Float,
        "<f8" => DataType::Double,
        "|i1" => DataType::Int8,
        "<i4" => DataType::Int32,
        "<i8" => DataType::Int64,
        "|u1" => DataType::Uint8,
        "|b1" => DataType::Bool,
        _ => return None,
    })
}

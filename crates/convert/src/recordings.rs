//! Recordings for a comparison: a .npz file that has an array for each input, with its name.
//!
//! Rule: as in [`npz`](crate::npz), nothing is allocated before its size is known to be reasonable.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use npyz::Order;
use zip::ZipArchive;

use crate::npz::{EXTENSION, read_header};
use crate::onnx::{DataType, element_count, type_bytes};
use crate::verify::{Host, Recording};

const TYPES: &str = "float16, float32, float64, int8 to int64, uint8 to uint64 and bool";

pub fn read(file: &Path) -> Result<Vec<Recording>, String> {
    let opened = File::open(file).map_err(|error| error.to_string())?;
    let mut archive = ZipArchive::new(opened).map_err(|error| format!("it is no .npz file: {error}"))?;
    let mut found = Vec::new();
    for index in 0..archive.len() {
        let mut entry = archive.by_index(index).map_err(|error| error.to_string())?;
        let name = entry.name().map_err(|error| error.to_string())?.into_owned();
        let input = name.strip_suffix(EXTENSION).unwrap_or(&name).to_owned();
        let array = read_array(&mut entry, &input);
        found.push(array.map_err(|error| format!("its array '{input}' cannot be read: {error}"))?);
    }
    if found.is_empty() {
        return Err("it has no arrays".to_owned());
    }
    Ok(found)
}

fn read_array(entry: &mut impl Read, input: &str) -> io::Result<Recording> {
    let refused = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
    let header = read_header(&mut *entry)?;
    let stored = header.dtype().descr();
    let elem: i32 = data_type(stored.trim_matches('\''))
        .ok_or_else(|| refused(format!("its type is {stored}, and one of {TYPES} is expected")))?
        .into();
    if header.order() == Order::Fortran {
        return Err(refused("its elements are in Fortran's order: save numpy.ascontiguousarray(array)".to_owned()));
    }
    let dims: Vec<i64> = header.shape().iter().map(|&dim| i64::try_from(dim).unwrap_or(i64::MAX)).collect();
    let wanted = element_count(&dims).saturating_mul(type_bytes(elem) as i64).cast_unsigned();
    let mut bytes = Vec::new();
    // One more byte shows that the array has more than its shape says.
    entry.take(wanted.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 != wanted {
        let has = if bytes.len() as u64 > wanted { "more than that".to_owned() } else { bytes.len().to_string() };
        return Err(refused(format!("its shape {dims:?} needs {wanted} bytes, and it has {has}")));
    }
    Ok(Recording { input: input.to_owned(), values: Host { elem, dims, bytes } })
}

/// The data type for NumPy's, of those that can be compared.
fn data_type(stored: &str) -> Option<DataType> {
    Some(match stored {
        "<f2" => DataType::Float16,
        "<f4" => DataType::Float,
        "<f8" => DataType::Double,
        "|i1" => DataType::Int8,
        "<i2" => DataType::Int16,
        "<i4" => DataType::Int32,
        "<i8" => DataType::Int64,
        "|u1" => DataType::Uint8,
        "<u2" => DataType::Uint16,
        "<u4" => DataType::Uint32,
        "<u8" => DataType::Uint64,
        "|b1" => DataType::Bool,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn array(shape: &str, bytes: usize) -> Vec<u8> {
        let text = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({shape}), }}");
        let header = format!("{text:117}\n");
        let mut file = b"\x93NUMPY\x01\x00".to_vec();
        file.extend((header.len() as u16).to_le_bytes());
        file.extend(header.as_bytes());
        file.resize(file.len() + bytes, 0);
        file
    }

    #[test]
    fn an_array_has_exactly_the_bytes_of_its_shape() {
        let read = |shape: &str, bytes: usize| read_array(&mut array(shape, bytes).as_slice(), "x");
        let values = read("2, 3,", 24).unwrap().values;
        assert_eq!((values.dims, values.bytes.len()), (vec![2, 3], 24));
        for (shape, bytes, expected) in [
            ("2, 3,", 23, "its shape [2, 3] needs 24 bytes, and it has 23"),
            ("2, 3,", 25, "its shape [2, 3] needs 24 bytes, and it has more than that"),
            ("2, 3,", 4096, "its shape [2, 3] needs 24 bytes, and it has more than that"),
            (
                "4611686018427387904, 2,",
                0,
                "its shape [4611686018427387904, 2] needs 9223372036854775807 bytes, and it has 0",
            ),
            (
                "9223372036854775808,",
                0,
                "its shape [9223372036854775807] needs 9223372036854775807 bytes, and it has 0",
            ),
        ] {
            assert_eq!(read(shape, bytes).unwrap_err().to_string(), expected);
        }
    }
}

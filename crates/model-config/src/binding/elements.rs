//! Reads the elements of tensors: from text, and from NumPy's .npz files.
//!
//! An array of a file must have the state's type; its shape is checked before its data is read. Its byte order and its
//! order of elements may be any.

use std::fmt::Display;
use std::io::{Cursor, Read};

use npyz::{DType, Endianness, Order, TypeChar, TypeStr};
use rows::reserve;
use rows::strings::Strings;
use rows::tensor::{DataType, Dims, element_count};
use stateful_convert::npz::{EXTENSION, brief, read_header};
use zip::ZipArchive;

use super::bound::InitialContent;

/// One element, read from text, or why the type does not have that value.
pub(super) fn element_bytes(data_type: DataType, text: &str) -> Result<Vec<u8>, String> {
    let error = |allowed: &str| format!("'{text}' is no {data_type}: {allowed} is expected");
    // Macros, because std has no trait for what the types of numbers have in common.
    macro_rules! integer {
        ($type:ty) => {
            match text.parse::<$type>() {
                Ok(number) => Ok(number.to_ne_bytes().to_vec()),
                Err(_) => Err(error(&format!("a whole number from {} to {}", <$type>::MIN, <$type>::MAX))),
            }
        };
    }
    // A number that is too large becomes infinity when it is read. Infinity itself is written without a digit.
    let may_be_infinite = !text.contains(|letter: char| letter.is_ascii_digit());
    macro_rules! float {
        ($read:expr, $largest:literal) => {
            match text.parse().map($read) {
                Ok(number) if number.is_finite() || may_be_infinite => Ok(number.to_ne_bytes().to_vec()),
                _ => Err(error(concat!("a number from -", $largest, " to ", $largest))),
            }
        };
    }
    match data_type {
        DataType::Bool => match text {
            "true" | "1" => Ok(vec![1]),
            "false" | "0" => Ok(vec![0]),
            _ => Err(error("true or false, 1 or 0")),
        },
        DataType::Uint8 => integer!(u8),
        DataType::Uint16 => integer!(u16),
        DataType::Uint32 => integer!(u32),
        DataType::Uint64 => integer!(u64),
        DataType::Int8 => integer!(i8),
        DataType::Int16 => integer!(i16),
        DataType::Int32 => integer!(i32),
        DataType::Int64 => integer!(i64),
        DataType::Fp16 => float!(half::f16::from_f64, "65504"),
        DataType::Bf16 => float!(half::bf16::from_f64, "3.3895e38"),
        DataType::Fp32 => float!(|number: f32| number, "3.4028e38"),
        DataType::Fp64 => float!(|number: f64| number, "1.7976e308"),
        DataType::Bytes => Err(format!("'{text}' is given for a {data_type}, but only requests can carry those")),
    }
}

/// Reads the array `array`, else the one called `state`, else the only one. `dims_of_row` checks the shape, and
/// makes of it the dims of a row.
pub(super) fn read_npz(
    bytes: &[u8],
    array: Option<&str>,
    state: &str,
    data_type: DataType,
    dims_of_row: impl Fn(&[i64]) -> Result<Vec<i64>, String>,
    limit: usize,
) -> Result<(Vec<i64>, InitialContent), String> {
    let mut archive = ZipArchive::new(Cursor::new(bytes)).map_err(|error| format!("it is no .npz file: {error}"))?;
    let name = find(&archive, array, state)?;
    let damaged = |error: &dyn Display| format!("its array '{name}' cannot be read: {}", brief(error));
    let mut entry = archive.by_name(&format!("{name}{EXTENSION}")).map_err(|error| damaged(&error))?;
    let header = read_header(&mut entry).map_err(|error| damaged(&error))?;
    let element = element(&header.dtype(), data_type)?;
    let shape: Vec<i64> = header.shape().iter().map(|&dim| i64::try_from(dim).unwrap_or(i64::MAX)).collect();
    let dims = dims_of_row(&shape)?;
    // A header may claim any shape, so its size is checked before anything is allocated.
    let count = element_count(&shape).unwrap_or(usize::MAX);
    let bytes = count.checked_mul(element.bytes).filter(|&bytes| bytes <= limit && bytes <= isize::MAX as usize);
    let bytes = bytes.ok_or_else(|| format!("with shape {} it is larger than a state may be", Dims(&shape)))?;
    let mut data = reserve(bytes).map_err(|error| error.to_string())?;
    entry.take(bytes as u64).read_to_end(&mut data).map_err(|error| damaged(&error))?;
    if data.len() != bytes {
        return Err(damaged(&format!("it has only {} of {bytes} bytes", data.len())));
    }
    if let Some(word) = element.swapped {
        data.chunks_exact_mut(word).for_each(<[u8]>::reverse);
    }
    if header.order() == Order::Fortran {
        data = in_c_order(&data, &shape, element.bytes);
    }
    Ok((dims, element.content(data)))
}

fn find(archive: &ZipArchive<Cursor<&[u8]>>, array: Option<&str>, state: &str) -> Result<String, String> {
    let files = archive.file_names().filter_map(Result::ok);
    let names: Vec<String> = files.filter_map(|name| Some(name.strip_suffix(EXTENSION)?.to_owned())).collect();
    let has = |wanted: &str| names.iter().find(|name| *name == wanted).cloned();
    let found = match (array, names.as_slice()) {
        (Some(array), _) => has(array),
        (None, [only]) => Some(only.clone()),
        (None, _) => has(state),
    };
    found.ok_or_else(|| {
        let listed: Vec<String> = names.iter().map(|name| format!("'{name}'")).collect();
        let wanted = array.unwrap_or(state);
        format!("it has no array '{wanted}' (it has {}): write 'npz:FILE:ARRAY'", listed.join(", "))
    })
}

struct Element {
    bytes: usize,
    /// Bytes of a number, or of a letter, if their order is not the machine's.
    swapped: Option<usize>,
    form: TypeChar,
}

fn element(stored: &DType, data_type: DataType) -> Result<Element, String> {
    let wrong = || format!("its type is {}, and the state is {data_type}", brief(&stored.descr()));
    let DType::Plain(of) = stored else { return Err(wrong()) };
    let bytes = of.num_bytes().filter(|_| is_of_type(of, data_type)).ok_or_else(wrong)?;
    let form = of.type_char();
    let word = if form == TypeChar::UnicodeStr { size_of::<u32>() } else { bytes };
    // The bytes of a text that isn't Unicode have no order.
    let foreign = if cfg!(target_endian = "little") { Endianness::Big } else { Endianness::Little };
    let swapped = (of.endianness() == foreign && form != TypeChar::ByteStr).then_some(word);
    Ok(Element { bytes, swapped, form })
}

fn is_of_type(of: &TypeStr, data_type: DataType) -> bool {
    let kind = match data_type {
        DataType::Bytes => return matches!(of.type_char(), TypeChar::ByteStr | TypeChar::UnicodeStr),
        // NumPy has no such type.
        DataType::Bf16 => return false,
        DataType::Bool => TypeChar::Bool,
        DataType::Uint8 | DataType::Uint16 | DataType::Uint32 | DataType::Uint64 => TypeChar::Uint,
        DataType::Int8 | DataType::Int16 | DataType::Int32 | DataType::Int64 => TypeChar::Int,
        DataType::Fp16 | DataType::Fp32 | DataType::Fp64 => TypeChar::Float,
    };
    of.type_char() == kind && of.num_bytes() == data_type.byte_size()
}

impl Element {
    fn content(&self, data: Vec<u8>) -> InitialContent {
        let texts = || data.chunks(self.bytes.max(1));
        match self.form {
            TypeChar::ByteStr => InitialContent::Strings(texts().map(without_padding).collect::<Strings>()),
            TypeChar::UnicodeStr => InitialContent::Strings(texts().map(text).collect::<Strings>()),
            // Any byte but 0 is true in NumPy.
            TypeChar::Bool => InitialContent::Bytes(data.iter().map(|&byte| u8::from(byte != 0)).collect()),
            _ => InitialContent::Bytes(data),
        }
    }
}

/// A text without the zeros that NumPy fills it up with.
fn without_padding(text: &[u8]) -> &[u8] {
    let length = text.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
    &text[..length]
}

/// A text of letters of four bytes.
fn text(letters: &[u8]) -> String {
    let letters = letters.as_chunks::<4>().0.iter().map(|&letter| u32::from_ne_bytes(letter));
    let text: String = letters.map(|letter| char::from_u32(letter).unwrap_or(char::REPLACEMENT_CHARACTER)).collect();
    text.trim_end_matches('\0').to_owned()
}

/// The elements of an array whose first index varies fastest, with the last index varying fastest.
fn in_c_order(data: &[u8], shape: &[i64], element: usize) -> Vec<u8> {
    let mut ordered = Vec::with_capacity(data.len());
    let mut index = vec![0; shape.len()];
    for _ in 0..data.len().checked_div(element).unwrap_or(0) {
        let at = index.iter().zip(shape).rev().fold(0, |at, (index, dim)| at * dim + index) as usize * element;
        ordered.extend_from_slice(&data[at..at + element]);
        for (index, dim) in index.iter_mut().zip(shape).rev() {
            *index += 1;
            if *index < *dim {
                break;
            }
            *index = 0;
        }
    }
    ordered
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use zip::write::{SimpleFileOptions, ZipWriter};

    /// A .npy file as NumPy writes it.
    fn npy(descr: &str, fortran: bool, shape: &str, data: &[u8]) -> Vec<u8> {
        let order = if fortran { "True" } else { "False" };
        let mut header = format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}");
        let padding = 64 - (10 + header.len() + 1) % 64;
        header += &" ".repeat(padding);
        header += "\n";
        let length = u16::try_from(header.len()).unwrap().to_le_bytes();
        [b"\x93NUMPY\x01\x00", &length[..], header.as_bytes(), data].concat()
    }

    /// A .npy file of a later version with this header.
    fn npy_2(header: &str, data: &[u8]) -> Vec<u8> {
        let length = u32::try_from(header.len()).unwrap().to_le_bytes();
        [b"\x93NUMPY\x02\x00", &length[..], header.as_bytes(), data].concat()
    }

    fn npz(arrays: &[(&str, Vec<u8>)]) -> Vec<u8> {
        let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
        let method = zip::CompressionMethod::Stored;
        for (name, content) in arrays {
            writer.start_file(format!("{name}.npy"), SimpleFileOptions::default().compression_method(method)).unwrap();
            writer.write_all(content).unwrap();
        }
        writer.finish().unwrap().into_inner()
    }

    fn content(file: &[u8], array: Option<&str>, data_type: DataType) -> Result<(Vec<i64>, InitialContent), String> {
        read_npz(file, array, "s", data_type, |shape| Ok(shape.to_vec()), 1000)
    }

    fn bytes<T: bytemuck::Pod>(values: &[T]) -> InitialContent {
        InitialContent::Bytes(bytemuck::cast_slice(values).to_vec())
    }

    #[test]
    fn any_order_of_bytes_and_elements_is_read() {
        let values = [1.5f32, -2.0, f32::NAN, 4.0, 5.0, 6.0];
        let little: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let big: Vec<u8> = values.iter().flat_map(|value| value.to_be_bytes()).collect();
        // [[1.5, -2, NaN], [4, 5, 6]], a column behind the other.
        let columns: Vec<u8> = [0, 3, 1, 4, 2, 5].iter().flat_map(|&at| values[at as usize].to_le_bytes()).collect();
        for file in [
            npy("<f4", false, "(2, 3)", &little),
            npy(">f4", false, "(2, 3)", &big),
            npy("<f4", true, "(2, 3)", &columns),
        ] {
            let (dims, read) = content(&npz(&[("s", file)]), None, DataType::Fp32).unwrap();
            assert_eq!((dims, read), (vec![2, 3], bytes(&values)));
        }
    }

    #[test]
    fn every_kind_of_element_is_read() {
        let utf32 =
            |letters: &str| letters.chars().flat_map(|letter| (letter as u32).to_le_bytes()).collect::<Vec<_>>();
        let strings = |texts: &[&str]| InitialContent::Strings(texts.iter().collect());
        for (file, data_type, expected) in [
            (npy("|b1", false, "(2,)", &[1, 0]), DataType::Bool, bytes(&[1u8, 0])),
            (npy("<i8", false, "()", &7i64.to_le_bytes()), DataType::Int64, bytes(&[7i64])),
            (npy(">u2", false, "(1,)", &[1, 2]), DataType::Uint16, bytes(&[258u16])),
            (npy("<f8", false, "(3, 0)", &[]), DataType::Fp64, bytes::<u8>(&[])),
            (npy("|S3", false, "(2,)", b"ab\0\0\0\0"), DataType::Bytes, strings(&["ab", ""])),
            (npy("<U2", false, "(2,)", &utf32("é\0ab")), DataType::Bytes, strings(&["é", "ab"])),
        ] {
            assert_eq!(content(&npz(&[("s", file)]), None, data_type).unwrap().1, expected);
        }
    }

    #[test]
    fn the_array_is_the_named_one_or_the_state_s_or_the_only_one() {
        let of = |value: u8| npy("|u1", false, "(1,)", &[value]);
        let several = npz(&[("a", of(1)), ("s", of(2)), ("x/h:0", of(3))]);
        for (array, value) in [(None, 2), (Some("a"), 1), (Some("x/h:0"), 3)] {
            assert_eq!(content(&several, array, DataType::Uint8).unwrap().1, bytes(&[value as u8]));
        }
        assert_eq!(content(&npz(&[("a", of(1))]), None, DataType::Uint8).unwrap().1, bytes(&[1u8]));
        for (file, array) in [(&several, Some("b")), (&npz(&[("a", of(1)), ("b", of(2))]), None)] {
            let error = content(file, array, DataType::Uint8).unwrap_err();
            assert!(error.contains(&format!("'{}'", array.unwrap_or("s"))) && error.contains("'a'"), "{error}");
        }
    }

    #[test]
    fn a_header_that_would_overwhelm_its_parser_is_refused_and_not_repeated() {
        let with_shape = |shape: &str| format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}");
        let nested =
            |depth: usize, open: &str, close: &str| with_shape(&(open.repeat(depth) + "1" + &close.repeat(depth)));
        let data = [0; 8];
        for (header, words) in [
            (nested(5000, "(", ",)"), ["15054 bytes", "10000"]),
            (nested(2000, "(", ",)"), ["2001 opening brackets", "'s'"]),
            (nested(40, "[", "]"), ["41 opening brackets", "has 2"]),
            (nested(40, "{", "}"), ["41 opening brackets", "has 2"]),
            (with_shape(&"1".repeat(1 << 20)), ["bytes", "10000"]),
            (with_shape(&"x".repeat(9000)), ["cannot be read", "'s'"]),
            (format!("{{{{{{{{{}", "1,".repeat(4900)), ["cannot be read", "'s'"]),
            (format!("[[[[{}", "1,".repeat(4900)), ["cannot be read", "'s'"]),
            (
                with_shape("(2,)").replace("'<f4'", &format!("[('{}', '<f4')]", "f".repeat(9000))),
                ["fff...", "TYPE_FP32"],
            ),
        ] {
            let error = content(&npz(&[("s", npy_2(&header, &data))]), None, DataType::Fp32).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)) && error.len() < 400, "{error}");
        }
        let file = npz(&[("s", npy_2(&with_shape("(2,)"), &data))]);
        assert_eq!(content(&file, None, DataType::Fp32).unwrap(), (vec![2], InitialContent::Bytes(data.to_vec())));
        let whole = npy("<f4", false, "(2,)", &data);
        for length in 0..whole.len() {
            content(&npz(&[("s", whole[..length].to_vec())]), None, DataType::Fp32).unwrap_err();
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let whole = npy("<f4", false, "(2,)", &[0; 8]);
        for (file, data_type, words) in [
            (npz(&[("s", whole.clone())]), DataType::Fp64, ["<f4", "TYPE_FP64"]),
            (npz(&[("s", whole.clone())]), DataType::Int32, ["<f4", "TYPE_INT32"]),
            (
                npz(&[("s", npy("<f4", false, "(2,)", &[0; 7]))]),
                DataType::Fp32,
                ["only 7 of 8 bytes", "cannot be read"],
            ),
            (npz(&[("s", npy("|O", false, "(2,)", &[0; 7]))]), DataType::Bytes, ["O", "TYPE_STRING"]),
            (npz(&[("s", npy("<f4", false, "(2000,)", &[]))]), DataType::Fp32, ["[2000]", "larger"]),
            (npz(&[("s", npy("<f4", false, "(4294967296,)", &[]))]), DataType::Fp32, ["larger", "shape"]),
            (npz(&[("s", b"no array".to_vec())]), DataType::Fp32, ["'s'", "cannot be read"]),
            (whole, DataType::Fp32, ["no .npz file", "it is"]),
            (Vec::new(), DataType::Fp32, ["no .npz file", "it is"]),
        ] {
            let error = content(&file, None, data_type).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
    }
}

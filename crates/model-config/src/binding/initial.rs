//! The value with which a state starts, as the configuration or the model gives it, and the elements of tensors, read
//! from text and from NumPy's .npz files.
//!
//! An array of a file must have the state's type; its shape is checked before its data is read. Its byte order and its
//! order of elements may be any.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io::{Cursor, Read};

use npyz::{DType, Endianness, Order, TypeChar, TypeStr};
use rows::reserve;
use rows::strings::{self, Strings};
use rows::tensor::{DataType, Dims, element_count};
use stateful_convert::npz::{EXTENSION, brief, read_header};
use zip::ZipArchive;

use super::bound::{Initial, InitialContent};
use super::fit::{BindingError, Result, names};
use crate::config::{Config, DeclaredState, InitialSources, InitialValue};
use crate::onnx::{all_agree, open_axes};

impl Initial {
    /// The value that the configuration gives for a state whose rows have `dims`, else that of the model, else zeros.
    pub(super) fn new(
        name: &str,
        data_type: DataType,
        dims: &[i64],
        declared: Option<&DeclaredState>,
        config: &Config,
        sources: &InitialSources,
    ) -> Result<Self> {
        // The model fixes the size of the other states.
        let limit = if dims.contains(&-1) { config.states.limits.per_sequence } else { usize::MAX };
        let file = |file: &str| sources.files.get(file).map(Vec::as_slice).unwrap_or_default();
        let value = |from: String| Value { name, from, data_type };
        if let Some(declaration) = declared
            && let Some(initial) = &declaration.initial
        {
            let row = dims;
            let dims = declared_dims(row, &initial.dims);
            let source = value("its initial_state".to_owned());
            if !all_agree(row, &dims) {
                let why = format!("its dims {} are not those of one sequence, {}", Dims(&initial.dims), Dims(row));
                return Err(source.error(why));
            }
            // A string takes at least the 4 bytes of its length.
            let bytes = element_count(&dims).and_then(|count| count.checked_mul(data_type.byte_size().unwrap_or(4)));
            if bytes.is_none_or(|bytes| bytes > limit) {
                let (given, most) = (Dims(&initial.dims), config.states.limits.per_sequence);
                return Err(source.error(format!(
                    "with dims {given} it is larger than a state may be (max_state_bytes_per_sequence, {most})"
                )));
            }
            let Some(name_of_file) = &initial.file else { return Ok(Self { dims, content: InitialContent::Zeros }) };
            return value(format!("file '{name_of_file}'")).read_bytes(&dims, file(name_of_file));
        }
        match config.states.initial.iter().find(|(of, _)| of == name) {
            Some((_, InitialValue::File(from))) => value(format!("file '{from}'")).read_bytes(dims, file(from)),
            Some((_, InitialValue::Array { file: from, name: array })) => {
                let of = array.as_ref().map_or(String::new(), |array| format!(", array '{array}'"));
                value(format!("file '{from}'{of}")).read_array(dims, file(from), array.as_deref(), limit)
            }
            Some((_, InitialValue::Metadata { keys, then_zeros })) => {
                let source = value(format!("the model's metadata '{}'", keys.join("+")));
                source.read_metadata(dims, keys, *then_zeros, &sources.metadata)
            }
            Some((_, InitialValue::List(values))) => value(INITIAL_STATES.to_owned()).read_list(dims, values),
            Some((_, InitialValue::Fill(text))) => value(INITIAL_STATES.to_owned()).fill(dims, text),
            None if sources.defaults.contains_key(name) => {
                let values: Vec<String> = sources.defaults[name].iter().map(f64::to_string).collect();
                value("the model's initializer".to_owned()).read_list(dims, &values)
            }
            None => {
                // Triton takes 1 for what a declared state leaves open. A cache that grows starts empty.
                let open = if declared.is_some() { 1 } else { 0 };
                let dims = dims.iter().map(|&dim| if dim < 0 { open } else { dim }).collect();
                Ok(Self { dims, content: InitialContent::Zeros })
            }
        }
    }
}

const INITIAL_STATES: &str = "parameter 'initial_states'";

/// The dims of a row, from those of the declared initial state, which may leave the batch axis out.
fn declared_dims(row: &[i64], initial: &[i64]) -> Vec<i64> {
    let mut dims = initial.to_vec();
    // The dims agree without the batch axis. If that holds for several axes, each of them is 1.
    let is_batch = |&axis: &usize| {
        let mut rest = row.to_vec();
        rest.remove(axis) == 1 && all_agree(&rest, initial)
    };
    if !all_agree(row, initial)
        && let Some(axis) = (0..row.len()).find(is_batch)
    {
        dims.insert(axis, 1);
    }
    dims
}

struct Value<'a> {
    name: &'a str,
    from: String,
    data_type: DataType,
}

impl Value<'_> {
    fn error(&self, why: String) -> BindingError {
        BindingError::Initial { name: self.name.to_owned(), from: self.from.clone(), why }
    }

    fn read_bytes(&self, dims: &[i64], bytes: &[u8]) -> Result<Initial> {
        let Some(size) = self.data_type.byte_size() else {
            let elements = strings::read(bytes)
                .map_err(|error| self.error(error.to_string()))?
                .ok_or_else(|| self.error("it is not a list of strings, each after its length".to_owned()))?;
            let dims = self.close(dims, elements.len())?;
            return Ok(Initial { dims, content: InitialContent::Strings(elements) });
        };
        if !bytes.len().is_multiple_of(size) {
            let why = format!("it has {} bytes, but an element of {} has {size}", bytes.len(), self.data_type);
            return Err(self.error(why));
        }
        let dims = self.close(dims, bytes.len() / size)?;
        Ok(Initial { dims, content: InitialContent::Bytes(bytes.to_vec()) })
    }

    fn read_list(&self, dims: &[i64], values: &[String]) -> Result<Initial> {
        let dims = self.close(dims, values.len())?;
        let content = match self.data_type {
            DataType::Bytes => InitialContent::Strings(values.iter().collect()),
            _ => InitialContent::Bytes(self.elements(values)?),
        };
        Ok(Initial { dims, content })
    }

    fn read_array(&self, dims: &[i64], bytes: &[u8], array: Option<&str>, limit: usize) -> Result<Initial> {
        let fits = |shape: &[i64]| {
            let closed = declared_dims(dims, shape);
            if all_agree(dims, &closed) {
                return Ok(closed);
            }
            Err(format!("its shape {} is not that of one sequence, {}", Dims(shape), Dims(dims)))
        };
        let content = read_npz(bytes, array, self.name, self.data_type, fits, limit);
        content.map(|(dims, content)| Initial { dims, content }).map_err(|why| self.error(why))
    }

    /// Numbers that are separated by a comma, spaces or line breaks, with or without the brackets of a list around
    /// them.
    fn read_metadata(
        &self,
        dims: &[i64],
        keys: &[String],
        then_zeros: bool,
        metadata: &BTreeMap<String, String>,
    ) -> Result<Initial> {
        let mut values = Vec::new();
        for key in keys {
            let Some(text) = metadata.get(key) else {
                let known: Vec<String> = metadata.keys().map(|key| format!("'{key}'")).collect();
                return Err(self.error(format!("the model has no metadata '{key}' (it has {})", names(&known))));
            };
            // A missing number would shift all numbers after it.
            if has_gap(text) {
                return Err(self.error(format!("metadata '{key}' has a comma without a number before it")));
            }
            let is_between = |letter: char| letter.is_whitespace() || [',', '[', ']'].contains(&letter);
            values.extend(text.split(is_between).filter(|value| !value.is_empty()).map(str::to_owned));
        }
        let wanted = element_count(dims).filter(|_| then_zeros).unwrap_or(0);
        if self.data_type == DataType::Bytes || values.len() >= wanted {
            return self.read_list(dims, &values);
        }
        let given = self.elements(&values)?;
        let mut bytes = self.repeated(&self.element("0")?, wanted)?;
        bytes[..given.len()].copy_from_slice(&given);
        Ok(Initial { dims: dims.to_vec(), content: InitialContent::Bytes(bytes) })
    }

    fn fill(&self, dims: &[i64], value: &str) -> Result<Initial> {
        let Some(count) = element_count(dims) else {
            let open = format!("the open dimension of {}", Dims(dims));
            return Err(self.error(format!("'{value}' does not say how long {open} is: list the elements")));
        };
        let content = if self.data_type == DataType::Bytes {
            let strings = Strings::repeated(value.as_bytes(), count);
            InitialContent::Strings(strings.map_err(|error| self.error(error.to_string()))?)
        } else {
            InitialContent::Bytes(self.repeated(&self.element(value)?, count)?)
        };
        Ok(Initial { dims: dims.to_vec(), content })
    }

    fn repeated(&self, element: &[u8], count: usize) -> Result<Vec<u8>> {
        // A dim of the model can be any number, so the allocation may fail, and must not end the server.
        let room = reserve(element.len().saturating_mul(count));
        let mut bytes = room.map_err(|error| self.error(error.to_string()))?;
        (0..count).for_each(|_| bytes.extend_from_slice(element));
        Ok(bytes)
    }

    fn elements(&self, values: &[String]) -> Result<Vec<u8>> {
        let elements = values.iter().map(|value| self.element(value)).collect::<Result<Vec<_>, _>>()?;
        Ok(elements.concat())
    }

    fn element(&self, value: &str) -> Result<Vec<u8>> {
        element_bytes(self.data_type, value).map_err(|why| self.error(why))
    }

    /// The dims of a row with `count` elements, which decide the one open dimension.
    fn close(&self, dims: &[i64], count: usize) -> Result<Vec<i64>> {
        let (row, mut closed) = (Dims(dims), dims.to_vec());
        let wanted = match open_axes(dims, None).as_slice() {
            [] => match element_count(dims) {
                Some(wanted) if wanted == count => return Ok(closed),
                wanted => format!("a row of {row} has {}", wanted.unwrap_or(usize::MAX)),
            },
            &[axis] => {
                closed[axis] = 1;
                let step = element_count(&closed).unwrap_or(0);
                // `step` is 0 if another dimension is. Then no length makes a row of these elements.
                if count.checked_rem(step) == Some(0) {
                    closed[axis] = (count / step) as i64;
                    return Ok(closed);
                }
                format!("a row of {row} has a multiple of {step}")
            }
            _ => format!("more than one dimension of {row} is open"),
        };
        let unit = self.data_type.byte_size().map_or(String::new(), |size| format!(" ({} bytes)", count * size));
        Err(self.error(format!("it has {count} elements{unit}, but {wanted}")))
    }
}

/// Whether a comma of a list has nothing before it.
fn has_gap(text: &str) -> bool {
    let mut parts = text.split(',').map(str::trim_end);
    // The last comma may end the list.
    parts.next_back();
    parts.any(|part| part.is_empty() || part.ends_with('['))
}

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
fn read_npz(
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

//! Tensors in JSON: nested arrays as the elements of a tensor, and predictions as TensorFlow Serving writes them.

use std::collections::BTreeMap;
use std::fmt::{self, Write};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use half::{bf16, f16};
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use tonic::Code;

use crate::models::SEQUENCE_ID;
use crate::predict::Prediction;
use crate::tensor::{DataType, Tensor, put_string};
use crate::triton::Failure;

pub const BASE64_KEY: &str = "b64";
/// Strings of outputs with such names are always in base64.
const BYTES_SUFFIX: &str = "_bytes";

/// How a request, and its answer, arrange the values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `instances` and `predictions`: a list with an element for each row of the batch.
    Row,
    /// `inputs` and `outputs`: a value for each tensor.
    Column,
}

pub fn tensor(data_type: DataType, value: &RawValue) -> Result<Tensor, serde_json::Error> {
    let mut elements = Elements::new(data_type);
    elements.read(value, 0)?;
    Ok(elements.tensor())
}

/// The tensor whose first dimension is the number of values.
pub fn tensor_of_rows(data_type: DataType, rows: &[&RawValue]) -> Result<Tensor, serde_json::Error> {
    let mut elements = Elements::new(data_type);
    for row in rows {
        elements.read(row, 1)?;
    }
    elements.end_array(0, rows.len())?;
    Ok(elements.tensor())
}

/// The elements so far. All arrays at one depth must have the same length, and all numbers the same depth.
struct Elements {
    data_type: DataType,
    content: BytesMut,
    /// By depth; none until an array at that depth has ended. Inner arrays end first.
    lengths: Vec<Option<usize>>,
    rank: Option<usize>,
}

enum Number {
    Signed(i64),
    Unsigned(u64),
    Float(f64),
}

impl Elements {
    fn new(data_type: DataType) -> Self {
        Self { data_type, content: BytesMut::new(), lengths: Vec::new(), rank: None }
    }

    fn read(&mut self, value: &RawValue, depth: usize) -> Result<(), serde_json::Error> {
        let mut deserializer = serde_json::Deserializer::from_str(value.get());
        Level { elements: self, depth }.deserialize(&mut deserializer)
    }

    fn tensor(self) -> Tensor {
        let shape = self.lengths.iter().map(|length| length.unwrap_or(0) as i64).collect();
        Tensor { data_type: self.data_type, shape, content: self.content.freeze() }
    }

    fn end_array<E: Error>(&mut self, depth: usize, length: usize) -> Result<(), E> {
        // An empty array has no element that could say how deep the elements are.
        if length == 0 {
            self.set_rank(depth + 1)?;
        }
        if self.lengths.len() <= depth {
            self.lengths.resize(depth + 1, None);
        }
        match self.lengths[depth].replace(length) {
            Some(before) if before != length => {
                Err(E::custom(format_args!("arrays of {before} and {length} elements stand side by side")))
            }
            _ => Ok(()),
        }
    }

    fn set_rank<E: Error>(&mut self, rank: usize) -> Result<(), E> {
        match self.rank.replace(rank) {
            Some(before) if before != rank => Err(E::custom("not all elements have the same depth")),
            _ => Ok(()),
        }
    }

    fn number<E: Error>(&mut self, depth: usize, number: Number) -> Result<(), E> {
        self.set_rank(depth)?;
        match self.data_type {
            DataType::Bool => return Err(E::custom("a number instead of true or false")),
            DataType::Uint8 => self.content.put_u8(number.whole()?),
            DataType::Uint16 => self.content.put_u16_le(number.whole()?),
            DataType::Uint32 => self.content.put_u32_le(number.whole()?),
            DataType::Uint64 => self.content.put_u64_le(number.whole()?),
            DataType::Int8 => self.content.put_i8(number.whole()?),
            DataType::Int16 => self.content.put_i16_le(number.whole()?),
            DataType::Int32 => self.content.put_i32_le(number.whole()?),
            DataType::Int64 => self.content.put_i64_le(number.whole()?),
            DataType::Fp16 => self.content.put_u16_le(f16::from_f64(number.float()).to_bits()),
            DataType::Bf16 => self.content.put_u16_le(bf16::from_f64(number.float()).to_bits()),
            DataType::Fp32 => self.content.put_f32_le(number.float() as f32),
            DataType::Fp64 => self.content.put_f64_le(number.float()),
            DataType::Bytes => return Err(E::custom("a number instead of a string")),
        }
        Ok(())
    }

    fn string<E: Error>(&mut self, depth: usize, string: &[u8]) -> Result<(), E> {
        self.set_rank(depth)?;
        if self.data_type == DataType::Bytes {
            put_string(&mut self.content, string).map_err(E::custom)
        } else {
            Err(E::custom(format_args!("a string instead of {}", self.data_type.protocol_name())))
        }
    }
}

impl Number {
    fn whole<T: TryFrom<i128>, E: Error>(self) -> Result<T, E> {
        let value = match self {
            // As i128, which has all values of both kinds of whole numbers.
            Self::Signed(value) => value.into(),
            Self::Unsigned(value) => value.into(),
            // The cast saturates, so what is too large stays too large.
            Self::Float(value) if value.fract() == 0.0 => value as i128,
            Self::Float(value) => return Err(E::custom(format_args!("{value} is not a whole number"))),
        };
        T::try_from(value).map_err(|_| E::custom(format_args!("{value} is out of range")))
    }

    fn float(self) -> f64 {
        match self {
            Self::Signed(value) => value as f64,
            Self::Unsigned(value) => value as f64,
            Self::Float(value) => value,
        }
    }
}

struct Level<'a> {
    elements: &'a mut Elements,
    depth: usize,
}

impl<'de> DeserializeSeed<'de> for Level<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        // Straight into the content, because a tree of JSON values would take many times the memory of the numbers.
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Level<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an array or a value of type {}", self.elements.data_type.protocol_name())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let Self { elements, depth } = self;
        let mut length = 0;
        while seq.next_element_seed(Level { elements, depth: depth + 1 })?.is_some() {
            length += 1;
        }
        elements.end_array(depth, length)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Some((key, value)) = map.next_entry::<String, String>()? else {
            return Err(A::Error::custom("an object without a value"));
        };
        if key != BASE64_KEY || map.next_key::<String>()?.is_some() {
            return Err(A::Error::custom("an object that isn't {\"b64\": …}"));
        }
        let bytes = STANDARD.decode(value).map_err(|error| A::Error::custom(format_args!("base64: {error}")))?;
        self.elements.string(self.depth, &bytes)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<(), E> {
        self.elements.set_rank(self.depth)?;
        if self.elements.data_type == DataType::Bool {
            self.elements.content.put_u8(value.into());
            Ok(())
        } else {
            Err(E::custom(format_args!("{value} instead of a number")))
        }
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<(), E> {
        self.elements.number(self.depth, Number::Signed(value))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<(), E> {
        self.elements.number(self.depth, Number::Unsigned(value))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<(), E> {
        self.elements.number(self.depth, Number::Float(value))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<(), E> {
        self.elements.string(self.depth, value.as_bytes())
    }
}

pub fn body(prediction: Prediction, format: Format) -> Result<String, Failure> {
    match format {
        Format::Column => Ok(columns(&prediction)),
        Format::Row => rows(&prediction),
    }
}

fn columns(prediction: &Prediction) -> String {
    let id = prediction.sequence_id.map(|id| {
        let content = Bytes::copy_from_slice(&id.to_le_bytes());
        Tensor { data_type: DataType::Uint64, shape: vec![1], content }
    });
    let outputs = prediction.outputs.iter().map(|(name, tensor)| (&**name, tensor));
    let outputs: Vec<_> = outputs.chain(id.iter().map(|tensor| (SEQUENCE_ID, tensor))).collect();
    let mut json = String::from("{\"outputs\": ");
    // TensorFlow Serving writes an only output without its name.
    if let [(name, tensor)] = &outputs[..] {
        Values::new(name, tensor).write(&tensor.shape, &mut json);
    } else {
        json.push('{');
        for (position, (name, tensor)) in outputs.iter().enumerate() {
            key(name, position, &mut json);
            Values::new(name, tensor).write(&tensor.shape, &mut json);
        }
        json.push('}');
    }
    json.push_str("}\n");
    json
}

fn rows(prediction: &Prediction) -> Result<String, Failure> {
    let count = row_count(&prediction.outputs)?;
    let is_object = prediction.outputs.len() + usize::from(prediction.sequence_id.is_some()) > 1;
    let mut outputs: Vec<_> = prediction
        .outputs
        .iter()
        .map(|(name, tensor)| (name, Values::new(name, tensor), tensor.shape.get(1..).unwrap_or_default()))
        .collect();
    let mut json = String::from("{\"predictions\": [");
    for row in 0..count {
        json.push_str(if row == 0 { "" } else { ", " });
        json.push_str(if is_object { "{" } else { "" });
        for (position, (name, values, shape)) in outputs.iter_mut().enumerate() {
            if is_object {
                key(name, position, &mut json);
            }
            values.write(shape, &mut json);
        }
        if let Some(id) = prediction.sequence_id {
            if is_object {
                key(SEQUENCE_ID, outputs.len(), &mut json);
            }
            push(&mut json, id);
        }
        json.push_str(if is_object { "}" } else { "" });
    }
    json.push_str("]}\n");
    Ok(json)
}

/// The first dimension of all outputs. The one id of the sequence is part of each row.
fn row_count(outputs: &BTreeMap<String, Tensor>) -> Result<i64, Failure> {
    let mut counts = outputs.values().map(|tensor| tensor.shape.first().copied());
    let first = counts.next().unwrap_or(Some(1));
    let text = "Response parsing to JSON error - the outputs have different first dimensions: ask with 'inputs'";
    first.filter(|_| counts.all(|other| other == first)).ok_or_else(|| Failure::new(Code::Internal, text))
}

fn key(name: &str, position: usize, json: &mut String) {
    json.push_str(if position == 0 { "" } else { ", " });
    quote(name, json);
    json.push_str(": ");
}

/// The elements of a tensor that have not been written.
struct Values {
    data_type: DataType,
    content: Bytes,
    as_bytes: bool,
}

impl Values {
    fn new(name: &str, tensor: &Tensor) -> Self {
        let (data_type, content) = (tensor.data_type, tensor.content.clone());
        Self { data_type, content, as_bytes: name.ends_with(BYTES_SUFFIX) }
    }

    /// Writes the next elements, as many as a tensor of this shape has.
    fn write(&mut self, shape: &[i64], json: &mut String) {
        let Some((count, inner)) = shape.split_first() else { return self.element(json) };
        json.push('[');
        for position in 0..*count {
            json.push_str(if position == 0 { "" } else { ", " });
            self.write(inner, json);
        }
        json.push(']');
    }

    fn element(&mut self, json: &mut String) {
        match self.data_type {
            DataType::Bool => push(json, self.next() != [0]),
            DataType::Uint8 => push(json, u8::from_le_bytes(self.next())),
            DataType::Uint16 => push(json, u16::from_le_bytes(self.next())),
            DataType::Uint32 => push(json, u32::from_le_bytes(self.next())),
            DataType::Uint64 => push(json, u64::from_le_bytes(self.next())),
            DataType::Int8 => push(json, i8::from_le_bytes(self.next())),
            DataType::Int16 => push(json, i16::from_le_bytes(self.next())),
            DataType::Int32 => push(json, i32::from_le_bytes(self.next())),
            DataType::Int64 => push(json, i64::from_le_bytes(self.next())),
            DataType::Fp16 => float(json, f16::from_le_bytes(self.next()).to_f32()),
            DataType::Bf16 => float(json, bf16::from_le_bytes(self.next()).to_f32()),
            DataType::Fp32 => float(json, f32::from_le_bytes(self.next())),
            DataType::Fp64 => float(json, f64::from_le_bytes(self.next())),
            DataType::Bytes => {
                // Each string is preceded by its length.
                let length = u32::from_le_bytes(self.next()) as usize;
                let string = self.content.split_to(length.min(self.content.len()));
                match std::str::from_utf8(&string) {
                    Ok(text) if !self.as_bytes => quote(text, json),
                    _ => {
                        let _ = write!(json, "{{\"{BASE64_KEY}\": \"{}\"}}", STANDARD.encode(&string));
                    }
                }
            }
        }
    }

    fn next<const N: usize>(&mut self) -> [u8; N] {
        // There are as many as the shape says, or `Tensor::new` would have refused the answer.
        let bytes = self.content.first_chunk().copied();
        self.content.advance(if bytes.is_some() { N } else { 0 });
        bytes.unwrap_or([0; N])
    }
}

fn push(json: &mut String, value: impl std::fmt::Display) {
    // Writing into a string can't fail.
    let _ = write!(json, "{value}");
}

fn float<T: Into<f64> + std::fmt::Debug + Copy>(json: &mut String, value: T) {
    // JSON has no numbers that aren't finite. TensorFlow Serving writes them all the same, and Python reads them.
    match value.into() {
        f64::INFINITY => json.push_str("Infinity"),
        f64::NEG_INFINITY => json.push_str("-Infinity"),
        wide if wide.is_nan() => json.push_str("NaN"),
        // With a point or an exponent, and as many digits as the number needs in its own type.
        _ => _ = write!(json, "{value:?}"),
    }
}

fn quote(text: &str, json: &mut String) {
    json.push_str(&serde_json::Value::from(text).to_string());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tensor::from_tensorflow;

    fn floats(shape: &[i64], values: &[f32]) -> Tensor {
        let content = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Tensor { data_type: DataType::Fp32, shape: shape.to_vec(), content }
    }

    fn prediction(outputs: &[(&str, Tensor)], sequence_id: Option<u64>) -> Prediction {
        let outputs = outputs.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.clone())).collect();
        Prediction { version: 1, outputs, sequence_id }
    }

    fn written(outputs: &[(&str, Tensor)], sequence_id: Option<u64>, format: Format) -> String {
        body(prediction(outputs, sequence_id), format).unwrap().trim_end().to_owned()
    }

    #[test]
    fn columns_are_objects_unless_there_is_one_output() {
        let y = ("y", floats(&[2, 2], &[1.0, 0.1, 1e-7, -3e38]));
        assert_eq!(
            written(std::slice::from_ref(&y), Some(u64::MAX), Format::Column),
            r#"{"outputs": {"y": [[1.0, 0.1], [1e-7, -3e38]], "sequence_id": [18446744073709551615]}}"#
        );
        assert_eq!(written(&[y], None, Format::Column), r#"{"outputs": [[1.0, 0.1], [1e-7, -3e38]]}"#);
        assert_eq!(written(&[("y", floats(&[], &[5.0]))], None, Format::Column), r#"{"outputs": 5.0}"#);
        assert_eq!(written(&[("y", floats(&[2, 0], &[]))], None, Format::Column), r#"{"outputs": [[], []]}"#);
    }

    #[test]
    fn each_row_has_the_id_of_the_sequence() {
        let outputs = [("y", floats(&[2, 1], &[1.0, 2.0])), ("z", floats(&[2], &[3.0, 4.0]))];
        assert_eq!(
            written(&outputs, Some(7), Format::Row),
            r#"{"predictions": [{"y": [1.0], "z": 3.0, "sequence_id": 7}, {"y": [2.0], "z": 4.0, "sequence_id": 7}]}"#
        );
        assert_eq!(written(&outputs[..1], None, Format::Row), r#"{"predictions": [[1.0], [2.0]]}"#);
        let differ = [("y", floats(&[2], &[1.0, 2.0])), ("z", floats(&[1], &[3.0]))];
        assert_eq!(body(prediction(&differ, None), Format::Row).unwrap_err().code, Code::Internal);
    }

    #[test]
    fn what_json_lacks_is_written_as_tensorflow_serving_does() {
        let values = floats(&[4], &[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0]);
        assert_eq!(written(&[("y", values)], None, Format::Column), r#"{"outputs": [NaN, Infinity, -Infinity, -0.0]}"#);
        let mut content = bytes::BytesMut::new();
        for string in [&b"\xff"[..], b"a\"b"] {
            put_string(&mut content, string).unwrap();
        }
        let strings = Tensor { data_type: DataType::Bytes, shape: vec![2], content: content.freeze() };
        assert_eq!(
            written(&[("y", strings.clone())], None, Format::Column),
            r#"{"outputs": [{"b64": "/w=="}, "a\"b"]}"#
        );
        assert_eq!(
            written(&[("y_bytes", strings)], None, Format::Column),
            r#"{"outputs": [{"b64": "/w=="}, {"b64": "YSJi"}]}"#
        );
    }

    proptest! {
        #[test]
        fn numbers_are_read_as_they_were(values in proptest::collection::vec(any::<f64>(), 1..10)) {
            let values: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
            let content = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let tensor = Tensor { data_type: DataType::Fp64, shape: vec![values.len() as i64], content };
            let json = written(&[("y", tensor)], None, Format::Column);
            let read: std::collections::BTreeMap<String, Vec<f64>> = serde_json::from_str(&json).unwrap();
            prop_assert_eq!(&read["outputs"], &values);
        }
    }

    fn parsed(data_type: DataType, json: &str) -> Result<Tensor, String> {
        let value: &RawValue = serde_json::from_str(json).unwrap();
        tensor(data_type, value).map_err(|error| error.to_string())
    }

    fn shape(data_type: DataType, json: &str) -> Vec<i64> {
        parsed(data_type, json).unwrap().shape
    }

    #[test]
    fn the_nesting_is_the_shape() {
        assert_eq!(shape(DataType::Fp32, "[[1, 2.5, -3], [4, 5e-1, 6]]"), [2, 3]);
        assert_eq!(shape(DataType::Fp32, "7"), [0_i64; 0]);
        assert_eq!(shape(DataType::Fp32, "[]"), [0]);
        assert_eq!(shape(DataType::Fp32, "[[], []]"), [2, 0]);
        assert_eq!(shape(DataType::Bytes, "[{\"b64\": \"AAE=\"}, \"x\"]"), [2]);
    }

    #[test]
    fn what_is_no_array_of_the_type_is_refused() {
        for json in
            ["[1, [2]]", "[[1], [2, 3]]", "[[1], []]", "[[[]], []]", "[null]", "[\"1\"]", "[{\"b64\": \"AA==\"}]"]
        {
            assert!(parsed(DataType::Fp32, json).is_err(), "{json}");
        }
        for json in ["[1.5]", "[256]", "[-1]", "[1e30]", "[true]"] {
            assert!(parsed(DataType::Uint8, json).is_err(), "{json}");
        }
        for json in ["[1]", "[{\"b64\": \"?\"}]", "[{\"b64\": 1}]", "[{}]", "[{\"a\": \"AA==\"}]"] {
            assert!(parsed(DataType::Bytes, json).is_err(), "{json}");
        }
    }

    #[test]
    fn numbers_are_as_exact_as_the_type() {
        assert_eq!(parsed(DataType::Uint64, "[18446744073709551615]").unwrap().content, u64::MAX.to_le_bytes()[..]);
        assert_eq!(parsed(DataType::Int64, "[-9223372036854775808]").unwrap().content, i64::MIN.to_le_bytes()[..]);
        assert_eq!(parsed(DataType::Int32, "[3.0]").unwrap().content, 3_i32.to_le_bytes()[..]);
        assert_eq!(parsed(DataType::Fp16, "[1]").unwrap().content, [0, 0x3c][..]);
        assert_eq!(parsed(DataType::Bool, "[true, false]").unwrap().content, [1, 0][..]);
        assert_eq!(parsed(DataType::Fp64, "[0.1]").unwrap().content, 0.1_f64.to_le_bytes()[..]);
    }

    #[test]
    fn rows_are_the_first_dimension() {
        let rows: Vec<&RawValue> = serde_json::from_str("[[1, 2], [3, 4], [5, 6]]").unwrap();
        assert_eq!(tensor_of_rows(DataType::Int32, &rows).unwrap().shape, [3, 2]);
        let scalars: Vec<&RawValue> = serde_json::from_str("[1, 2]").unwrap();
        assert_eq!(tensor_of_rows(DataType::Int32, &scalars).unwrap().shape, [2]);
        let mixed: Vec<&RawValue> = serde_json::from_str("[1, [2]]").unwrap();
        assert!(tensor_of_rows(DataType::Int32, &mixed).is_err());
    }

    proptest! {
        #[test]
        fn each_float_is_read_as_it_was_written(values in proptest::collection::vec(-1e30_f64..1e30, 1..20)) {
            let tensor = parsed(DataType::Fp64, &serde_json::to_string(&values).unwrap()).unwrap();
            let content: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            prop_assert_eq!(&tensor.content[..], &content[..]);
        }

        #[test]
        fn no_json_panics(json in "[\\[\\]{}0-9,.eE\"b64:-]{0,40}", number in 0..14_usize) {
            let data_type = from_tensorflow([1, 2, 3, 4, 5, 6, 7, 9, 10, 14, 17, 19, 22, 23][number]).unwrap();
            if let Ok(value) = serde_json::from_str::<&RawValue>(&json)
                && let Ok(read) = tensor(data_type, value)
            {
                prop_assert!(Tensor::new(read.data_type, read.shape, read.content).is_ok());
            }
        }
    }
}

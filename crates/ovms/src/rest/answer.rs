//! The JSON of a prediction, as TensorFlow Serving writes it.

use std::collections::BTreeMap;
use std::fmt::Write;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::{Buf, Bytes};
use half::{bf16, f16};
use tonic::Code;

use super::array::BASE64_KEY;
use super::request::Format;
use crate::predict::Prediction;
use crate::predict::specials::SEQUENCE_ID;
use crate::tensor::{DataType, Tensor};
use crate::triton::Failure;

/// Strings of outputs with such names are always in base64.
const BYTES_SUFFIX: &str = "_bytes";

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
    use crate::tensor::put_string;

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
}

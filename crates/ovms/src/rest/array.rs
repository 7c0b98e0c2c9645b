//! Nested JSON arrays as the elements of a tensor.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::{BufMut, BytesMut};
use half::{bf16, f16};
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::tensor::{DataType, Tensor, put_string};

pub const BASE64_KEY: &str = "b64";

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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tensor::from_tensorflow;

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

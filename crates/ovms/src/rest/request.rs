//! The body of `:predict`: `inputs` (by column) or `instances` (by row), with named inputs or the only one.

use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::json::{self, BASE64_KEY, Format};
use crate::models::{SEQUENCE_CONTROL_INPUT, SEQUENCE_ID, Signature, Special, Specials};
use crate::predict::Tensors;
use crate::tensor::Tensor;
use crate::triton::Failure;

const NOT_JSON: &str = "The file is not valid json";
const NO_OBJECT: &str = "Request body should be JSON object";
const UNKNOWN_ORDER: &str = "Invalid JSON structure. Could not detect row or column format";
const INSTANCES_NOT_AN_ARRAY: &str = "Invalid JSON structure. Nonamed instance is not an array.";
const INSTANCE_NOT_AN_OBJECT: &str = "Invalid JSON structure. One of named instances is not a JSON object.";
const NO_INSTANCES: &str = "Invalid JSON structure. Missing instances in row format";
const NEITHER_NAMED_NOR_NOT: &str = "Could not detect neither named or nonamed format";
const BATCH_SIZES_DIFFER: &str = "Invalid JSON structure. Request inputs have different batch sizes";
const INPUTS_NOT_AN_OBJECT: &str = "Invalid JSON structure. One of inputs is not a JSON object.";
const NO_INPUTS: &str = "Invalid JSON structure, missing inputs";
const BAD_INSTANCE: &str = "Could not parse instance content. Not valid ndarray detected";
const BAD_INPUT: &str = "Could not parse input content. Not valid ndarray detected";
const BAD_PRECISION: &str = "Could not parse input content. Unsupported data precision detected";
const NOT_ONE_INPUT: &str = "Inputs inside buffer does not match expected format.";

/// A request whose values are still text, because their types are the model's.
#[derive(Debug)]
pub struct Request<'a> {
    pub format: Format,
    values: Values<'a>,
}

#[derive(Debug)]
enum Values<'a> {
    /// Of the only input.
    Unnamed(&'a RawValue),
    /// By column, each name has one value; by row, one for each row.
    Named(Vec<(String, Vec<&'a RawValue>)>),
}

#[derive(Deserialize)]
struct Body<'a> {
    #[serde(borrow)]
    instances: Option<&'a RawValue>,
    #[serde(borrow)]
    inputs: Option<&'a RawValue>,
}

impl<'a> Request<'a> {
    /// Fails as OVMS does, in its words.
    pub fn parse(body: &'a [u8]) -> Result<Self, Failure> {
        // OVMS answers 412, which is for a state of the server. Malformed JSON is the client's mistake.
        let not_json = |error: serde_json::Error| Failure::invalid(format!("{NOT_JSON} - Error: {error}"));
        // The values are located but not parsed, because the model decides the types of the numbers, and it isn't known
        // yet.
        let value: &RawValue = serde_json::from_slice(body).map_err(not_json)?;
        if !value.get().starts_with('{') {
            return Err(Failure::invalid(NO_OBJECT));
        }
        match serde_json::from_str(value.get()).map_err(not_json)? {
            Body { instances: Some(instances), inputs: None } => {
                Ok(Self { format: Format::Row, values: Values::of_instances(instances)? })
            }
            Body { instances: None, inputs: Some(inputs) } => {
                Ok(Self { format: Format::Column, values: Values::of_inputs(inputs)? })
            }
            Body { .. } => Err(Failure::invalid(UNKNOWN_ORDER)),
        }
    }

    /// The special inputs, with nothing but their JSON checked.
    pub fn specials(&self) -> Result<Specials, Failure> {
        Ok(Specials { sequence_id: self.special(SEQUENCE_ID)?, control: self.special(SEQUENCE_CONTROL_INPUT)? })
    }

    /// The other inputs, in the types of the model.
    pub fn tensors(&self, signature: &Signature) -> Result<Tensors, Failure> {
        match &self.values {
            Values::Unnamed(value) => {
                // Without a name, only a model with one input says which is meant.
                let [input] = &signature.inputs[..] else { return Err(Failure::invalid(NOT_ONE_INPUT)) };
                let data_type = input.data_type.ok_or_else(|| Failure::invalid(BAD_PRECISION))?;
                let tensor = json::tensor(data_type, value).map_err(|error| self.bad(&input.name, &error))?;
                Ok(vec![(input.name.clone(), tensor)])
            }
            Values::Named(values) => {
                let data = values.iter().filter(|(name, _)| !signature.has_special(name));
                let tensors: Tensors = data
                    .map(|(name, values)| Ok((name.clone(), self.tensor(name, values, signature)?)))
                    .collect::<Result<_, Failure>>()?;
                let mut rows = tensors.iter().map(|(_, tensor)| tensor.shape.first());
                let first = rows.next();
                if self.format == Format::Row && rows.any(|rows| Some(rows) != first) {
                    return Err(Failure::invalid(BATCH_SIZES_DIFFER));
                }
                Ok(tensors)
            }
        }
    }

    fn tensor(&self, name: &str, values: &[&RawValue], signature: &Signature) -> Result<Tensor, Failure> {
        let input = signature.input(name).ok_or_else(|| Failure::unexpected_input(name))?;
        let data_type = input.data_type.ok_or_else(|| Failure::invalid(BAD_PRECISION))?;
        let tensor = match (self.format, values) {
            (Format::Column, [value]) => json::tensor(data_type, value),
            (_, values) => json::tensor_of_rows(data_type, values),
        };
        tensor.map_err(|error| self.bad(name, &error))
    }

    fn special<T: for<'de> Deserialize<'de> + Copy>(&self, name: &str) -> Result<Option<Special<T>>, Failure> {
        let Values::Named(named) = &self.values else { return Ok(None) };
        let Some((_, values)) = named.iter().find(|(other, _)| other == name) else { return Ok(None) };
        let mut numbers: Vec<T> = Vec::new();
        for value in values {
            let text = value.get();
            // A row has one value of an input, which clients write with or without brackets.
            if self.format == Format::Row && !text.starts_with('[') {
                numbers.push(serde_json::from_str(text).map_err(|error| self.bad(name, &error))?);
            } else {
                let several: Vec<T> = serde_json::from_str(text).map_err(|error| self.bad(name, &error))?;
                numbers.extend(several);
            }
        }
        if numbers.is_empty() {
            return Err(self.bad(name, &"there is no number"));
        }
        Ok(Some(Special::new(vec![numbers.len() as i64], &numbers)))
    }

    fn bad(&self, name: &str, error: &dyn fmt::Display) -> Failure {
        let text = if self.format == Format::Row { BAD_INSTANCE } else { BAD_INPUT };
        Failure::invalid(format!("{text} - input '{name}': {error}"))
    }
}

impl<'a> Values<'a> {
    fn of_instances(instances: &'a RawValue) -> Result<Self, Failure> {
        if !instances.get().starts_with('[') {
            return Err(Failure::invalid(INSTANCES_NOT_AN_ARRAY));
        }
        let rows: Vec<&RawValue> =
            serde_json::from_str(instances.get()).map_err(|_| Failure::invalid(INSTANCES_NOT_AN_ARRAY))?;
        let Some(first) = rows.first() else { return Err(Failure::invalid(NO_INSTANCES)) };
        if !is_named(first) {
            let is_null = first.get() == "null";
            return if is_null { Err(Failure::invalid(NEITHER_NAMED_NOR_NOT)) } else { Ok(Self::Unnamed(instances)) };
        }
        Ok(Self::Named(named(rows.into_iter().map(|row| match serde_json::from_str(row.get()) {
            Ok(Members(members)) if members.is_empty() => Err(Failure::invalid(BAD_INSTANCE)),
            Ok(members) => Ok(members),
            Err(_) => Err(Failure::invalid(INSTANCE_NOT_AN_OBJECT)),
        }))?))
    }

    fn of_inputs(inputs: &'a RawValue) -> Result<Self, Failure> {
        if inputs.get() == "null" {
            return Err(Failure::invalid(INPUTS_NOT_AN_OBJECT));
        }
        if !is_named(inputs) {
            return Ok(Self::Unnamed(inputs));
        }
        let members: Members<'_> =
            serde_json::from_str(inputs.get()).map_err(|_| Failure::invalid(INPUTS_NOT_AN_OBJECT))?;
        if members.0.is_empty() {
            return Err(Failure::invalid(NO_INPUTS));
        }
        let named = named([Ok(members)])?;
        match named.iter().find(|(_, values)| values.len() > 1) {
            Some((name, _)) => Err(Failure::invalid(format!("{BAD_INPUT} - input '{name}' is there twice"))),
            None => Ok(Self::Named(named)),
        }
    }
}

/// The values of each name in objects, in the order in which the names first occur.
fn named<'a>(
    objects: impl IntoIterator<Item = Result<Members<'a>, Failure>>,
) -> Result<Vec<(String, Vec<&'a RawValue>)>, Failure> {
    let mut named: Vec<(String, Vec<&RawValue>)> = Vec::new();
    // A search through all names would take time that grows with the square of their number, and a body can have many
    // names.
    let mut places = HashMap::new();
    for object in objects {
        for (name, value) in object?.0 {
            let place = *places.entry(name.clone()).or_insert(named.len());
            match named.get_mut(place) {
                Some((_, values)) => values.push(value),
                None => named.push((name, vec![value])),
            }
        }
    }
    Ok(named)
}

/// Whether the value is an object of inputs, and not of base64.
fn is_named(value: &RawValue) -> bool {
    if !value.get().starts_with('{') {
        return false;
    }
    match serde_json::from_str(value.get()) {
        Ok(Members(members)) => match &members[..] {
            [(name, value)] => !(name == BASE64_KEY && value.get().starts_with('"')),
            _ => true,
        },
        Err(_) => true,
    }
}

/// The members of an object, in order, with their values as text. A map would lose one of two members with one name.
struct Members<'a>(Vec<(String, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for Members<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MembersVisitor;

        impl<'de> Visitor<'de> for MembersVisitor {
            type Value = Members<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members<'de>, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }

        deserializer.deserialize_map(MembersVisitor)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::models::TensorInfo;
    use crate::tensor::DataType;

    fn signature(names: &[&str]) -> Signature {
        let info =
            |name: &&str| TensorInfo { name: (*name).to_owned(), data_type: Some(DataType::Int32), shape: vec![-1, 1] };
        let inputs = names.iter().map(info).collect();
        Signature { version: 1, inputs, outputs: Vec::new(), special_shape: Some(vec![1, 1]) }
    }

    fn shapes(body: &str, names: &[&str]) -> Result<Vec<(String, Vec<i64>)>, String> {
        let request = Request::parse(body.as_bytes()).map_err(|failure| failure.message)?;
        let tensors = request.tensors(&signature(names)).map_err(|failure| failure.message)?;
        Ok(tensors.into_iter().map(|(name, tensor)| (name, tensor.shape)).collect())
    }

    fn specials(body: &str) -> Result<Specials, String> {
        Request::parse(body.as_bytes()).and_then(|request| request.specials()).map_err(|failure| failure.message)
    }

    #[test]
    fn columns_and_rows_give_the_same_tensor() {
        let expected = Ok(vec![("a".to_owned(), vec![2, 1])]);
        for body in [
            r#"{"inputs": {"a": [[1], [2]], "sequence_id": [1]}}"#,
            r#"{"instances": [{"a": [1]}, {"a": [2]}]}"#,
            r#"{"inputs": [[1], [2]]}"#,
            r#"{"signature_name": "any", "instances": [[1], [2]]}"#,
        ] {
            assert_eq!(shapes(body, &["a"]), expected, "{body}");
        }
    }

    #[test]
    fn what_is_no_request_is_refused_in_ovms_s_words() {
        for (body, text) in [
            ("", NOT_JSON),
            ("{\"inputs\": 1} x", NOT_JSON),
            ("[1]", NO_OBJECT),
            ("{}", UNKNOWN_ORDER),
            (r#"{"inputs": [1], "instances": [1]}"#, UNKNOWN_ORDER),
            (r#"{"instances": {}}"#, INSTANCES_NOT_AN_ARRAY),
            (r#"{"instances": []}"#, NO_INSTANCES),
            (r#"{"instances": [null]}"#, NEITHER_NAMED_NOR_NOT),
            (r#"{"instances": [{"a": 1}, 2]}"#, INSTANCE_NOT_AN_OBJECT),
            (r#"{"instances": [{}]}"#, BAD_INSTANCE),
            (r#"{"instances": [{"a": 1, "b": 2}, {"a": 1}]}"#, BATCH_SIZES_DIFFER),
            (r#"{"inputs": {}}"#, NO_INPUTS),
            (r#"{"inputs": {"a": "1"}}"#, BAD_INPUT),
            (r#"{"inputs": {"a": 1, "a": 2}}"#, BAD_INPUT),
            (r#"{"inputs": [1]}"#, NOT_ONE_INPUT),
            (r#"{"inputs": {"c": 1}}"#, "Unexpected input"),
        ] {
            let error = shapes(body, &["a", "b"]).unwrap_err();
            assert!(error.starts_with(text), "{body}: {error}");
        }
    }

    #[test]
    fn the_special_inputs_are_arrays_of_one_number() {
        let of = |id| Some(Special { shape: vec![1], value: Some(id) });
        let column = specials(r#"{"inputs": {"sequence_id": [18446744073709551615], "a": [1]}}"#).unwrap();
        assert_eq!(column.sequence_id, of(u64::MAX));
        assert_eq!(specials(r#"{"instances": [{"sequence_id": [7], "a": [1]}]}"#).unwrap().sequence_id, of(7));
        assert_eq!(specials(r#"{"instances": [{"sequence_id": 7, "a": [1]}]}"#).unwrap().sequence_id, of(7));
        assert_eq!(specials(r#"{"inputs": [[1]]}"#), Ok(Specials::default()));
        let two = specials(r#"{"inputs": {"sequence_id": [1, 2]}}"#).unwrap();
        assert_eq!(two.sequence_id, Some(Special { shape: vec![2], value: None }));
        for value in ["[-1]", "[\"1\"]", "[1.0]", "[[1]]", "[]", "1", "null", "{}", "[18446744073709551616]"] {
            let error = specials(&format!("{{\"inputs\": {{\"sequence_id\": {value}}}}}")).unwrap_err();
            assert!(error.starts_with(BAD_INPUT), "{value}: {error}");
        }
    }

    #[test]
    fn many_names_take_no_time_of_their_square() {
        let members: Vec<_> = (0..200_000).map(|at| format!("\"{at}\":[1]")).collect();
        let object = format!("{{{}}}", members.join(","));
        let began = std::time::Instant::now();
        for body in [format!("{{\"inputs\":{object}}}"), format!("{{\"instances\":[{object}]}}")] {
            let error = shapes(&body, &["a"]).unwrap_err();
            assert!(error.starts_with("Unexpected input"), "{error}");
        }
        assert!(began.elapsed().as_secs() < 10);
    }

    proptest! {
        #[test]
        fn no_body_panics(body: Vec<u8>) {
            let _ = Request::parse(&body);
        }

        #[test]
        fn no_json_panics(value in "[\\[\\]{}0-9,.e\"ab64:-]{0,30}", key in "(inputs|instances)") {
            let body = format!("{{\"{key}\": {value}}}");
            if let Ok(request) = Request::parse(body.as_bytes()) {
                let _ = request.specials();
                let _ = request.tensors(&signature(&["a"]));
            }
        }
    }
}

//! The types of elements that a comparison can have.

use stateful_convert::onnx::{DataType, schema::ValueInfoProto};
use stateful_convert::{Options, convert};

use crate::common::{Build, FLOAT, assert_equal, checked, compare, dims, node};

/// `x` as FLOAT, a GRU, and its answers as `elem`, multiplied by 1000 and then raised by `added`.
fn model(elem: DataType, added: f32) -> Vec<u8> {
    let mut build = Build::new().typed_input("x", elem, "time batch 4").recurrent_weights(3);
    build.graph.output.push(ValueInfoProto::tensor("y", elem.into(), &dims("time 1 batch 3")));
    let cast = |from: &str, to: &str, elem: i32| {
        let mut cast = node("Cast", from, to).with_int("to", elem.into());
        cast.name = Some(format!("{to} is cast"));
        cast
    };
    let mut gru = node("GRU", "float w r b", "all").with_int("hidden_size", 3);
    gru.name = Some("gru".to_owned());
    let scalar = |name: &str, value: f32| stateful_convert::onnx::schema::TensorProto {
        name: Some(name.to_owned()),
        data_type: Some(FLOAT),
        float_data: vec![value],
        ..Default::default()
    };
    build.graph.initializer.extend([scalar("thousand", 1000.0), scalar("added", added)]);
    let build = build.node(cast("x", "float", FLOAT)).node(gru).node(node("Abs", "all", "positive"));
    let build = build.node(node("Mul", "positive thousand", "large")).node(node("Add", "large added", "answer"));
    build.node(cast("answer", "y", elem.into())).bytes()
}

#[test]
fn tensors_of_each_type_are_compared() {
    use DataType::{Bfloat16, Bool, Double, Float, Float16, Int8, Int16, Int32, Int64, Uint8, Uint16, Uint32, Uint64};
    for elem in [Bfloat16, Bool, Double, Float, Float16, Int8, Int16, Int32, Int64, Uint8, Uint16, Uint32, Uint64] {
        let (_, compared) = checked(model(elem, 0.0), &Options::default()).unwrap();
        assert_equal(elem.as_str_name(), &compared);
    }
}

#[test]
fn tensors_of_strings_are_refused() {
    let mut build = Build::new().input("x", "time batch 4").recurrent_weights(3);
    build = build.typed_input("words", DataType::String, "batch");
    build.graph.output.push(ValueInfoProto::tensor("same", DataType::String.into(), &dims("batch")));
    let build =
        build.node(node("Identity", "words", "same")).node(node("GRU", "x w r b", "y").with_int("hidden_size", 3));
    let bytes = build.output("y", "time 1 batch 3").bytes();
    let converted = convert(bytes.clone().into(), &Options::default()).unwrap();
    let error = compare(&bytes, &converted).unwrap_err().to_string();
    assert_eq!(error, "'words' is STRING, and such tensors can't be compared");
}

/// A class is another one if its number is off by 1. A large number may have been rounded.
#[test]
fn small_integers_must_be_equal_and_large_ones_nearly() {
    let compared = |added: f32, of_original: f32| {
        let converted = convert(model(DataType::Int32, added).into(), &Options::default()).unwrap();
        compare(&model(DataType::Int32, of_original), &converted).map(|_| ()).map_err(|error| error.to_string())
    };
    let error = compared(1.0, 0.0).unwrap_err();
    assert!(error.contains("output 'y' differs by 1.0e0 at step 0"), "{error}");
    assert_eq!(compared(50_001.0, 50_000.0), Ok(()));
    let error = compared(50_002.0, 50_000.0).unwrap_err();
    assert!(error.contains("output 'y' differs by 2.0e0 at step 0"), "{error}");
    let error = compared(1_001_000.0, 1_000_000.0).unwrap_err();
    assert!(error.contains("output 'y' differs by 1.0e3 at step 0"), "{error}");
}

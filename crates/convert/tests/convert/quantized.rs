//! Quantized operators, pooling, half precision, and what a comparison finds.

use stateful_convert::convert;
use stateful_convert::onnx::schema::{NodeProto, TensorProto};
use stateful_convert::onnx::{DataType, bracketed, opset, read};
use stateful_convert::report::StartsAt;
use stateful_convert::verify::Compared;

use crate::common::{Build, checked, compare, dims, node, refusal};
use crate::graphs::{along_time, behind};
use crate::layers::{any, assert_equal, layer};

#[test]
fn convolutions_that_drop_steps_are_refused() {
    let build = Build::new().input("x", "batch 4 time").output("y", "batch 3 out").weights("k", &[3, 4, 5]);
    let message = refusal(build.node(node("Conv", "x k", "y")).bytes(), &any());
    assert!(message.contains("Conv 'the conv' gives 4 steps fewer than it takes; pad 4 steps in front"), "{message}");
    assert!(message.contains("'input_context'"), "{message}");
}

/// Quantized weights, and the scales and zero points of all.
fn quantized(build: Build) -> Build {
    let tensor = |name: &str, elem: DataType, dims: &[i64]| TensorProto {
        name: Some(name.to_owned()),
        data_type: Some(elem.into()),
        dims: dims.to_vec(),
        ..TensorProto::default()
    };
    let mut build = build;
    let bytes = (0..48).map(|number| number * 5 % 251).collect();
    build.graph.initializer.push(TensorProto { float_data: vec![0.02], ..tensor("s", DataType::Float, &[]) });
    build.graph.initializer.push(TensorProto { int32_data: vec![120], ..tensor("z", DataType::Uint8, &[]) });
    build.graph.initializer.push(TensorProto { int32_data: bytes, ..tensor("k", DataType::Uint8, &[4, 4, 3]) });
    build.graph.initializer.push(TensorProto { int32_data: vec![90; 16], ..tensor("m", DataType::Uint8, &[4, 4]) });
    build
}

#[test]
fn quantized_operators_are_followed_and_their_padding_is_the_zero_point() {
    let microsoft = |mut node: NodeProto| {
        node.domain = Some("com.microsoft".to_owned());
        node
    };
    let build = Build::new().input("x", "batch 4 time").output("y", "batch time 4");
    let nodes = [
        node("QuantizeLinear", "x s z", "q"),
        node("QLinearConv", "q s z k s z s z", "c").with_ints("pads", &[2, 0]),
        microsoft(node("QLinearSigmoid", "c s z s z", "d")),
        microsoft(node("QLinearAdd", "d s z q s z s z", "e")),
        node("Transpose", "e", "f").with_ints("perm", &[0, 2, 1]),
        node("QLinearMatMul", "f s z m s z s z", "g"),
        node("DequantizeLinear", "g s z", "y"),
    ];
    let build = nodes.into_iter().fold(quantized(build), Build::node);
    let (converted, compared) = checked(build.bytes(), &any()).unwrap();
    let [state] = converted.report.states.as_slice() else { panic!("{:?}", converted.report.states) };
    assert_eq!((state.elem, state.starts_at), (DataType::Uint8.into(), StartsAt::Value(120.0)));
    assert_eq!(bracketed(&state.dims), "[batch, 4, 2]");
    assert_equal(&compared);
}

#[test]
fn operators_of_onnx_runtime_are_refused_with_what_helps() {
    for (op, expected) in [
        ("QAttention", "attends over the whole input; attention over the whole input can't run in steps"),
        ("AttnLSTM", "keeps the attention of its last step to itself"),
        ("SkipLayerNormalization", "convert the model as it was before them"),
    ] {
        let other = NodeProto { domain: Some("com.microsoft".to_owned()), ..node(op, "x w", "z") };
        let message = refusal(behind(vec![other]).bytes(), &along_time());
        assert!(message.contains(&format!("com.microsoft.{op}")) && message.contains(expected), "{message}");
    }
}

#[test]
fn pooling_over_time_starts_from_the_lowest_value() {
    let pool = node("MaxPool", "x", "y").with_ints("kernel_shape", &[3]).with_ints("pads", &[2, 0]);
    let build = Build::new().input("x", "batch 4 time").output("y", "batch 4 time").node(pool);
    let (converted, compared) = checked(build.bytes(), &any()).unwrap();
    assert_eq!(converted.report.states[0].starts_at, StartsAt::Value(f64::NEG_INFINITY));
    assert_equal(&compared);
}

#[test]
fn pooling_of_integers_starts_from_the_lowest_integer() {
    for (elem, zero_point, lowest) in
        [(DataType::Int8, -7, StartsAt::Value(-128.0)), (DataType::Uint8, 120, StartsAt::Zero)]
    {
        let pool = node("MaxPool", "q", "p").with_ints("kernel_shape", &[3]).with_ints("pads", &[2, 0]);
        let mut build = quantized(Build::new().input("x", "batch 4 time").output("y", "batch 4 time"));
        build.graph.initializer[1].data_type = Some(elem.into());
        build.graph.initializer[1].int32_data = vec![zero_point];
        let nodes = [node("QuantizeLinear", "x s z", "q"), pool, node("DequantizeLinear", "p s z", "y")];
        let (converted, compared) = checked(nodes.into_iter().fold(build, Build::node).bytes(), &any()).unwrap();
        let [state] = converted.report.states.as_slice() else { panic!("{:?}", converted.report.states) };
        assert_eq!((state.elem, state.starts_at), (elem.into(), lowest));
        assert_equal(&compared);
    }
}

#[test]
fn negative_zero_points_are_where_padding_starts() {
    let tensor = |name: &str, dims: &[i64], values: Vec<i32>| TensorProto {
        name: Some(name.to_owned()),
        data_type: Some(DataType::Int8.into()),
        dims: dims.to_vec(),
        int32_data: values,
        ..TensorProto::default()
    };
    let mut build = quantized(Build::new().input("x", "batch 4 time").output("y", "batch 4 time"));
    build.graph.initializer.push(tensor("below", &[], vec![-100]));
    build.graph.initializer.push(tensor("weights", &[4, 4, 3], (0..48).map(|number| number * 5 % 251 - 125).collect()));
    let nodes = [
        node("QuantizeLinear", "x s below", "q"),
        node("QLinearConv", "q s below weights s below s below", "c").with_ints("pads", &[2, 0]),
        node("DequantizeLinear", "c s below", "y"),
    ];
    let (converted, compared) = checked(nodes.into_iter().fold(build, Build::node).bytes(), &any()).unwrap();
    assert_eq!(converted.report.states[0].starts_at, StartsAt::Value(-100.0));
    assert_equal(&compared);
}

#[test]
fn products_and_activations_of_onnx_runtime_are_followed() {
    let microsoft = |node: NodeProto| NodeProto { domain: Some("com.microsoft".to_owned()), ..node };
    let product = || microsoft(node("FusedMatMul", "x k", "p").with_int("transA", 0).with_int("transB", 1));
    let build =
        |product: NodeProto| behind(vec![product, microsoft(node("QuickGelu", "p", "z"))]).weights("k", &[4, 4]);
    let (_, compared) = checked(build(product()).bytes(), &along_time()).unwrap();
    assert_equal(&compared);
    for attribute in ["transA", "transBatchA", "transBatchB"] {
        let message = refusal(build(product().with_int(attribute, 1)).bytes(), &along_time());
        assert!(message.starts_with("com.microsoft.FusedMatMul 'the fusedmatmul' "), "{message}");
    }
    // Weights that aren't square.
    let narrow =
        behind(vec![microsoft(node("FusedMatMul", "x k", "p").with_int("transB", 1)), node("MatMul", "p l", "z")]);
    let (_, compared) = checked(narrow.weights("k", &[5, 4]).weights("l", &[5, 4]).bytes(), &along_time()).unwrap();
    assert_equal(&compared);
}

/// The weights of half precision are multiplied with `factor` in the converted model.
fn compared_with_other_weights(factor: f32) -> Result<Vec<Compared>, String> {
    let conv = node("Conv", "x k", "y").with_ints("pads", &[2, 0]);
    let half = |build: Build| {
        let mut build = build;
        let elem: i32 = DataType::Float16.into();
        build.graph.input[0].set_tensor(elem, &dims("batch 4 time"));
        build.graph.output[0].set_tensor(elem, &dims("batch 4 time"));
        let weights = &mut build.graph.initializer[0];
        weights.data_type = Some(elem);
        let bits = |value: f32| i32::from(half::f16::from_f32(value).to_bits());
        weights.int32_data = std::mem::take(&mut weights.float_data).into_iter().map(bits).collect();
        build
    };
    let build = || Build::new().input("x", "batch 4 time").output("y", "batch 4 time").weights("k", &[4, 4, 3]);
    let original = half(build().node(conv.clone())).bytes();
    let mut other = build().node(conv);
    other.graph.initializer[0].float_data.iter_mut().for_each(|weight| *weight *= factor);
    let converted = convert(half(other).bytes().into(), &any()).unwrap();
    compare(&original, &converted).map_err(|error| error.to_string())
}

#[test]
fn half_precision_is_compared_within_its_rounding() {
    compared_with_other_weights(1.002).unwrap();
    let error = compared_with_other_weights(1.05).unwrap_err();
    assert!(error.contains("output 'y' differs"), "{error}");
}

#[test]
fn a_comparison_finds_a_state_that_is_lost() {
    let bytes = layer("LSTM", 4, |node| node).bytes();
    let mut converted = convert(bytes.clone().into(), &any()).unwrap();
    let other = converted.report.states[0].pair.output.clone();
    converted.report.states[1].pair.output = other;
    let error = compare(&bytes, &converted).unwrap_err().to_string();
    assert!(error.contains("differs from the original: in chunks of 1, output 'y' differs"), "{error}");
}

#[test]
fn a_comparison_finds_a_lost_state_in_small_answers() {
    let build = Build::new().input("x", "time batch 4").output("small", "time 1 batch 3").recurrent_weights(3);
    let build =
        build.node(node("GRU", "x w r b", "y").with_int("hidden_size", 3)).node(node("Mul", "y factor", "small"));
    let mut build = build.weights("factor", &[1]);
    build.graph.initializer.last_mut().unwrap().float_data = vec![1e-4];
    let bytes = build.bytes();
    let mut converted = convert(bytes.clone().into(), &any()).unwrap();
    assert_equal(&compare(&bytes, &converted).unwrap());
    // The state goes in and never comes out changed.
    let mut model = read(converted.model.clone().into()).unwrap();
    let graph = model.graph.as_mut().unwrap();
    graph.node.iter_mut().find(|node| node.op() == "GRU").unwrap().set_output(1, "lost");
    graph.node.push(node("Identity", "the.gru.h_in", "the.gru.h_out"));
    converted.model = stateful_convert::onnx::write(&model);
    let error = compare(&bytes, &converted).unwrap_err().to_string();
    assert!(error.contains("differs from the original: in chunks of 1, output 'small' differs"), "{error}");
}

#[test]
fn a_comparison_of_nothing_but_nan_says_nothing() {
    let build = Build::new().input("x", "time batch 4").output("y", "time 1 batch 3").recurrent_weights(1);
    let nodes = [node("Abs", "x", "a"), node("Neg", "a", "n"), node("Sqrt", "n", "z")];
    let build = nodes.into_iter().fold(build, Build::node);
    let bytes = build.node(node("RNN", "z w r b", "y").with_int("hidden_size", 3)).bytes();
    let converted = convert(bytes.clone().into(), &any()).unwrap();
    let error = compare(&bytes, &converted).unwrap_err().to_string();
    assert!(error.contains("says nothing") && error.contains("output 'y' has no finite number"), "{error}");
}

#[test]
fn what_the_schema_knows_survives() {
    let mut model = read(layer("LSTM", 4, |node| node).bytes().into()).unwrap();
    model.producer_name = Some("somebody".to_owned());
    let entry = |key: &str| stateful_convert::onnx::schema::StringStringEntryProto {
        key: Some(key.to_owned()),
        value: Some("v".to_owned()),
    };
    model.metadata_props.push(entry("of the model"));
    model.graph.as_mut().unwrap().node[0].metadata_props.push(entry("of the node"));
    let bytes = stateful_convert::onnx::write(&model);
    let again = read(convert(bytes.into(), &any()).unwrap().model.into()).unwrap();
    assert_eq!((again.producer_name(), opset(&again)), ("somebody", 17));
    assert_eq!(again.metadata_props[0].key(), "of the model");
    assert_eq!(again.graph.unwrap().node[0].metadata_props[0].key(), "of the node");
}

#[test]
fn other_files_are_refused() {
    assert!(refusal(b"not a model".to_vec(), &any()).starts_with("it is no ONNX model"));
    assert_eq!(refusal(Vec::new(), &any()), "it is no ONNX model: it has no graph");
}

#[test]
fn nodes_that_lack_inputs_are_refused_here_or_by_the_comparison() {
    for op in [
        "Add", "Concat", "Gather", "MatMul", "Where", "Loop", "Scan", "If", "LSTM", "Conv", "Reshape", "Slice", "Pad",
        "TopK",
    ] {
        for inputs in [&["x"][..], &[]] {
            let bytes = behind(vec![NodeProto::make(op, "lacking", inputs, &["z"])]).bytes();
            if let Ok(converted) = convert(bytes.clone().into(), &along_time()) {
                assert!(compare(&bytes, &converted).is_err(), "{op}");
            }
        }
    }
}

//! The models of `exports/`, which real exporters made.

use crate::common::{self, Build, assert_equal, checked, export, node, pair, refusal, states};
use stateful_convert::onnx::{Dim, bracketed, read, write};
use stateful_convert::report::StartsAt;
use stateful_convert::verify::Compared;
use stateful_convert::{Converted, Hint, InputAxis, Options, convert, passes_on_rows};

fn converted(name: &str) -> (Converted, Vec<Compared>) {
    converted_with(name, &Options::default())
}

fn converted_with(name: &str, options: &Options) -> (Converted, Vec<Compared>) {
    checked(std::fs::read(export(name)).unwrap(), options).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn refused(name: &str) -> String {
    refusal(std::fs::read(export(name)).unwrap(), &Options::default())
}

#[test]
fn recurrent_layers_get_a_state_each() {
    for (name, expected) in [
        ("torch_lstm2", vec!["r.LSTM.h_in", "r.LSTM.c_in", "r.LSTM_1.h_in", "r.LSTM_1.c_in"]),
        ("torch_lstm_time_major", vec!["r.LSTM.h_in", "r.LSTM.c_in"]),
        ("torch_lstm_last", vec!["r.LSTM.h_in", "r.LSTM.c_in"]),
        ("torch_lstm_returned", vec!["r.LSTM.h_in", "r.LSTM.c_in", "r.LSTM_1.h_in", "r.LSTM_1.c_in"]),
        ("torch_lstm_packed", vec!["r.LSTM.h_in", "r.LSTM.c_in"]),
        ("torch_gru", vec!["r.GRU.h_in"]),
        ("torch_rnn_relu", vec!["r.RNN.h_in"]),
        ("dynamo_gru", vec!["node_gru__1.h_in"]),
        ("keras_lstm_last", vec!["LSTM__169.h_in", "LSTM__169.c_in"]),
    ] {
        let (converted, compared) = converted(name);
        assert_eq!(states(&converted), expected, "{name}");
        assert!(converted.initial_states.is_none(), "{name} starts at zero");
        assert_equal(name, &compared);
    }
}

#[test]
fn exports_that_leave_out_unused_outputs_get_them() {
    for name in ["dynamo_lstm", "keras_lstm2"] {
        let (converted, compared) = converted(name);
        assert_eq!(converted.report.states.len(), 4, "{name}");
        assert_equal(name, &compared);
    }
}

#[test]
fn learned_initial_states_are_kept() {
    for name in ["torch_lstm_learned", "dynamo_lstm_learned"] {
        let (converted, compared) = converted(name);
        assert!(converted.report.states.iter().all(|state| state.starts_at == StartsAt::Model), "{name}");
        assert_equal(name, &compared);
        let bytes = std::fs::read(export(name)).unwrap();
        let without = converted.starting_at_zero().unwrap();
        assert!(without.initial_states.is_none());
        assert!(without.report.states.iter().all(|state| state.starts_at == StartsAt::Zero), "{name}");
        let error = common::compare(&bytes, &without).unwrap_err().to_string();
        assert!(error.contains("differs from the original"), "{error}");
    }
}

#[test]
fn what_a_stateful_keras_layer_held_is_told() {
    let (converted, compared) = converted("keras_stateful");
    assert!(converted.report.warnings[0].to_string().contains("start at constants that aren't zero"));
    assert_equal("keras_stateful", &compared);
}

#[test]
fn loops_and_scans_turn_once_a_step_of_the_chunk() {
    for (name, expected) in [
        ("torch_script_loop", 2),
        ("torch_script_sum", 2),
        ("keras_gru", 1),
        ("keras_gru_reset_before", 1),
        ("keras_simple_rnn", 1),
        ("keras_masking", 3),
        ("dynamo_scan", 1),
    ] {
        let (converted, compared) = converted(name);
        assert_eq!(converted.report.states.len(), expected, "{name}");
        assert_equal(name, &compared);
    }
}

#[test]
fn causal_convolutions_keep_their_last_frames() {
    for (name, frames) in [
        ("torch_conv_gru", vec!["Pad.frames_in", "Pad_1.frames_in", "r.GRU.h_in"]),
        ("torch_tcn", vec!["a.Conv.frames_in", "b.Conv.frames_in"]),
    ] {
        let (converted, compared) = converted(name);
        assert_eq!(states(&converted), frames);
        assert!(compared.iter().all(|compared| compared.largest < 1e-6), "{name}: {compared:?}");
    }
    let (converted, _) = converted("keras_causal_conv");
    assert_eq!(converted.report.states.len(), 4);
}

#[test]
fn strides_over_time_make_requests_a_multiple_of_their_product() {
    let (converted, compared) = converted("torch_strided");
    assert_eq!(converted.report.steps_multiple, 4);
    assert_eq!(compared[0].what, "chunks of 4");
    assert_equal("torch_strided", &compared);
}

#[test]
fn a_fixed_length_is_opened() {
    let (converted, compared) = converted("torch_lstm_static");
    assert_eq!(bracketed(&converted.report.inputs[0].dims), "[3, 5, 4]");
    assert_eq!(bracketed(&converted.report.outputs[0].dims), "[3, time, 3]");
    assert_equal("torch_lstm_static", &compared);
}

/// An export whose axes have other names.
fn renamed(name: &str, names: &[(&str, &str)]) -> Vec<u8> {
    let mut model = read(std::fs::read(export(name)).unwrap().into()).unwrap();
    let graph = model.graph.as_mut().unwrap();
    for value in graph.input.iter_mut().chain(&mut graph.output).chain(&mut graph.value_info) {
        let new = |dim: Dim| match names.iter().find(|(old, _)| dim == Dim::Symbol((*old).to_owned())) {
            Some((_, "?")) => Dim::Open,
            Some((_, new)) => Dim::Symbol((*new).to_owned()),
            None => dim,
        };
        let (elem, dims) = (value.elem(), value.dims().unwrap().into_iter().map(new).collect::<Vec<_>>());
        value.set_tensor(elem, &dims);
    }
    write(&model)
}

#[test]
fn a_batch_that_the_exporter_numbered_gets_its_usual_name() {
    let models = [
        ("torch", renamed("dynamo_gru", &[("batch", "s77"), ("time", "s27")]), "[batch, s27, 4]", "[1, batch, 8]"),
        ("open", renamed("torch_gru", &[("batch", "?"), ("time", "?")]), "[batch, time, 4]", "[1, batch, 8]"),
        (
            "time first",
            renamed("torch_lstm_time_major", &[("time", "x_0"), ("batch", "x_1")]),
            "[x_0, batch, 4]",
            "[1, batch, 8]",
        ),
        ("keras", std::fs::read(export("keras_lstm2")).unwrap(), "[batch, unk__136, 4]", "[1, batch, 8]"),
    ];
    for (name, bytes, x, state) in models {
        let (converted, compared) = checked(bytes, &Options::default()).unwrap();
        assert_equal(name, &compared);
        let graph = read(converted.model.clone().into()).unwrap().graph.unwrap();
        assert_eq!(bracketed(&graph.input[0].dims().unwrap()), x, "{name}");
        let kept = &converted.report.states[0];
        let input = graph.input.iter().find(|input| input.name() == kept.pair.input).unwrap();
        assert_eq!(bracketed(&input.dims().unwrap()), state, "{name}");
        assert!(graph.output.iter().all(|output| output.dims().unwrap().contains(&Dim::Symbol("batch".to_owned()))));
        assert_eq!(bracketed(&kept.dims), state, "{name}");
    }
}

#[test]
fn an_open_dimension_that_outputs_have_not_keeps_its_name() {
    // The rows of the layer may be frequencies.
    let sum = node("ReduceSum", "y_all axes", "y").with_int("keepdims", 0);
    let build = Build::new().input("x", "time bins 4").output("y", "time 1 3").recurrent_weights(3);
    let build = build.ints("axes", &[1], &[2]).node(node("GRU", "x w r b", "y_all").with_int("hidden_size", 3));
    let converted = convert(build.node(sum).bytes().into(), &Options::default()).unwrap();
    assert_eq!(bracketed(&converted.report.states[0].dims), "[1, bins, 3]");
    assert_eq!(bracketed(&converted.report.inputs[0].dims), "[time, bins, 4]");
}

#[test]
fn quantized_layers_are_converted_with_a_warning() {
    let (converted, compared) = converted("quantized_lstm");
    assert_eq!(converted.report.states.len(), 4);
    assert!(
        converted.report.warnings[0].to_string().contains("one quantization scale"),
        "{:?}",
        converted.report.warnings
    );
    assert!(compared.iter().all(|compared| compared.largest < 0.01), "{compared:?}");
}

#[test]
fn what_needs_later_steps_is_refused_with_the_node() {
    for (name, expected) in [
        ("torch_lstm_bidirectional", "LSTM '/r/LSTM' is bidirectional"),
        ("keras_bidirectional", "is bidirectional"),
        ("torch_conv_same", "Conv '/a/Conv' looks 1 step ahead"),
        ("torch_mixing_mean", "ReduceMean '/ReduceMean' reduces over time"),
        ("torch_mixing_center", "ReduceMean '/ReduceMean' reduces over time"),
        ("torch_mixing_flip", "Slice '/Slice' turns time around"),
        ("torch_mixing_norm", "InstanceNormalization '/norm/InstanceNormalization' normalizes over time"),
        ("torch_mixing_attention", "MatMul '/MatMul' combines each step with every other"),
        ("torch_unrolled", "for an unrolled loop, export the recurrence as a layer"),
        ("dynamo_rnn_unrolled", "for an unrolled loop, export the recurrence as a layer"),
    ] {
        let message = refused(name);
        assert!(message.contains(expected), "{name}: {message}");
    }
}

#[test]
fn states_that_the_model_has_are_paired_by_name() {
    let error = convert(std::fs::read(export("torch_lstm_given")).unwrap().into(), &Options::default()).unwrap_err();
    assert!(error.to_string().contains("starts from input 'h0'"), "{error}");
    assert!(error.to_string().contains("and their outputs: '<<<h0, hn>>> <<<c0, cn>>>'"), "{error}");
    assert_eq!(error.hints(), [Hint::States]);
    let options = Options { states: vec![pair("h0", "hn"), pair("c0", "cn")], ..Options::default() };
    let (converted, compared) = converted_with("torch_lstm_given", &options);
    assert_eq!(states(&converted), ["h0", "c0"]);
    assert_equal("torch_lstm_given", &compared);
}

#[test]
fn an_unrolled_loop_is_told_in_front_of_other_axes() {
    for name in ["torch_unrolled", "dynamo_rnn_unrolled"] {
        let message = refused(name);
        let first = message.lines().nth(1).unwrap();
        assert!(first.contains("for an unrolled loop, export the recurrence as a layer"), "{message}");
        assert!(message.lines().count() > 2);
    }
}

#[test]
fn a_single_step_model_is_converted_by_its_pairs() {
    let message = refused("torch_lstm_cell");
    assert_eq!(
        message,
        "by their types and dims, the inputs h, c may be states that the model has: then this graph makes one step and \
         needs no conversion; serve it as it is, with its pairs in 'state_pairs'; else, no axis of the inputs leads to a \
         recurrence or a causal convolution"
    );
    let options = Options { states: vec![pair("h", "hn"), pair("c", "cn")], ..Options::default() };
    let (converted, _) = converted_with("torch_lstm_cell", &options);
    assert_eq!(states(&converted), ["h", "c"]);
    let wrong = Options { states: vec![pair("h", "cm")], ..Options::default() };
    let message = refusal(std::fs::read(export("torch_lstm_cell")).unwrap(), &wrong);
    assert_eq!(message, "the model has no output 'cm' (it has hn, cn)");
}

#[test]
fn a_converted_model_stays_as_it_is() {
    let (first, _) = converted("torch_lstm2");
    let again = stateful_convert::convert(first.model.clone().into(), &Options::default()).unwrap();
    assert_eq!(states(&again), states(&first));
    assert!(again.model == first.model);
}

#[test]
fn a_batch_of_one_is_opened() {
    let open = Options { open_batch: true, ..Options::default() };
    let (converted, compared) = converted_with("torch_lstm_batch_one", &open);
    assert_eq!(bracketed(&converted.report.states[0].dims), "[1, batch, 8]");
    assert_equal("torch_lstm_batch_one", &compared);
    assert_eq!(compared.last().unwrap().what, "rows together and alone");
}

#[test]
fn a_published_denoiser_gets_a_batch() {
    let pairs = vec![pair("conv_cache", "conv_cache_out"), pair("rnn_cache", "rnn_cache_out")];
    let open = Options { open_batch: true, states: pairs, ..Options::default() };
    let (converted, compared) = converted_with("torch_denoiser", &open);
    let dims: Vec<String> = converted.report.states.iter().map(|state| bracketed(&state.dims)).collect();
    assert_eq!(dims, ["[batch, 1, 4, 16]", "[1, batch, 8]"]);
    assert!(compared.iter().all(|compared| compared.largest < 1e-6), "{compared:?}");
}

#[test]
fn a_batch_that_shares_an_axis_with_frequencies_is_taken_apart() {
    let pairs = vec![pair("conv_cache", "conv_cache_out"), pair("rnn_cache", "rnn_cache_out")];
    let open = Options { open_batch: true, states: pairs, ..Options::default() };
    let (converted, compared) = converted_with("torch_denoiser_merged", &open);
    let dims: Vec<String> = converted.report.states.iter().map(|state| bracketed(&state.dims)).collect();
    assert_eq!(dims, ["[batch, 1, 4, 16]", "[batch, 16, 8]"]);
    assert!(compared.iter().all(|compared| compared.largest < 1e-6), "{compared:?}");
}

#[test]
fn stacked_states_of_a_dual_path_model_get_a_batch() {
    let pairs = vec![pair("inter_cache", "inter_cache_out")];
    let open = Options { open_batch: true, states: pairs, ..Options::default() };
    let (converted, compared) = converted_with("torch_dual_path", &open);
    assert_eq!(bracketed(&converted.report.states[0].dims), "[2, batch, 16, 8]");
    assert_eq!(
        compared.iter().map(|compared| compared.what.as_str()).collect::<Vec<_>>(),
        ["5 steps", "rows together and alone"]
    );
    assert!(compared.iter().all(|compared| compared.largest < 1e-6), "{compared:?}");
}

#[test]
fn rows_in_a_loop_or_under_one_scale_keep_the_batch_closed() {
    let open = Options { open_batch: true, ..Options::default() };
    let message = refusal(std::fs::read(export("keras_stateful")).unwrap(), &open);
    assert!(message.contains("Loop 'sequential_8_1/lstm_6_1/while_loop' has the rows in its body"), "{message}");
}

#[test]
fn each_export_survives_reading_and_writing_byte_by_byte() {
    for entry in export("x").parent().unwrap().read_dir().unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "onnx") {
            let bytes = std::fs::read(&path).unwrap();
            let again = stateful_convert::onnx::write(&stateful_convert::onnx::read(bytes.clone().into()).unwrap());
            assert_eq!(again.len(), bytes.len(), "{}", path.display());
            assert!(again == bytes, "{}", path.display());
        }
    }
}

#[test]
fn a_node_that_runs_along_the_batch_is_found() {
    let along = |name: &str, axis: usize| {
        let rows = [InputAxis { input: "x".to_owned(), axis }];
        passes_on_rows(std::fs::read(export(name)).unwrap().into(), &rows)
    };
    let time_in_front = ["torch_lstm_time_major", "torch_script_loop", "dynamo_scan"];
    for (name, operator) in [
        ("torch_lstm2", "LSTM '"),
        ("torch_gru", "GRU '"),
        ("torch_lstm_bidirectional", "LSTM '"),
        ("torch_tcn", "Conv '"),
        ("torch_lstm_time_major", "LSTM '"),
        ("torch_script_loop", "Loop '"),
        ("dynamo_scan", "Scan '"),
    ] {
        let time = if name == "torch_tcn" { 2 } else { usize::from(!time_in_front.contains(&name)) };
        let batch = usize::from(time == 0);
        let found = along(name, time).unwrap_or_else(|| panic!("{name} passes nothing along axis {time}"));
        assert!(found.starts_with(operator), "{name}: {found}");
        assert_eq!(along(name, batch), None, "{name}");
    }
}

"""Models that the backend converts when it loads them: they answer in steps as the original does at once."""

import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnx.external_data_helper import convert_model_to_external_data
from tritonclient.utils import InferenceServerException

from harness import models
from harness.clients import new_id
from harness.conversations import together
from harness.graphs import graph, node
from harness.logs import log_since, messages
from harness.own import own
from harness.raw import Unary
from harness.refusals import said
from harness.whole_sequences import (
    EXPORTS,
    KERAS_PAIRS,
    STEPS,
    TIME_FIRST,
    assert_only_multiples_are_taken,
    assert_sequences_get_their_own_answers,
    assert_steps_are_the_whole,
    keras_with_states,
    steps,
    whole,
)
from support.paths import INSPECT

RNG = np.random.default_rng(9)


def config(**parameters: str) -> str:
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()]
    return "\n".join(['backend: "stateful"', *lines])


def written(deployment, served: str, model: onnx.ModelProto | str, **parameters: str) -> Path:
    """The folder of a model, with nothing in its configuration but these parameters."""
    folder = Path(deployment.repository) / served
    (folder / "1").mkdir(parents=True)
    if isinstance(model, str):
        shutil.copy(EXPORTS / f"{model}.onnx", folder / "1" / "model.onnx")
    else:
        onnx.save(model, folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text(config(**parameters))
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def load(deployment, served: str, model: onnx.ModelProto | str, **parameters: str) -> str:
    """Loads the model, and checks that its folder is as it was. Answers what the backend says of the load."""
    folder = written(deployment, served, model, **parameters)
    before = contents(folder)
    deployment.admin.load_model(served)
    assert contents(folder) == before
    return "\n".join(messages(log_since(deployment, served)))


def load_error(deployment, model: onnx.ModelProto | str, **parameters: str) -> str:
    served = f"refused_{new_id()}"
    folder = written(deployment, served, model, **parameters)
    try:
        with pytest.raises(InferenceServerException) as refused:
            deployment.admin.load_model(served)
    finally:
        shutil.rmtree(folder)
    return refused.value.message()


def assert_said(text: str, *words: str) -> None:
    missing = [word for word in words if not said(word, text)]
    assert not missing, f"{missing} not in: {text}"


def lstm(name: str, h: np.ndarray | None = None, c: np.ndarray | None = None, hidden: int = 5) -> onnx.ModelProto:
    """An LSTM over one row, `[time, 1, 4]`, that starts at these values."""
    rng = np.random.default_rng(3)
    shapes = {"W": (1, 4 * hidden, 4), "R": (1, 4 * hidden, hidden), "B": (1, 8 * hidden)}
    weights = {key: rng.normal(scale=0.3, size=shape).astype(np.float32) for key, shape in shapes.items()}
    starts = {"H": h, "C": c} if h is not None and c is not None else {}
    all_inputs = "x W R B - H C" if starts else "x W R B"
    made = node("LSTM", all_inputs, "y", hidden_size=hidden, name=name)
    outputs = [("y", "fp32", ("time", 1, 1, hidden))]
    return graph([made], [("x", "fp32", ("time", 1, 4))], outputs, weights | starts)


@pytest.mark.simulated_device
@pytest.mark.parametrize(
    "name",
    [
        "torch_lstm2",
        "torch_gru",
        "torch_lstm_learned",
        "torch_script_loop",
        "dynamo_scan",
        "torch_conv_gru",
        "keras_lstm2",
        "keras_gru_reset_before",
    ],
)
@pytest.mark.host_and_device
def test_a_model_that_is_converted_at_load_answers_in_steps_as_at_once(deployment, name):
    served = f"at_load_{name}"
    log = load(deployment, served, name, low_latency_transformation="true")
    assert_said(log, "the model was converted", "compared with the original", "chunks of 1")
    assert_steps_are_the_whole(deployment.connect(), served, name)


def u_net() -> onnx.ModelProto:
    """Two channels over time and 8 frequencies: each step minus the one before, a convolution behind a Pad of both axes, a
    transposed one whose last step is cut off, and a residual connection."""
    rng = np.random.default_rng(8)
    ints = {"delay": [0, 0, 1, 0, 0, 0, -1, 0], "pads": [0, 0, 2, 1, 0, 0, 0, 1], "from": [0], "to": [-1], "time": [2]}
    kernels = {"down": (4, 2, 3, 3), "up": (4, 2, 2, 2)}
    weights = {key: rng.normal(scale=0.3, size=shape).astype(np.float32) for key, shape in kernels.items()}
    nodes = [
        node("Pad", "x delay", "before"),
        node("Sub", "x before", "changes"),
        node("Pad", "changes pads", "padded"),
        node("Conv", "padded down", "narrow", strides=[1, 2]),
        node("Relu", "narrow", "bottom"),
        node("ConvTranspose", "bottom up", "longer", strides=[1, 2]),
        node("Slice", "longer from to time", "wide"),
        node("Add", "wide x", "y"),
    ]
    dims = ("batch", 2, "time", 8)
    constants = weights | {key: np.array(value, np.int64) for key, value in ints.items()}
    return graph(nodes, [("x", "fp32", dims)], [("y", "fp32", dims)], constants)


def at_each_frequency(order: list[int], back: list[int]) -> onnx.ModelProto:
    """A GRU over time at each of 8 frequencies: its rows are those of the batch and the frequencies."""
    rng = np.random.default_rng(9)
    shapes = {"W": (1, 9, 2), "R": (1, 9, 3), "K": (3, 2)}
    weights = {key: rng.normal(scale=0.3, size=shape).astype(np.float32) for key, shape in shapes.items()}
    ints = {"rows": [0, -1, 2], "one": [1]}
    nodes = [
        node("Transpose", "x", "front", perm=order),
        node("Reshape", "front rows", "merged"),
        node("GRU", "merged W R", "all", hidden_size=3),
        node("Squeeze", "all one", "flat"),
        node("MatMul", "flat K", "made"),
        node("Shape", "front", "shape"),
        node("Reshape", "made shape", "parts"),
        node("Transpose", "parts", "y", perm=back),
    ]
    dims = ("batch", 2, "time", 8)
    constants = weights | {key: np.array(value, np.int64) for key, value in ints.items()}
    return graph(nodes, [("x", "fp32", dims)], [("y", "fp32", dims)], constants)


@pytest.mark.simulated_device
@pytest.mark.parametrize(
    ("served", "model"),
    [
        ("at_load_u_net", u_net()),
        ("at_load_batch_outside", at_each_frequency([2, 0, 3, 1], [1, 3, 0, 2])),
        ("at_load_batch_inside", at_each_frequency([2, 3, 0, 1], [2, 3, 0, 1])),
    ],
)
def test_a_denoiser_answers_in_steps_as_at_once(deployment, served, model):
    load(deployment, served, model, low_latency_transformation="true")
    assert deployment.admin.get_model_config(served).config.max_batch_size > 1
    client, ids = deployment.connect(), [new_id() for _ in range(3)]
    whole_input = RNG.normal(size=(3, 2, STEPS, 8)).astype(np.float32)
    came: list[list[np.ndarray]] = [[] for _ in ids]
    for start, end in ((0, 1), (1, 2), (2, 9), (9, 10), (10, STEPS)):
        said = together(
            partial(client.step, served, i, {"x": x[None, :, start:end]}, start=start == 0, end=end == STEPS)
            for i, x in zip(ids, whole_input, strict=True)
        )
        for parts, answer in zip(came, said, strict=True):
            parts.append(answer["y"])
    original = onnxruntime.InferenceSession(model.SerializeToString())
    for x, parts in zip(whole_input, came, strict=True):
        expected = original.run(None, {"x": x[None]})[0]
        np.testing.assert_allclose(np.concatenate(parts, axis=2), expected, rtol=0, atol=1e-6)


def renamed(name: str, names: dict[str, str]) -> onnx.ModelProto:
    """An export whose axes have other names."""
    model = onnx.load(EXPORTS / f"{name}.onnx")
    for value in [*model.graph.input, *model.graph.output, *model.graph.value_info]:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in names:
                dim.dim_param = names[dim.dim_param]
    return model


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("dynamo_gru", {"batch": "s77", "time": "s27"}),
        ("torch_lstm_time_major", {"batch": "s77", "time": "s27"}),
        ("keras_lstm2", {}),
        ("keras_gru", {}),
    ],
)
def test_a_model_whose_axes_the_exporter_numbered_is_batched_without_a_further_line(deployment, name, names):
    served = f"at_load_numbered_{name}"
    log = load(deployment, served, renamed(name, names), low_latency_transformation="true")
    assert deployment.admin.get_model_config(served).config.max_batch_size > 1
    assert "state_dims" not in log
    assert_steps_are_the_whole(deployment.connect(), served, name)


@pytest.mark.parametrize(
    "converted", [{}, {"low_latency_transformation": "true"}, {"low_latency_transformation": "x@1"}]
)
def test_states_with_names_of_their_own_for_the_batch_share_runs(deployment, converted):
    """They are no lengths that vary, which would start at 0 and make each START fail."""
    served = f"at_load_keras_states_{'_'.join(converted.values()).replace('@', '_')}"
    load(deployment, served, keras_with_states(), state_pairs=KERAS_PAIRS, **converted)
    assert deployment.admin.get_model_config(served).config.max_batch_size > 1
    assert_sequences_get_their_own_answers(deployment.connect(), served, keras_with_states())


@pytest.mark.parametrize("name", ["torch_gru", "torch_lstm2", "torch_rnn_relu"])
def test_a_request_without_steps_is_refused_and_the_sequence_goes_on(deployment, name):
    """ONNX Runtime's GRU ends the process, and its LSTM and RNN give back states of zeros."""
    served = f"at_load_no_steps_{name}"
    load(deployment, served, name, low_latency_transformation="true")
    x, client, sequence_id = RNG.normal(size=(1, 6, 4)).astype(np.float32), deployment.connect(), new_id()
    came = [client.step(served, sequence_id, {"x": x[:, :4]}, start=True)["y"]]
    with pytest.raises(InferenceServerException, match=r"input 'x' has no elements, with shape \[1, 0, 4\], but node"):
        client.step(served, sequence_id, {"x": x[:, :0]})
    came.append(client.step(served, sequence_id, {"x": x[:, 4:]}, end=True)["y"])
    np.testing.assert_allclose(np.concatenate(came, axis=1), whole(name, x), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("dynamo_scan", ["node_scan__1.0"]),
        ("torch_script_loop", ["Loop.0", "Loop.1"]),
        ("keras_gru_reset_before", None),
    ],
)
def test_the_states_of_a_converted_loop_are_read_and_written_by_their_names(deployment, name, states):
    """A state is named after its node, and after the number of what the loop carries from turn to turn."""
    served = f"at_load_state_api_{name}"
    log = load(deployment, served, name, low_latency_transformation="true", state_api="true")
    names = re.findall(r"<<<(\S+), \S+>>> of (?:Loop|Scan)", log)
    if states is not None:
        assert [state.removesuffix("_in") for state in names] == states
    time = 0 if name in TIME_FIRST else 1
    x = RNG.normal(size=(1, STEPS, 4)).astype(np.float32)
    fed = x.swapaxes(0, 1)[None] if name in TIME_FIRST else x

    def steps_of(start: int, end: int) -> dict[str, np.ndarray]:
        return {"x": np.take(fed, range(start, end), axis=time + (name in TIME_FIRST))}

    client, first, second = Unary(deployment), new_id(), new_id()
    read = {"sequence_id": first, "sequence_start": True, "get_state": ",".join(names)}
    states_then = client.ask(served, steps_of(0, 8), read).outputs
    brought = {f"state.{state}": states_then[f"state.{state}"] for state in names}
    assert len(brought) == len(names) > 0 and all(np.abs(value).max() > 0 for value in brought.values())
    answers = [
        client.ask(
            served, steps_of(8, STEPS) | more, {"sequence_id": sequence_id, "sequence_start": bool(more)}
        ).outputs
        for sequence_id, more in ((first, {}), (second, brought))
    ]
    [output] = answers[0].keys() & {"y", "output", "Identity:0"}
    np.testing.assert_array_equal(answers[1][output], answers[0][output])
    came = answers[1][output].reshape(STEPS - 8, -1)
    np.testing.assert_allclose(came, whole(name, x).reshape(STEPS, -1)[8:], rtol=0, atol=1e-6)
    client.close()


def test_a_request_must_have_a_multiple_of_the_strides_over_time(deployment):
    log = load(deployment, "at_load_strided", "torch_strided", low_latency_transformation="true")
    assert_said(log, "must be a multiple of 4")
    assert_only_multiples_are_taken(deployment.connect(), "at_load_strided", "torch_strided", 4)


def test_a_row_without_steps_keeps_its_state(deployment):
    """ONNX Runtime gives back states of zeros for it."""
    served = "at_load_lengths"
    load(deployment, served, "torch_lstm_packed", low_latency_transformation="true")
    original = onnxruntime.InferenceSession(EXPORTS / "torch_lstm_packed.onnx")
    x, client, sequence_id = RNG.normal(size=(1, 8, 4)).astype(np.float32), deployment.connect(), new_id()
    lengths = next(value.name for value in original.get_inputs() if value.name != "x")
    [output] = [value.name for value in original.get_outputs()]
    expected = original.run(None, {"x": x, lengths: np.array([8], np.int64)})[0]
    came = []
    for start, length in ((0, 4), (0, 0), (4, 4)):
        fed = {"x": x[:, start : start + 4], lengths: np.array([[length]], np.int64)}
        answer = client.step(served, sequence_id, fed, start=not came, end=start == 4)[output]
        came.append(answer[:, :length])
    np.testing.assert_allclose(np.concatenate(came, axis=1), expected, rtol=0, atol=1e-6)


def test_padding_is_refused(deployment):
    error = load_error(deployment, "torch_lstm_packed", low_latency_transformation="true", padded_inputs="x=lengths")
    assert_said(error, "'padded_inputs' lists 'x'", "leave 'padded_inputs' out")


def test_the_axis_of_the_steps_may_be_named(deployment):
    load(deployment, "at_load_axis", "torch_gru", low_latency_transformation="x@1")
    assert_steps_are_the_whole(deployment.connect(), "at_load_axis", "torch_gru")
    error = load_error(deployment, "torch_gru", low_latency_transformation="z@1")
    assert_said(error, "low_latency_transformation", "no input 'z'")


def test_a_complete_configuration_needs_no_states_of_the_converted_model(deploy):
    own = deploy(extra_args=["--disable-auto-complete-config"])
    folder = written(own, "complete", "torch_gru", low_latency_transformation="true")
    with (folder / "config.pbtxt").open("a") as file:
        file.write("\nmax_batch_size: 8 sequence_batching { oldest { max_candidate_sequences: 8 } }\n")
        file.write("input { name: 'x' data_type: TYPE_FP32 dims: [ -1, 4 ] }\n")
        file.write("output { name: 'y' data_type: TYPE_FP32 dims: [ -1, 3 ] }\n")
    own.admin.load_model("complete")
    assert_steps_are_the_whole(own.connect(), "complete", "torch_gru")


def test_states_start_at_zero_with_use_const_initializer(deployment):
    h, c = (RNG.normal(size=(1, 1, 5)).astype(np.float32) for _ in "hc")
    zeros = np.zeros((1, 1, 5), np.float32)
    x = RNG.normal(size=(6, 1, 4)).astype(np.float32)
    answers = {}
    for served, more in {"learned": {}, "zero": {"use_const_initializer": "true"}}.items():
        log = load(deployment, f"at_load_{served}", lstm("rnn", h, c), low_latency_transformation="true", **more)
        assert said("'use_const_initializer' starts them at zero", log) == (served == "learned")
        start = (h, c) if served == "learned" else (zeros, zeros)
        expected = onnxruntime.InferenceSession(lstm("rnn", *start).SerializeToString()).run(None, {"x": x})[0]
        client, sequence_id = deployment.connect(), new_id()
        came = [
            client.step(f"at_load_{served}", sequence_id, {"x": x[at : at + 2]}, start=at == 0, end=at == 4)["y"]
            for at in (0, 2, 4)
        ]
        answers[served] = np.concatenate(came)
        np.testing.assert_allclose(answers[served], expected, rtol=0, atol=1e-6)
    assert np.abs(answers["learned"] - answers["zero"]).max() > 1e-3


@pytest.mark.parametrize("batch", ["true", "x@0"])
def test_a_batch_is_opened_and_the_recurrence_cut(deployment, batch):
    served = f"at_load_batch_{batch.replace('@', '_')}"
    both = {"low_latency_transformation": "true", "open_batch": batch}
    log = load(deployment, served, "torch_lstm_batch_one", **both)
    assert_said(log, "the batch is open on x@0", "rows together and alone")
    assert deployment.admin.get_model_config(served).config.max_batch_size > 1
    rows = [RNG.normal(size=(1, STEPS, 4)).astype(np.float32) for _ in range(3)]
    for row, answers in zip(rows, steps(deployment.connect(), served, "", rows, 1), strict=True):
        came = np.concatenate(answers, axis=1)
        np.testing.assert_allclose(came, whole("torch_lstm_batch_one", row), rtol=0, atol=1e-6)


def test_the_batch_of_a_denoiser_is_opened_and_its_states_found_by_their_names(deployment):
    served = "at_load_denoiser"
    load(deployment, served, "torch_dual_path", open_batch="true")
    assert deployment.admin.get_model_config(served).config.max_batch_size > 1
    original = onnxruntime.InferenceSession(EXPORTS / "torch_dual_path.onnx")
    client = deployment.connect()
    talks = [(new_id(), np.zeros((2, 1, 16, 8), np.float32)) for _ in range(4)]
    for step in range(6):
        fed = [RNG.normal(size=(1, 1, 16, 2)).astype(np.float32) for _ in talks]
        tasks = [
            partial(client.step, served, sequence_id, {"x": x}, outputs=["y"], start=step == 0, end=step == 5)
            for (sequence_id, _), x in zip(talks, fed, strict=True)
        ]
        for row, (answer, x) in enumerate(zip(together(tasks), fed, strict=True)):
            sequence_id, cache = talks[row]
            expected, cache = original.run(["y", "inter_cache_out"], {"x": x, "inter_cache": cache})
            talks[row] = sequence_id, cache
            np.testing.assert_allclose(answer["y"], expected, rtol=0, atol=1e-6)


def test_a_model_that_has_states_is_served_as_it_is(deployment):
    model = own(models.counter(name="at_load_counter"), low_latency_transformation="true")
    deployment.serve(model)
    log = "\n".join(messages(log_since(deployment, model.name)))
    assert_said(log, "'low_latency_transformation' has no effect", "inputs and outputs already")
    assert "was converted" not in log


def half_stateful() -> onnx.ModelProto:
    """Two layers over `[time, 1, 4]`. Only the first has its state outside."""
    rng = np.random.default_rng(4)
    shapes = {"W": (1, 12, 4), "R": (1, 12, 4), "B": (1, 24)}
    weights = {key: rng.normal(scale=0.3, size=shape).astype(np.float32) for key, shape in shapes.items()}
    nodes = [
        node("GRU", "x W R B - h_in", "all h_out", hidden_size=4, name="first"),
        node("Squeeze", "all axis", "between"),
        node("GRU", "between W R B", "y", hidden_size=4, name="second"),
    ]
    inputs = [("x", "fp32", ("time", 1, 4)), ("h_in", "fp32", (1, 1, 4))]
    outputs = [("y", "fp32", ("time", 1, 1, 4)), ("h_out", "fp32", (1, 1, 4))]
    return graph(nodes, inputs, outputs, weights | {"axis": np.array([1])})


def test_a_recurrence_beside_the_models_states_is_named_and_converted_where_its_axis_is_written(deployment):
    x = RNG.normal(size=(6, 1, 4)).astype(np.float32)
    original = onnxruntime.InferenceSession(half_stateful().SerializeToString())
    state = np.zeros((1, 1, 4), np.float32)
    at_once = original.run(["y"], {"x": x, "h_in": state})[0]
    in_steps = []
    for at in (0, 2, 4):
        answer, state = original.run(["y", "h_out"], {"x": x[at : at + 2], "h_in": state})
        in_steps.append(answer)
    expected = {"true": np.concatenate(in_steps), "x@0": at_once}
    for parameter, served in {"true": "left_beside", "x@0": "converted_beside"}.items():
        load(deployment, served, half_stateful(), low_latency_transformation=parameter)
        warned = "\n".join(messages(log_since(deployment, served), "W"))
        assert said("GRU 'second'", warned) == (parameter == "true"), warned
        if parameter == "true":
            assert_said(warned, "begin anew in each request", "'low_latency_transformation'", "'x@0'")
        client, sequence_id = deployment.connect(), new_id()
        came = [
            client.step(served, sequence_id, {"x": x[at : at + 2]}, outputs=["y"], start=at == 0, end=at == 4)["y"]
            for at in (0, 2, 4)
        ]
        np.testing.assert_allclose(np.concatenate(came), expected[parameter], rtol=0, atol=1e-6)
    assert np.abs(expected["true"] - expected["x@0"]).max() > 1e-3


def strided_with_states() -> onnx.ModelProto:
    """The mean of each two steps of `[time, 1, 4]`, and a layer behind it that has its state outside."""
    rng = np.random.default_rng(5)
    weights = {key: rng.normal(scale=0.3, size=(1, 12, 4)).astype(np.float32) for key in ("W", "R")}
    nodes = [
        node("Transpose", "x", "channels", perm=[1, 2, 0]),
        node("AveragePool", "channels", "pairs", kernel_shape=[2], strides=[2]),
        node("Transpose", "pairs", "steps", perm=[2, 0, 1]),
        node("GRU", "steps W R - - h_in", "y h_out", hidden_size=4),
    ]
    inputs = [("x", "fp32", ("time", 1, 4)), ("h_in", "fp32", (1, 1, 4))]
    return graph(nodes, inputs, [("y", "fp32", ("half", 1, 1, 4)), ("h_out", "fp32", (1, 1, 4))], weights)


def test_a_stride_is_checked_although_the_model_has_all_its_states(deployment):
    x = RNG.normal(size=(8, 1, 4)).astype(np.float32)
    original = onnxruntime.InferenceSession(strided_with_states().SerializeToString())
    expected = original.run(["y"], {"x": x, "h_in": np.zeros((1, 1, 4), np.float32)})[0]
    load(deployment, "strided_with_states", strided_with_states(), low_latency_transformation="x@0")
    client, sequence_id = deployment.connect(), new_id()

    def step(start: int, end: int) -> np.ndarray:
        fed = {"x": x[start:end]}
        return client.step("strided_with_states", sequence_id, fed, outputs=["y"], start=start == 0, end=end == 8)["y"]

    came = [step(0, 4)]
    for end in (5, 7):
        with pytest.raises(InferenceServerException) as refused:
            step(4, end)
        assert_said(refused.value.message(), f"'x' has {end - 4} steps", "multiple of 2")
    came += [step(4, 6), step(6, 8)]
    np.testing.assert_allclose(np.concatenate(came), expected, rtol=0, atol=1e-6)


def test_a_model_that_has_states_and_cannot_be_looked_at_is_served_with_a_warning(deployment):
    model = half_stateful()
    # Nothing uses it. If a node did, it would run in place of the operator.
    function = helper.make_function(
        "com.microsoft", "FusedGemm", ["a"], ["b"], [node("Relu", "a", "b")], model.opset_import
    )
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    load(deployment, "at_load_function", model, low_latency_transformation="true")
    warned = "\n".join(messages(log_since(deployment, "at_load_function"), "W"))
    assert_said(warned, "may begin anew in each request", "function 'FusedGemm'")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torch_lstm_bidirectional", ["LSTM '/r/LSTM' is bidirectional", "train the model with a forward layer"]),
        ("torch_mixing_mean", ["ReduceMean '/ReduceMean' reduces over time"]),
        ("torch_unrolled", ["for an unrolled loop, export the recurrence as a layer"]),
    ],
)
def test_what_cannot_run_in_steps_is_refused_with_the_node_and_what_would_help(deployment, name, words):
    error = load_error(deployment, name, low_latency_transformation="true")
    assert_said(error, "low_latency_transformation", "model.onnx", *words)


def test_a_batch_that_cannot_be_opened_is_refused(deployment):
    both = {"low_latency_transformation": "true"}
    error = load_error(deployment, "torch_gru", open_batch="true", **both)
    assert_said(error, "parameter 'open_batch'", "its batch is open already")
    error = load_error(deployment, "torch_lstm_batch_one", open_batch="x@2", **both)
    assert_said(error, "parameter 'open_batch'", "axis 2 of input 'x'", "[1, time, 4]")


def with_weights_outside(
    deployment, served: str, name: str, location: str = "model.onnx.data", **parameters: str
) -> Path:
    """The folder of an export whose weights are in a file of their own, as PyTorch's new exporter writes it."""
    folder = written(deployment, served, name, **parameters)
    model = onnx.load(folder / "1" / "model.onnx")
    convert_model_to_external_data(model, location="model.onnx.data", size_threshold=64)
    onnx.save(model, folder / "1" / "model.onnx")
    assert (folder / "1" / "model.onnx.data").stat().st_size > 0
    if location != "model.onnx.data":
        for entry in (entry for weight in model.graph.initializer for entry in weight.external_data):
            entry.value = location if entry.key == "location" else entry.value
        (folder / "1" / "model.onnx").write_bytes(model.SerializeToString())
    return folder


@pytest.mark.parametrize("name", ["torch_lstm2", "torch_lstm_learned", "dynamo_lstm"])
def test_a_model_with_weights_in_a_file_of_their_own_is_converted(deployment, name):
    served = f"at_load_external_{name}"
    folder = with_weights_outside(deployment, served, name, low_latency_transformation="true")
    before = contents(folder)
    deployment.admin.load_model(served)
    assert contents(folder) == before
    assert_steps_are_the_whole(deployment.connect(), served, name)


def test_the_batch_of_a_model_with_weights_in_a_file_of_their_own_is_opened(deployment):
    served = "at_load_external_batch"
    both = {"low_latency_transformation": "true", "open_batch": "true"}
    with_weights_outside(deployment, served, "torch_lstm_batch_one", **both)
    deployment.admin.load_model(served)
    assert deployment.admin.get_model_config(served).config.max_batch_size > 1
    rows = [RNG.normal(size=(1, STEPS, 4)).astype(np.float32) for _ in range(3)]
    for row, answers in zip(rows, steps(deployment.connect(), served, "", rows, 1), strict=True):
        came = np.concatenate(answers, axis=1)
        np.testing.assert_allclose(came, whole("torch_lstm_batch_one", row), rtol=0, atol=1e-6)


def test_weights_outside_the_models_folder_are_not_read(deployment):
    """ONNX Runtime would take some of these paths, but the backend would then read any file for who can write a model."""
    served = f"refused_{new_id()}"
    folder = with_weights_outside(deployment, served, "torch_lstm2", "../stolen", low_latency_transformation="true")
    shutil.move(folder / "1" / "model.onnx.data", folder / "stolen")
    with pytest.raises(InferenceServerException) as refused:
        deployment.admin.load_model(served)
    assert_said(refused.value.message(), "../stolen")
    shutil.rmtree(folder)
    folder = with_weights_outside(deployment, served, "torch_lstm2", low_latency_transformation="true")
    shutil.move(folder / "1" / "model.onnx.data", folder / "stolen")
    (folder / "1" / "model.onnx.data").symlink_to(folder / "stolen")
    with pytest.raises(InferenceServerException) as refused:
        deployment.admin.load_model(served)
    assert_said(refused.value.message(), "model.onnx.data")
    shutil.rmtree(folder)


def test_what_a_model_without_states_is_advised_works_with_weights_in_a_file_of_their_own(deployment):
    served = "at_load_external_advised"
    folder = with_weights_outside(deployment, served, "torch_lstm2")
    with pytest.raises(InferenceServerException) as refused:
        deployment.admin.load_model(served)
    [line] = re.findall(r"parameters \{ key: 'low_latency_transformation'.*? \} \}", refused.value.message())
    with (folder / "config.pbtxt").open("a") as file:
        file.write(f"\n{line}\n")
    deployment.admin.load_model(served)
    assert_steps_are_the_whole(deployment.connect(), served, "torch_lstm2")


def test_a_converted_model_that_answers_otherwise_does_not_load(deployment):
    """Dropout that trains drops other elements in each run, so no conversion is right."""
    made = lstm("rnn")
    made.graph.node[0].output[0] = "all"
    made.graph.node.append(node("Dropout", "all half trains", "y"))
    constants = {"half": np.float32(0.5), "trains": np.bool_(True)}
    made.graph.initializer.extend(numpy_helper.from_array(np.asarray(value), key) for key, value in constants.items())
    error = load_error(deployment, made, low_latency_transformation="true")
    assert_said(error, "the check of the conversion failed", "chunks of 1", "output 'y' differs", "--compare-with")


@pytest.mark.parametrize("parameters", [{}, {"open_batch": "true"}])
def test_a_model_without_states_is_refused_with_the_node_that_has_them_inside(deployment, parameters):
    error = load_error(deployment, lstm("encoder/rnn"), **parameters)
    assert_said(error, "node 'encoder/rnn' (LSTM)", "'low_latency_transformation'", "stateful-convert")
    plain = graph([node("Relu", "x", "y")], [("x", "fp32", ("N", 4))], [("y", "fp32", ("N", 4))])
    assert not said("low_latency_transformation", load_error(deployment, plain))


def test_inspect_shows_the_converted_model():
    command = [INSPECT, EXPORTS / "torch_lstm_learned.onnx", "--parameter", "low_latency_transformation=true"]
    shown = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "the conversion at load" in shown.stderr and "compared with the original" in shown.stderr
    # The file has no such inputs: the configuration asks for the conversion, and names none of its states.
    assert "low_latency_transformation" in shown.stdout and "state_pairs" not in shown.stdout


def test_a_model_for_initial_states_beside_that_of_the_conversion_is_refused(deployment):
    both = {"low_latency_transformation": "true", "initial_state_model": "start.onnx"}
    error = load_error(deployment, "torch_lstm_learned", **both)
    assert_said(error, "initial_state_model", "start.onnx", "use_const_initializer")


def test_the_hidden_state_and_the_cell_state_of_a_layer_are_not_one_state(deployment):
    rng = np.random.default_rng(4)
    weights = {
        key: rng.normal(size=shape).astype(np.float32) for key, shape in {"W": (1, 20, 4), "R": (1, 20, 5)}.items()
    }
    states = [(name, "fp32", (1, "batch", 5)) for name in ("h", "c", "hn", "cn")]
    made = node("LSTM", "x W R - - h c", "y hn cn", hidden_size=5, name="layer")
    outputs = [("y", "fp32", (1, 1, "batch", 5)), *states[2:]]
    model = graph([made], [("x", "fp32", (1, "batch", 4)), *states[:2]], outputs, weights)
    load(deployment, "right_ends", model, state_pairs="<<<h, hn>>> <<<c, cn>>>")
    error = load_error(deployment, model, state_pairs="<<<h, cn>>> <<<c, hn>>>")
    assert_said(error, "'h' and 'cn' can't be the two ends of a state", "LSTM 'layer'", "correct the pairs")

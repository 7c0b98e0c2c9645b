"""Models whose names or dims could be read wrongly when their configuration is completed: served rightly, or refused."""

import dataclasses
import re
import subprocess

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness.clients import new_id
from harness.conversations import talk
from harness.logs import log_of_load, warnings_of_load
from harness.model import parameter
from harness.models.exports import HALF, Bare, Export, Signature
from harness.refusals import refused
from support.paths import INSPECT

LENGTHS = Export(
    {"x": ("batch", 4), "cell": ("batch", 8), "length": ("int64", ("batch", 1))},
    {"y": ("batch", 2), "cell_out": ("batch", 8), "length_out": ("int64", ("batch", 1))},
    {"cell": "cell_out"},
)


#: The names of a published denoiser: numbered caches beside a signal.
DENOISER = Export(
    {"wav_in": (1, 9, 1), "cache_in_0": (1, 2, 3), "cache_in_1": (1, 5)},
    {"wav_out": (1, 9, 1), "cache_out_0": (1, 2, 3), "cache_out_1": (1, 5)},
    {"cache_in_0": "cache_out_0", "cache_in_1": "cache_out_1"},
    batch=None,
)


def denoiser(*answers: str) -> Export:
    """`band_in` and `band_out` are what clients send and get, though they look like a state."""
    inputs: dict[str, Signature] = {"band_in": ("batch", 9), "state_in": ("batch", 4), "sr": ("int64", ())}
    outputs: dict[str, Signature] = {
        "band_out": ("batch", 9),
        "state_out": ("batch", 4),
        **{name: ("batch", 1) for name in answers},
    }
    return Export(inputs, outputs, {"state_in": "state_out"})


def scalar(*answers: str) -> Export:
    inputs: dict[str, Signature] = {"x": (1, 4), "cell": (1, 8), "sr": ("int64", ())}
    outputs: dict[str, Signature] = {name: (1, 2) for name in answers}
    return Export(inputs, {**outputs, "cell_out": (1, 8)}, {"cell": "cell_out"}, batch=None)


def without(model: Bare, name: str, **changes) -> Bare:
    """The model without this input for requests."""
    return dataclasses.replace(model, inputs=tuple(t for t in model.inputs if t.name != name), **changes)


def with_parameter(name: str, value: str) -> str:
    return f'backend: "stateful"\n{parameter(name, value)}'


def test_lengths_that_go_in_and_out_are_no_state(deployment):
    talk(deployment, LENGTHS.served("edge", "edge_lengths.stateful"))


RATE = with_parameter("constant_inputs", "sr=16000")


@pytest.mark.parametrize("answers", [(), ("vad",)])
@pytest.mark.parametrize("written", [None, RATE])
def test_a_signal_named_like_a_state_is_what_requests_carry_where_nothing_else_is(deployment, answers, written):
    name = f"edge_signal_{len(answers)}_{written is None}.stateful"
    model = denoiser(*answers).served("edge", name, written=written)
    if written:
        model = without(model, "sr", constants={"sr": 16000})
    talk(deployment, model)


def test_a_signal_named_like_a_state_is_told_from_numbered_caches(deployment):
    talk(deployment, DENOISER.served("edge", "edge_numbered.stateful"))


def test_two_signals_named_like_states_are_asked_for(deployment):
    export = Export(
        {"band_in": ("batch", 9), "tone_in": ("batch", 7), "state_in": ("batch", 4)},
        {"band_out": ("batch", 9), "tone_out": ("batch", 7), "state_out": ("batch", 4)},
        {"state_in": "state_out"},
    )
    words = "<<<band_in, band_out>>>", "<<<tone_in, tone_out>>>", "state_pairs", "'input'"
    refused(deployment, export.served("edge", "edge_two_signals.stateful"), *words)


def test_a_signal_named_like_a_state_is_served_once_it_is_listed(deployment):
    listed = (
        'input [ { name: "band_in" data_type: TYPE_FP32 dims: [ 9 ] },'
        ' { name: "sr" data_type: TYPE_INT64 dims: [ 1 ] reshape { shape: [ ] } } ]'
    )
    talk(deployment, denoiser("vad").served("edge", "edge_listed", written=f'backend: "stateful"\n{listed}'))


def test_a_scalar_without_a_batch_may_be_a_constant(deployment):
    export = scalar("y").served("edge", "edge_constant", written=RATE)
    talk(deployment, without(export, "sr", constants={"sr": 16000}))


@pytest.mark.parametrize("folder", ["edge_of_triton_s", "edge_of_triton_s.stateful"])
def test_a_model_onnx_without_a_configuration_is_not_ours(deployment, folder):
    """As docs/errors.md has it: the file's name alone makes it one of Triton's onnxruntime backend."""
    model = LENGTHS.served("model", folder, file_name="model.onnx")
    refused(deployment, model, "unable to find backend library for backend 'onnxruntime'")


# ---- states that are found by half


PAIRS = "<<<gist, gist_new>>> <<<memory, remembered>>>"


def printed_line(text: str) -> str:
    """The line of config.pbtxt that a warning says is to be written."""
    [line] = re.findall(r"parameters \{ key: 'state_pairs' value \{ string_value: '[^']*' \} \}", text)
    return line


@pytest.mark.parametrize(
    ("name", "written", "line"),
    [
        ("by_names", 'backend: "stateful"', PAIRS),
        (
            "written",
            with_parameter("state_pairs", "<<<memory, remembered>>>"),
            "<<<memory, remembered>>> <<<gist, gist_new>>>",
        ),
        (
            "declared",
            'backend: "stateful"\nsequence_batching { state { input_name: "gist" output_name: "gist_new"'
            " data_type: TYPE_FP32 dims: [ 8 ] } oldest { } }",
            PAIRS,
        ),
    ],
)
def test_half_found_states_are_warned_of_with_the_line_to_write(deployment, name, written, line):
    model = HALF.served("model", f"half_{name}", file_name="model.onnx", written=written)
    # a configuration that writes no idle limit is warned of that, too
    [warning] = [text for text in warnings_of_load(deployment, model) if "core forgets a sequence" not in text]
    assert printed_line(warning) == f"parameters {{ key: 'state_pairs' value {{ string_value: '{line}' }} }}"
    if name == "by_names":
        with pytest.raises(InferenceServerException, match=re.escape("missing required input(s) ['memory']")):
            deployment.connect().step(model.name, new_id(), {"x": np.zeros((1, 4), np.float32)}, start=True)
    whole = f'backend: "stateful"\n{printed_line(warning)}'
    model = HALF.served("model", f"half_{name}_whole", file_name="model.onnx", written=whole)
    assert warnings_of_load(deployment, model) == []
    talk(deployment, model)


def test_inputs_that_are_listed_are_not_asked_about(deployment):
    listed = " ".join(
        f'input {{ name: "{name}" data_type: TYPE_FP32 dims: [ {dim} ] }}' for name, dim in (("x", 4), ("memory", 6))
    )
    model = HALF.served("model", "half_listed", file_name="model.onnx", written=f'backend: "stateful"\n{listed}')
    assert warnings_of_load(deployment, model) == []


def test_stateful_inspect_warns_of_half_found_states(tmp_path):
    file = tmp_path / "model.onnx"
    file.write_bytes(HALF.served("model", "half").build().SerializeToString())
    printed = subprocess.run([INSPECT, file, "--quiet"], capture_output=True, text=True, check=True)
    assert PAIRS in printed_line(printed.stderr)
    value = PAIRS.join(["state_pairs=", ""])
    printed = subprocess.run([INSPECT, file, "--quiet", "-p", value], capture_output=True, text=True, check=True)
    assert printed.stderr == ""


# ---- dims and batches that only the user can know


def fixed(*dims: int | str) -> Export:
    return Export(
        {"wave": dims, "cell": (1, 8)}, {"score": (1, 2), "cell_out": (1, 8)}, {"cell": "cell_out"}, batch=None
    )


def test_a_context_that_fits_one_axis_only_needs_no_axis(deployment):
    model = fixed(1, 9).served(
        "model", "edge_context", file_name="model.onnx", written=with_parameter("input_context", "wave=4")
    )
    deployment.serve(model)
    config = deployment.admin.get_model_config(model.name).config
    assert (config.max_batch_size, list(config.input[0].dims)) == (0, [1, 5])


@pytest.mark.parametrize(
    ("name", "dims", "written", "words"),
    [
        ("two_axes", ("T", 9), "", ["wave=4", "[-1, 9]", "'wave=4@0'", "'wave=4@1'"]),
        ("too_long", (1, 3), "", ["wave=4", "[1, 3]", "longer than 4"]),
        (
            "whole_dims",
            (1, 9),
            'input { name: "wave" data_type: TYPE_FP32 dims: [ 1, 9 ] }',
            ["wave=4", "[1, 9]", "{ name: 'wave' data_type: TYPE_FP32 dims: [1, 5] }"],
        ),
    ],
)
def test_a_context_whose_axis_cannot_be_told_is_refused_with_the_line_to_write(deployment, name, dims, written, words):
    context = with_parameter("input_context", "wave=4")
    model = fixed(*dims).served(
        "model", f"refused_context_{name}", file_name="model.onnx", written=f"{context}\n{written}"
    )
    refused(deployment, model, "input_context", *words)


@pytest.mark.parametrize("size", [1, 8])
def test_batches_of_a_model_with_a_fixed_batch_are_refused_by_that_name(deployment, size):
    written = f'backend: "stateful"\nmax_batch_size: {size}'
    model = fixed(1, 9).served("model", f"refused_batch_{size}", file_name="model.onnx", written=written)
    refused(deployment, model, f"max_batch_size is {size}", "'score'", "[1, 2]", "'max_batch_size: 0'")


def test_a_scalar_of_requests_is_sent_with_two_dimensions(deployment):
    model = denoiser().served("edge", "edge_scalar_sent.stateful")
    assert "one value for a batch, sent as [1, 1]" in log_of_load(deployment, model)
    band = np.zeros((1, 9), np.float32)
    client = deployment.connect()
    with pytest.raises(InferenceServerException, match=re.escape("Expected [-1,1], got [1]")):
        client.step(model.name, new_id(), {"band_in": band, "sr": np.array([16000])}, start=True)
    client.step(model.name, new_id(), {"band_in": band, "sr": np.array([[16000]])}, start=True, end=True)

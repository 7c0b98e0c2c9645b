"""The models of the benchmark of conversions. No server."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from support.bench import conversion
from support.bench.conversion import Denoiser
from support.bench.models import sequence_lstm


def test_both_exports_of_the_lstm_compute_the_same():
    whole, stepped = (
        onnxruntime.InferenceSession(sequence_lstm(3, 4, states=states).SerializeToString()) for states in (False, True)
    )
    x = np.random.default_rng(1).random((2, 5, 3), np.float32)
    states = {name: np.zeros((2, 2, 4), np.float32) for name in ("h_in", "c_in")}
    steps = []
    for step in range(5):
        y, h, c = stepped.run(["y", "h_out", "c_out"], {"x": x[:, step : step + 1]} | states)
        states = {"h_in": h, "c_in": c}
        steps.append(y)
    np.testing.assert_allclose(np.concatenate(steps, 1), whole.run(["y"], {"x": x})[0], atol=1e-6)


@pytest.fixture
def file(tmp_path):
    info = lambda name, *dims: helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)  # noqa: E731
    nodes = [helper.make_node("Add", ["x", "s"], ["t"]), helper.make_node("Identity", ["t"], ["y"])]
    graph = helper.make_graph(nodes, "g", [info("x", 1, 8), info("s", 1, 8)], [info("y", 1, 8), info("t", 1, 8)])
    path = tmp_path / "denoiser.onnx"
    onnx.save(helper.make_model(graph), path)
    return path


def test_a_denoiser_is_served_with_its_batch_of_1_and_opened(file):
    fixed, fixed_on_two, opened = Denoiser.parse(f"{file},s=t").servings(16)
    assert "max_batch_size: 0" in fixed.config
    assert "dims: [ 1, 8 ]" in fixed.config
    assert "worker_count" not in fixed.config
    assert "worker_count" in fixed_on_two.config
    assert "open_batch" in opened.config
    assert "dims: [ 8 ]" in opened.config
    assert {of.name for of in (fixed, fixed_on_two, opened)} == {
        f"stateful_{way}_denoiser_16" for way in ("batch 1", "batch 1, 2 workers", "opened")
    }


@pytest.mark.parametrize("text", ["absent.onnx,s=t", "{file}", "{file},s"])
def test_a_denoiser_needs_a_file_and_pairs(file, text):
    with pytest.raises(ValueError, match="is wanted"):
        Denoiser.parse(text.format(file=file))


def test_a_pair_that_the_file_has_not_is_named(file):
    with pytest.raises(ValueError, match="there is no 'u'"):
        Denoiser.parse(f"{file},s=u")


def test_an_input_without_a_batch_of_1_is_named(file):
    made = onnx.load(file)
    made.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.save(made, file)
    with pytest.raises(ValueError, match="input 'x' is not FLOAT with fixed dims, the first of them 1"):
        Denoiser.parse(f"{file},s=t")


def test_what_is_compared_is_measured(file):
    measured = {of.name for of in (conversion.CONVERTED, conversion.EXPORTED)}
    measured |= {of.way.name for of in Denoiser.parse(f"{file},s=t").servings(1)}
    assert {name for pair in conversion.COMPARED for name in pair} == measured

"""Requests that are wrong in a special input or in the data: cases O20 to O29 of OpenVINO Model Server.

Triton's core checks types, shapes and names of all inputs before the backend sees a request, so it gives most of these
errors, with texts of its own.
"""

import contextlib

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from harness import models
from harness.model import Tensor
from harness.own import ByInputs, Talk, fails_with, fed, special, total
from harness.raw import Refused
from harness.ways import every_way, through_gateway


def refusal(client, model, inputs, parameters=None) -> Refused:
    with pytest.raises(Refused) as caught:
        client.ask(model.name, inputs, parameters or {})
    return caught.value


@pytest.fixture
def alive(serve, connect):
    """A sequence 42 with a sum of 5, which is still there at the end of the test and has that sum."""
    talk = Talk(connect(), serve(), 42, ByInputs)
    talk.start(fed(5))
    yield talk
    assert total(talk.end(fed(7))) == 12


def test_o20_a_wrong_shape_of_the_id_comes_before_a_wrong_control(alive):
    inputs = {**fed(5), **special(alive.model, 42, 999), "sequence_id": np.full((1, 2), 42, np.uint64)}
    error = refusal(alive.client, alive.model, inputs)
    assert error.code == "INVALID_ARGUMENT" and "shape" in error.text and "'sequence_id'" in error.text


@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
def test_o21_a_wrong_type_of_the_id_is_refused(alive, dtype):
    inputs = {**fed(5), "sequence_id": np.full((1, 1), 42, dtype)}
    error = refusal(alive.client, alive.model, inputs)
    assert error.code == "INVALID_ARGUMENT" and "data-type" in error.text and "'sequence_id'" in error.text


@pytest.mark.parametrize("dtype", [np.int32, np.uint64])
def test_o22_a_wrong_type_of_the_control_is_refused(alive, dtype):
    inputs = {**fed(5), **special(alive.model, 42), "sequence_control_input": np.full((1, 1), 2, dtype)}
    error = refusal(alive.client, alive.model, inputs)
    assert error.code == "INVALID_ARGUMENT" and "data-type" in error.text and "'sequence_control_input'" in error.text


@pytest.mark.parametrize("shape", [(1, 2), (1, 1, 1), (1, 0)])
@pytest.mark.parametrize("name", ["sequence_id", "sequence_control_input"])
def test_o23_a_wrong_shape_is_refused(alive, name, shape):
    right = special(alive.model, 42, 0)
    error = refusal(alive.client, alive.model, {**fed(5), **right, name: np.full(shape, 42, right[name].dtype)})
    assert error.code == "INVALID_ARGUMENT" and "shape" in error.text and f"'{name}'" in error.text


@pytest.mark.parametrize("name", ["sequence_id", "sequence_control_input"])
def test_o24_a_scalar_is_refused(alive, name):
    right = special(alive.model, 42, 0)
    error = refusal(alive.client, alive.model, {**fed(5), **right, name: np.array(42, right[name].dtype)})
    assert error.code == "INVALID_ARGUMENT" and "shape" in error.text and f"'{name}'" in error.text


def json_of(**sequence_id) -> dict:
    """A request over HTTP with this as its input `sequence_id`."""
    data = [{"name": name, "shape": [1, 1], "datatype": "INT64", "data": [5]} for name in ("INPUT", "WORK")]
    right = {"name": "sequence_id", "shape": [1, 1], "datatype": "UINT64", "data": [42]}
    return {"inputs": [*data, right | sequence_id]}


def test_o24_an_input_without_a_shape_is_refused_over_http(alive, connect):
    """Triton's HTTP front end calls this error its own: 500."""
    request = json_of()
    del request["inputs"][2]["shape"]
    with pytest.raises(Refused, match="500.*shape"):
        connect("http").post(alive.model.name, request)


@pytest.mark.parametrize(
    ("data", "code"),
    [([-1], "500"), (["42"], "400|500"), (42, "400|500"), ([4.5], "400|500"), ([2**64], "400|500")],
    ids=["negative", "text", "no_array", "fraction", "too_large"],
)
def test_o25_an_id_that_is_no_unsigned_number_is_refused_over_http(alive, connect, data, code):
    with pytest.raises(Refused, match=f"^({code}):"):
        connect("http").post(alive.model.name, json_of(data=data))


def test_o26_a_misspelt_input_is_refused(alive):
    inputs = {**fed(5), "sequenceid": np.full((1, 1), 42, np.uint64)}
    error = refusal(alive.client, alive.model, inputs)
    assert error.code == "INVALID_ARGUMENT" and "sequenceid" in error.text


# ---- wrong data


def of_any_length(name: str, **changes):
    """A model that takes four elements, with a configuration that lets core pass any number on to the backend."""
    return models.counter("fp32", name, inputs=(Tensor("INPUT", "fp32", (-1,)),), **changes)


GOOD, BAD = ({"INPUT": np.ones((1, length), np.float32)} for length in (4, 5))


@every_way
@pytest.mark.parametrize("by", ["core", "backend"])
def test_o27_wrong_data_comes_before_an_unknown_id(serve, connect, way, by):
    model = serve(of_any_length) if by == "backend" else serve(models.counter, type="fp32")
    error = refusal(connect(), model, *(_joined(BAD, way.control(model, 99, False, False))))
    assert error.code == "INVALID_ARGUMENT" and "shape" in error.text and "'INPUT'" in error.text


@every_way
@pytest.mark.parametrize("by", ["core", "backend"])
def test_o28_a_start_with_wrong_data_makes_no_sequence(deployment, serve, connect, way, by):
    model, client = serve(of_any_length) if by == "backend" else serve(models.counter, type="fp32"), connect()
    error = refusal(client, model, *(_joined(BAD, way.control(model, 5, True, False))))
    assert error.code == "INVALID_ARGUMENT" and "shape" in error.text
    talk = Talk(client, model, 5, way)
    with fails_with("SEQUENCE_MISSING", 5):
        talk.step(GOOD)
    assert deployment.metric("stateful_live_sequences", model) == 0
    talk.start(GOOD)


@through_gateway
def test_o28_a_start_with_wrong_data_and_no_id_uses_no_id_up(serve, connect):
    model, client = serve(of_any_length), connect()
    refusal(client, model, *(_joined(BAD, ByInputs.control(model, None, True, False))))
    talk = Talk(client, model, None)
    talk.start(GOOD)
    assert talk.sequence_id == 1


@every_way
def test_wrong_data_leaves_a_live_sequence_as_it_was(serve, connect, way):
    model, client = serve(of_any_length), connect()
    talk = Talk(client, model, 5, way)
    talk.start(GOOD)
    for start, end in ((False, False), (True, False), (False, True)):
        error = refusal(client, model, *(_joined(BAD, way.control(model, 5, start, end))))
        assert error.code == "INVALID_ARGUMENT" and "shape" in error.text
    talk.step(GOOD)
    talk.end(GOOD)


def _joined(inputs, control):
    special_inputs, parameters = control
    return {**inputs, **special_inputs}, parameters


def test_o29_a_missing_input_is_noticed_beside_a_special_one(alive):
    """Core counts: WORK and the id are as many inputs as a request needs."""
    inputs = {"WORK": fed(5)["WORK"], **special(alive.model, 42)}
    error = refusal(alive.client, alive.model, inputs)
    assert error.code == "INVALID_ARGUMENT" and "'INPUT'" in error.text and "missing" in error.text


def test_o29_a_start_without_its_data_makes_no_sequence(serve, connect):
    model, client = serve(), connect()
    error = refusal(client, model, special(model, 42, 1))
    assert error.code == "INVALID_ARGUMENT" and "missing" in error.text
    with fails_with("SEQUENCE_MISSING", 42):
        Talk(client, model, 42, ByInputs).step()


@through_gateway
def test_a_missing_id_comes_before_wrong_data(serve, connect):
    """OpenVINO Model Server's order: special inputs, control, id, data, sequence."""
    model, client = serve(of_any_length), connect()
    with fails_with("SEQUENCE_ID_NOT_PROVIDED"):
        client.ask(model.name, BAD, {})
    with fails_with("INVALID_SEQUENCE_CONTROL_INPUT"):
        client.ask(model.name, {**BAD, **special(model, None, 3)}, {})


def test_several_rows_without_ids_are_refused_with_what_to_do(serve, connect):
    model, client = serve(), connect()
    two = {name: np.repeat(value, 2, axis=0) for name, value in fed(5).items()}
    error = refusal(client, model, two, {"sequence_id": 42, "sequence_start": True})
    assert error.code == "INVALID_ARGUMENT"
    assert "'INPUT' has shape [2, 1], which is 2 rows, but a request has one row" in error.text, error.text
    with fails_with("SEQUENCE_MISSING", 42):
        Talk(client, model, 42).step()


def test_a_start_with_id_0_from_tritonclient_is_told_why_it_is_none(deployment, serve):
    """tritonclient sends START only with an id, and takes 0 for none."""
    model = serve()
    tensors = [grpc_client.InferInput(name, list(value.shape), "INT64") for name, value in fed(5).items()]
    for tensor, value in zip(tensors, fed(5).values(), strict=True):
        tensor.set_data_from_numpy(value)
    with (
        contextlib.closing(grpc_client.InferenceServerClient(deployment.server.grpc_url)) as client,
        pytest.raises(InferenceServerException, match="tritonclient sends no START with id 0"),
    ):
        client.infer(model.name, tensors, sequence_id=0, sequence_start=True)

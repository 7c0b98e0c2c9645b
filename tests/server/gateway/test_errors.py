"""Every row of OpenVINO Model Server's table of errors, over gRPC and HTTP: the code, the status and the text."""

import numpy as np
import pytest

from harness.own import fed, total
from harness.raw import Refused
from harness.tensorflow_serving import Predict, predict_request, tensor_proto
from harness.ways import GATEWAY

START, END = 1, 2

over_both = pytest.mark.parametrize("protocol", GATEWAY)


def ask(client, model: str, value: int = 5, sequence_id: int | None = None, control: int | None = None, **how):
    inputs = fed(value)
    if sequence_id is not None:
        inputs["sequence_id"] = np.array([sequence_id], np.uint64)
    if control is not None:
        inputs["sequence_control_input"] = np.array([control], np.uint32)
    return client.ask(model, inputs | how.pop("inputs", {}), {}, **how)


def refused(grpc_code: str, status: int, text: str, task) -> None:
    with pytest.raises(Refused) as caught:
        task()
    assert caught.value.code in (grpc_code, str(status)), caught.value
    assert caught.value.text.startswith(text), caught.value


@pytest.fixture
def alive(serve, connect):
    """A model with a sequence 42, whose sum is 5 and still is at the end of the test."""
    model, client = serve(), connect("predict")
    ask(client, model.name, sequence_id=42, control=START)
    yield model.name
    assert total(ask(client, model.name, 7, sequence_id=42, control=END)) == 12


@over_both
@pytest.mark.parametrize("control", [None, 0, END])
def test_a_sequence_that_does_not_exist(alive, connect, protocol, control):
    client = connect(protocol)
    text = "Sequence with provided ID does not exist"
    refused("NOT_FOUND", 404, text, lambda: ask(client, alive, sequence_id=99, control=control))


@over_both
def test_a_sequence_that_already_exists(alive, connect, protocol):
    client = connect(protocol)
    text = "Sequence with provided ID already exists"
    refused("ALREADY_EXISTS", 409, text, lambda: ask(client, alive, 100, sequence_id=42, control=START))


@over_both
def test_too_many_sequences(serve, connect, protocol):
    model, client = serve(parameters={"max_sequence_number": 2}).name, connect(protocol)
    for sequence_id in (1, 2):
        ask(client, model, sequence_id=sequence_id, control=START)
    text = "Max sequence number has been reached. Could not create new sequence."
    refused("UNAVAILABLE", 503, text, lambda: ask(client, model, sequence_id=3, control=START))
    refused("UNAVAILABLE", 503, text, lambda: ask(client, model, control=START))
    ask(client, model, sequence_id=1, control=END)
    ask(client, model, sequence_id=3, control=START)


@over_both
@pytest.mark.parametrize("control", [None, 0, END])
@pytest.mark.parametrize("sequence_id", [None, 0])
def test_no_id(alive, connect, protocol, sequence_id, control):
    client = connect(protocol)
    text = "Sequence ID has not been provided in request inputs"
    refused("INVALID_ARGUMENT", 400, text, lambda: ask(client, alive, sequence_id=sequence_id, control=control))


@over_both
@pytest.mark.parametrize("control", [3, 999, 2**32 - 1])
@pytest.mark.parametrize("sequence_id", [None, 42])
def test_an_unknown_control(alive, connect, protocol, sequence_id, control):
    client = connect(protocol)
    text = "Unexpected value of sequence control input"
    refused("INVALID_ARGUMENT", 400, text, lambda: ask(client, alive, sequence_id=sequence_id, control=control))


@over_both
def test_a_start_after_an_end_that_still_runs(serve, connect, protocol):
    """OpenVINO Model Server refuses it with FAILED_PRECONDITION and 412. Here it waits, and begins a new sequence."""
    model, client, other = serve(), connect("predict"), connect(protocol)
    ask(client, model.name, sequence_id=42, control=START)
    inputs = {**fed(1, work=400), "sequence_id": np.array([42], np.uint64)}
    end = client.send(model.name, {**inputs, "sequence_control_input": np.array([END], np.uint32)}, {})
    answer = None
    while answer is None:
        try:
            answer = ask(other, model.name, 100, sequence_id=42, control=START)
        except Refused as error:
            # it came before the END
            assert error.text.startswith("Sequence with provided ID already exists")
    assert total(end.answer()) == 6 and total(answer) == 100


@over_both
def test_a_model_that_does_not_exist(alive, connect, protocol):
    client = connect(protocol)
    text = "Model with requested name is not found"
    refused("NOT_FOUND", 404, text, lambda: ask(client, "no_such_model", sequence_id=42))


@over_both
def test_a_version_that_does_not_exist(alive, connect, protocol):
    client = connect(protocol)
    text = "Model with requested version is not found"
    refused("NOT_FOUND", 404, text, lambda: ask(client, alive, sequence_id=42, version="7"))


@over_both
def test_a_model_whose_sequences_core_schedules(connect, protocol):
    """Such a model has no special inputs. Core requires an id in a request parameter, which this API lacks."""
    client = connect(protocol)
    inputs = {"INPUT": np.zeros((1, 1), np.float32)}
    with pytest.raises(Refused, match="^(INVALID_ARGUMENT|400): .*sequence_id"):
        send_as_it_is(client, "control_model", inputs | {"sequence_id": np.array([42], np.uint64)})
    with pytest.raises(Refused, match="^(INVALID_ARGUMENT|400): .*correlation ID"):
        send_as_it_is(client, "control_model", inputs)


# ---- which error comes first


@over_both
def test_the_model_is_looked_up_first(connect, protocol):
    client = connect(protocol)
    text = "Model with requested name is not found"
    refused("NOT_FOUND", 404, text, lambda: ask(client, "no_such_model", control=999))


@over_both
def test_a_wrong_id_comes_before_a_wrong_control(alive, connect, protocol):
    client = connect(protocol)
    two = {"sequence_id": np.array([[42]], np.uint64)}
    with pytest.raises(Refused) as caught:
        send_as_it_is(client, alive, {**fed(5), **two, "sequence_control_input": np.array([999], np.uint32)})
    assert caught.value.code in ("INVALID_ARGUMENT", "400") and "control" not in caught.value.text


@over_both
def test_a_wrong_control_comes_before_a_missing_id_and_that_before_wrong_data(alive, connect, protocol):
    client = connect(protocol)
    wrong = {"inputs": {"INPUT": np.zeros((1, 2), np.int64)}}
    text = "Unexpected value of sequence control input"
    refused("INVALID_ARGUMENT", 400, text, lambda: ask(client, alive, control=3, **wrong))
    text = "Sequence ID has not been provided in request inputs"
    refused("INVALID_ARGUMENT", 400, text, lambda: ask(client, alive, **wrong))


@over_both
def test_wrong_data_comes_before_a_sequence_that_does_not_exist(alive, connect, protocol):
    client = connect(protocol)
    wrong = {"inputs": {"INPUT": np.zeros((1, 2), np.int64)}}
    with pytest.raises(Refused) as caught:
        ask(client, alive, sequence_id=99, **wrong)
    assert caught.value.code in ("INVALID_ARGUMENT", "400") and "'INPUT'" in caught.value.text, caught.value


def send_as_it_is(client, model: str, inputs):
    """Sends the special inputs with the shapes that they have here, which `ask` would change."""
    if isinstance(client, Predict):
        return client.call(predict_request(model, inputs)).answer()
    return client.post(f"{model}:predict", {"inputs": {name: value.tolist() for name, value in inputs.items()}})


# ---- wrong protos, which only gRPC has


def special_error(predict, model: str, name: str, proto) -> Refused:
    request = predict_request(model, {**fed(5), "sequence_id": np.array([42], np.uint64)})
    request.inputs[name].CopyFrom(proto)
    with pytest.raises(Refused) as caught:
        predict.call(request).answer()
    assert caught.value.code == "INVALID_ARGUMENT", caught.value
    return caught.value


def test_no_value_in_uint64_val(alive, predict):
    proto = tensor_proto(np.array([42], np.uint64))
    proto.ClearField("uint64_val")
    error = special_error(predict, alive, "sequence_id", proto)
    assert error.text.startswith("Could not find sequence id in expected tensor proto field uint64_val")


def test_no_value_in_uint32_val(alive, predict):
    proto = tensor_proto(np.array([2], np.uint32))
    proto.ClearField("uint32_val")
    error = special_error(predict, alive, "sequence_control_input", proto)
    assert error.text.startswith("Could not find sequence control input in expected tensor proto field uint32_val")


@pytest.mark.parametrize(("name", "dtype"), [("sequence_id", np.uint64), ("sequence_control_input", np.uint32)])
def test_no_shape(alive, predict, name, dtype):
    proto = tensor_proto(np.array([2], dtype))
    proto.ClearField("tensor_shape")
    error = special_error(predict, alive, name, proto)
    assert error.text.startswith("Special input proto does not contain tensor shape information")

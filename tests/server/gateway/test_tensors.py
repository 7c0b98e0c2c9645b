"""Tensors of every type in both directions: by their bytes, value by value, and in JSON; and those that are wrong."""

import base64
import json

import ml_dtypes
import numpy as np
import pytest

from harness import models
from harness.model import Tensor
from harness.own import FAILS, fed, total
from harness.raw import Refused
from harness.repetitions import every_type
from harness.tensorflow_protos import types_pb2
from harness.tensorflow_serving import Rest, of_ovms, predict_request
from harness.values import bits, random_bits

START, STEP = {"sequence_id": 42, "sequence_start": True}, {"sequence_id": 42}


def echo_of(type: str):
    return lambda name, **changes: models.echo(type, name, **changes)


@pytest.mark.parametrize("by_values", [False, True], ids=["by_bytes", "by_values"])
@every_type()
def test_every_bit_of_a_tensor_arrives_and_comes_back(serve, predict, type, by_values):
    """The model `echo` answers with the input of the request before."""
    model, rng = serve(echo_of(type)), np.random.default_rng(1)
    sent = random_bits(type, (1, 4), rng)
    if by_values and type in ("fp32", "fp64"):
        # protobuf may turn a signalling NaN into a quiet one
        sent = rng.standard_normal((1, 4)).astype(sent.dtype)
    predict.ask(model.name, {"INPUT": sent}, START, by_values=by_values)
    answer = predict.ask(model.name, {"INPUT": sent}, STEP, by_values=by_values).outputs["OUTPUT"]
    assert answer.dtype == sent.dtype and answer.shape == sent.shape and bits(answer) == bits(sent)


@pytest.mark.parametrize("rows", [False, True], ids=["inputs", "instances"])
@every_type()
def test_every_type_in_json(serve, connect, gateway, type, rows):
    model, rest = serve(echo_of(type)), Rest(gateway, rows)
    sent = {
        "bool": np.array([[True, False, False, True]]),
        "string": np.array([["", "a", "Ünïcödé ☎", 'quote" \\ \n']], np.object_),
        "fp16": np.array([[1.5, -0.25, 65504, 6e-5]], np.float16),
        "bf16": np.array([[1.5, -0.25, 3e38, 1e-30]]).astype(ml_dtypes.bfloat16),
        "fp32": np.array([[1.5, 0.1, 3.4e38, 1e-40]], np.float32),
        "fp64": np.array([[1.5, 0.1, 1.7e308, 5e-324]], np.float64),
    }.get(type)
    if sent is None:
        limits = np.iinfo(f"{type}")
        sent = np.array([[limits.min, limits.max, 0, 1]], type)
    rest.ask(model.name, {"INPUT": sent}, START)
    answer = rest.ask(model.name, {"INPUT": sent}, STEP).outputs["OUTPUT"]
    rest.close()
    assert answer.shape == sent.shape and bits(answer) == bits(sent)


def test_binary_values_in_json(serve, rest):
    """A value that isn't text must be in base64, and is answered in base64."""
    model = serve(echo_of("string"))
    binary = [b"\x00\xff", b"", b"text", bytes(range(256))]
    encoded = [[{"b64": base64.b64encode(word).decode()} for word in binary]]
    flags = {"sequence_id": [42], "sequence_control_input": [1]}
    rest.post(f"{model.name}:predict", {"inputs": {"INPUT": encoded, **flags}})
    came = rest.post(f"{model.name}:predict", {"inputs": {"INPUT": encoded, "sequence_id": [42]}})
    [row] = came["outputs"]["OUTPUT"]
    assert [base64.b64decode(word["b64"]) if isinstance(word, dict) else word.encode() for word in row] == binary
    assert isinstance(row[0], dict) and row[2] == "text"


@pytest.mark.parametrize("wrong", [{"b64": "not base64!"}, {"b64": 5}, {"b65": "AAAA"}, {"b64": "AAAA", "more": 1}, {}])
def test_wrong_binary_values_in_json(serve, rest, wrong):
    model = serve(echo_of("string"))
    flags = {"sequence_id": [42], "sequence_control_input": [1]}
    with pytest.raises(Refused, match="^400: "):
        rest.post(f"{model.name}:predict", {"inputs": {"INPUT": [["a", "b", "c", wrong]], **flags}})


def test_whole_numbers_in_json_may_be_floats_of_the_model(serve, rest):
    model = serve(echo_of("fp32"))
    flags = {"sequence_id": [42], "sequence_control_input": [1]}
    rest.post(f"{model.name}:predict", {"inputs": {"INPUT": [[1, 2.5, -3, 2**24]], **flags}})
    came = rest.post(f"{model.name}:predict", {"inputs": {"INPUT": [[0, 0, 0, 0]], "sequence_id": [42]}})
    assert came["outputs"]["OUTPUT"] == [[1.0, 2.5, -3.0, 2.0**24]]


def test_numbers_that_are_not_finite_in_json(serve, predict, rest):
    """JSON has none; TensorFlow Serving writes NaN, Infinity and -Infinity all the same."""
    model = serve(echo_of("fp32"))
    predict.ask(model.name, {"INPUT": np.array([[np.nan, np.inf, -np.inf, -0.0]], np.float32)}, START)
    came = rest.post(f"{model.name}:predict", {"inputs": {"INPUT": [[1, 2, 3, 4]], "sequence_id": [42]}})
    assert json.dumps(came["outputs"]["OUTPUT"]) == "[[NaN, Infinity, -Infinity, -0.0]]"


@pytest.mark.parametrize(
    ("type", "value"),
    [
        ("int8", 128),
        ("uint8", -1),
        ("uint8", 256),
        ("int32", 2**31),
        ("int64", 2**63),
        ("uint64", -1),
        ("uint64", 2**64),
        ("int64", 1.5),
        ("int64", "5"),
        ("int64", True),
        ("int64", None),
        ("fp32", "1.5"),
        ("bool", 1),
        ("string", 5),
    ],
)
def test_a_number_that_the_type_does_not_have_in_json(serve, rest, type, value):
    model = serve(echo_of(type))
    flags = {"sequence_id": [42], "sequence_control_input": [1]}
    right = {"bool": False, "string": ""}.get(type, 0)
    with pytest.raises(Refused, match="^400: "):
        rest.post(f"{model.name}:predict", {"inputs": {"INPUT": [[right, right, right, value]], **flags}})


@pytest.mark.parametrize(
    "value",
    [[[1, 2], [3]], [[1, [2]]], [1, [2]], [[[1], [2, 3]]], [[]], [], [[], [1]]],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_arrays_that_are_not_rectangular(serve, rest, value):
    model = serve(echo_of("int64"))
    flags = {"sequence_id": [42], "sequence_control_input": [1]}
    with pytest.raises(Refused, match="^400: "):
        rest.post(f"{model.name}:predict", {"inputs": {"INPUT": value, **flags}})


# ---- protos that are short, long or wrong


@pytest.fixture
def echoed(serve, predict):
    """Sends a tensor to `echo` as an input, and gives what arrived."""
    model = serve(echo_of("fp32"))
    predict.ask(model.name, {"INPUT": np.zeros((1, 4), np.float32)}, START)

    def ask(change) -> np.ndarray:
        request = predict_request(model.name, of_ovms({"INPUT": np.zeros((1, 4), np.float32)}, STEP), by_values=True)
        request.inputs["INPUT"].ClearField("float_val")
        change(request.inputs["INPUT"])
        predict.call(request).answer()
        return predict.ask(model.name, {"INPUT": np.zeros((1, 4), np.float32)}, STEP).outputs["OUTPUT"]

    return ask


def test_one_value_stands_for_all(echoed):
    """As TensorFlow writes a tensor of equal values."""
    assert echoed(lambda proto: proto.float_val.append(7)).tolist() == [[7] * 4]
    assert echoed(lambda proto: proto.float_val.extend([1, 2, 3, 4])).tolist() == [[1, 2, 3, 4]]


def resized(*sizes):
    def change(proto):
        proto.tensor_shape.ClearField("dim")
        for size in sizes:
            proto.tensor_shape.dim.add(size=size)
        proto.float_val.append(1)

    return change


def retyped(dtype: str):
    def change(proto):
        proto.dtype = getattr(types_pb2, dtype)
        proto.float_val.extend([1] * 4)

    return change


def unranked(proto):
    proto.ClearField("tensor_shape")
    proto.tensor_shape.unknown_rank = True
    proto.float_val.extend([1] * 4)


WRONG = {
    "no_values": lambda proto: None,
    "too_few_values": lambda proto: proto.float_val.extend([1] * 3),
    "too_many_values": lambda proto: proto.float_val.extend([1] * 5),
    "values_of_another_type": lambda proto: proto.int64_val.extend([1] * 4),
    "short_content": lambda proto: setattr(proto, "tensor_content", bytes(15)),
    "long_content": lambda proto: setattr(proto, "tensor_content", bytes(17)),
    "another_shape": resized(1, 5),
    "no_dims": resized(),
    "a_negative_size": resized(1, -4),
    "an_overflow": resized(2**62, 2**62),
    "too_large": resized(1, 2**40),
    "unknown_rank": unranked,
    "type_invalid": retyped("DT_INVALID"),
    "type_resource": retyped("DT_RESOURCE"),
    "type_complex": retyped("DT_COMPLEX64"),
    "type_quantized": retyped("DT_QINT8"),
    "another_type": retyped("DT_DOUBLE"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_tensor_is_refused(echoed, gateway, wrong):
    before = gateway.resident_bytes()
    with pytest.raises(Refused) as caught:
        echoed(wrong)
    assert caught.value.code == "INVALID_ARGUMENT" and "INPUT" in caught.value.text, caught.value
    # no memory was allocated for a size that a client only claimed
    assert gateway.resident_bytes() < before + 2**28
    assert echoed(lambda proto: proto.float_val.append(3)).tolist() == [[3, 3, 3, 3]]


def test_inputs_that_a_few_bytes_make_large_are_refused(serve, predict, gateway):
    """A single value stands for all elements: in inputs of the model for 64 MiB in all, in others for nothing."""
    model = serve(lambda name, **changes: models.two_inputs(name, **changes))
    before = gateway.resident_bytes()
    request = predict_request(model.name, of_ovms({}, START))
    for at in range(50):
        resized(1, 16 * 2**20)(request.inputs[f"A{at}"])
        request.inputs[f"A{at}"].dtype = types_pb2.DT_FLOAT
    with pytest.raises(Refused, match="the model has no input 'A0'") as caught:
        predict.call(request).answer()
    assert caught.value.code == "INVALID_ARGUMENT"
    assert gateway.resident_bytes() < before + 2**28


def test_a_missing_input_is_named(serve, predict):
    model = serve()
    request = predict_request(model.name, of_ovms({"INPUT": fed(5)["INPUT"]}, START))
    with pytest.raises(Refused, match="WORK") as caught:
        predict.call(request).answer()
    assert caught.value.code == "INVALID_ARGUMENT"


# ---- sizes


def test_a_tensor_of_16_mib_in_both_directions(serve, predict):
    width = 4 * 2**20
    model = serve(lambda name, **changes: models.echo("fp32", name, (-1,), **changes))
    sent = np.arange(width, dtype=np.float32)[None]
    predict.ask(model.name, {"INPUT": sent}, START)
    answer = predict.ask(model.name, {"INPUT": sent[:, :1]}, STEP).outputs["OUTPUT"]
    assert answer.tobytes() == sent.tobytes()


def test_a_large_body_over_http(serve, rest):
    model = serve(lambda name, **changes: models.echo("int64", name, (-1,), **changes))
    sent = np.arange(10**6)[None]
    rest.ask(model.name, {"INPUT": sent}, START)
    answer = rest.ask(model.name, {"INPUT": sent[:, :1]}, STEP).outputs["OUTPUT"]
    assert answer.tobytes() == sent.tobytes()


def test_a_tensor_without_elements(serve, predict):
    model = serve(lambda name, **changes: models.echo("fp32", name, (-1,), **changes))
    nothing = {"INPUT": np.zeros((1, 0), np.float32)}
    predict.ask(model.name, nothing, START)
    assert predict.ask(model.name, nothing, STEP).outputs["OUTPUT"].shape == (1, 0)


# ---- outputs


def test_a_response_says_its_model_and_version(serve, predict):
    model = serve(versions=(1, 3))
    response = predict.stub.Predict(predict_request(model.name, of_ovms(fed(5), START)))
    assert response.model_spec.name == model.name and response.model_spec.version.value == 3
    proto = response.outputs["sequence_id"]
    assert proto.dtype == types_pb2.DT_UINT64 and proto.uint64_val == [42] and not proto.tensor_content
    assert [dim.size for dim in proto.tensor_shape.dim] == [1]


@pytest.mark.parametrize("more", ["", None], ids=["configured", "not_configured"])
def test_o56_the_id_is_in_every_response(serve, predict, rest, more):
    """Whether or not the configuration lists the output."""
    model = serve(**({"more": more} if more is not None else {}))
    for client in (predict, rest):
        for flags in ({"sequence_start": True}, {}, {"sequence_end": True}):
            assert set(client.ask(model.name, fed(1), {"sequence_id": 42, **flags}).outputs) == {
                "OUTPUT",
                "sequence_id",
            }


@pytest.mark.parametrize("wanted", [[], ["OUTPUT"], ["OUTPUT", "sequence_id"], ["OUTPUT", "OUTPUT"], ["sequence_id"]])
def test_a_filter_of_outputs(serve, predict, wanted):
    """OpenVINO Model Server adds the id to every response."""
    model = serve()
    answer = predict.ask(model.name, fed(5), START, outputs=wanted)
    assert set(answer.outputs) == {"sequence_id", *(wanted or ["OUTPUT"])}
    assert total(predict.ask(model.name, fed(7), STEP)) == 12


def test_a_filter_of_some_of_several_outputs(serve, predict):
    model = serve(models.two_inputs)
    inputs = {"LEFT": np.array([[5, 7]], np.float32), "RIGHT": np.array([[1, 2]], np.float32)}
    for wanted in (["DIFFERENCE"], ["TOTAL_OUT"], ["TOTAL_OUT", "DIFFERENCE"]):
        answer = predict.ask(model.name, inputs, {**START, "sequence_id": len(str(wanted))}, outputs=wanted)
        assert set(answer.outputs) == {*wanted, "sequence_id"}
        assert all(answer.outputs[name].tolist() == [[4, 5]] for name in wanted)


def test_a_filter_with_an_unknown_name(serve, predict):
    model = serve()
    with pytest.raises(Refused, match="NO_SUCH_OUTPUT") as caught:
        predict.ask(model.name, fed(5), START, outputs=["OUTPUT", "NO_SUCH_OUTPUT"])
    assert caught.value.code == "INVALID_ARGUMENT"
    with pytest.raises(Refused, match="Sequence with provided ID does not exist"):
        predict.ask(model.name, fed(5), STEP)


@pytest.mark.parametrize("name", ["sequence_id", "sequence_control_input"])
def test_o58_a_models_own_output_of_a_special_name_is_not_answered(serve, predict, name):
    """The id is, as in OpenVINO Model Server."""
    output = Tensor(name, "int64", (1,))

    def make(**changes):
        model = models.work(**changes)

        def build():
            graph = model.build()
            for node in graph.graph.node:
                node.output[:] = [name if output == "OUTPUT" else output for output in node.output]
            graph.graph.output[0].name = name
            return graph

        return model.variant(model.name, build=build)

    model = serve(make, outputs=(output,), more="")
    answer = predict.ask(model.name, fed(5), START)
    assert set(answer.outputs) == {"sequence_id"} and answer.outputs["sequence_id"].tolist() == [42]


def test_a_run_that_fails_is_an_internal_error(serve, predict, rest):
    model = serve()
    for client, code in ((predict, "INTERNAL"), (rest, "500")):
        client.ask(model.name, fed(5), START)
        with pytest.raises(Refused, match=f"^{code}: .*ONNX Runtime"):
            client.ask(model.name, fed(FAILS), STEP)
        assert total(client.ask(model.name, fed(7), {**STEP, "sequence_end": True})) == 12

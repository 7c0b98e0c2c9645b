"""The inputs `sequence_id` and `sequence_control_input`, sent in every wrong way: cases O20 to O26 of OpenVINO Model
Server, which checks their shape and reads only one field of values. No such request changes a sequence."""

import numpy as np
import pytest

from harness.own import fed, total
from harness.raw import Refused
from harness.tensorflow_protos import tensor_pb2, types_pb2
from harness.tensorflow_serving import predict_request

TEXT = {
    "no_shape": "Special input proto does not contain tensor shape information",
    "sequence_id": "Could not find sequence id in expected tensor proto field uint64_val",
    "sequence_control_input": "Could not find sequence control input in expected tensor proto field uint32_val",
}
FIELD = {"sequence_id": ("DT_UINT64", "uint64_val"), "sequence_control_input": ("DT_UINT32", "uint32_val")}

either = pytest.mark.parametrize("name", FIELD)


@pytest.fixture
def alive(serve, predict):
    """A model with a sequence 42, whose sum is 5 and still is at the end of the test."""
    model = serve().name
    predict.ask(model, fed(5), {"sequence_id": 42, "sequence_start": True})
    yield model
    assert total(predict.ask(model, fed(7), {"sequence_id": 42, "sequence_end": True})) == 12


def proto_of(dtype: str, shape, **values) -> object:
    proto = tensor_pb2.TensorProto(dtype=getattr(types_pb2, dtype), **values)
    for size in shape:
        proto.tensor_shape.dim.add(size=size)
    return proto


def ask(predict, model: str, **protos):
    """A request of sequence 42, unless it says otherwise."""
    request = predict_request(model, {**fed(100), "sequence_id": np.array([42], np.uint64)})
    for name, proto in protos.items():
        request.inputs[name].CopyFrom(proto)
    return predict.call(request).answer()


def error_of(predict, model: str, **protos) -> str:
    with pytest.raises(Refused) as caught:
        ask(predict, model, **protos)
    assert caught.value.code == "INVALID_ARGUMENT", caught.value
    return caught.value.text


# ---- gRPC: shapes


@either
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (0, 0), (1, 1, 1)])
def test_o23_several_dimensions(alive, predict, name, shape):
    dtype, field = FIELD[name]
    text = error_of(predict, alive, **{name: proto_of(dtype, shape, **{field: [2]})})
    assert f"Required shape for {name} is: (1)" in text


@either
@pytest.mark.parametrize("size", [0, 2, -1, 2**62])
def test_o23_a_size_that_is_not_1(alive, predict, name, size):
    dtype, field = FIELD[name]
    text = error_of(predict, alive, **{name: proto_of(dtype, (size,), **{field: [2, 2]})})
    assert f"Required shape for {name} is: (1)" in text


@either
def test_o24_a_scalar(alive, predict, name):
    dtype, field = FIELD[name]
    text = error_of(predict, alive, **{name: proto_of(dtype, (), **{field: [2]})})
    assert text.startswith(TEXT["no_shape"])


@either
def test_o24_an_empty_tensor(alive, predict, name):
    assert error_of(predict, alive, **{name: tensor_pb2.TensorProto()}).startswith(TEXT["no_shape"])


# ---- gRPC: values


@either
@pytest.mark.parametrize("values", [[], [2, 2]], ids=["none", "two"])
def test_o21_o22_not_one_value(alive, predict, name, values):
    dtype, field = FIELD[name]
    assert error_of(predict, alive, **{name: proto_of(dtype, (1,), **{field: values})}).startswith(TEXT[name])


@either
@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("DT_INT64", {"int64_val": [2]}),
        ("DT_INT32", {"int_val": [2]}),
        ("DT_FLOAT", {"float_val": [2.0]}),
        ("DT_STRING", {"string_val": [b"2"]}),
        ("DT_BOOL", {"bool_val": [True]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_o21_o22_a_value_in_the_field_of_another_type(alive, predict, name, dtype, values):
    assert error_of(predict, alive, **{name: proto_of(dtype, (1,), **values)}).startswith(TEXT[name])


def test_o21_o22_the_field_of_the_other_special_input(alive, predict):
    text = error_of(predict, alive, sequence_id=proto_of("DT_UINT32", (1,), uint32_val=[42]))
    assert text.startswith(TEXT["sequence_id"])
    text = error_of(predict, alive, sequence_control_input=proto_of("DT_UINT64", (1,), uint64_val=[2]))
    assert text.startswith(TEXT["sequence_control_input"])


@either
def test_o21_o22_a_value_by_its_bytes(alive, predict, name):
    """OpenVINO Model Server doesn't read them there either."""
    dtype, _ = FIELD[name]
    content = np.array([2], np.uint64 if name == "sequence_id" else np.uint32).tobytes()
    assert error_of(predict, alive, **{name: proto_of(dtype, (1,), tensor_content=content)}).startswith(TEXT[name])


@pytest.mark.parametrize("dtype", ["DT_UINT64", "DT_INVALID", "DT_INT32", "DT_STRING"])
def test_the_declared_type_is_not_looked_at(alive, predict, dtype):
    protos = {
        "sequence_id": proto_of(dtype, (1,), uint64_val=[43]),
        "sequence_control_input": proto_of(dtype, (1,), uint32_val=[1]),
    }
    assert total(ask(predict, alive, **protos)) == 100


def test_o20_a_wrong_shape_of_the_id_comes_before_a_wrong_control(alive, predict):
    protos = {
        "sequence_id": proto_of("DT_UINT64", (2,), uint64_val=[42]),
        "sequence_control_input": proto_of("DT_UINT32", (1,), uint32_val=[999]),
    }
    assert "Required shape for sequence_id is: (1)" in error_of(predict, alive, **protos)


def test_o26_a_misspelt_name(alive, predict):
    request = predict_request(alive, {**fed(100), "sequenceid": np.array([42], np.uint64)})
    with pytest.raises(Refused, match="Sequence ID has not been provided in request inputs") as caught:
        predict.call(request).answer()
    assert caught.value.code == "INVALID_ARGUMENT"


def test_o26_a_misspelt_name_of_the_control(alive, predict):
    text = error_of(predict, alive, sequence_control=proto_of("DT_UINT32", (1,), uint32_val=[2]))
    assert "sequence_control" in text


# ---- HTTP

NO_ARRAY = "Could not parse input content. Not valid ndarray detected"


def rest_error(rest, model: str, **inputs) -> str:
    given = {"INPUT": [[100]], "WORK": [[0]], "sequence_id": [42], **inputs}
    with pytest.raises(Refused) as caught:
        rest.post(f"{model}:predict", {"inputs": given})
    assert caught.value.code == "400", caught.value
    return caught.value.text


@either
@pytest.mark.parametrize(
    "value",
    [[-1], ["42"], [4.5], [2**64], [True], [None], [[2]], [], 2, "2", {}, None],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_o25_what_is_no_array_of_one_unsigned_number(alive, rest, name, value):
    assert rest_error(rest, alive, **{name: value}).startswith(NO_ARRAY)


@either
def test_o23_two_numbers_over_http(alive, rest, name):
    assert f"Required shape for {name} is: (1)" in rest_error(rest, alive, **{name: [2, 2]})


def test_a_control_beyond_32_bits_over_http(alive, rest):
    assert rest_error(rest, alive, sequence_control_input=[2**32]).startswith(NO_ARRAY)


def test_the_largest_id_over_http(alive, rest):
    inputs = {"INPUT": [[100]], "WORK": [[0]], "sequence_id": [2**64 - 1], "sequence_control_input": [1]}
    came = rest.post(f"{alive}:predict", {"inputs": inputs})
    assert came["outputs"]["sequence_id"] == [2**64 - 1] and came["outputs"]["OUTPUT"] == [[100]]


@either
@pytest.mark.parametrize("value", [[-1], ["42"], [4.5], [[2]], []], ids=lambda value: str(value))
def test_o25_in_instances(alive, rest, name, value):
    row = {"INPUT": [100], "WORK": [0], "sequence_id": [42], name: value}
    with pytest.raises(Refused) as caught:
        rest.post(f"{alive}:predict", {"instances": [row]})
    assert caught.value.code == "400", caught.value


def test_o26_a_misspelt_name_over_http(alive, rest):
    inputs = {"INPUT": [[100]], "WORK": [[0]], "sequenceid": [42]}
    with pytest.raises(Refused, match="^400: Sequence ID has not been provided in request inputs"):
        rest.post(f"{alive}:predict", {"inputs": inputs})

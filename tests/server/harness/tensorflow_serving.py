"""Clients of TensorFlow Serving's API with the interface of `harness.raw`: OpenVINO Model Server's protocol.

`Predict` speaks gRPC, `Rest` HTTP. A sequence is controlled by the inputs `sequence_id` and `sequence_control_input`, so
both of Triton's ways to control one become these; what this API cannot express is an error of the test.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Mapping
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import requests

from harness.clients import TIMEOUT_S
from harness.raw import Answer, Inputs, Parameters, Refused
from harness.tensorflow_protos import predict_pb2, prediction_service_pb2_grpc, tensor_pb2, types_pb2
from harness.values import words

#: Of each data type: TensorFlow's name, the field for its values, and how numpy sees what is in the field.
FIELDS: dict[type, tuple[str, str, type]] = {
    np.bool_: ("DT_BOOL", "bool_val", np.bool_),
    np.int8: ("DT_INT8", "int_val", np.int8),
    np.int16: ("DT_INT16", "int_val", np.int16),
    np.int32: ("DT_INT32", "int_val", np.int32),
    np.int64: ("DT_INT64", "int64_val", np.int64),
    np.uint8: ("DT_UINT8", "int_val", np.uint8),
    np.uint16: ("DT_UINT16", "int_val", np.uint16),
    np.uint32: ("DT_UINT32", "uint32_val", np.uint32),
    np.uint64: ("DT_UINT64", "uint64_val", np.uint64),
    np.float16: ("DT_HALF", "half_val", np.uint16),
    ml_dtypes.bfloat16: ("DT_BFLOAT16", "half_val", np.uint16),
    np.float32: ("DT_FLOAT", "float_val", np.float32),
    np.float64: ("DT_DOUBLE", "double_val", np.float64),
    np.object_: ("DT_STRING", "string_val", np.object_),
}
_OF_TENSORFLOW = {getattr(types_pb2, name): (dtype, field, seen) for dtype, (name, field, seen) in FIELDS.items()}

SPECIAL = ("sequence_id", "sequence_control_input")


def tensor_proto(value: np.ndarray, *, by_values: bool = False):
    """A tensor by its bytes, or value by value. Strings, and tensors of one element, are always sent value by value, as
    TensorFlow does."""
    value = np.asarray(value)
    name, field, seen = FIELDS[value.dtype.type]
    made = tensor_pb2.TensorProto(dtype=getattr(types_pb2, name))
    for size in value.shape:
        made.tensor_shape.dim.add(size=size)
    if value.dtype == np.object_:
        made.string_val.extend(words(value))
    elif by_values or value.size == 1:
        getattr(made, field).extend(np.ascontiguousarray(value).view(seen).ravel().tolist())
    else:
        made.tensor_content = np.ascontiguousarray(value).tobytes()
    return made


def array(proto) -> np.ndarray:
    """The values of a tensor. The proto must have each of them: one value doesn't stand for all."""
    dtype, field, seen = _OF_TENSORFLOW[proto.dtype]
    shape = [dim.size for dim in proto.tensor_shape.dim]
    if proto.tensor_content:
        return np.frombuffer(proto.tensor_content, dtype).reshape(shape)
    return np.array(getattr(proto, field), seen).view(dtype).reshape(shape)


def of_ovms(inputs: Inputs, parameters: Parameters) -> dict[str, np.ndarray]:
    """The inputs with OpenVINO Model Server's two special ones, each with one dimension."""
    made = {name: value.reshape(1) if name in SPECIAL else value for name, value in inputs.items()}
    rest = dict(parameters)
    start, end = rest.pop("sequence_start", False), rest.pop("sequence_end", False)
    assert not (start and end), "no request of this API starts a sequence and ends it"
    if "sequence_id" in rest:
        made["sequence_id"] = np.array([rest.pop("sequence_id")], np.uint64)
    if start or end:
        made["sequence_control_input"] = np.array([1 if start else 2], np.uint32)
    assert not rest, f"this API has no {', '.join(rest)}"
    return made


def predict_request(model: str, inputs: Mapping[str, np.ndarray], *, outputs=None, version: str = "", **how):
    request = predict_pb2.PredictRequest()
    request.model_spec.name = model
    if version:
        request.model_spec.version.value = int(version)
    for name, value in inputs.items():
        request.inputs[name].CopyFrom(tensor_proto(value, **how))
    request.output_filter.extend(outputs or ())
    return request


class Predict:
    """gRPC. May be used by several threads at once."""

    by_ovms = True

    def __init__(self, gateway):
        # a connection of its own: channels would share one
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        self.channel = grpc.insecure_channel(gateway.grpc_url, options)
        self.stub = prediction_service_pb2_grpc.PredictionServiceStub(self.channel)

    def connected(self) -> Predict:
        """Waits for the connection: requests that are sent before are sent in any order."""
        grpc.channel_ready_future(self.channel).result(TIMEOUT_S)
        return self

    def ask(self, model: str, inputs: Inputs, parameters: Parameters, **how) -> Answer:
        return self.send(model, inputs, parameters, **how).answer()

    def send(self, model: str, inputs: Inputs, parameters: Parameters, **how) -> Call:
        return self.call(predict_request(model, of_ovms(inputs, parameters), **how))

    def call(self, request, timeout_s: float = TIMEOUT_S) -> Call:
        return Call(self.stub.Predict.future(request, timeout=timeout_s))

    def close(self) -> None:
        self.channel.close()


class Call:
    """A request whose answer is awaited."""

    def __init__(self, future: grpc.Future):
        self.future = future

    def answer(self) -> Answer:
        try:
            response = self.future.result()
        except grpc.RpcError as error:
            raise Refused(error.code().name, error.details(), by_ovms=True) from None
        return answer_of({name: array(proto) for name, proto in response.outputs.items()})


class Pipelined(Predict):
    """Sends all requests on one connection without waiting. `reply` gives the outcome of the oldest request."""

    def __init__(self, gateway):
        super().__init__(gateway)
        self.connected()
        self.due: deque[tuple[int, Call]] = deque()
        self.count = 0

    def send(self, model: str, inputs: Inputs, parameters: Parameters, **how) -> Any:
        number, self.count = self.count, self.count + 1
        self.due.append((number, super().send(model, inputs, parameters, **how)))
        return number

    def reply(self) -> tuple[int, Answer | Refused]:
        number, call = self.due.popleft()
        try:
            return number, call.answer()
        except Refused as error:
            return number, error

    def leave(self) -> None:
        """Breaks the connection off."""
        self.channel.close()


class Rest:
    """HTTP, with the inputs by name or, `rows`, as a list of instances. One thread only."""

    by_ovms = True

    def __init__(self, gateway, rows: bool = False):
        self.url = f"http://{gateway.rest_url}/v1/models"
        self.session = requests.Session()
        self.rows = rows
        self.dtypes: dict[str, dict[str, type]] = {}

    def ask(self, model: str, inputs: Inputs, parameters: Parameters, *, outputs=None, version: str = "") -> Answer:
        assert outputs is None, "this API has no filter of outputs over HTTP"
        path = model + (f"/versions/{version}" if version else "")
        given = {name: _json(value) for name, value in of_ovms(inputs, parameters).items()}
        if self.rows:
            return self._answer(path, self.post(f"{path}:predict", {"instances": _instances(given)}))
        return self._answer(path, self.post(f"{path}:predict", {"signature_name": "serving_default", "inputs": given}))

    def post(self, path: str, body: Any) -> dict:
        """Sends any JSON, below /v1/models/."""
        return _result(self.session.post(f"{self.url}/{path}", json=body, timeout=TIMEOUT_S))

    def get(self, path: str) -> dict:
        return _result(self.session.get(f"{self.url}/{path}", timeout=TIMEOUT_S))

    def _answer(self, path: str, came: dict) -> Answer:
        outputs = came["outputs"] if "outputs" in came else _columns(came["predictions"])
        dtypes = self._dtypes(path)
        return answer_of({name: np.array(value, dtypes[name]) for name, value in outputs.items()})

    def _dtypes(self, path: str) -> dict[str, type]:
        """The outputs' types by the metadata, because JSON has only numbers."""
        if path not in self.dtypes:
            signature = self.get(f"{path}/metadata")["metadata"]["signature_def"]["signatureDef"]["serving_default"]
            names = {name: tensor["dtype"] for name, tensor in signature["outputs"].items()}
            of = {name: dtype for dtype, (name, _, _) in FIELDS.items()}
            self.dtypes[path] = {name: of[dtype] for name, dtype in names.items()} | {"sequence_id": np.uint64}
        return self.dtypes[path]

    def close(self) -> None:
        self.session.close()


CLIENTS = {"predict": Predict, "rest": Rest}


def answer_of(outputs: dict[str, np.ndarray]) -> Answer:
    """Every response has the id of its sequence."""
    sequence_id = outputs["sequence_id"]
    assert sequence_id.dtype == np.uint64 and sequence_id.shape == (1,), sequence_id
    return Answer(outputs, {"stateful_sequence_id": int(sequence_id[0])})


def _result(response: requests.Response) -> dict:
    assert response.headers["content-type"].startswith("application/json"), response.headers
    came = response.json()
    if response.status_code != 200:
        assert set(came) == {"error"}, came
        raise Refused(str(response.status_code), came["error"], by_ovms=True)
    return came


def _json(value: np.ndarray) -> list:
    if value.dtype != np.object_:
        return value.tolist()
    encoded = [_text(word) for word in words(value)]
    return np.array(encoded, np.object_).reshape(value.shape).tolist()


def _text(word: bytes) -> object:
    """A string, in base64 if it isn't text."""
    try:
        return word.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(word).decode()}


def _instances(inputs: dict[str, list]) -> list[dict]:
    """The one row of a request."""
    return [{name: value if name in SPECIAL else value[0] for name, value in inputs.items()}]


def _columns(predictions: list[dict]) -> dict[str, list]:
    """The outputs of the one row. Each has lost its first dimension, which is the only one of `sequence_id`."""
    [row] = predictions
    return {name: [value] for name, value in row.items()}

"""Requests as the protocols carry them: any parameters, any inputs, and the parameters of the answer.

tritonclient sends neither START nor END without a sequence id, and shows neither the parameters of an answer over HTTP
nor the id of a request that failed on a stream.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import queue
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import grpc
import numpy as np
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

from harness.clients import TIMEOUT_S
from harness.deployment import eventually
from harness.model import Model
from harness.values import words

Value = bool | int | str
Inputs = Mapping[str, np.ndarray]
Parameters = Mapping[str, Value]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came for one request."""

    outputs: dict[str, np.ndarray]
    parameters: dict[str, Value]


class Refused(Exception):
    """The server's error. The code is gRPC's name or HTTP's number; a stream carries none.

    by_ovms: the gateway's, whose codes and texts are OpenVINO Model Server's."""

    def __init__(self, code: str, text: str, by_ovms: bool = False):
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text
        self.by_ovms = by_ovms


class Unary:
    """gRPC, one call a request. May be used by several threads at once."""

    by_ovms = False

    def __init__(self, deployment, headers: Mapping[str, str] = {}):
        self.channel = grpc.insecure_channel(deployment.server.grpc_url)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        self.headers = tuple(headers.items())

    def ask(self, model: str, inputs: Inputs, parameters: Parameters, **how) -> Answer:
        return self.send(model, inputs, parameters, **how).answer()

    def send(self, model: str, inputs: Inputs, parameters: Parameters, **how) -> Call:
        request = request_of(model, inputs, parameters, **how)
        return Call(self.stub.ModelInfer.future(request, timeout=TIMEOUT_S, metadata=self.headers))

    def close(self) -> None:
        self.channel.close()


class Call:
    """A request whose answer is awaited."""

    def __init__(self, future: grpc.Future):
        self.future = future

    def answer(self) -> Answer:
        try:
            return _answer(self.future.result())
        except grpc.RpcError as error:
            raise Refused(error.code().name, error.details()) from None


class Stream:
    """gRPC, one stream for all requests. `send` doesn't wait; `reply` gives what came next, and for which request.

    The server has answered a request on it before any other is sent. tritonserver 2.51 can crash if a stream is
    cancelled while its first request is in flight (docs/sequences.md).
    """

    by_ovms = False

    def __init__(self, deployment, headers: Mapping[str, str] = {}):
        self.channel = grpc.insecure_channel(deployment.server.grpc_url)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        self.asked: queue.SimpleQueue = queue.SimpleQueue()
        how = {"timeout": TIMEOUT_S, "metadata": tuple(headers.items())}
        self.replies = stub.ModelStreamInfer(iter(self.asked.get, None), **how)
        self.asked.put(service_pb2.ModelInferRequest(model_name="first-request"))
        assert "unknown model" in next(self.replies).error_message
        self.count = 0

    def send(self, model: str, inputs: Inputs, parameters: Parameters, **how) -> int:
        """The number of the request: 0, 1, 2, …"""
        number, self.count = self.count, self.count + 1
        request = request_of(model, inputs, parameters, **how)
        request.id = str(number)
        self.asked.put(request)
        return number

    def reply(self) -> tuple[int, Answer | Refused]:
        came = next(self.replies)
        number = int(came.infer_response.id)
        if came.error_message:
            return number, Refused("", came.error_message)
        return number, _answer(came.infer_response)

    def all_replies(self, count: int) -> dict[int, Answer | Refused]:
        """The next replies by their requests' numbers, in the order in which they came."""
        return dict(self.reply() for _ in range(count))

    def ask(self, model: str, inputs: Inputs, parameters: Parameters, **how) -> Answer:
        self.send(model, inputs, parameters, **how)
        _, came = self.reply()
        if isinstance(came, Refused):
            raise came
        return came

    def leave(self) -> None:
        """Breaks the stream off, which cancels its requests."""
        self.replies.cancel()
        self.channel.close()

    def close(self) -> None:
        self.asked.put(None)
        self.channel.close()


class Http:
    """HTTP with JSON tensors. One thread only."""

    by_ovms = False

    def __init__(self, deployment, headers: Mapping[str, str] = {}):
        host, port = deployment.server.http_url.split(":")
        self.connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)
        self.headers = dict(headers)

    def ask(self, model: str, inputs: Inputs, parameters: Parameters, *, outputs=None, version: str = "") -> Answer:
        came = self.post(model, _json(inputs, parameters, outputs), version)
        found = {
            tensor["name"]: np.array(tensor["data"], triton_to_np_dtype(tensor["datatype"])).reshape(tensor["shape"])
            for tensor in came["outputs"]
        }
        return Answer(found, came.get("parameters", {}))

    def post(self, model: str, body: object, version: str = "") -> dict:
        """Sends any JSON as a request."""
        self._send(model, body, version)
        response = self.connection.getresponse()
        text = response.read().decode()
        if response.status != 200:
            raise Refused(str(response.status), json.loads(text)["error"])
        return json.loads(text)

    def _send(self, model: str, body: object, version: str) -> None:
        path = f"/v2/models/{model}" + (f"/versions/{version}" if version else "") + "/infer"
        self.connection.request("POST", path, json.dumps(body), self.headers)

    def close(self) -> None:
        self.connection.close()


def take_back(deployment, model: str, inputs: Inputs, parameters: Parameters, after_s: float = 0) -> None:
    """Sends a request, and cancels it. On a stream: tritonserver 2.51 can crash if a unary call is cancelled."""
    stream = Stream(deployment)
    stream.send(model, inputs, parameters)
    time.sleep(after_s)
    stream.leave()


def under_way(deployment, model: Model, inputs: Inputs, parameters: Parameters) -> Stream:
    """A stream with a request of many steps that has made some of them."""
    stream, before = Stream(deployment), deployment.statistics(model).execution_count
    stream.send(model.name, inputs, parameters)
    eventually(lambda: deployment.statistics(model).execution_count - before, lambda steps: steps > 10)
    return stream


Client = Unary | Stream | Http


class Asks(Protocol):
    """A client that asks and waits, of these or through the gateway."""

    by_ovms: bool

    @property
    def ask(self) -> Callable[..., Answer]: ...


PROTOCOLS: dict[str, type[Client]] = {"unary": Unary, "stream": Stream, "http": Http}


def _json(inputs: Inputs, parameters: Parameters, outputs=None) -> dict:
    tensors = [
        {
            "name": name,
            "shape": list(value.shape),
            "datatype": np_to_triton_dtype(value.dtype),
            "data": value.ravel().tolist(),
        }
        for name, value in inputs.items()
    ]
    wanted = {} if outputs is None else {"outputs": [{"name": name} for name in outputs]}
    return {"inputs": tensors, "parameters": dict(parameters), **wanted}


def request_of(model: str, inputs: Inputs, parameters: Parameters, *, outputs=None, version: str = ""):
    request = service_pb2.ModelInferRequest(model_name=model, model_version=version)
    for name, value in inputs.items():
        request.inputs.add(name=name, shape=value.shape, datatype=np_to_triton_dtype(value.dtype))
        request.raw_input_contents.append(_content(value))
    for name in outputs or ():
        request.outputs.add(name=name)
    for name, said in parameters.items():
        if isinstance(said, bool):
            request.parameters[name].bool_param = said
        elif isinstance(said, int):
            request.parameters[name].int64_param = _as_int64(said)
        else:
            request.parameters[name].string_param = said
    return request


def _content(value: np.ndarray) -> bytes:
    """The bytes of a tensor: each string with its length in front."""
    if value.dtype != np.object_:
        return np.ascontiguousarray(value).tobytes()
    return b"".join(len(word).to_bytes(4, "little") + word for word in words(value))


def _as_int64(value: int) -> int:
    """The number with the same bits: gRPC's parameters have no unsigned numbers."""
    return value - 2**64 if value >= 2**63 else value


def _answer(response) -> Answer:
    result = InferResult(response)
    outputs = {tensor.name: result.as_numpy(tensor.name) for tensor in response.outputs}
    values = {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in response.parameters.items()}
    return Answer(outputs, values)

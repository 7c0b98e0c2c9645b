"""The three ways a client talks to Triton, with one face: `step` asks and waits.

Each raises tritonclient's InferenceServerException for an error. Deadlines are long: this
tritonserver version crashes on very short ones, and no test is about them.
"""

from __future__ import annotations

import dataclasses
import itertools
import queue

import numpy as np
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

TIMEOUT_S = 120.0

_ids = itertools.count(1)


def new_id() -> int:
    """A sequence id that no other test has used."""
    return next(_ids)


def _ask(library, inputs, outputs, more):
    """The arguments that both client libraries share."""
    asked = []
    for name, value in inputs.items():
        tensor = library.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(np.ascontiguousarray(value))
        asked.append(tensor)
    wanted = None if outputs is None else [library.InferRequestedOutput(name) for name in outputs]
    return {"inputs": asked, "outputs": wanted, **more}


class Unary:
    """gRPC, one call a request. May be used by several threads at once."""

    def __init__(self, deployment):
        self.client = grpc_client.InferenceServerClient(deployment.server.grpc_url)

    def step(self, model: str, sequence_id, inputs, *, start=False, end=False, outputs=None, version=""):
        result = self.client.infer(
            model,
            **_ask(grpc_client, inputs, outputs, {"model_version": version}),
            sequence_id=sequence_id,
            sequence_start=start,
            sequence_end=end,
            client_timeout=TIMEOUT_S,
        )
        return {out.name: result.as_numpy(out.name) for out in result.get_response().outputs}

    def close(self):
        self.client.close()


class Http:
    """HTTP with binary tensors. One thread only."""

    def __init__(self, deployment):
        self.client = http_client.InferenceServerClient(
            deployment.server.http_url,
            connection_timeout=TIMEOUT_S,
            network_timeout=TIMEOUT_S,
        )

    def step(self, model: str, sequence_id, inputs, *, start=False, end=False, outputs=None, version=""):
        result = self.client.infer(
            model,
            **_ask(http_client, inputs, outputs, {"model_version": version}),
            sequence_id=sequence_id,
            sequence_start=start,
            sequence_end=end,
        )
        return {out["name"]: result.as_numpy(out["name"]) for out in result.get_response()["outputs"]}

    def close(self):
        self.client.close()


@dataclasses.dataclass(frozen=True)
class Reply:
    """What came back on a stream for one request. An error carries no request id there."""

    request_id: str
    outputs: dict[str, np.ndarray]
    error: InferenceServerException | None = None


class Stream:
    """gRPC, one stream for all requests. `send` does not wait; `replies` collects."""

    def __init__(self, deployment):
        self.client = grpc_client.InferenceServerClient(deployment.server.grpc_url)
        self.arrived: queue.Queue[Reply] = queue.Queue()
        self.client.start_stream(callback=self._arrive)

    def _arrive(self, result, error):
        if error is not None:
            self.arrived.put(Reply("", {}, error))
            return
        response = result.get_response()
        outputs = {out.name: result.as_numpy(out.name) for out in response.outputs}
        self.arrived.put(Reply(response.id, outputs))

    def send(
        self,
        model: str,
        sequence_id,
        inputs,
        *,
        start=False,
        end=False,
        outputs=None,
        version="",
        request_id="",
    ):
        self.client.async_stream_infer(
            model,
            **_ask(grpc_client, inputs, outputs, {"model_version": version}),
            sequence_id=sequence_id,
            sequence_start=start,
            sequence_end=end,
            request_id=request_id,
        )

    def replies(self, count: int) -> list[Reply]:
        return [self.arrived.get(timeout=TIMEOUT_S) for _ in range(count)]

    def step(self, model: str, sequence_id, inputs, **how):
        self.send(model, sequence_id, inputs, **how)
        (reply,) = self.replies(1)
        if reply.error is not None:
            raise reply.error
        return reply.outputs

    def close(self):
        self.client.stop_stream()
        self.client.close()


Client = Unary | Stream | Http

PROTOCOLS: dict[str, type[Client]] = {"unary": Unary, "stream": Stream, "http": Http}

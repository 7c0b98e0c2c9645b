"""What the client tells a proxy, and when it leaves a server. A gRPC service in place of a server that is drained or replaced."""

from __future__ import annotations

import concurrent.futures
import contextlib

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from triton_stateful import (
    Retry,
    Sequence,
    SequenceMissing,
    SequenceMoved,
    StatefulError,
    StoreDamaged,
    StoreFailed,
    Stream,
    Unavailable,
)
from triton_stateful.errors import of_server

STATE_API = model_config_pb2.ModelParameter(string_value="true")
INPUT = model_config_pb2.ModelInput(name="INPUT", data_type=model_config_pb2.TYPE_FP32, dims=[1])
ONE = np.ones(1, np.float32)


class Service(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers each request without outputs, and a request on a stream with the next of `errors`, if it is no empty text."""

    def __init__(self):
        self.headers: list[str] = []
        self.streams: list[list[str]] = []
        self.errors: list[str] = []
        self.refusals = 0

    def ModelConfig(self, request, context):
        if self.refusals:
            self.refusals -= 1
            context.abort(grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'model' has no available versions")
        config = model_config_pb2.ModelConfig(name=request.name, input=[INPUT], parameters={"state_api": STATE_API})
        return service_pb2.ModelConfigResponse(config=config)

    def ModelInfer(self, request, context):
        self.headers.append(dict(context.invocation_metadata())["sequence-id"])
        return service_pb2.ModelInferResponse()

    def ModelStreamInfer(self, requests, context):
        answers: list[str] = []
        self.streams.append(answers)
        self.headers.append(dict(context.invocation_metadata())["sequence-id"])
        for request in requests:
            answers.append(self.errors.pop(0) if self.errors else "")
            answer = service_pb2.ModelInferResponse(id=request.id)
            yield service_pb2.ModelStreamInferResponse(error_message=answers[-1], infer_response=answer)


@pytest.fixture
def service():
    made = Service()
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(8))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(made, server)
    made.url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield made
    server.stop(None)


@pytest.mark.parametrize(
    ("sequence_id", "headers", "wanted"),
    [(7, None, "7"), ("a é", None, "a%20%C3%A9"), (7, {"sequence-id": "group"}, "group"), (7, {"other": "x"}, "7")],
)
def test_requests_have_the_id_or_what_is_given(service, sequence_id, headers, wanted):
    sequence = Sequence(service.url, "model", sequence_id, headers=headers)
    sequence.step(ONE)
    assert service.headers == [wanted]


def test_the_configuration_is_asked_for_again_while_a_server_stops(service):
    service.refusals = 2
    Sequence(service.url, "model", retry=Retry(attempts=3, backoff=0)).step(ONE)
    service.refusals = 2
    with pytest.raises(Unavailable, match="no available versions"):
        Sequence(service.url, "model", retry=Retry(attempts=2, backoff=0)).step(ONE)
    assert len(service.headers) == 1


def test_a_clone_is_looked_for_where_the_original_is(service):
    with tritonclient.grpc.InferenceServerClient(service.url) as client, contextlib.suppress(KeyError):
        # the service doesn't say how many steps it has made
        Sequence(client, "model", 8, clone_of=7).info()
    assert service.headers == ["7"]


@pytest.mark.parametrize(
    "error", ["SEQUENCE_MOVED: this server drains", "GRPC server is shutting down and has stopped"]
)
def test_a_stream_leaves_a_server_that_wants_it_when_all_answers_have_come(service, error):
    service.errors = ["", error, "", ""]
    with Stream(service.url) as stream:
        sequences = [Sequence(stream, "model", retry=Retry(attempts=3, backoff=0)) for _ in range(2)]
        futures = [sequence.send(ONE) for sequence in sequences for _ in range(2)]
        assert isinstance(futures[1].exception(10), Unavailable)
        later = Sequence(stream, "model")
        later.send(ONE).result(10)
        assert futures[3].result(10) is not None
        sequences[1].step(ONE)
    # none of the requests that were sent before is lost, and the new stream goes to the same place if that still lives
    assert len(service.streams) == 2 and sum(map(len, service.streams)) == 6
    assert len({*service.headers}) == 1


@pytest.mark.parametrize(
    ("status", "text", "of_stream", "wanted"),
    [
        ("StatusCode.INTERNAL", "upstream reset", True, Unavailable),
        ("StatusCode.CANCELLED", "", True, Unavailable),
        ("StatusCode.INTERNAL", "the run failed", False, StatefulError),
        (None, "the run failed", True, StatefulError),
        (None, "GRPC server is shutting down and has stopped accepting new requests.", True, Unavailable),
        ("StatusCode.NOT_FOUND", "Request for unknown model: 'm' has no available versions", False, Unavailable),
        ("StatusCode.NOT_FOUND", "Request for unknown model: 'm' is not found", False, StatefulError),
        ("StatusCode.UNAVAILABLE", "SEQUENCE_MOVED: x", False, SequenceMoved),
        (None, "SEQUENCE_MOVED: x", True, SequenceMoved),
        (None, "STATE_STORE_FAILED: x", True, StoreFailed),
        ("StatusCode.INTERNAL", "STATE_STORE_DAMAGED: x", False, StoreDamaged),
        ("StatusCode.NOT_FOUND", "SEQUENCE_NOT_SAVED: x", False, SequenceMissing),
        ("StatusCode.PERMISSION_DENIED", "", True, StatefulError),
    ],
)
def test_errors_of_servers_and_proxies(status, text, of_stream, wanted):
    assert type(of_server(InferenceServerException(text, status), of_stream)) is wanted

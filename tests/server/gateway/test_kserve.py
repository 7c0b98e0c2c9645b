"""Triton's own API, KServe's version 2, which the gateway passes on to Triton unchanged."""

import contextlib

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException

from harness import models, raw
from harness.clients import PROTOCOLS
from harness.conversations import interleave, together
from harness.gateway import Gateway
from harness.own import Talk, fails_with, fed, total
from support.server import HOST, free_port


class _Server:
    """A gateway in the place of a deployment: Triton's clients read its addresses from `server`."""

    def __init__(self, gateway):
        self.server = self
        self.grpc_url, self.http_url = gateway.grpc_url, gateway.rest_url


@pytest.fixture
def through(gateway):
    """Clients of Triton that are connected to the gateway."""
    with contextlib.ExitStack() as opened:

        def connect(made):
            client = made(_Server(gateway))
            opened.callback(client.close)
            return client

        yield connect


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tritonclient(deployment, through, protocol):
    """Sequences of core's batcher, over unary calls, streams and HTTP."""
    model = deployment.serve(models.counter(name="kserve_counter"))
    interleave(through(PROTOCOLS[protocol]), model, np.random.default_rng(1), sequences=5)


@pytest.mark.parametrize("protocol", raw.PROTOCOLS)
def test_sequences_of_the_backend(serve, through, protocol):
    client = through(raw.PROTOCOLS[protocol])
    Talk(client, serve(), 42).whole(4)
    with fails_with("SEQUENCE_MISSING", 42):
        Talk(client, serve(), 42).step()


def test_a_stream_carries_many_requests_both_ways(serve, through):
    """Requests go on while responses come, and keep their order."""
    model, streams = serve(), [through(raw.Stream) for _ in range(4)]

    def flood(at: int) -> None:
        stream, length = streams[at], 90
        for i in range(length):
            flags = {"sequence_start": i == 0, "sequence_end": i == length - 1}
            stream.send(model.name, fed(1), {"sequence_id": at + 1, **flags})
        replies = [stream.reply() for _ in range(length)]
        assert [(number, total(answer)) for number, answer in replies] == [(i, i + 1) for i in range(length)]

    together(lambda at=at: flood(at) for at in range(4))


def test_a_stream_that_breaks_off(deployment, serve, through):
    """Its requests are cancelled in Triton, and the gateway goes on."""
    model = serve()
    stream = through(raw.Stream)
    stream.send(model.name, fed(1), {"sequence_id": 42, "sequence_start": True})
    stream.reply()
    for _ in range(5):
        stream.send(model.name, fed(1, work=20), {"sequence_id": 42})
    stream.reply()
    stream.leave()
    client = through(raw.Unary)
    assert total(client.ask(model.name, fed(0), {"sequence_id": 42, "sequence_end": True})) in range(2, 7)


def test_deadlines_that_pass_cost_no_other_client_an_answer(gateway, serve, connect, through):
    """They share one connection to Triton. A request that is answered in time is followed by longer ones."""
    model, client = serve(parameters={"max_sequence_number": 1000}), through(raw.Unary)
    steady = connect("predict")
    steady.ask(model.name, fed(0), {"sequence_id": 1, "sequence_start": True})
    passed, work = 0, 150
    for at in range(1, 31):
        request = raw.request_of(model.name, fed(1, work), {"sequence_id": 1000 + at, "sequence_start": True})
        late = client.stub.ModelInfer.future(request, timeout=0.05)
        assert total(steady.ask(model.name, fed(1), {"sequence_id": 1})) == 2 * at - 1
        has_passed = late.exception() is not None
        passed += has_passed
        work *= 1 if has_passed else 2
        assert total(steady.ask(model.name, fed(1), {"sequence_id": 1})) == 2 * at
    assert passed > 0


def test_one_sequence_by_both_apis(serve, predict, through):
    model, client = serve(), through(raw.Unary)
    assert total(client.ask(model.name, fed(1), {"sequence_id": 42, "sequence_start": True})) == 1
    assert total(predict.ask(model.name, fed(2), {"sequence_id": 42})) == 3
    assert total(client.ask(model.name, fed(4), {"sequence_id": 42, "sequence_end": True})) == 7


@pytest.mark.parametrize("library", [grpc_client, http_client], ids=["grpc", "http"])
def test_what_else_tritonclient_asks(gateway, serve, library):
    model = serve().name
    url = gateway.grpc_url if library is grpc_client else gateway.rest_url
    client = library.InferenceServerClient(url)
    # not that the server is ready: it is shared with tests of models that fail to load
    assert client.is_server_live() and client.is_model_ready(model)
    assert not client.is_model_ready("no_such_model")
    config = client.get_model_config(model)
    metadata = client.get_model_metadata(model)
    index = client.get_model_repository_index()
    if library is grpc_client:
        assert config.config.name == metadata.name == model and model in {one.name for one in index.models}
    else:
        assert config["name"] == metadata["name"] == model and model in {one["name"] for one in index}
    with pytest.raises(InferenceServerException, match="no_such_model"):
        client.get_model_config("no_such_model")
    client.close()


def test_binary_tensors_over_http(deployment, gateway):
    """Their lengths are in headers."""
    model = deployment.serve(models.echo("fp32", "kserve_echo"))
    client = http_client.InferenceServerClient(gateway.rest_url)
    sent = np.random.default_rng(1).standard_normal((1, 4)).astype(np.float32)
    tensor = http_client.InferInput("INPUT", [1, 4], "FP32").set_data_from_numpy(sent, binary_data=True)
    wanted = [http_client.InferRequestedOutput("OUTPUT", binary_data=True)]
    for start in (True, False):
        answer = client.infer(model.name, [tensor], outputs=wanted, sequence_id=1, sequence_start=start)
    assert answer.as_numpy("OUTPUT").tobytes() == sent.tobytes()
    client.infer(model.name, [tensor], sequence_id=1, sequence_end=True)
    client.close()


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_bodies(deployment, gateway, algorithm):
    model = deployment.serve(models.counter(name="kserve_compressed"))
    client = http_client.InferenceServerClient(gateway.rest_url)
    tensor = http_client.InferInput("INPUT", [1, 4], "FP32").set_data_from_numpy(np.ones((1, 4), np.float32))
    how = {"request_compression_algorithm": algorithm, "response_compression_algorithm": algorithm}
    flags = {"sequence_id": 1, "sequence_start": True, "sequence_end": True}
    answer = client.infer(model.name, [tensor], **how, **flags)
    assert answer.as_numpy("OUTPUT").tolist() == [[1] * 4]
    client.close()


def test_errors_and_headers_come_through(deployment, gateway):
    """As Triton sends them, except for headers of the connection."""
    for path in ("/v2", "/v2/health/ready", "/v2/models/no_such_model", "/v2/no/such/path"):
        direct = requests.get(f"http://{deployment.server.http_url}{path}", timeout=10)
        came = gateway.get(path)
        assert (came.status_code, came.content) == (direct.status_code, direct.content), path
        assert came.headers.get("content-type") == direct.headers.get("content-type")
    came = gateway.get("/v2", headers={"Connection": "close, X-Of-This-Hop", "X-Of-This-Hop": "1", "TE": "trailers"})
    assert came.status_code == 200


def test_a_model_without_states_is_served_over_kserve(deployment, gateway):
    """The gateway doesn't look at the requests that it passes on."""
    with http_client.InferenceServerClient(gateway.rest_url) as client:
        assert client.get_model_metadata("control_model")["name"] == "control_model"


def test_without_tritons_http_port_grpc_is_served(deployment):
    """Nothing listens at the address of --triton_http."""
    nowhere = f"{HOST}:{free_port(HOST, ())}"
    with Gateway(f"--triton={deployment.server.grpc_url}", f"--triton_http={nowhere}") as gateway:
        response = gateway.get("/v2/health/ready")
        assert response.status_code == 503 and response.json()["error"]
        with grpc_client.InferenceServerClient(gateway.grpc_url) as client:
            assert client.is_server_live()

"""Requests that are wrong: each is refused alone, and the sequence goes on as if it had not come."""

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from harness import models
from harness.clients import new_id
from harness.conversations import Conversation, outcome, together
from harness.model import Tensor

F32 = np.float32

BAD = {
    "too_wide": {"LEFT": np.zeros((1, 3), F32), "RIGHT": np.zeros((1, 2), F32)},
    "too_narrow": {"LEFT": np.zeros((1, 1), F32), "RIGHT": np.zeros((1, 2), F32)},
    "one_dim_more": {"LEFT": np.zeros((1, 1, 2), F32), "RIGHT": np.zeros((1, 2), F32)},
    "one_dim_less": {"LEFT": np.zeros(2, F32), "RIGHT": np.zeros((1, 2), F32)},
    "empty": {"LEFT": np.zeros((1, 0), F32), "RIGHT": np.zeros((1, 2), F32)},
    "other_type": {"LEFT": np.zeros((1, 2), np.int32), "RIGHT": np.zeros((1, 2), F32)},
    "missing_input": {"LEFT": np.zeros((1, 2), F32)},
    "unknown_input": {
        "LEFT": np.zeros((1, 2), F32),
        "RIGHT": np.zeros((1, 2), F32),
        "MIDDLE": np.zeros((1, 2), F32),
    },
    "misspelt_input": {"LEFT": np.zeros((1, 2), F32), "RIHGT": np.zeros((1, 2), F32)},
    "state_from_outside": {
        "LEFT": np.zeros((1, 2), F32),
        "RIGHT": np.zeros((1, 2), F32),
        "TOTAL_IN": np.zeros((1, 2), F32),
    },
    "batch_of_two": {"LEFT": np.zeros((2, 2), F32), "RIGHT": np.zeros((2, 2), F32)},
}


@pytest.mark.parametrize(("protocol", "status"), [("unary", "StatusCode.INVALID_ARGUMENT"), ("http", "400")])
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_request_is_refused_and_leaves_the_sequence_as_it_was(deployment, bad, protocol, status):
    model = deployment.serve(models.two_inputs())
    client = deployment.connect(protocol)
    talk = Conversation(client, model, np.random.default_rng(1))
    talk.start()
    with pytest.raises(InferenceServerException) as refused:
        client.step(model.name, talk.sequence_id, BAD[bad])
    assert refused.value.status() == status, refused.value
    talk.step()
    talk.end()


@pytest.mark.parametrize("bytes_sent", [0, 4, 12])
def test_a_tensor_of_the_wrong_byte_size_is_refused(deployment, bytes_sent):
    model = deployment.serve(models.two_inputs())
    talk = Conversation(deployment.connect(), model, np.random.default_rng(2))
    talk.start()

    request = service_pb2.ModelInferRequest(model_name=model.name)
    request.parameters["sequence_id"].int64_param = talk.sequence_id
    for name in ("LEFT", "RIGHT"):
        request.inputs.add(name=name, datatype="FP32", shape=[1, 2])
    request.raw_input_contents.extend([bytes(bytes_sent), bytes(8)])
    with grpc.insecure_channel(deployment.server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.ModelInfer(request, timeout=60)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT

    talk.step()
    talk.end()


def test_a_variable_dimension_of_zero_harms_nobody(deployment):
    # ONNX Runtime makes a state of another shape from it: [1, 0] instead of [1, 1]
    model = deployment.serve(models.accumulate())
    talk = Conversation(deployment.connect(), model, np.random.default_rng(3))
    talk.start()
    nothing = {"INPUT": np.zeros((1, 0), F32)}
    came = outcome(lambda: talk.client.step(model.name, talk.sequence_id, nothing))
    assert isinstance(came, InferenceServerException), came
    talk.step()
    talk.end()


def test_a_shape_that_the_configuration_allows_and_the_model_does_not_is_refused_alone(deployment):
    # the configuration says any length; the model takes four
    model = deployment.serve(
        models.counter(
            name="counter_of_any_width",
            inputs=(Tensor("INPUT", "fp32", (-1,)),),
            max_batch_size=4,
            oldest="preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 100000",
        )
    )
    client = deployment.connect()
    four = {"INPUT": np.ones((1, 4), F32)}
    talks = [Conversation(client, model, np.random.default_rng(i)) for i in range(3)]
    together(lambda talk=talk: talk.start(four) for talk in talks)
    five = Conversation(client, model, np.random.default_rng(9))
    came = together(
        [
            lambda: outcome(lambda: five.start({"INPUT": np.ones((1, 5), F32)})),
            *(lambda talk=talk: talk.step(four) for talk in talks),
        ]
    )
    assert isinstance(came[0], InferenceServerException)
    assert came[0].status() == "StatusCode.INVALID_ARGUMENT"
    assert "INPUT" in came[0].message()
    together(lambda talk=talk: talk.end(four) for talk in talks)


def test_a_start_that_is_refused_for_its_shape_takes_no_slot(deployment):
    model = deployment.serve(models.two_inputs("two_inputs_refused", max_candidates=4))
    client = deployment.connect()
    for bad in BAD.values():
        with pytest.raises(InferenceServerException):
            client.step(model.name, new_id(), bad, start=True)
    deployment.settles("stateful_live_sequences", model, 0)
    Conversation(client, model, np.random.default_rng(4)).whole(3)


def test_bad_requests_do_not_disturb_sequences_of_the_same_moment(deployment):
    model = deployment.serve(models.two_inputs())
    client = deployment.connect()

    def good(seed):
        rng = np.random.default_rng(seed)
        for _ in range(6):
            Conversation(client, model, rng).whole(4)

    def bad():
        for fed in list(BAD.values()) * 4:
            with pytest.raises(InferenceServerException):
                client.step(model.name, new_id(), fed, start=True)

    together([*(lambda seed=seed: good(seed) for seed in range(6)), bad, bad])

"""What one client's requests may make the server take, and that it gives it back."""

import re

import numpy as np
from tritonclient.utils import InferenceServerException

from harness import models
from harness.batches import TOGETHER, four, runs_of
from harness.clients import new_id
from harness.conversations import outcome, together
from harness.graphs import BATCH, graph, node
from harness.model import Model, Tensor

MB = 1 << 20
# ONNX Runtime's arena keeps what a run needed; what is measured here is the backend's
NO_ARENA = {"enable_mem_arena": "0"}
EMPTY = np.full((1, 2_000_000), b"", np.object_)


def echo(name: str) -> Model:
    """Y is X, any number of strings; the state counts nothing."""

    def build():
        strings, one = [BATCH, "T"], [BATCH, 1]
        return graph(
            [node("Identity", "X", "Y"), node("Identity", "S_IN", "S_OUT")],
            [("X", "string", strings), ("S_IN", "fp32", one)],
            [("Y", "string", strings), ("S_OUT", "fp32", one)],
        )

    inputs, outputs = (Tensor("X", "string", (-1,)),), (Tensor("Y", "string", (-1,)),)
    return Model(name, build, inputs=inputs, outputs=outputs, states=(("S_IN", "S_OUT"),), parameters=NO_ARENA)


def test_a_long_chunk_is_not_what_short_ones_are_filled_up_to(deploy):
    deployed = deploy()
    model = models.masked("memory_padded", **TOGETHER | {"max_batch_size": 16})
    model = deployed.serve(model.with_parameters(model.name, **NO_ARENA))
    talks = [talk for _ in range(4) for talk in four(deployed, model)]

    def ask(lengths, **how):
        return lambda: together(
            lambda talk=talk, length=length: talk.step({"X": np.ones((1, length), np.float32)}, **how)
            for talk, length in zip(talks, lengths, strict=True)
        )

    ask([16] * 16, start=True)()
    before, long = deployed.resident_bytes(), 16 * MB // 4
    ran = runs_of(deployed, model, ask([long] + [16] * 15))
    assert ran[1] >= 1 and sum(size * runs for size, runs in ran.items()) == 16, ran
    # all 16 filled up were 256 MB; the server's front end keeps some of the long request and of its answer
    assert deployed.resident_bytes() - before < 150 * MB
    ask([16] * 16, end=True)()


def test_strings_take_no_memory_each_and_none_when_they_have_been_answered(deploy):
    deployed = deploy()
    model, client, sequence_id = deployed.serve(echo("memory_strings")), deployed.connect(), new_id()
    client.step(model.name, sequence_id, {"X": EMPTY[:, :4]}, start=True)
    before = deployed.resident_bytes()
    came = client.step(model.name, sequence_id, {"X": EMPTY}, end=True)
    assert came["Y"].shape == EMPTY.shape
    # 8 MB were sent; with 24 bytes more for each element, and the tensors kept, 200 MB were left
    assert deployed.resident_bytes() - before < 80 * MB


def test_a_request_that_there_is_no_memory_for_is_refused_and_the_sequence_goes_on(deploy):
    deployed = deploy()
    model, client, sequence_id = deployed.serve(echo("memory_none")), deployed.connect(), new_id()
    client.step(model.name, sequence_id, {"X": EMPTY[:, :4]}, start=True)
    # the front end needs some 20 MB for the request, the backend and ONNX Runtime 64 MB each for its tensor
    with deployed.without_more_memory(than=50 * MB):
        refused = outcome(lambda: client.step(model.name, sequence_id, {"X": EMPTY}))
    assert isinstance(refused, InferenceServerException) and refused.status() == "StatusCode.UNAVAILABLE", refused
    assert re.search("bytes of host memory|bad_alloc", refused.message()), refused
    came = client.step(model.name, sequence_id, {"X": EMPTY[:, :4]}, end=True)
    assert came["Y"].shape == (1, 4)

"""Runs at load, before the first client: ours, and Triton's."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from harness import models
from harness.batches import batch_sizes
from harness.conversations import Conversation, interleave
from harness.graphs import BATCH
from harness.refusals import refused

pytestmark = pytest.mark.simulated_device

MADE = [
    lambda name: models.counter(name=name),
    lambda name: models.lstm(name=name),
    lambda name: models.append(name=name),
    lambda name: models.caches(name=name),
    lambda name: models.masked(name, context=2).with_parameters(name, input_context="X=2"),
    lambda name: models.accumulate(name),
    lambda name: models.speech_like(name=name),
]
IDS = ["counter", "lstm", "append", "caches", "masked", "accumulate", "speech_like"]


@pytest.mark.parametrize("make", MADE, ids=IDS)
def test_warm_up_sizes_run_at_load_and_leave_nothing(deployment, make, request):
    model = make(f"warm_{request.node.callspec.id}")
    before = len(deployment.server.log_text())
    model = deployment.serve(model.with_parameters(model.name, warmup_batch_sizes="1, 4 8"))
    assert "warm-up" not in deployment.server.log_text()[before:], "a failure would be there"
    assert batch_sizes(deployment, model) == {}, "Triton counts requests only"
    assert deployment.metric("stateful_live_sequences", model) == 0
    assert deployment.metric("stateful_sequences_started_total", model) == 0
    interleave(deployment.connect(), model, np.random.default_rng(1), sequences=4)


def test_a_warm_up_that_fails_is_a_warning(deployment):
    # an index of zero is in the table, but not of this one, which has none
    model = models.looked_up("warm_fails")
    empty = model.variant(model.name, build=lambda: emptied(model.build()))
    before = len(deployment.server.log_text())
    deployment.serve(empty.with_parameters(model.name, warmup_batch_sizes=2))
    log = deployment.server.log_text()[before:]
    assert "the warm-up with 2 rows failed" in log, log


def emptied(graph: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with a TABLE of no elements."""
    [table] = graph.graph.initializer
    table.CopyFrom(numpy_helper.from_array(np.zeros(0, object), table.name))
    return graph


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("none", "0", ["0", "1", "8"]),
        ("too_many", "1, 9", ["'9'", "max_batch_size", "8"]),
        ("no_number", "1 x", ["'x'"]),
        ("negative", "-1", ["'-1'"]),
    ],
)
def test_a_bad_warm_up_size_is_refused_by_value_and_rule(deployment, name, value, words):
    model = models.counter(name=f"refused_warmup_{name}").with_parameters(
        f"refused_warmup_{name}", warmup_batch_sizes=value
    )
    refused(deployment, model, "warmup_batch_sizes", *words)


def warmup(inputs: str, batch_size: int = 3) -> str:
    return f'model_warmup {{ name: "w" batch_size: {batch_size} {inputs} }}'


def of(name: str, kind: str, dims: str) -> str:
    return f'inputs {{ key: "{name}" value {{ data_type: TYPE_{kind} dims: [ {dims} ] zero_data: true }} }}'


@pytest.mark.parametrize(
    ("name", "make", "inputs"),
    [
        ("growing", lambda name, **more: models.append(name=name, **more), of("INPUT", "FP32", "5, 2")),
        (
            "context",
            lambda name, **more: models.framed(name, [BATCH, "T"], (3, 1), (-1,), **more),
            of("FRAMES", "FP32", "4"),
        ),
        ("lengths", lambda name, **more: models.masked(name, **more), of("X", "FP32", "6")),
    ],
)
def test_tritons_warm_up_runs_and_leaves_nothing(deployment, name, make, inputs):
    model = deployment.serve(make(f"warm_triton_{name}", more=warmup(inputs)))
    assert deployment.metric("stateful_live_sequences", model) == 0
    assert deployment.metric("stateful_growing_state_bytes", model) == 0
    interleave(deployment.connect(), model, np.random.default_rng(1), sequences=4)
    Conversation(deployment.connect(), model, np.random.default_rng(2)).whole(3)

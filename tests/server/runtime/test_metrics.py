"""The metrics of sequences, runs and failures in Triton's Prometheus endpoint."""

import re
import time

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import models
from harness.conversations import Conversation, together
from harness.deployment import eventually
from harness.own import own

HISTOGRAMS = (
    "stateful_run_rows",
    "stateful_run_duration_seconds",
    "stateful_run_state_bytes_copied",
    "stateful_queue_duration_seconds",
    "stateful_sequence_duration_seconds",
    "stateful_sequence_requests",
)


def converse(deployment, model, sequences: int, steps: int) -> None:
    client = deployment.connect()
    together(
        lambda seed=seed: Conversation(client, model, np.random.default_rng(seed)).whole(steps)
        for seed in range(sequences)
    )


def test_runs_are_observed(deployment):
    model = deployment.serve(models.slow("slow_observed"))
    began = time.monotonic()
    converse(deployment, model, 8, 5)
    elapsed = time.monotonic() - began
    deployment.settles("stateful_run_rows_sum", model, 40)
    runs = deployment.statistics(model).execution_count
    assert deployment.metric("stateful_run_rows_count", model) == runs
    assert deployment.metric("stateful_run_duration_seconds_count", model) == runs
    assert 0 < deployment.metric("stateful_run_duration_seconds_sum", model) <= runs * elapsed
    copied = deployment.metric("stateful_state_bytes_copied_total", model)
    assert 0 < deployment.metric("stateful_run_state_bytes_copied_sum", model) <= copied
    assert deployment.metric("stateful_queue_duration_seconds_count", model) == 0, "the queue is core's"


def test_lives_are_observed_when_they_are_over(deployment):
    model = deployment.serve(models.counter(name="lives_observed"))
    converse(deployment, model, 3, 5)
    deployment.settles("stateful_sequence_requests_count", model, 3)
    assert deployment.metric("stateful_sequence_requests_sum", model) == 15
    assert deployment.metric("stateful_sequence_duration_seconds_count", model) == 3
    assert deployment.metric("stateful_sequence_duration_seconds_sum", model) > 0


def test_the_queue_of_the_backend_is_observed(deployment):
    model = deployment.serve(own(models.counter(name="queue_observed")))
    began = time.monotonic()
    converse(deployment, model, 3, 5)
    elapsed = time.monotonic() - began
    deployment.settles("stateful_queue_duration_seconds_count", model, 15)
    assert 0 < deployment.metric("stateful_queue_duration_seconds_sum", model) <= 15 * elapsed


@pytest.mark.parametrize("rule", ["own", "oldest"])
def test_failures_are_counted_by_their_reason(deployment, rule):
    model = models.fails(f"fails_by_reason_{rule}")
    model = deployment.serve(own(model) if rule == "own" else model)
    client = deployment.connect()
    talk = Conversation(client, model, np.random.default_rng(1))
    talk.start()
    assert set(deployment.failures(model).values()) == {0.0}, "every reason is there from the beginning"
    for _ in range(3):
        with pytest.raises(InferenceServerException):
            talk.step({"INPUT": np.array([[99]], np.int64)})
    with pytest.raises(InferenceServerException):
        talk.step({"INPUT": np.array([[1, 2]], np.int64)})
    talk.end()
    eventually(lambda: deployment.failures(model)["run"], lambda count: count == 3)
    # core refuses a wrong shape itself
    assert sum(deployment.failures(model).values()) == 3


def test_every_histogram_has_a_bucket_for_each_bound(deployment):
    model = deployment.serve(models.counter(name="buckets_counted"))
    converse(deployment, model, 1, 2)
    text = deployment.server.metrics()
    for name in HISTOGRAMS:
        bounds = re.findall(rf'^{name}_bucket{{[^}}]*model="{model.name}"[^}}]*le="([^"]+)"}}', text, re.M)
        assert len(bounds) > 5, name
        assert bounds[-1] == "+Inf"
        assert [float(bound) for bound in bounds] == sorted(float(bound) for bound in bounds)

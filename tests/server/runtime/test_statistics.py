"""Triton's statistics: requests, runs, and where the time went."""

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import models
from harness.conversations import Conversation, together


def test_successes_are_counted_with_the_times_of_every_stage(deployment):
    model = deployment.serve(models.lstm("lstm_counted"))
    client = deployment.connect()
    together(lambda seed=seed: Conversation(client, model, np.random.default_rng(seed)).whole(5) for seed in range(4))
    found = deployment.statistics(model)
    assert found.inference_count == 20
    assert 0 < found.execution_count <= 20
    times = found.inference_stats
    assert times.success.count == 20
    assert times.fail.count == 0
    for stage in (times.queue, times.compute_input, times.compute_infer, times.compute_output):
        assert stage.count == 20
        assert stage.ns > 0
    assert times.success.ns >= times.compute_infer.ns


def test_batches_are_counted_by_their_size(deployment):
    model = deployment.serve(models.slow("slow_counted"))
    client = deployment.connect()
    together(lambda seed=seed: Conversation(client, model, np.random.default_rng(seed)).whole(5) for seed in range(8))
    found = deployment.statistics(model)
    assert sum(b.batch_size * b.compute_infer.count for b in found.batch_stats) == 40
    assert sum(b.compute_infer.count for b in found.batch_stats) == found.execution_count
    for batch in found.batch_stats:
        assert batch.compute_input.ns > 0
        assert batch.compute_infer.ns > 0
        assert batch.compute_output.ns > 0


def test_failures_are_counted_as_failures(deployment):
    model = deployment.serve(models.fails("fails_counted"))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(1))
    talk.start()
    for _ in range(3):
        with pytest.raises(InferenceServerException):
            talk.step({"INPUT": np.array([[99]], np.int64)})
    talk.end()
    times = deployment.statistics(model).inference_stats
    assert (times.success.count, times.fail.count) == (2, 3)


def test_a_sequence_that_found_no_slot_is_counted_as_a_failure(deployment):
    model = models.counter(name="refusals_counted", max_candidates=4, max_batch_size=2)
    model = deployment.serve(model.with_parameters(model.name, max_candidate_sequence_use_ratio=0.5))
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng(i)) for i in range(3)]
    for talk in talks[:2]:
        talk.start()
    with pytest.raises(InferenceServerException):
        talks[2].start()
    for talk in talks[:2]:
        talk.end()
    times = deployment.statistics(model).inference_stats
    assert (times.success.count, times.fail.count) == (4, 1)

"""The `direct` strategy, where every sequence has its row and a batch may have holes; and models
without a batch dimension."""

import numpy as np
import pytest

from harness import models
from harness.clients import new_id
from harness.conversations import Conversation, interleave, pipeline, script, together
from harness.model import Tensor
from harness.strategies import both_strategies

pytestmark = pytest.mark.simulated_device


@pytest.mark.parametrize("make", [models.accumulate, models.counter, models.lstm, models.axes])
@pytest.mark.host_and_device
def test_rows_with_holes_between_them_keep_their_states(deployment, make):
    model = deployment.serve(make(name=f"{make.__name__}_direct", direct="", max_batch_size=6))
    interleave(deployment.connect(), model, np.random.default_rng(1), sequences=6)


def test_more_sequences_than_rows_take_their_turn(deployment):
    model = deployment.serve(models.counter(name="counter_direct_queued", direct="", max_batch_size=3))
    client = deployment.connect()

    def talk(seed):
        rng = np.random.default_rng(seed)
        for _ in range(3):
            Conversation(client, model, rng).whole(int(rng.integers(1, 7)))

    together(lambda seed=seed: talk(seed) for seed in range(10))


def test_sequences_that_start_and_end_at_random_share_batches(deployment):
    delay = "max_queue_delay_microseconds: 20000 minimum_slot_utilization: 1.0"
    model = models.controls("controls_direct", direct=delay, max_batch_size=4)
    model = deployment.serve(model)
    client = deployment.connect()

    def talk(seed):
        rng = np.random.default_rng(seed)
        for _ in range(4):
            Conversation(client, model, rng).whole(int(rng.integers(1, 5)))

    together(lambda seed=seed: talk(seed) for seed in range(4))
    assert max(batch.batch_size for batch in deployment.statistics(model).batch_stats) > 1


@pytest.mark.parametrize("instances", [1, 2])
def test_an_id_reused_without_waiting_never_mixes_its_lives(deployment, instances):
    model = models.counter(name=f"counter_direct_reused_{instances}", direct="", max_batch_size=8, instances=instances)
    model = deployment.serve(model)
    rng = np.random.default_rng(2)
    for _ in range(3):
        scripts = [script(model, rng, new_id(), lives=5) for _ in range(6)]
        pipeline(deployment.connect("stream"), model, rng, scripts)


@both_strategies
def test_a_model_without_triton_s_batch_dimension_is_served(deployment, direct):
    model = models.counter(
        name=f"counter_unbatched_{'oldest' if direct is None else 'direct'}",
        max_batch_size=0,
        direct=direct,
        inputs=(Tensor("INPUT", "fp32", (1, 4)),),
        outputs=(Tensor("OUTPUT", "fp32", (1, 4)),),
    )
    model = deployment.serve(model)
    client = deployment.connect()

    def talk(seed):
        rng = np.random.default_rng(seed)
        for _ in range(3):
            Conversation(client, model, rng).whole(5)

    talk(0)
    together(lambda seed=seed: talk(seed) for seed in range(4))

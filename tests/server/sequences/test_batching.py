"""Ready sequences share a run, and nobody notices but the statistics."""

import numpy as np
import pytest

from harness import models
from harness.conversations import Conversation, some_at_once, together

pytestmark = pytest.mark.simulated_device


def batch_sizes(deployment, model) -> dict[int, int]:
    """How many runs there were of each batch size."""
    found = deployment.statistics(model).batch_stats
    return {batch.batch_size: batch.compute_infer.count for batch in found}


def test_requests_that_wait_while_a_run_is_busy_share_the_next(deployment):
    model = deployment.serve(models.slow("slow_batched", max_batch_size=16))
    client = deployment.connect()

    def talk(seed):
        Conversation(client, model, np.random.default_rng(seed)).whole(10)

    together(lambda seed=seed: talk(seed) for seed in range(16))
    sizes = batch_sizes(deployment, model)
    assert max(sizes) > 1, f"every request ran alone: {sizes}"
    assert max(sizes) <= 16
    assert sum(size * runs for size, runs in sizes.items()) == 160


@pytest.mark.parametrize(
    "make",
    [models.counter, models.lstm, models.axes, models.crossed, models.speech_like],
    ids=lambda make: make.__name__,
)
@pytest.mark.host_and_device
def test_full_batches_keep_each_rows_state_with_its_sequence(deployment, make):
    model = deployment.serve(
        make(
            name=f"{make.__name__}_full",
            max_batch_size=6,
            oldest="preferred_batch_size: [ 6 ] max_queue_delay_microseconds: 200000",
        )
    )
    client = deployment.connect()

    def talk(seed):
        # three lengths, so the batch changes its members as it goes
        rng = np.random.default_rng(seed)
        for length in (3 + seed % 3, 4):
            Conversation(client, model, rng).whole(length)

    together(lambda seed=seed: talk(seed) for seed in range(6))
    assert max(batch_sizes(deployment, model)) > 1


def test_requests_of_different_lengths_that_come_together_are_all_right(deployment):
    model = deployment.serve(
        models.accumulate(
            "accumulate_lengths",
            max_batch_size=4,
            oldest="preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 20000",
        )
    )
    client = deployment.connect()

    def talk(seed):
        rng = np.random.default_rng(seed)
        talk = Conversation(client, model, rng)
        for i in range(8):
            length = 3 if rng.integers(2) else 5
            fed = {"INPUT": rng.integers(-9, 9, (1, length)).astype(np.float32)}
            talk.step(fed, start=i == 0, end=i == 7)

    together(lambda seed=seed: talk(seed) for seed in range(8))


def test_no_run_is_larger_than_the_maximum_batch(deployment):
    model = deployment.serve(models.slow("slow_of_three", max_batch_size=3, products=60))
    client = deployment.connect()

    def talk(seed):
        Conversation(client, model, np.random.default_rng(seed)).whole(5)

    together(lambda seed=seed: talk(seed) for seed in range(10))
    assert max(batch_sizes(deployment, model)) <= 3


@pytest.mark.parametrize("make", [models.counter, models.append, models.controls])
def test_batches_are_run_in_parts_of_so_many_rows(deployment, make):
    delay = "preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 20000"
    model = make(name=f"in_parts_{make.__name__}", oldest=delay)
    model = deployment.serve(model.with_parameters(model.name, max_rows_per_run=3, warmup_batch_sizes="1 3"))
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng([4, i])) for i in range(8)]
    together(talk.start for talk in talks)
    some_at_once(talks, np.random.default_rng(4), rounds=6)
    together(talk.end for talk in talks)
    assert max(batch_sizes(deployment, model)) <= 3

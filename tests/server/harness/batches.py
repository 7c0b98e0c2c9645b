"""Requests that come together, and in what batches they ran."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from harness.conversations import Conversation, together
from harness.model import Model

# four sequences whose requests come at once run at once; the delay is for a machine that is busy
TOGETHER = {
    "max_batch_size": 4,
    "oldest": "preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 3000000",
}


def four(deployment, model: Model) -> list[Conversation]:
    """Four sequences of the model."""
    client = deployment.connect()
    return [Conversation(client, model, np.random.default_rng(seed)) for seed in range(4)]


def steps(talks: list[Conversation], asked: list[dict], **how) -> Callable[[], list]:
    """Each sequence's request, all at once."""
    return lambda: together(
        lambda talk=talk, fed=fed: talk.step(fed, **how) for talk, fed in zip(talks, asked, strict=True)
    )


def batch_sizes(deployment, model: Model) -> dict[int, int]:
    """How many runs there were of each batch size."""
    found = deployment.statistics(model).batch_stats
    return {batch.batch_size: batch.compute_infer.count for batch in found}


def runs_of(deployment, model: Model, task: Callable[[], object]) -> dict[int, int]:
    """How many runs of each batch size the task made."""
    before = batch_sizes(deployment, model)
    task()
    after = batch_sizes(deployment, model)
    return {size: runs - before.get(size, 0) for size, runs in after.items() if runs != before.get(size, 0)}

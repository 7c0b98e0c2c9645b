"""More sequences than places: core lets the others wait in its backlog, and each that it admits is served.

The models declare Triton's implicit state and none of our parameters, as models of other backends do.
"""

from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import models
from harness.clients import new_id
from harness.conversations import Conversation, outcome, pipeline, script, together, windowed
from harness.deployment import Deployment
from harness.model import Model
from harness.models import implicit

PLACES = 4

#: How four sequences, and no more, are admitted.
HOW: dict[str, dict[str, Any]] = {
    "oldest": {"max_candidates": 4, "max_batch_size": 4},
    "oldest_delayed": {
        "max_candidates": 4,
        "max_batch_size": 8,
        "oldest": "preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 20000",
    },
    "oldest_of_two_instances": {"max_candidates": 2, "max_batch_size": 2, "instances": 2},
    "direct": {"direct": "", "max_batch_size": 4},
    "direct_of_four_instances": {"direct": "", "max_batch_size": 1, "instances": 4},
}

pytestmark = pytest.mark.parametrize("how", HOW)


def full(deployment: Deployment, name: str, how: str, **changes) -> Model:
    made = models.counter("int64", **HOW[how], **changes)
    model = deployment.serve(implicit(made, f"backlog_{name}_{how}"))
    assert deployment.metric("stateful_slot_capacity", model) == PLACES
    return model


def test_clients_that_wait_for_each_answer_are_all_served(deployment, how):
    model = full(deployment, "in_turn", how)
    client = deployment.connect()

    def talk(seed):
        rng = np.random.default_rng(seed)
        for _ in range(4):
            Conversation(client, model, rng).whole(int(rng.integers(1, 5)))

    together(lambda seed=seed: talk(seed) for seed in range(12))
    deployment.settles("stateful_live_sequences", model, 0)


@pytest.mark.parametrize("lives", [1, 4])
def test_sequences_sent_in_full_before_the_first_answer_are_all_served(deployment, how, lives):
    """With several lives, the backlog has an id more than once."""
    model = full(deployment, f"ahead_{lives}", how)
    rng = np.random.default_rng(lives)
    for _ in range(3):
        scripts = [script(model, rng, new_id(), lives) for _ in range(12)]
        pipeline(deployment.connect("stream"), model, rng, scripts)
    deployment.settles("stateful_live_sequences", model, 0)


def test_a_start_that_waited_gets_the_place_of_a_silent_sequence(deployment, how):
    """Core drops what is silent for longer than the idle limit, and admits the next one at once. The margin that the
    backend adds to the limit is so long here that nobody could wait for it."""
    hour_us = 3_600_000_000
    model = full(
        deployment, "silent", how, idle_us=2_000_000, parameters={"sequence_idle_margin_microseconds": str(hour_us)}
    )
    client, rng = deployment.connect(), np.random.default_rng(6)
    silent = [Conversation(client, model, rng) for _ in range(PLACES)]
    for talk in silent:
        talk.start()
    scripts = [script(model, rng, new_id(), lives=1) for _ in range(3 * PLACES)]
    windowed(deployment.connect("stream"), model, rng, scripts, window=8)

    # core may not have looked at all of them yet; the others go on
    late = [outcome(talk.step) for talk in silent]
    refused = [error.message() for error in late if isinstance(error, InferenceServerException)]
    assert refused
    assert all("must specify the START flag" in message for message in refused), refused
    # their ids serve again, from a fresh state
    scripts = [script(model, rng, talk.sequence_id, lives=2) for talk in silent]
    windowed(deployment.connect("stream"), model, rng, scripts, window=8)

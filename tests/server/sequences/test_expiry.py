"""Sequences that nobody ends: their slots come back after the idle time and the margin."""

import time

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import models
from harness.conversations import Conversation, outcome
from harness.deployment import eventually


def idle(name: str, idle_us: int, margin_us: int, **changes):
    model = models.counter(name=name, idle_us=idle_us, max_batch_size=2, **changes)
    return model.with_parameters(name, sequence_idle_margin_microseconds=margin_us)


def test_an_idle_sequence_is_freed_while_the_server_gets_no_requests(deployment):
    model = deployment.serve(idle("idle", 1_000_000, 200_000, max_candidates=4))
    rng = np.random.default_rng(1)
    client = deployment.connect()
    talks = [Conversation(client, model, rng) for _ in range(3)]
    for talk in talks:
        talk.start()
    deployment.settles("stateful_sequences_started_total", model, 3)
    deployment.settles("stateful_live_sequences", model, 0)
    deployment.settles("stateful_sequences_expired_total", model, 3)
    deployment.settles("stateful_sequences_ended_total", model, 0)
    # core forgot them as well
    with pytest.raises(InferenceServerException, match="START"):
        talks[0].step()
    # and the slots and ids serve again, from a fresh state
    for talk in talks:
        talk.start()
        talk.end()


def test_a_sequence_that_goes_on_does_not_expire(deployment):
    model = deployment.serve(idle("idle_busy", 1_500_000, 0))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(2))
    talk.start()
    began = last = time.monotonic()
    while last - began < 3.0:
        came = outcome(talk.step)
        now = time.monotonic()
        if isinstance(came, InferenceServerException):
            assert now - last > 1.0, came
            talk.start()  # this process or the server paused for so long that the sequence could expire
            began = now = time.monotonic()
        last = now
    talk.end()


def test_an_expired_sequence_makes_room_in_a_full_pool(deployment):
    model = idle("idle_full", 1_000_000, 100_000, max_candidates=6)
    model = model.with_parameters(model.name, max_candidate_sequence_use_ratio=0.5)
    model = deployment.serve(model)
    rng = np.random.default_rng(3)
    client = deployment.connect()
    for _ in range(3):
        Conversation(client, model, rng).start()
    late = Conversation(client, model, rng)

    def started():
        try:
            return late.start()
        except InferenceServerException as error:
            assert error.status() == "StatusCode.UNAVAILABLE"
            return None

    eventually(started, lambda answer: answer is not None)
    late.end()


def test_slabs_are_given_back_when_their_sequences_expire(deployment):
    model = idle("idle_lazy", 1_000_000, 100_000, max_candidates=10)
    model = model.with_parameters(
        model.name,
        initial_buffer_size=2,
        subsequent_buffer_size=2,
        buffer_alloc_threshold=2,
        buffer_dealloc_threshold=1,
    )
    model = deployment.serve(model)
    rng = np.random.default_rng(4)
    client = deployment.connect()
    for _ in range(6):
        Conversation(client, model, rng).start()
    eventually(lambda: deployment.metric("stateful_slots_allocated", model), lambda size: size >= 6)
    deployment.settles("stateful_slots_allocated", model, 2)

"""Sequences that go from one server to another, as snapshots."""

import threading

import numpy as np
import pytest

from harness import models
from harness.conversations import together
from harness.models import booked, ledger
from harness.repetitions import repeated
from harness.state_api import OLDEST, OWN, StateSequence, with_state_api
from harness.values import bits

pytestmark = pytest.mark.simulated_device


@pytest.fixture
def two(deployment, deploy):
    return deployment, deploy()


@pytest.mark.parametrize("rounds", [25, *repeated(750)])
@pytest.mark.parametrize("by", [OWN, OLDEST])
def test_hand_over_under_load(two, connect, by, rounds):
    """Sequences change the server again and again, while others keep both busy."""
    own = {"worker_count": 2} if by == OWN else {}
    model = with_state_api(ledger(f"handed_over_{by}_{rounds}"), by, held_inputs="SCALE", **own)
    for deployment in two:
        deployment.serve(model)
    done = threading.Event()

    def load(deployment, seed: int) -> int:
        one = StateSequence(connect(to=deployment), model, np.random.default_rng(seed))
        one.start(booked(1, 2))
        steps = 0
        while not done.is_set():
            # the log grows with each step
            one.step(booked(seed, None), reset_state="LOG")
            steps += 1
        one.states()
        return steps

    def wander(seed: int) -> None:
        rng = np.random.default_rng([seed, rounds])
        clients = [connect("stream" if seed % 2 else "unary", to=deployment) for deployment in two]
        one = StateSequence(clients[0], model, rng)
        one.start(booked(int(rng.integers(99)), int(rng.integers(1, 9))))
        for round in range(rounds):
            for _ in range(int(rng.integers(0, 3))):
                one.step(booked(int(rng.integers(99)), None), get_state=True)
            reset = {"reset_state": "LOG"} if round % 7 == 0 else {}
            saved = one.save(booked(int(rng.integers(99)), None), **reset)
            there = clients[(round + 1) % 2]
            moved = one.restored(saved, booked(1, None) if rng.integers(2) else None, client=there, query_state=True)
            one.ask(delete=True, end=True)
            one = moved
        one.end(booked(0, None), get_state=True, query_state=True)

    def wander_all() -> list:
        try:
            return together(lambda seed=seed: wander(seed) for seed in range(4))
        finally:
            done.set()

    busy = [lambda deployment=deployment, seed=seed: load(deployment, seed) for seed, deployment in enumerate(two)]
    counts = together([*busy, wander_all])
    assert min(counts[:2]) > 0
    for deployment in two:
        deployment.settles("stateful_live_sequences", model, 1)


KINDS = {
    "batch_inside": models.lstm,
    "growing_and_fixed": models.caches,
    "attention": models.attention,
    "strings": lambda name: models.append("string", name),
    "stored_as_fp16": lambda name: models.axes(name, parameters={"store_states_as_fp16": "1"}),
}


def test_the_answers_are_bit_equal(two, connect):
    """Also if one server schedules the sequences itself, and the other leaves it to core."""
    clients = [connect(to=deployment) for deployment in two]
    for kind, make in KINDS.items():
        served = [
            deployment.serve(with_state_api(make(f"moved_{kind}"), by))
            for deployment, by in zip(two, (OWN, OLDEST), strict=True)
        ]
        one = StateSequence(clients[0], served[0], np.random.default_rng(2))
        one.start()
        one.step()
        saved = one.save()
        other = StateSequence(clients[1], served[1], np.random.default_rng(2))
        other.ask(start=True, restore=saved)
        for _ in range(3):
            inputs = one.model.draw(one.rng)
            came = [talk.step(inputs, get_state=True).outputs for talk in (one, other)]
            assert came[0].keys() == came[1].keys()
            assert all(bits(came[0][name]) == bits(came[1][name]) for name in came[0]), kind
        assert one.save().bytes == other.save().bytes

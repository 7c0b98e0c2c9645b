"""Growing states of megabytes: large enough to have pages of their own, and to be lent to a run where they lie."""

import numpy as np
import pytest

from harness import models
from harness.conversations import Conversation, together

pytestmark = pytest.mark.simulated_device


def chunk(rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    return {"INPUT": rng.standard_normal((1, rows, 2)).astype(np.float32)}


@pytest.mark.parametrize("layout", ["NTW", "TNW", "WTN"])
@pytest.mark.host_and_device
def test_states_that_grow_steadily_and_then_otherwise_stay_right(deployment, layout):
    model = deployment.serve(models.append(name=f"large_{layout}", layout=layout))
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng(seed)) for seed in range(3)]
    usual = [20_000, 3_000, 7]
    for step in range(40):
        for number, talk in enumerate(talks):
            rows = usual[number] if step % 9 else int(talk.rng.integers(1, 60_000))
            started_over = step == 25 and number == 1
            talk.step(chunk(talk.rng, rows), start=step == 0 or started_over, end=step == 39)


@pytest.mark.host_and_device
def test_sequences_that_end_while_they_grow_leave_nothing_to_the_next(deployment):
    model = deployment.serve(models.append(name="large_lives"))
    client = deployment.connect()
    rng = np.random.default_rng(5)
    for _ in range(12):
        talks = [Conversation(client, model, rng) for _ in range(2)]
        rows = [int(rng.integers(20_000, 60_000)) for _ in talks]
        last = int(rng.integers(3, 7))
        for step in range(last + 1):
            for talk, usual in zip(talks, rows, strict=True):
                talk.step(chunk(rng, usual if step < 3 else 40_000), start=step == 0, end=step == last)
    deployment.settles("stateful_growing_state_bytes", model, 0)


@pytest.mark.host_and_device
def test_large_states_of_one_length_share_a_batch_and_of_others_run_alone(deployment):
    model = deployment.serve(models.append(name="large_together", oldest="max_queue_delay_microseconds: 20000"))

    def whole(seed: int) -> None:
        talk = Conversation(deployment.connect(), model, np.random.default_rng(seed))
        for step in range(12):
            rows = 15_000 if step < 8 else 15_000 + seed
            talk.step(chunk(talk.rng, rows), start=step == 0, end=step == 11)

    together([lambda seed=seed: whole(seed) for seed in range(4)])


def test_a_large_state_over_its_limit_stays_as_it_was(deployment):
    limit = 3_000_000
    model = models.append(name="large_limited")
    model = deployment.serve(model.with_parameters(model.name, max_state_bytes_per_sequence=limit))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(1))
    talk.start(chunk(talk.rng, 100_000))
    for _ in range(3):
        talk.step(chunk(talk.rng, 50_000))
    for _ in range(3):
        with pytest.raises(Exception, match=f"2800000 bytes.*{limit}|{limit}"):
            talk.step(chunk(talk.rng, 200_000))
        talk.step(chunk(talk.rng, 1_000))
    talk.end(chunk(talk.rng, 1_000))
    deployment.settles("stateful_growing_state_bytes", model, 0)

"""States stay where a run wrote them: nothing is copied where the same sequences come again, and whatever the
company changes to, each sequence has its own state."""

import dataclasses
import random

import numpy as np
import pytest

from harness import models
from harness.batches import TOGETHER, four, runs_of
from harness.conversations import Conversation, some_at_once, together
from harness.deployment import eventually
from harness.model import Model
from harness.refusals import refused
from harness.repetitions import repeated

pytestmark = pytest.mark.simulated_device

ROW_BYTES = 16
"""The state of `counter`: four floats."""


def copied(deployment, model: Model) -> float:
    return deployment.metric("stateful_state_bytes_copied_total", model)


def copies_of(deployment, model: Model, task) -> float:
    """Bytes of states that the task copied, once the metric rests."""
    before = copied(deployment, model)
    task()
    seen: list[float] = []

    def rests() -> bool:
        seen.append(copied(deployment, model))
        return len(seen) > 3 and len(set(seen[-3:])) == 1

    eventually(rests, lambda resting: resting)
    return seen[-1] - before


def at_once(talks: list[Conversation], order: list[int] | None = None, **how) -> None:
    """All take a step at once, which is one batch."""
    chosen = [talks[at] for at in order] if order else talks
    together(lambda talk=talk: talk.step(**how) for talk in chosen)


MODELS = {
    "first": lambda name, **changes: models.counter("fp32", name, **changes),
    "middle": lambda name, **changes: models.lstm(name, **changes),
    "everywhere": lambda name, **changes: models.axes(name, **changes),
    "forty": lambda name, **changes: models.many_states(name, **changes),
}


@pytest.mark.parametrize("axis", MODELS)
def test_the_same_sequences_again_in_any_order_copy_nothing(deployment, axis):
    model = deployment.serve(MODELS[axis](f"resident_same_{axis}", **TOGETHER))
    talks = four(deployment, model)
    assert runs_of(deployment, model, lambda: at_once(talks, start=True)) == {4: 1}

    def again():
        for _ in range(8):
            at_once(talks, random.sample(range(4), 4))

    runs = {}
    assert copies_of(deployment, model, lambda: runs.update(runs_of(deployment, model, again))) == 0
    assert runs == {4: 8}
    at_once(talks, end=True)


def test_sets_of_sequences_in_turn_copy_nothing_as_long_as_all_can_stay(deployment):
    model = deployment.serve(models.counter("fp32", "resident_sets", **TOGETHER))
    client = deployment.connect()
    sets = [[Conversation(client, model, np.random.default_rng([s, i])) for i in range(4)] for s in range(4)]
    for talks in sets:
        at_once(talks, start=True)
    for talks in sets:
        # Each comes back once before it may stay.
        at_once(talks)
    assert copies_of(deployment, model, lambda: [at_once(talks) for _ in range(3) for talks in sets]) == 0
    few = deployment.serve(
        models.counter("fp32", "resident_sets_of_one", **TOGETHER).with_parameters(
            "resident_sets_of_one", resident_batches=1
        )
    )
    sets = [[Conversation(client, few, np.random.default_rng([s, i])) for i in range(4)] for s in range(4)]
    for talks in sets:
        at_once(talks, start=True)
    turns = copies_of(deployment, few, lambda: [at_once(talks) for _ in range(3) for talks in sets])
    assert 0 < turns <= 12 * 4 * 2 * ROW_BYTES, "at most one copy in and one out for each row"


@pytest.mark.host_and_device
def test_a_row_that_joins_and_one_that_leaves_cost_a_copy_each(deployment):
    model = models.counter("fp32", "resident_swap", **TOGETHER).with_parameters("resident_swap", resident_batches=1)
    model = deployment.serve(model)
    talks = four(deployment, model)
    other = Conversation(deployment.connect(), model, np.random.default_rng(9))
    other.start()
    at_once(talks, start=True)
    at_once(talks)
    at_once(talks)
    swapped = [talks[0], talks[1], talks[2], other]
    assert copies_of(deployment, model, lambda: at_once(swapped)) <= 2 * ROW_BYTES
    assert copies_of(deployment, model, lambda: at_once(swapped)) == 0


def test_one_sequence_alone_copies_nothing(deployment):
    model = deployment.serve(models.counter("fp32", "resident_alone"))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(1))
    talk.start()
    assert copies_of(deployment, model, lambda: [talk.step() for _ in range(20)]) == 0
    talk.end()


@pytest.mark.host_and_device
def test_growing_states_of_the_same_sequences_are_not_copied(deployment):
    model = deployment.serve(models.append("fp32", "resident_growing", **TOGETHER))
    talks = four(deployment, model)
    feed = lambda: {"INPUT": np.random.default_rng().standard_normal((1, 3, 2)).astype(np.float32)}  # noqa: E731

    def round(chosen=talks, **how):
        together(lambda talk=talk: talk.step(feed(), **how) for talk in chosen)

    round(start=True)
    runs = {}
    again = lambda: [round(random.sample(talks, 4)) for _ in range(6)]  # noqa: E731
    assert copies_of(deployment, model, lambda: runs.update(runs_of(deployment, model, again))) == 0
    assert runs == {4: 6}
    row = 7 * 3 * 8
    alone = copies_of(deployment, model, lambda: round(talks[:1]))
    assert 0 < alone <= 5 * row, "all go home, and the one may be copied to its run"
    together(lambda talk=talk: talk.step(feed(), end=True) for talk in talks)
    deployment.settles("stateful_growing_state_bytes", model, 0)


@pytest.mark.parametrize("resident", [1, 4, *repeated(2)])
@pytest.mark.parametrize("axis", MODELS)
@pytest.mark.parametrize("kept", ["as_is", "as_fp16", "padded"])
@pytest.mark.host_and_device
def test_each_sequence_has_its_own_state_in_any_company(deployment, axis, resident, kept):
    name = f"resident_{axis}_{resident}_{kept}"
    parameters = {"resident_batches": resident}
    if kept == "padded":
        parameters["always_pad_to_max_batch"] = 1
    model = MODELS[axis](name, max_batch_size=4).with_parameters(name, **parameters)
    if kept == "as_fp16":
        model = model.with_parameters(name, **parameters, store_states_as_fp16=1)
    model = deployment.serve(model)
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng([resident, i])) for i in range(7)]
    together(talk.start for talk in talks)
    rng = np.random.default_rng(resident)
    some_at_once(talks, rng, 12)
    talks[2].end()
    talks[4].end()
    talks[2].start()
    some_at_once([talk for at, talk in enumerate(talks) if at != 4], rng, 8)
    talks[4].start()
    some_at_once(talks, rng, 4)
    together(talk.end for talk in talks)


@pytest.mark.parametrize("resident", [1, 4])
@pytest.mark.host_and_device
def test_a_run_that_fails_leaves_states_in_place(deployment, resident):
    name = f"resident_fails_{resident}"
    model = deployment.serve(models.fails(name, **TOGETHER).with_parameters(name, resident_batches=resident))
    talks = four(deployment, model)
    good = [{"INPUT": np.array([[at % 4]], np.int64)} for at in range(4)]
    together(lambda talk=talk, fed=fed: talk.start(fed) for talk, fed in zip(talks, good, strict=True))
    bad = {"INPUT": np.array([[9]], np.int64)}

    def one_fails(at: int):
        def step(talk, fed, wrong):
            if not wrong:
                talk.step(fed)
                return
            with pytest.raises(Exception, match="ONNX Runtime"):
                talk.client.step(model.name, talk.sequence_id, bad)

        together(lambda i=i: step(talks[i], good[i], i == at) for i in range(4))

    for at in (1, 3, 0):
        one_fails(at)
        together(lambda talk=talk, fed=fed: talk.step(fed) for talk, fed in zip(talks, good, strict=True))
    together(lambda talk=talk, fed=fed: talk.end(fed) for talk, fed in zip(talks, good, strict=True))


@pytest.mark.parametrize("value", ["0", "-1", "1025", "many", "1.5", ""])
def test_a_bad_number_of_resident_batches_is_refused(deployment, value):
    model = models.counter("fp32", "refused_resident").with_parameters("refused_resident", resident_batches=value)
    refused(deployment, model, "resident_batches", f"'{value}'", "1 to 1024")


@pytest.mark.host_and_device
def test_instances_keep_their_own_batches(deployment):
    model = dataclasses.replace(models.counter("fp32", "resident_instances", max_batch_size=4), instances=2)
    model = deployment.serve(model)
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng([3, i])) for i in range(8)]
    together(talk.start for talk in talks)
    some_at_once(talks, np.random.default_rng(3), 15)
    together(talk.end for talk in talks)

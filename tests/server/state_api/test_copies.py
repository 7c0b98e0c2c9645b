"""Clones and snapshots have every bit of the state, whatever the state is and wherever it lies; and both go on."""

import numpy as np
import pytest

from harness import models
from harness.batches import batch_sizes
from harness.conversations import together
from harness.deployment import eventually
from harness.graphs import BATCH
from harness.model import Model
from harness.models import booked, ledger
from harness.repetitions import repeated
from harness.state_api import DIRECT, OLDEST, OWN, Saved, StateSequence, at_once
from harness.values import bits

pytestmark = pytest.mark.simulated_device


def named(make, *args, **changes):
    """A function of `models` whose first arguments are given, with the name as a keyword."""
    return lambda name, **more: make(*args, name=name, **changes, **more)


KINDS = {
    "batch_first": models.counter,
    "batch_inside": models.lstm,
    "batch_first_inside_and_last": models.axes,
    "many": models.many_states,
    "fp16": named(models.counter, "fp16"),
    "fp64": named(models.counter, "fp64"),
    "int64": named(models.counter, "int64"),
    "bool": named(models.counter, "bool"),
    "uint8": named(models.counter, "uint8"),
    "strings": named(models.echo, "string"),
    "growing": models.append,
    "growing_with_the_time_first": named(models.append, layout="TNW"),
    "growing_int64": named(models.append, "int64"),
    "growing_strings": named(models.append, "string"),
    "growing_and_shrinking": models.queue,
    "caches_of_attention": models.attention,
    "growing_and_fixed": models.caches,
    "stored_as_fp16": named(models.axes, parameters={"store_states_as_fp16": "1"}),
    "growing_stored_as_fp16": named(models.append, parameters={"store_states_as_fp16": "1"}),
    "context": named(models.framed, shape=[BATCH, "T"], context=(3, 1), dims=(-1,)),
    "held": named(ledger, parameters={"held_inputs": "SCALE"}),
}


def same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].shape == other[name].shape and bits(one[name]) == bits(other[name]), name


def agree(talks: list[StateSequence], steps: int = 3, **how) -> None:
    """All have the same states, and the same inputs give the same bits."""
    for _ in range(steps):
        same = [talk.states() for talk in talks]
        inputs = talks[0].model.draw(talks[0].rng)
        answers = [talk.step(inputs, **how).outputs for talk in talks]
        for states, answer in zip(same[1:], answers[1:], strict=True):
            same_bits(states, same[0])
            same_bits(answer, answers[0])


def part(talks: list[StateSequence]) -> None:
    """Each goes its own way."""
    for _ in range(2):
        for talk in talks:
            talk.step(get_state=True)


def begun(client, model: Model, seed: int = 1, steps: int = 3) -> StateSequence:
    talk = StateSequence(client, model, np.random.default_rng(seed))
    first = model.draw(talk.rng)
    for name in model.parameters.get("held_inputs", "").split():
        first[name] = np.full((1, 1), seed + 2, np.int64)
    talk.step(first, start=True)
    for _ in range(steps):
        talk.step()
    return talk


@pytest.mark.parametrize("by", [OWN, OLDEST, *repeated(DIRECT)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.host_and_device
def test_a_clone_and_a_snapshot_have_every_bit(serve, connect, kind, by):
    model, client = serve(KINDS[kind], by), connect()
    talk = begun(client, model)
    saved = talk.save()
    copies = [talk.clone(), talk.restored(saved)]
    agree([talk, *copies])
    part([talk, *copies])
    # a live sequence is set back, and a clone of a clone is one, too
    copies[0].ask(restore=saved)
    again = talk.restored(saved)
    agree([copies[0], again, again.clone()])
    # with an inference in the same request
    inputs = model.draw(talk.rng)
    together_made = [talk.clone(inputs), talk.clone(inputs), talk.restored(talk.save(), inputs)]
    agree(together_made)
    assert bits(talk.save().tensor) == bits(talk.save().tensor)


@pytest.mark.parametrize("kind", ["batch_inside", "growing", "growing_strings", "growing_and_fixed", "context", "held"])
def test_a_new_sequence_of_nothing_can_be_copied(serve, connect, kind):
    """Before its first inference."""
    talk = StateSequence(connect(), serve(KINDS[kind]))
    talk.ask(start=True, query_state=True)
    copies = [talk.clone(), talk.restored(talk.save())]
    first = talk.model.draw(talk.rng)
    if kind == "held":
        first["SCALE"] = np.full((1, 1), 3, np.int64)
    answers = [one.step(first).outputs for one in (talk, *copies)]
    for answer in answers[1:]:
        same_bits(answer, answers[0])
    part([talk, *copies])


@pytest.mark.parametrize(("by", "workers"), [(OWN, 1), (OWN, 2), (OLDEST, 1)])
@pytest.mark.parametrize("kind", ["batch_first", "batch_first_inside_and_last", "growing", "growing_and_fixed", "held"])
@pytest.mark.host_and_device
def test_states_in_batch_buffers_are_copied(deployment, serve, connect, kind, by, workers):
    """Sequences that run as one batch leave their states in its buffers; some of them are copied from there."""
    own = {"worker_count": workers} if by == OWN else {}
    model = serve(KINDS[kind], by, parameters=own, max_batch_size=4, oldest="max_queue_delay_microseconds: 20000")
    client, stream = connect(), connect("stream")
    talks = [begun(client, model, seed, steps=0) for seed in range(4)]
    chunk = model.draw(np.random.default_rng(9))
    chunk.pop("SCALE", None)

    def step() -> int:
        at_once(stream, talks, [chunk] * 4)
        return max(batch_sizes(deployment, model))

    eventually(step, lambda largest: largest > 1)
    copies = [talks[1].clone(), talks[2].restored(talks[2].save()), talks[1].restored(talks[1].save(chunk))]
    everyone = [*talks, *copies]
    for _ in range(3):
        at_once(stream, everyone, [chunk] * 7)
        together(talk.states for talk in everyone)
    at_once(stream, everyone, [chunk] * 7, commit=False)
    at_once(stream, everyone, [chunk] * 7, get_state=True)


def test_a_snapshot_does_not_change_with_its_sequence(serve, connect):
    talk = begun(connect(), serve(ledger))
    saved = talk.save()
    first = saved.bytes
    talk.step(booked(7))
    talk.ask(reset_state=True)
    assert saved.bytes == first
    agree([talk.restored(saved), talk.restored(saved)])


def test_a_snapshot_has_the_steps(serve, connect):
    talk = begun(connect(), serve(ledger))
    saved = talk.save()
    other = talk.restored(saved, booked(1), query_state=True)
    assert other.oracle.count == 5
    other.ask(restore=saved, query_state=True)
    other.clone(query_state=True).clone(booked(2), query_state=True)


@pytest.mark.parametrize("how", [{}, {"commit": False}])
def test_a_live_sequence_is_set_back_and_steps_at_once(serve, connect, how):
    talk = begun(connect(), serve(ledger))
    saved = talk.save()
    talk.step()
    before = talk.oracle.copy()
    answer = talk.client.ask(
        talk.model.name, {**booked(7), "state_snapshot": saved.tensor}, {"sequence_id": talk.sequence_id, **how}
    )
    talk.oracle = saved.oracle.copy()
    expected = talk.oracle.step(booked(7))
    assert bits(answer.outputs["OUTPUT"]) == bits(expected["OUTPUT"])
    if how:
        talk.oracle = before
    talk.states()


@pytest.mark.parametrize("what", ["clone", "snapshot"])
@pytest.mark.parametrize("by", [OLDEST, DIRECT])
def test_a_copy_is_no_new_beginning_for_the_model(serve, connect, what, by):
    """Its control input START would clear the state."""
    model, client = serve(models.accumulate, by), connect()
    one = lambda value: {"INPUT": np.array([[value]], np.float32)}  # noqa: E731
    client.ask(model.name, one(5), {"sequence_id": 1, "sequence_start": True})
    saved = client.ask(model.name, {}, {"sequence_id": 1, "snapshot": True}).outputs
    begin = {"sequence_id": 2, "sequence_start": True}
    if what == "clone":
        answer = client.ask(model.name, one(2), {**begin, "clone_of": 1})
    else:
        answer = client.ask(model.name, {**one(2), **saved}, begin)
    assert answer.outputs["OUTPUT"].item() == 7
    assert client.ask(model.name, one(1), {"sequence_id": 2}).outputs["OUTPUT"].item() == 8


def test_clones_of_a_sequence_that_many_clone_at_once(serve, connect):
    client, model = connect(), serve(ledger, parameters={"worker_count": 2})
    talk = begun(client, model)
    rngs = [np.random.default_rng(seed) for seed in range(16)]
    made = [StateSequence(client, model, rng) for rng in rngs]
    together(lambda one=one: one.ask(start=True, clone_of=talk, get_state=True) for one in made)
    together(one.step for one in [talk, *made])
    together(one.states for one in [talk, *made])
    assert isinstance(talk.save(), Saved)

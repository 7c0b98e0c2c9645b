"""`held_inputs`: START carries them, and the sequence keeps them."""

import re

import numpy as np
import pytest

from harness import models
from harness.conversations import together
from harness.models import booked, ledger
from harness.own import FAILS
from harness.raw import Refused
from harness.refusals import refused as load_refused
from harness.state_api import (
    OLDEST,
    OWN,
    StateSequence,
    at_once,
    both_schedulers,
    every_scheduler,
    refused,
    with_state_api,
)

pytestmark = pytest.mark.simulated_device

HELD = {"held_inputs": "SCALE"}


@pytest.fixture
def talk(serve, connect):
    """A sequence of `ledger` that holds its SCALE, 3, and has made a step."""

    def made(by: str = OWN, protocol: str = "unary", **parameters) -> StateSequence:
        one = StateSequence(connect(protocol), serve(ledger, by, parameters={**HELD, **parameters}))
        one.start(booked(1, 3))
        return one

    return made


@pytest.mark.parametrize("protocol", ["unary", "stream", "http"])
@every_scheduler
def test_later_requests_leave_it_out_or_replace_it(talk, by, protocol):
    one = talk(by, protocol)
    one.step(booked(1, None), get_state=True)
    one.step(booked(1, 5), get_state=True)
    one.step(booked(1, None), get_state=True)
    one.end(booked(1, None), get_state=True)
    one.start(booked(2, 7))
    one.step(booked(1, None), get_state=True)


def test_an_input_with_a_context_cannot_be_held(deployment):
    model = models.framed("held_context", ["N", "T"], (3, 1), (-1,))
    model = model.with_parameters("held_context", held_inputs="FRAMES")
    load_refused(deployment, model, "held_inputs", "'FRAMES'", "input_context")


@every_scheduler
def test_start_must_carry_it(talk, by):
    one = talk(by)
    other = one.other()
    with refused("input 'SCALE' is missing"):
        other.start(booked(1, None))
    with pytest.raises(Refused):
        other.step(booked(1, 2))
    # what another sequence had is nothing to this one
    one.end(booked(1, None))
    with refused("input 'SCALE' is missing"):
        one.start(booked(1, None))


@pytest.mark.parametrize("by", [OWN, OLDEST])
def test_it_is_replaced_only_by_a_request_that_succeeds_and_is_committed(talk, by):
    one = talk(by)
    with one.refuses("ONNX Runtime"):
        one.step(booked(FAILS, 9))
    one.step(booked(1, None), get_state=True)
    one.step(booked(1, 9), commit=False, get_state=True)
    one.step(booked(1, None), get_state=True)
    with one.refuses("STATE_UNKNOWN"):
        one.step(booked(1, 9), get_state="NOTHING")
    with one.refuses("SEQUENCE_STEP_CONFLICT"):
        one.step(booked(1, 9), sequence_step=77)
    one.step(booked(1, None), get_state=True)


@pytest.mark.parametrize("by", [OWN, OLDEST])
def test_a_start_without_commit_holds_its_inputs(talk, by):
    other = talk(by).other()
    other.start(booked(1, 4), commit=False)
    other.step(booked(1, None), get_state=True)


@pytest.mark.parametrize("by", [OWN, OLDEST])
def test_resets_and_new_states_leave_it(talk, by):
    one = talk(by)
    one.ask(reset_state=True)
    one.step(booked(1, None), get_state=True)
    one.step(booked(1, None), set={"SUM": np.array([[4]], np.int64)}, reset_state="LOG", get_state=True)


@pytest.mark.parametrize("by", [OWN, OLDEST])
def test_it_is_part_of_clones_and_snapshots(talk, by):
    one = talk(by)
    saved = one.save()
    copies = [one.clone(), one.restored(saved), one.clone(booked(1, None)), one.restored(saved, booked(1, None))]
    replaced = [one.clone(booked(1, 8)), one.restored(saved, booked(1, 8))]
    one.step(booked(1, 2))
    for copy in (*copies, *replaced):
        copy.step(booked(1, None), get_state=True)
    one.ask(restore=saved)
    one.step(booked(1, None), get_state=True)


@pytest.mark.parametrize("by", [OWN, OLDEST])
def test_a_snapshot_without_it_gives_a_sequence_that_has_to_bring_it(talk, by):
    """A sequence that has not run the model has none yet, so its snapshots and clones have none either."""
    one = talk(by)
    not_run = one.other()
    saved = not_run.save(start=True)
    one.ask(restore=saved)
    for without in (not_run, one.restored(saved), not_run.clone(), one):
        with without.refuses("input 'SCALE' is missing"):
            without.step(booked(1, None))
        without.step(booked(1, 5), get_state=True)
        without.step(booked(1, None), get_state=True)
    with refused("input 'SCALE' is missing"):
        one.restored(saved, booked(1, None))
    one.restored(saved, booked(1, 6)).step(booked(1, None), get_state=True)


def test_a_snapshot_of_a_model_that_did_not_hold_it_yet_fits(serve, connect):
    """`held_inputs` may be added while clients have snapshots."""
    client = connect()
    before = StateSequence(client, serve(lambda name, **more: ledger(f"{name}_before", **more)))
    before.start(booked(1, 3))
    now = StateSequence(client, serve(ledger, parameters=HELD))
    copy = now.restored(before.save())
    copy.oracle.model = now.model
    with copy.refuses("input 'SCALE' is missing"):
        copy.step(booked(1, None))
    copy.step(booked(1, 5), get_state=True)
    copy.step(booked(1, None), get_state=True)


@pytest.mark.parametrize("by", [OWN, OLDEST])
def test_sequences_of_one_batch_hold_their_own(serve, connect, by):
    model = serve(ledger, by, parameters=HELD, oldest="max_queue_delay_microseconds: 20000")
    client, stream = connect(), connect("stream")
    talks = [StateSequence(client, model) for _ in range(4)]
    together(lambda talk=talk, scale=scale: talk.start(booked(1, scale)) for scale, talk in enumerate(talks, 2))
    for value in range(1, 9):
        at_once(stream, talks, [booked(value, value if value % 4 == at else None) for at in range(4)], get_state=True)


def test_it_works_without_the_state_api(serve, connect):
    model, client = serve(ledger, parameters={**HELD, "state_api": None}), connect()
    at = {"sequence_id": 1}
    client.ask(model.name, booked(1, 3), {**at, "sequence_start": True})
    assert client.ask(model.name, booked(2, None), at).outputs["OUTPUT"][0, 0] == 9
    with refused("STATE_API_OFF"):
        client.ask(model.name, booked(1, None), {**at, "get_state": True})


def test_it_may_not_be_larger_than_the_limit(serve, connect):
    """The states may: each has a limit of its own."""
    make = lambda name, **changes: models.append(name=name, **changes)  # noqa: E731
    parameters = {"held_inputs": "INPUT", "max_state_bytes_per_sequence": 160}
    one = StateSequence(connect(), serve(make, parameters=parameters))
    chunk = lambda length: {"INPUT": np.ones((1, length, 2), np.float32)}  # noqa: E731
    with refused("held inputs would have 168 bytes, and 160 are allowed (max_state_bytes_per_sequence)"):
        one.start(chunk(21))
    with pytest.raises(Refused):
        one.step(chunk(1))
    one.start(chunk(5), get_state=True)
    with one.refuses("held inputs"):
        one.step(chunk(21), reset_state=True)
    one.step(chunk(15), get_state=True)


#: Bytes of a VOICE.
VOICE = 4096
GROWING = "stateful_growing_state_bytes"
NO_ROOM = "no room for the sequence's held inputs"


def said(number: int, voice: int | None = None) -> dict[str, np.ndarray]:
    """INPUT, and VOICE if there is one."""
    inputs = {"INPUT": np.array([[number]], np.float32)}
    return inputs if voice is None else {**inputs, "VOICE": np.full((1, VOICE // 4), voice, np.float32)}


@pytest.fixture
def voices(serve, connect):
    """Makes a sequence that has not begun, of a model that may hold so many VOICEs, and a few bytes more."""

    def made(count: int, by: str = OWN, **parameters: object) -> StateSequence:
        parameters = {"held_inputs": "VOICE", "max_state_bytes": count * VOICE + 9, **parameters}
        return StateSequence(connect(), serve(models.voiced, by, parameters=parameters))

    return made


def starts(first: StateSequence, count: int) -> list[StateSequence]:
    """So many sequences, each with a VOICE of its own."""
    talks = [first.other() for _ in range(count)]
    for at, talk in enumerate(talks):
        talk.start(said(1, at))
    return talks


@both_schedulers
def test_all_sequences_together_hold_no_more_than_the_limit(deployment, voices, by):
    first = voices(5, by)
    talks = starts(first, 5)
    deployment.settles(GROWING, first.model, 5 * VOICE)
    why = f"{VOICE} bytes more are needed, and {5 * VOICE} of {5 * VOICE + 9} bytes are in use (max_state_bytes)"
    late = first.other()
    for _ in range(3):
        with pytest.raises(Refused, match=re.escape(f"UNAVAILABLE: {NO_ROOM}: {why}")):
            late.start(said(1, 7))
    # the sequences go on, also one that was to hold another VOICE
    with talks[0].refuses(NO_ROOM):
        talks[0].step(said(2, 8))
    for talk in talks:
        talk.step(said(3), get_state=True)
    # what is not held needs no room
    talks[0].ask(get_state=True, reset_state=True)
    talks[1].end(said(3))
    late.start(said(1, 7))
    late.step(said(1))
    for talk in (*talks[2:], talks[0], late):
        talk.end(said(1))
    deployment.settles(GROWING, first.model, 0)


def test_a_model_whose_held_inputs_have_a_limit_loads_without_a_warning(deployment, voices):
    first = voices(2)
    assert f"model {first.model.name}: 'max_state_bytes'" not in deployment.server.log_text()


@both_schedulers
def test_clones_that_share_a_held_input_count_once(deployment, voices, by):
    first = voices(2, by)
    [one] = starts(first, 1)
    clones = [one.clone(said(at)) for at in range(5)]
    clones += [clones[0].clone() for _ in range(3)]
    deployment.settles(GROWING, first.model, VOICE)
    one.end(said(1))
    deployment.settles(GROWING, first.model, VOICE)
    clones[0].step(said(1, 4))
    deployment.settles(GROWING, first.model, 2 * VOICE)
    with clones[1].refuses(NO_ROOM):
        clones[1].step(said(1, 5))
    for clone in clones:
        clone.step(said(2), get_state=True)
    # a snapshot brings bytes of its own
    saved = clones[1].save()
    with refused(NO_ROOM):
        first.restored(saved)
    with clones[2].refuses(NO_ROOM):
        clones[2].ask(restore=saved)
    clones[0].end(said(1))
    restored = first.restored(saved)
    deployment.settles(GROWING, first.model, 2 * VOICE)
    for talk in (restored, *clones[1:]):
        talk.end(said(1))
    deployment.settles(GROWING, first.model, 0)


def test_a_request_that_fails_or_does_not_commit_holds_nothing(deployment, voices):
    first = voices(2)
    [one] = starts(first, 1)
    one.step(said(1, 5), commit=False)
    for _ in range(3):
        with one.refuses("STATE_UNKNOWN"):
            one.step(said(1, 6), get_state="NOTHING")
        with one.refuses("SEQUENCE_STEP_CONFLICT"):
            one.step(said(1, 6), sequence_step=77)
    deployment.settles(GROWING, first.model, VOICE)
    one.step(said(1), get_state=True)


def test_what_parked_sequences_hold_counts(deployment, voices):
    first = voices(3, sequence_idle_timeout_ms=60, park_ms=600_000)
    talks = starts(first, 3)
    deployment.settles("stateful_parked_sequences", first.model, 3)
    deployment.settles(GROWING, first.model, 3 * VOICE)
    late = first.other()
    with refused(NO_ROOM):
        late.start(said(1, 7))
    talks[0].start(said(1), resume=True, end=True)
    late.start(said(1, 7), end=True)
    # a START without `resume` ends the parked one
    talks[1].start(said(1, 7), end=True)
    deployment.settles(GROWING, first.model, VOICE)


def test_strings_and_inputs_without_a_batch_are_held(serve, connect):
    words = lambda name, **changes: models.echo("string", name, **changes)  # noqa: E731
    one = StateSequence(connect(), serve(words, parameters={"held_inputs": "INPUT", "worker_count": 2}))
    said = {"INPUT": np.array([[b"a", b"", "ü".encode(), b"z" * 500]], np.object_)}
    one.start(said)
    copies = [one.clone(), one.restored(one.save())]
    for copy in (one, *copies):
        answer = copy.client.ask(copy.model.name, {}, {"sequence_id": copy.sequence_id})
        assert answer.outputs["OUTPUT"].tolist() == said["INPUT"].tolist()


def test_a_knob_is_held(serve, connect):
    """An input that all rows of a run share, so that sequences with other values run apart."""
    make = lambda name, **changes: models.knob(name, **changes)  # noqa: E731
    model, client, stream = serve(make, parameters={"held_inputs": "KNOB"}), connect(), connect("stream")
    talks = [StateSequence(client, model, np.random.default_rng(seed)) for seed in range(4)]
    for at, talk in enumerate(talks):
        first = model.draw(talk.rng)
        talk.start({**first, "KNOB": np.full_like(first["KNOB"], 1 + at % 2)})
    for _ in range(4):
        fed = [{"INPUT": model.draw(talk.rng)["INPUT"]} for talk in talks]
        at_once(stream, talks, fed, get_state=True)


def test_a_name_that_is_no_input_is_refused(deployment):
    model = with_state_api(ledger("refused_held_inputs"), held_inputs="SPEED")
    load_refused(deployment, model, "held_inputs", "SPEED", "INPUT", "SCALE")


def test_a_state_is_not_held(deployment):
    model = with_state_api(ledger("refused_held_state"), held_inputs="SUM")
    load_refused(deployment, model, "held_inputs", "SUM")

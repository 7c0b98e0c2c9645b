"""`park_ms`: a sequence that was idle for too long keeps its state, and START with `resume` takes it up again."""

import contextlib
import time

import numpy as np
import pytest

from harness.conversations import together
from harness.deployment import eventually
from harness.models import booked, generated, ledger
from harness.models.generated import counted
from harness.own import FAILS
from harness.raw import Inputs, Refused
from harness.refusals import refused as load_refused
from harness.state_api import OLDEST, OWN, StateSequence, refused, with_state_api

pytestmark = pytest.mark.simulated_device

#: Idle soon, parked for long.
PARKS = {"sequence_idle_timeout_ms": 60, "park_ms": 600_000}
SCANS = {"sequence_cleaner_poll_wait_minutes": 0.001, "park_ms": 600_000}

#: The run fails.
FAILING = booked(FAILS)

both_rules = pytest.mark.parametrize("rule", [PARKS, SCANS], ids=["precise", "scans"])


def idles_out(one: StateSequence, fails: Inputs = FAILING) -> None:
    """Waits until no sequence of that id is live. The requests that look for it fail, so they do not keep it alive."""

    def code() -> str:
        try:
            one.client.ask(one.model.name, fails, {"sequence_id": one.sequence_id})
        except Refused as error:
            return error.text.partition(":")[0]
        return "it ran"

    eventually(code, lambda came: came == "SEQUENCE_MISSING")


def live(deployment, one: StateSequence) -> float:
    return deployment.metric("stateful_live_sequences", one.model)


@pytest.fixture
def talk(serve, connect):
    """A sequence of `ledger` that has made a step."""

    def made(protocol: str = "unary", rule=PARKS, **parameters) -> StateSequence:
        one = StateSequence(connect(protocol), serve(ledger, parameters={**rule, **parameters}))
        one.start()
        return one

    return made


@pytest.mark.parametrize("protocol", ["unary", "stream", "http"])
@both_rules
def test_a_parked_sequence_goes_on(talk, rule, protocol):
    one = talk(protocol, rule, worker_count=2)
    for _ in range(3):
        idles_out(one)
        with refused("SEQUENCE_MISSING"):
            one.step()
        one.step(start=True, resume=True, get_state=True)
    idles_out(one)
    one.ask(start=True, resume=True, get_state=True, query_state=True)
    idles_out(one)
    one.step(start=True, end=True, resume=True, sequence_step=4, get_state=True)


@both_rules
def test_without_resume_a_start_begins_anew(deployment, talk, rule):
    one = talk(rule=rule)
    idles_out(one)
    deployment.settles("stateful_parked_sequences", one.model, 1)
    slots = deployment.metric("stateful_slots_allocated", one.model)
    all_bytes = deployment.metric("stateful_slot_pool_bytes", one.model)
    assert deployment.metric("stateful_parked_slot_bytes", one.model) == all_bytes / slots > 0
    one.start(end=True, get_state=True)
    with refused("SEQUENCE_NOT_PARKED"):
        one.start(resume=True)
    deployment.settles("stateful_parked_sequences", one.model, 0)


def test_what_is_not_parked_is_not_resumed(talk):
    one = talk(sequence_idle_timeout_ms=600_000)
    with one.refuses("SEQUENCE_ALREADY_EXISTS"):
        one.start(resume=True)
    one.end()
    with refused("SEQUENCE_NOT_PARKED", str(one.sequence_id)):
        one.start(resume=True)
    with refused("SEQUENCE_NOT_PARKED"):
        one.other().start(resume=True)
    with refused("SEQUENCE_MISSING"):
        one.step()


def test_a_sequence_is_resumed_once(talk):
    idle_s = 1
    one = talk(sequence_idle_timeout_ms=1000 * idle_s)

    def resume() -> bool:
        how = {"sequence_id": one.sequence_id, "sequence_start": True, "resume": True}
        try:
            one.client.ask(one.model.name, {}, how)
        except Refused as error:
            assert error.text.startswith("SEQUENCE_ALREADY_EXISTS"), error
            return False
        return True

    def resumed_at_once() -> int:
        """How often; 0 if it took so long that the sequence may have been parked again."""
        idles_out(one)
        begun = time.monotonic()
        resumed = sum(together([resume] * 8))
        return resumed if time.monotonic() - begun < idle_s else 0

    assert eventually(resumed_at_once, lambda resumed: resumed > 0) == 1
    idles_out(one)
    one.ask(start=True, resume=True, get_state=True)


def test_a_sequence_that_ended_is_not_parked(deployment, talk):
    one = talk(sequence_idle_timeout_ms=600_000)
    one.end()
    other = one.other()
    other.start()
    other.ask(delete=True, end=True)
    deployment.settles("stateful_live_sequences", one.model, 0)
    for gone in (one, other):
        with refused("SEQUENCE_NOT_PARKED"):
            gone.start(resume=True)


def test_the_longest_parked_makes_room(deployment, talk):
    one = talk(max_parked_sequences=2)
    talks = [one, one.other(), one.other(), one.other()]
    idles_out(one)
    for later in talks[1:]:
        later.start()
        idles_out(later)
    eventually(lambda: live(deployment, one), lambda count: count == 2)
    for gone in talks[:2]:
        with refused("SEQUENCE_NOT_PARKED", "max_parked_sequences"):
            gone.start(resume=True)
    for kept in talks[2:]:
        kept.ask(start=True, resume=True, get_state=True)


def test_after_its_time_a_parked_sequence_is_over(deployment, talk):
    one = talk(park_ms=100)
    eventually(lambda: live(deployment, one), lambda count: count == 0)
    with refused("SEQUENCE_NOT_PARKED"):
        one.start(resume=True)
    one.start(get_state=True)


def test_parked_sequences_take_no_place(talk):
    one = talk(max_sequence_number=1)

    def resume() -> str:
        """What comes of it."""
        try:
            one.start(resume=True, get_state=True)
        except Refused as error:
            return error.text.partition(":")[0]
        return "it goes on"

    def resume_beside_another() -> str:
        idles_out(one)
        # the place is free, unless it still has the last one
        with contextlib.suppress(Refused):
            one.other().start()
        return resume()

    eventually(resume_beside_another, lambda came: came == "MAX_SEQUENCE_NUMBER_REACHED")
    eventually(resume, lambda came: came == "it goes on")


def test_a_resume_that_is_refused_leaves_the_sequence_parked(talk):
    one = talk()
    idles_out(one)
    wrong = [
        ("STATE_UNKNOWN", {"get_state": "NOTHING"}),
        ("STATE_PARAMETER", {"commit": "perhaps"}),
        ("STATE_CONFLICT", {"set": {"SUM": np.array([[1]], np.int64)}, "reset_state": "SUM"}),
    ]
    for word, how in wrong:
        with refused(word):
            one.step(start=True, resume=True, **how)
    with refused("is missing"):
        one.step({"INPUT": np.array([[1]], np.int64)}, start=True, resume=True)
    one.step(start=True, resume=True, get_state=True)


def test_a_resume_whose_inference_fails_keeps_the_state(talk):
    """The sequence is live again."""
    one = talk()
    idles_out(one)
    with refused("ONNX Runtime"):
        one.step(booked(FAILS), start=True, resume=True)
    try:
        one.states()
    except Refused:
        # it was idle again before the request came
        one.ask(start=True, resume=True, get_state=True)


def test_a_resume_may_change_the_state(talk):
    one = talk()
    idles_out(one)
    one.step(start=True, resume=True, set={"SUM": np.array([[70]], np.int64)}, reset_state="LOG", get_state=True)
    idles_out(one)
    one.step(start=True, resume=True, commit=False, get_state=True, query_state=True)
    idles_out(one)
    one.step(start=True, end=True, resume=True, get_state=True)
    with refused("SEQUENCE_NOT_PARKED"):
        one.start(resume=True)


def test_held_inputs_are_parked_too(talk):
    one = talk(held_inputs="SCALE")
    idles_out(one)
    one.step(booked(1, None), start=True, resume=True, get_state=True)


def test_the_counts_of_generated_inputs_are_parked_too(serve, connect):
    model = serve(lambda name: counted(name, *generated.OF_EACH_KIND), parameters=PARKS)
    one = StateSequence(connect(), model)
    one.start()
    for _ in range(3):
        idles_out(one, {"INPUT": np.array([[9]], np.int64)})
        one.step(start=True, resume=True, query_state=True)


def test_a_copy_of_a_parked_sequence_needs_it_to_be_resumed(talk):
    one = talk().other()
    saved = one.save(booked(5), start=True)
    idles_out(one)
    with refused("SEQUENCE_MISSING"):
        one.clone(get_state=True)
    one.restored(saved, get_state=True)
    # one that takes its id makes an end of it
    one.ask(start=True, restore=saved, get_state=True)


@pytest.mark.host_and_device
def test_parking_while_others_come_and_go(deployment, talk):
    """More sequences than places and parking places, on two workers; each is as it was or gone."""
    first = talk(max_sequence_number=6, max_parked_sequences=3, worker_count=2, max_queue_size=50)
    talks = [first, *(first.other() for _ in range(5))]
    for at, one in enumerate(talks):
        one.rng = np.random.default_rng(at)

    def go_on(one: StateSequence) -> int:
        resumed = 0
        for _ in range(8):
            try:
                one.start(resume=True, get_state=True)
                resumed += 1
            except Refused as error:
                word = error.text.partition(":")[0]
                assert word in ("SEQUENCE_NOT_PARKED", "SEQUENCE_ALREADY_EXISTS", "MAX_SEQUENCE_NUMBER_REACHED"), error
                if word == "SEQUENCE_NOT_PARKED":
                    one.start(get_state=True)
            idles_out(one)
        return resumed

    assert sum(together(lambda one=one: go_on(one) for one in talks)) > 0
    eventually(lambda: live(deployment, first), lambda count: count <= 3)


def test_core_parks_nothing(deployment, serve, connect):
    one = StateSequence(connect(), serve(ledger, OLDEST))
    one.start()
    with refused("STATE_CONFLICT", "'resume'", "sequence_batching"):
        one.other().start(resume=True)
    for parameter in ("park_ms", "max_parked_sequences"):
        load_refused(
            deployment,
            with_state_api(ledger("refused_parking"), OLDEST, **{parameter: 5}),
            parameter,
            "sequence_batching",
        )
    load_refused(deployment, with_state_api(ledger("refused_parking"), OWN, max_parked_sequences=5), "park_ms")
    load_refused(deployment, with_state_api(ledger("refused_parking"), OWN, park_ms=0), "park_ms", "0")

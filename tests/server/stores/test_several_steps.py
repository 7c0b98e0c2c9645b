"""Requests of several steps (`repeat`) that fail between two of them, with a store."""

import numpy as np
import pytest

from harness import models
from harness.deployment import eventually
from harness.raw import Refused, Unary
from harness.repeats import RepeatOracle, RepeatTalk
from harness.state_api import with_state_api
from harness.stored import both_stores, steps, stored

#: Steps that take a second or so.
MANY = 30_000


def spoken(name: str, location: str):
    return stored(with_state_api(models.spoken(name, until=None)), location, on_duplicate_start="restart")


def talk_of(deployment, model, seed: int = 1) -> RepeatTalk:
    return RepeatTalk(Unary(deployment), RepeatOracle(model, {"NEXT": "TOKENS"}, lambda outputs: False), seed)


def fails_at(talk: RepeatTalk, step: int) -> dict[str, np.ndarray]:
    inputs = talk.draw(2)
    inputs["FAILS_AT"][...] = step
    return inputs


@both_stores
def test_a_request_that_fails_in_the_middle_leaves_what_was_saved(deploy, location):
    model = spoken("stored_fails", location)
    first = deploy(control_model=False)
    first.serve(model)
    talk, failed = talk_of(first, model), talk_of(first, model, 2)
    assert steps(talk.ask(3, start=True, max_steps=2)) == (2, 2)
    with pytest.raises(Refused, match="step 3 of the request"):
        talk.ask(fails_at(talk, 5), max_steps=9)
    assert steps(talk.ask(3, max_steps=4)) == (6, 6)
    failed.ask(1, start=True, max_steps=2)
    with pytest.raises(Refused, match="step 2 of the request"):
        failed.ask(fails_at(failed, 2), start=True, max_steps=9)
    with pytest.raises(Refused, match="step 3 of the request"):
        talk.ask(fails_at(talk, 9), max_steps=9)
    first.kill()
    second = deploy(control_model=False)
    second.serve(model)
    talk.client = failed.client = Unary(second)
    assert steps(talk.ask(2, max_steps=3)) == (9, 9)
    assert steps(talk.ask(1, end=True, max_steps=2)) == (11, 11)
    # the START that failed has replaced the older sequence
    with pytest.raises(Refused, match="SEQUENCE_MISSING"):
        failed.ask(1, max_steps=1)


def test_a_start_that_fails_ends_no_sequence_of_another_server(deploy, valkey):
    store = valkey()
    model = spoken("stored_late_start", store.location)
    two = deploy(control_model=False), deploy(control_model=False)
    for deployment in two:
        deployment.serve(model)
    here, elsewhere = (talk_of(deployment, model) for deployment in two)
    elsewhere.sequence_id = here.sequence_id
    parameters = {"sequence_id": here.sequence_id, "sequence_start": True, "max_steps": MANY}
    call = here.client.send(model.name, fails_at(here, MANY - 1), parameters)
    # the START has a record before it has made all steps
    eventually(lambda: store.ask("KEYS", "b*"), bool)
    elsewhere.ask(2, start=True, max_steps=3)
    with pytest.raises(Refused):
        call.answer()
    assert steps(elsewhere.ask(2, max_steps=3)) == (6, 6)

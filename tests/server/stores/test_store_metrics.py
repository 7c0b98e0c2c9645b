"""The metrics of a store: which sequences are whose, and what is saved."""

from __future__ import annotations

import subprocess

import pytest

from harness import models
from harness.deployment import Deployment, eventually
from harness.model import Model
from harness.own import Talk
from harness.raw import Refused
from harness.stored import Diary, both_stores, saved_later, stored, word
from support.paths import DRAIN

OWNED, CLAIMED, MOVED = "stateful_owned_sequences", "stateful_sequences_claimed_total", "stateful_sequences_moved_total"


def numbers(deployment: Deployment, model: Model) -> tuple[float, float, float]:
    """How many sequences the server owns, has taken, and has lost to another one."""
    return deployment.metric(OWNED, model), deployment.metric(CLAIMED, model), deployment.metric(MOVED, model)


def settle(deployments: tuple[Deployment, Deployment], model: Model, *wanted: tuple[int, int, int]) -> None:
    eventually(lambda: [numbers(one, model) for one in deployments], lambda found: found == list(wanted))


def test_a_sequence_that_moves_is_counted_once_on_each_side(two, connect, location_of_valkey):
    """The old owner is asked, or the store tells it, or both."""
    model = saved_later(models.lstm("counts_moves"), location_of_valkey, state_api="true")
    for deployment in two:
        deployment.serve(model)
    old, new = (connect(deployment) for deployment in two)
    talks = [Diary(old, model, number) for number in (1, 2, 3)]
    for talk in talks:
        talk.start()
        talk.step()
    two[0].settles("stateful_oldest_unsaved_step_seconds", model, 0)
    settle(two, model, (3, 0, 0), (0, 0, 0))
    for talk in talks[:2]:
        talk.client = new
        for _ in range(3):
            talk.step()
    settle(two, model, (1, 0, 2), (2, 2, 0))
    two[1].settles("stateful_oldest_unsaved_step_seconds", model, 0)
    talks[0].client = old
    talks[0].step()
    settle(two, model, (2, 1, 2), (1, 2, 1))
    # neither an END nor a drain moves a sequence
    talks[2].end()
    settle(two, model, (1, 1, 2), (1, 2, 1))
    assert subprocess.run([DRAIN, "--url", two[0].server.http_url], capture_output=True).returncode == 0
    settle(two, model, (0, 1, 2), (1, 2, 1))
    talks[0].client = new
    talks[0].step()
    settle(two, model, (0, 1, 2), (2, 3, 1))


def test_at_step_a_server_notices_with_the_next_request_that_a_sequence_has_moved(two, connect, location_of_valkey):
    model = stored(models.lstm("notices_moves"), location_of_valkey)
    for deployment in two:
        deployment.serve(model)
    old, new = (connect(deployment) for deployment in two)
    talks = [Talk(old, model, number) for number in (1, 2)]
    for talk in talks:
        talk.start()
    for talk.client in (new, new):
        talk.step()
    settle(two, model, (2, 0, 0), (1, 1, 0))
    talk.client = old
    talk.step()
    settle(two, model, (2, 1, 1), (1, 1, 0))
    # it was ended elsewhere
    talk.client = new
    talk.end()
    settle(two, model, (2, 1, 1), (0, 2, 1))
    talk.client = old
    with pytest.raises(Refused) as refused:
        talk.step()
    assert word(refused.value) == "SEQUENCE_MISSING"
    settle(two, model, (1, 1, 2), (0, 2, 1))


@both_stores
@pytest.mark.parametrize("kept", [stored, saved_later])
def test_an_idle_sequence_is_claimed_when_it_comes_back(deploy, connect, location, kept):
    deployment = deploy(control_model=False)
    model = deployment.serve(kept(models.lstm("comes_back"), location, sequence_idle_timeout_ms=300))
    talk = Diary(connect(deployment), model, 1)
    talk.start()
    deployment.settles("stateful_sequences_expired_total", model, 1)
    eventually(lambda: numbers(deployment, model), lambda found: found == (0, 0, 0))
    talk.step()
    eventually(lambda: numbers(deployment, model), lambda found: found[1:] == (1, 0))
    assert talk.lost == 0


def test_saves_and_errors_of_the_store_are_counted_at_step(deploy, connect, valkey):
    store, deployment = valkey(), deploy(control_model=False)
    model = deployment.serve(stored(models.lstm("counts_saves"), store.location))
    here, elsewhere = (Talk(connect(deployment), model, number) for number in (1, 2))
    here.start()
    here.step()
    here.step()
    deployment.settles("stateful_states_saved_total", model, 3)
    assert deployment.metric("stateful_store_errors_total", model) == 0
    store.kill()
    for errors, talk in enumerate((here, elsewhere), start=1):
        with pytest.raises(Refused) as refused:
            talk.step()
        assert word(refused.value) == "STATE_STORE_FAILED"
        deployment.settles("stateful_store_errors_total", model, errors)
    assert deployment.metric("stateful_states_saved_total", model) == 3

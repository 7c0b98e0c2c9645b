"""Stores that are down, full or wrong, and configurations that cannot be."""

import contextlib
import re
import time

import pytest

from harness import models
from harness.deployment import eventually
from harness.models import booked, ledger
from harness.own import Talk, fails_with, fed, own, total
from harness.raw import Refused
from harness.refusals import refused as load_refused
from harness.stored import steps, stored, word


def fails(talk: Talk, wanted: str, code: str, text: str = "", **how) -> None:
    """A step is refused, and the oracle does not make it."""
    with pytest.raises(Refused) as refused:
        talk.step(**how)
    assert word(refused.value) == wanted and refused.value.code == code, refused.value
    assert text in refused.value.text, refused.value


def test_while_the_store_is_down_steps_are_refused_and_change_nothing(deploy, connect, valkey):
    store, deployment = valkey(), deploy()
    model = stored(ledger("store_down"), store.location, sequence_idle_timeout_ms=600_000)
    deployment.serve(model)
    here, elsewhere = (Talk(connect(deployment), model, number) for number in (1, 2))
    here.start()
    store.kill()
    for how in ({}, {"end": True}):
        fails(here, "STATE_STORE_FAILED", "UNAVAILABLE", "can't be reached", **how)
    fails(elsewhere, "STATE_STORE_FAILED", "UNAVAILABLE")
    fails(elsewhere, "STATE_STORE_FAILED", "UNAVAILABLE", start=True)
    # another model goes on
    deployment.assert_healthy()
    store.start()

    def step() -> object:
        try:
            return steps(here.step())
        except Refused as error:
            return word(error)

    # it may still wait with the next attempt to connect
    assert eventually(step, lambda came: came != "STATE_STORE_FAILED") == (2, 2)
    with fails_with("SEQUENCE_MISSING"):
        elsewhere.step()
    elsewhere.start()


def test_an_end_that_is_refused_can_be_sent_again(deploy, connect, valkey):
    """The store fails before the END would run, and answers when the batch of the END is saved."""
    store, deployment = valkey(), deploy(control_model=False)
    model = stored(models.work("ended_again"), store.location)
    deployment.serve(model)
    client = connect(deployment)
    assert steps(client.ask(model.name, fed(1), {"sequence_id": 1, "sequence_start": True})) == (1, 1)
    store.kill()
    first = client.send(model.name, fed(1, 500), {"sequence_id": 2, "sequence_start": True})
    time.sleep(0.05)
    # these wait for the first one, and run together
    end = client.send(model.name, fed(1), {"sequence_id": 1, "sequence_end": True})
    other = client.send(model.name, fed(1, 2000), {"sequence_id": 3, "sequence_start": True})
    with pytest.raises(Refused):
        first.answer()
    store.start()
    with pytest.raises(Refused) as refused:
        end.answer()
    assert word(refused.value) == "STATE_STORE_FAILED"
    with contextlib.suppress(Refused):
        # the store may have come too late for it
        other.answer()

    def again() -> object:
        try:
            answer = client.ask(model.name, fed(10), {"sequence_id": 1, "sequence_end": True})
        except Refused as error:
            return word(error)
        return total(answer), steps(answer)

    assert eventually(again, lambda came: came != "STATE_STORE_FAILED") == (11, (2, 2))


def test_a_store_that_is_down_at_load_is_used_when_it_is_up(deploy, connect, valkey):
    store, deployment = valkey(), deploy()
    store.kill()
    model = stored(ledger("late_store"), store.location)
    deployment.serve(model)
    assert re.search(r"late_store.*state_store.*can't be reached", deployment.server.log_text())
    talk = Talk(connect(deployment), model, 1)
    fails(talk, "STATE_STORE_FAILED", "UNAVAILABLE", start=True)
    store.start()

    def start() -> bool:
        try:
            return steps(talk.start()) == (1, 1)
        except Refused:
            return False

    eventually(start, bool)
    talk.step()


def test_a_store_that_refuses_to_write(deploy, connect, valkey):
    store, deployment = valkey("--maxmemory-policy", "noeviction"), deploy()
    model = stored(ledger("refusing"), store.location)
    deployment.serve(model)
    talk = Talk(connect(deployment), model, 1)
    talk.start()
    store.ask("CONFIG", "SET", "maxmemory", "1")
    fails(talk, "STATE_STORE_FAILED", "UNAVAILABLE", "OOM")
    store.ask("CONFIG", "SET", "maxmemory", "0")
    talk.step()
    store.ask("REPLICAOF", "127.0.0.1", "1")
    fails(talk, "STATE_STORE_FAILED", "UNAVAILABLE", "replica")
    store.ask("REPLICAOF", "NO", "ONE")
    talk.step()


def test_a_state_in_the_store_that_is_damaged_or_of_another_model(deploy, connect, valkey):
    store, deployment = valkey(), deploy()
    model = stored(ledger("damaged"), store.location, sequence_idle_timeout_ms=50)
    deployment.serve(model)
    talk, other = Talk(connect(deployment), model, 1), Talk(connect(deployment), model, 2)
    other.start()
    for damage in (lambda blob: blob[:-1], lambda blob: blob[:40] + b"x" + blob[41:], lambda blob: b"x"):
        talk.start(booked(5))
        deployment.settles("stateful_live_sequences", model, 0)
        (key,) = [key for key in store.ask("KEYS", "b*") if b":n1}" in key]
        store.ask("SET", key, damage(store.ask("GET", key)))
        # another server may be able to read it, so only an END removes it
        fails(talk, "STATE_STORE_DAMAGED", "INTERNAL")
        fails(talk, "SEQUENCE_ALREADY_EXISTS", "ALREADY_EXISTS", start=True)
        fails(talk, "STATE_STORE_DAMAGED", "INTERNAL", end=True)
        fails(talk, "SEQUENCE_MISSING", "NOT_FOUND")
    other.step()
    # another model of that name has other states, and so no sequence of the first
    deployment.unload(model)
    changed = stored(models.counter("fp32", "damaged"), store.location)
    deployment.serve(changed)
    with fails_with("SEQUENCE_MISSING"):
        Talk(connect(deployment), changed, 2).step()


def test_wrong_passwords_are_refused_at_load_and_not_repeated(deploy, connect, valkey, tmp_path):
    store, deployment = valkey("--requirepass", "hush-hush"), deploy(env={"STORE_PASSWORD": "hush-hush"})
    file = tmp_path / "password"
    file.write_text("wrong-wrong")
    for options in ("", f"?password_file={file}", "?password_env=NO_SUCH", "?password_env=STORE_PASSWORD&user=nobody"):
        error = deployment.load_error(stored(ledger("locked"), store.location + options))
        assert "'state_store'" in error and "refuses this server" in error, error
    model = stored(ledger("open"), f"{store.location}?password_env=STORE_PASSWORD")
    deployment.serve(model)
    Talk(connect(deployment), model, 1).whole(3)
    assert not re.search("hush|wrong-wrong", deployment.server.log_text())


def test_a_model_may_require_its_store(deploy, connect, valkey):
    store, deployment = valkey(), deploy()
    store.kill()
    required = stored(ledger("required"), store.location, require_state_store="true")
    error = deployment.load_error(required)
    assert "'state_store'" in error and store.location.partition("?")[0] in error and "can't be reached" in error, error
    store.start()
    deployment.serve(required)
    Talk(connect(deployment), required, 1).whole(2)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"state_store": "http://x"}, ("'state_store'", "http:...", "redis://HOST")),
        ({"state_store": "rediss://x?ca=/no/ca.pem"}, ("'state_store'", "/no/ca.pem")),
        ({"state_store": "rediss://x?cert=/a"}, ("'state_store'", "'key=FILE'")),
        ({"state_store": "redis+sentinel://x"}, ("'state_store'", "name of the primary")),
        ({"state_store": "redis+cluster://x/1"}, ("'state_store'", "database 0 only")),
        ({"state_store": "redis://me:hush@x"}, ("'state_store'", "password_file")),
        ({"state_store": "file:/proc/nowhere"}, ("'state_store'", "/proc/nowhere")),
        ({"state_store": "file:/tmp/x", "durability": "always"}, ("'durability'", "always", "'step'")),
        ({"durability": "step"}, ("'durability'", "state_store")),
        ({"state_store": "file:/tmp/x", "replicas": "1"}, ("'replicas'", "a folder has no replicas")),
        ({"state_store": "redis://x", "replicas": "1", "durability": "drain"}, ("'replicas'", "only with")),
        ({"state_store": "file:/tmp/x", "park_ms": "5"}, ("'park_ms'", "state_store")),
        ({"state_store": "file:/tmp/x", "state_store_ttl_ms": "0"}, ("'state_store_ttl_ms'", "1 or more")),
    ],
)
def test_configurations_that_cannot_be(deployment, parameters, words):
    load_refused(deployment, own(ledger("wrong_store"), **parameters), *words)


@pytest.mark.parametrize("scheduling", [None, "sequence_batching { direct { } }"])
def test_core_cannot_schedule_a_model_with_a_store(deployment, scheduling):
    model = ledger("of_core", parameters={"state_store": "file:/tmp/x"})
    load_refused(deployment, model.variant("of_core", scheduling=scheduling), "'state_store'", "core refuses")


def test_the_server_says_where_models_keep_sequences(deploy, connect, location_of_file):
    first = deploy(backend_config={"state-store": location_of_file})
    kept, not_kept, of_core = own(ledger("kept")), own(ledger("not_kept"), durability="none"), ledger("by_core")
    for model in (kept, not_kept, of_core):
        first.serve(model)
    talks = {model.name: Talk(connect(first), model, 1) for model in (kept, not_kept)}
    for talk in talks.values():
        talk.start()
    first.kill()
    second = deploy(backend_config={"state-store": location_of_file})
    for model in (kept, not_kept):
        second.serve(model)
    for talk in talks.values():
        talk.client = connect(second)
    talks["kept"].step()
    with fails_with("SEQUENCE_MISSING"):
        talks["not_kept"].step()

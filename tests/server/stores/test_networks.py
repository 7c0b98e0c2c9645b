"""Stores that are reached with TLS, or where sentinels say, replicas that have each step, and clusters."""

import pytest

from harness import models
from harness.deployment import eventually
from harness.models import ledger
from harness.networks import Authority
from harness.own import Talk
from harness.raw import Refused
from harness.stored import NEVER_MS, Diary, saved_later, steps, stored, word


def test_sequences_go_on_after_a_kill_with_tls(deploy, connect, valkey, tls, tmp_path):
    first = deploy(control_model=False)
    terminator = tls(valkey())
    model = stored(ledger("with_tls"), terminator.location)
    first.serve(model)
    talk = Talk(connect(first), model, 1)
    talk.start()
    assert steps(talk.step()) == (2, 2)
    first.kill()
    # the authorities of the system are those of this file
    location, ca = terminator.location.split("?ca=")
    second = deploy(control_model=False, env={"SSL_CERT_FILE": ca})
    model = stored(ledger("with_tls"), location)
    second.serve(model)
    talk.client = connect(second)
    assert steps(talk.step()) == (3, 3)
    other = Authority(tmp_path / "other").ca
    error = second.load_error(stored(ledger("of_another_authority"), f"{location}?ca={other}"))
    assert "'state_store'" in error and "UnknownIssuer" in error and str(other) in error, error


def test_no_answered_step_is_lost_in_a_fail_over(deploy, connect, network):
    """The primary has two replicas, and each step is on one of them before it is answered."""
    primary = network.start()
    replicas = [network.replica(primary), network.replica(primary)]
    sentinel = network.watch(primary)
    sentinel.sees(2)
    model = stored(ledger("failed_over"), sentinel.location, replicas=1)
    first, second = deploy(control_model=False), deploy(control_model=False)
    for deployment in (first, second):
        deployment.serve(model)
    talk = Talk(connect(first), model, 1)
    talk.start()
    for made in range(2, 12):
        assert steps(talk.step()) == (made, made)
    primary.kill()

    def primaries() -> list:
        told = {store: store.ask("INFO", "replication") for store in replicas}
        return [store for store, text in told.items() if b"role:master" in text and b"state=online" in text]

    (new,) = eventually(primaries, lambda found: len(found) == 1)
    assert steps(talk.step()) == (12, 12)
    first.kill()
    talk.client = connect(second)
    assert steps(talk.step()) == (13, 13)
    # the last replica
    (other,) = (store for store in replicas if store is not new)
    other.kill()
    with pytest.raises(Refused) as refused:
        talk.step()
    assert word(refused.value) == "STATE_STORE_FAILED" and refused.value.code == "UNAVAILABLE", refused.value
    assert "0 of 1 replicas confirmed the write in time" in refused.value.text, refused.value


def test_a_sequence_that_moves_between_servers_of_a_cluster_loses_nothing(two, connect, network):
    """The owner has 250 ms to answer. On a busy machine that can be too short, then other sequences are tried."""
    primaries = network.cluster(3)
    model = saved_later(models.lstm("in_cluster"), network.location_of_cluster(primaries), NEVER_MS)
    for deployment in two:
        deployment.serve(model)
    for store in primaries:
        # both servers hear what they are asked for there
        eventually(lambda store=store: store.ask("PUBSUB", "CHANNELS", "stateful:*"), lambda found: len(found) == 2)
    first, second = (connect(deployment) for deployment in two)
    moved = set()
    for number in range(1, 60):
        talk = Diary(first, model, number)
        talk.start()
        talk.step()
        talk.client = second
        try:
            talk.step()
        except Refused as error:
            assert word(error) == "SEQUENCE_NOT_SAVED", error
            continue
        if talk.lost == 0:
            moved |= {index for index, store in enumerate(primaries) if network.has(store, f":n{number}}}")}
        if moved == {0, 1, 2}:
            return
    pytest.fail(f"each sequence lost a step, except on {moved}")

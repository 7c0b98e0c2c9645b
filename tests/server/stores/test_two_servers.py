"""Two servers share a store, and a request may come to either of them."""

import random
import re
import time
from functools import partial

import pytest

from harness import models
from harness.conversations import together
from harness.deployment import eventually
from harness.models import booked, ledger
from harness.own import Talk, fails_with, fed, total
from harness.raw import Refused, Stream
from harness.stored import saved_later, steps, stored, word


def test_requests_alternate_at_random(two, connect, location_of_valkey):
    """Every answer is right, although each sequence moves all the time."""
    served = [
        stored(ledger("shared_ledger"), location_of_valkey, worker_count=2),
        stored(models.lstm("shared_lstm"), location_of_valkey),
    ]
    for deployment in two:
        for model in served:
            deployment.serve(model)
    clients = [connect(deployment) for deployment in two]

    def wander(number: int) -> None:
        rng = random.Random(number)
        for life in range(2):
            talk = Talk(clients[0], served[number % 2], 100 + number)
            for step in range(12):
                talk.client = rng.choice(clients)
                assert steps(talk.step(start=step == 0)) == (step + 1, step + 1), life
            talk.client = rng.choice(clients)
            assert steps(talk.end()) == (13, 13)
            for talk.client in clients:
                with fails_with("SEQUENCE_MISSING", talk.sequence_id):
                    talk.step()

    together(partial(wander, number) for number in range(6))


def test_the_old_owner_of_a_sequence_answers_nothing_that_is_not_saved(two, connect, location_of_valkey):
    """While one server runs a request, the other goes on with the sequence."""
    model = stored(models.work("overtaken"), location_of_valkey)
    clients = []
    for deployment in two:
        deployment.serve(model)
        clients.append(connect(deployment))
    old, new = clients
    for number, work in enumerate((400, 2000, 10000)):
        sequence = {"sequence_id": 10 + number}
        assert total(old.ask(model.name, fed(1), {**sequence, "sequence_start": True})) == 1
        call = old.send(model.name, fed(10, work), sequence)
        time.sleep(0.1)
        in_time = total(new.ask(model.name, fed(100), sequence)) == 101 and not call.future.done()
        if not in_time:
            continue
        with pytest.raises(Refused) as refused:
            call.answer()
        assert word(refused.value) == "SEQUENCE_MOVED" and refused.value.code == "UNAVAILABLE"
        # sent again, it is made once
        assert total(old.ask(model.name, fed(10), sequence)) == 111
        return
    pytest.fail("the old owner was always faster")


@pytest.mark.parametrize("kept", [stored, saved_later])
def test_a_request_behind_an_end_does_not_take_the_sequence_back(two, connect, location_of_valkey, kept):
    """Core hands both over while the END waits or runs."""
    model = kept(models.work("behind_an_end"), location_of_valkey, worker_count=2, state_api="true")
    for deployment in two:
        deployment.serve(model)
    first, second = (connect(deployment) for deployment in two)
    stream = Stream(two[0])
    for number, at in enumerate(({}, {"sequence_step": 2}), 1):
        sequence = {"sequence_id": number}
        assert total(first.ask(model.name, fed(1), {**sequence, "sequence_start": True})) == 1
        stream.send(model.name, fed(10, 200), sequence)
        end = stream.send(model.name, fed(100, 200), {**sequence, "sequence_end": True, **at})
        again = stream.send(model.name, fed(1000), sequence)
        replies = stream.all_replies(3)
        assert total(replies[end]) == 111 and steps(replies[end])[0] == 3
        assert word(replies[again]) == "SEQUENCE_MISSING"
        for client in (first, second):
            with fails_with("SEQUENCE_MISSING", number):
                client.ask(model.name, fed(1), sequence)


def test_an_end_that_is_sent_twice_runs_once(two, connect, location_of_valkey):
    model = stored(models.work("ends_twice"), location_of_valkey, worker_count=2, state_api="true")
    two[0].serve(model)
    stream = Stream(two[0])
    stream.send(model.name, fed(1), {"sequence_id": 1, "sequence_start": True, "sequence_step": 0})
    for _ in range(3):
        stream.send(model.name, fed(10, 200), {"sequence_id": 1, "sequence_end": True, "sequence_step": 1})
    assert [total(reply) for reply in stream.all_replies(4).values()] == [1, 11, 11, 11]
    assert two[0].statistics(model).execution_count == 2


@pytest.mark.parametrize("older", [False, True], ids=["fresh", "used"])
def test_a_start_that_takes_long_replaces_no_younger_sequence(two, connect, valkey, older):
    """Its client has sent it again, to another server."""
    store = valkey()
    model = stored(models.work("long_start"), store.location, on_duplicate_start="restart")
    for deployment in two:
        deployment.serve(model)
    old, new = (connect(deployment) for deployment in two)

    def asked() -> int:
        [calls] = re.findall(rb"cmdstat_eval:calls=(\d+)", store.ask("INFO", "commandstats")) or [0]
        return int(calls)

    for number, work in enumerate((400, 2000, 10000), 1):
        start = {"sequence_id": number, "sequence_start": True}
        if older:
            old.ask(model.name, fed(5), start)
        before = asked()
        call = old.send(model.name, fed(1, work), start)
        # it has asked which sequence it replaces
        eventually(asked, lambda calls, before=before: calls > before)
        assert total(new.ask(model.name, fed(10), start)) == 10
        in_time = not call.future.done()
        if in_time:
            with pytest.raises(Refused) as refused:
                call.answer()
            assert word(refused.value) == "SEQUENCE_MOVED"
        assert total(new.ask(model.name, fed(100), {"sequence_id": number, "sequence_end": True})) == 110
        if in_time:
            return
    pytest.fail("the old server was always faster")


def test_a_start_that_is_sent_again_does_not_begin_the_sequence_anew(two, connect, location_of_valkey):
    """As a server does that was paused, and finds the START when its client has gone on elsewhere."""
    model = stored(ledger("started_once"), location_of_valkey)
    for deployment in two:
        deployment.serve(model)
    talk, late = (Talk(connect(deployment), model, "seven") for deployment in two)
    talk.start()
    talk.step()
    for _ in range(2):
        with fails_with("SEQUENCE_ALREADY_EXISTS", "'seven' is in the state store"):
            late.start(booked(9))
    assert steps(talk.step()) == (3, 3)
    talk.end()
    assert steps(late.start(booked(3))) == (1, 1)


def test_a_start_begins_anew_on_any_server(two, connect, location_of_valkey):
    model = stored(ledger("started_over"), location_of_valkey, on_duplicate_start="restart")
    for deployment in two:
        deployment.serve(model)
    old, new = (Talk(connect(deployment), model, "seven") for deployment in two)
    old.start()
    old.step()
    new.start(booked(3))
    new.client = old.client
    assert steps(new.step(booked(4))) == (2, 2)


def test_a_clone_of_a_sequence_that_may_be_elsewhere_is_refused(two, connect, location_of_valkey):
    model = stored(models.lstm("cloned_elsewhere"), location_of_valkey, state_api="true")
    two[0].serve(model)
    talk = Talk(connect(two[0]), model, 70)
    talk.start()
    with pytest.raises(Refused) as refused:
        clone = {"sequence_id": 71, "sequence_start": True, "clone_of": 70}
        talk.client.ask(model.name, model.draw(talk.rng), clone)
    assert refused.value.code == "INVALID_ARGUMENT"
    assert "clone_of" in refused.value.text and "state_store" in refused.value.text
    assert steps(talk.step()) == (2, 2)


def test_a_folder_is_for_one_server(two, location_of_file):
    model = stored(ledger("one_server"), location_of_file)
    two[0].serve(model)
    error = two[1].load_error(model)
    assert "in use by another server" in error and "state_store" in error, error

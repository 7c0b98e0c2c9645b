"""Two servers that save steps after their answers: the owner of a sequence is asked before another server takes it."""

import os
import random
import signal
import time
from functools import partial

import numpy as np
import pytest

from harness import models
from harness.conversations import together
from harness.deployment import eventually
from harness.models import ledger
from harness.models.windows import cut
from harness.own import fails_with, fed, total
from harness.raw import Refused, Stream
from harness.stored import NEVER_MS, Diary, saved_later, steps, stored, word


def served(two, model):
    for deployment in two:
        deployment.serve(model)
    return model


@pytest.mark.parametrize("interval_ms", [NEVER_MS, None], ids=["interval", "drain"])
def test_a_sequence_that_moves_from_a_living_server_loses_nothing(two, connect, location_of_valkey, interval_ms):
    """The owner has 250 ms to answer. On a busy machine that can be too short, then the next sequence is tried."""
    model = served(two, saved_later(models.lstm("moves"), location_of_valkey, interval_ms, worker_count=2))
    clients = [connect(deployment) for deployment in two]
    for number in range(1, 10):
        talk = Diary(clients[0], model, number)
        talk.start()
        talk.step()
        try:
            for step in range(6):
                # nothing has saved the steps but the move
                talk.client = clients[step % 2]
                talk.step()
                talk.step()
        except Refused as error:
            assert word(error) == "SEQUENCE_NOT_SAVED", error
            continue
        talk.end()
        for talk.client in clients:
            with fails_with("SEQUENCE_MISSING"):
                talk.step()
        if talk.lost == 0:
            return
    pytest.fail("each sequence lost a step")


def test_sequences_alternate_at_random(two, connect, location_of_valkey):
    """Each answer is right for the number of steps that it names, and no step that was said to be saved is lost."""
    kinds = [
        served(two, saved_later(ledger("alternate_ledger"), location_of_valkey, worker_count=2)),
        served(two, saved_later(models.lstm("alternate_lstm"), location_of_valkey, None)),
    ]
    clients = [connect(deployment) for deployment in two]

    def wander(number: int) -> int:
        """How many steps were lost."""
        rng, lost = random.Random(number), 0
        for _life in range(3):
            # an id is used by one client, again and again
            talk = Diary(clients[0], kinds[number % 2], 100 + number)
            talk.start()
            for _ in range(12):
                talk.client = rng.choice(clients)
                try:
                    talk.step()
                except Refused as error:
                    assert word(error) in ("SEQUENCE_NOT_SAVED", "SEQUENCE_MOVED"), error
                    if word(error) == "SEQUENCE_NOT_SAVED":
                        talk.start()
            talk.end()
            lost += talk.lost
        return lost

    lost = together(partial(wander, number) for number in range(6))
    # most moves lose nothing
    assert sum(lost) < 100, lost


def test_requests_that_wait_for_a_sequence_which_leaves_are_sent_on(two, connect, location_of_valkey):
    """The first of two requests runs when its sequence leaves, and the second waits for it.

    A run that the owner can't end within its 250 ms is halved for the next attempt, and one that ends too early is doubled.
    """
    model = served(two, saved_later(models.work("leaves"), location_of_valkey, NEVER_MS))
    old, new = (connect(deployment) for deployment in two)
    work = 200

    def outcome(call) -> int | tuple[str, str]:
        try:
            return total(call.answer())
        except Refused as error:
            return word(error), error.code

    for number in range(1, 40):
        sequence = {"sequence_id": number}
        assert total(old.ask(model.name, fed(1), {**sequence, "sequence_start": True})) == 1
        running = old.send(model.name, fed(10, work), sequence)
        time.sleep(0.03)
        queued = old.send(model.name, fed(500), sequence)
        moved = outcome(new.send(model.name, fed(100), sequence))
        if (outcome(running), outcome(queued), moved) == (11, ("SEQUENCE_MOVED", "UNAVAILABLE"), 111):
            # sent again, it is made
            assert total(old.ask(model.name, fed(5), sequence)) == 116
            return
        work = max(work // 2, 1) if moved == ("SEQUENCE_NOT_SAVED", "NOT_FOUND") else work * 2
    pytest.fail("no sequence moved while its request ran")


def test_a_dead_owner_is_not_asked_and_a_frozen_one_not_waited_for(two, connect, location_of_valkey):
    model = served(two, saved_later(models.lstm("frozen"), location_of_valkey))
    frozen, dead = (Diary(connect(two[0]), model, number) for number in (1, 2))
    for talk in (frozen, dead):
        talk.start()
        talk.step()
    two[0].settles("stateful_oldest_unsaved_step_seconds", model, 0)
    os.kill(two[0].server.pid, signal.SIGSTOP)
    frozen.client = connect(two[1])
    frozen.step()
    assert (frozen.answered, frozen.lost) == (3, 0)
    os.kill(two[0].server.pid, signal.SIGCONT)
    # it hears that it was asked
    two[0].settles("stateful_live_sequences", model, 1)
    frozen.client = connect(two[0])
    while frozen.answered < 8:
        frozen.step()
    two[0].kill()
    for talk in (frozen, dead):
        talk.client = connect(two[1])
        talk.step()
    assert dead.lost == 0


@pytest.mark.parametrize("kept", [stored, saved_later])
def test_an_end_whose_client_has_gone_ends_nothing(two, connect, valkey, kept):
    """The client may send it again, to any server."""
    store = valkey()
    model = served(two, kept(models.work("late_end", max_batch_size=1), store.location, worker_count=1))
    here, there = (connect(deployment) for deployment in two)
    assert total(here.ask(model.name, fed(1), {"sequence_id": 1, "sequence_start": True})) == 1
    # The END comes while another sequence runs.
    blocks = here.send(model.name, fed(0, 10_000), {"sequence_id": 2, "sequence_start": True, "sequence_end": True})
    eventually(lambda: [key for key in store.ask("KEYS", "b*") if b":n2}" in key], bool)
    stream = Stream(two[0])
    stream.send(model.name, fed(10), {"sequence_id": 1, "sequence_end": True})
    two[0].settles("stateful_queued_requests", model, 1)
    stream.leave()
    blocks.answer()
    eventually(lambda: two[0].failures(model), lambda failures: failures["cancelled"] == 1)
    for client in (there, here):
        assert steps(client.ask(model.name, fed(0), {"sequence_id": 1}))[0] == 2 + (client is here)
    assert total(there.ask(model.name, fed(10), {"sequence_id": 1, "sequence_end": True})) == 11


@pytest.mark.parametrize("kept", [stored, saved_later])
def test_an_end_that_is_late_between_two_steps_ends_nothing(two, connect, location_of_valkey, kept):
    later = {} if kept is stored else {"interval_ms": None}
    model = served(two, kept(cut("late_between", 5), location_of_valkey, **later))
    here, there = (connect(deployment) for deployment in two)

    def ask(client, elements: int, **flags):
        inputs = {"AUDIO": np.ones((1, elements), np.float32), "GAIN": np.ones((1, 1), np.float32)}
        return client.ask(model.name, inputs, {"sequence_id": 1, **flags})

    assert steps(ask(here, 5, sequence_start=True))[0] == 1
    assert steps(ask(here, 5))[0] == 2
    with pytest.raises(Refused) as refused:
        ask(here, 500_000, sequence_end=True, timeout=20_000)
    assert word(refused.value) in ("REQUEST_TIMEOUT", "SEQUENCE_QUEUE_TIMEOUT"), refused.value
    assert steps(ask(there, 5))[0] == 3
    assert steps(ask(here, 5, sequence_end=True))[0] == 4


@pytest.mark.parametrize("kept", [stored, saved_later])
def test_a_start_whose_client_has_gone_leaves_the_sequence_that_began_elsewhere(two, connect, location_of_valkey, kept):
    """As after a pause of the server: the client has sent its START again, to another one."""
    model = served(two, kept(ledger("late_start"), location_of_valkey, max_sequence_number=1, max_queue_size=1))
    here, there = (connect(deployment) for deployment in two)
    blocks, talk = Diary(here, model, 1), Diary(there, model, 2)
    blocks.start()
    start = here.send(model.name, model.draw(talk.rng), {"sequence_id": 2, "sequence_start": True})
    two[0].settles("stateful_waiting_starts", model, 1)
    start.future.cancel()
    talk.start()
    talk.step()
    # the server has heard that it is cancelled
    time.sleep(0.5)
    blocks.end()
    eventually(lambda: two[0].failures(model), lambda failures: failures["cancelled"] == 1)
    talk.step()
    assert (talk.answered, talk.lost) == (3, 0)

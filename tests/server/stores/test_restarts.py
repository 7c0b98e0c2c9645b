"""A server is killed in the middle of its sequences, and another one goes on with them."""

import threading

import numpy as np
import pytest

from harness import models
from harness.deployment import eventually
from harness.models import booked, generated, ledger
from harness.models.generated import Made, counted
from harness.models.inputs import framed
from harness.models.windows import cut
from harness.own import FAILS, Talk, fails_with, fed, total
from harness.raw import Refused, Stream, Unary
from harness.stored import both_stores, steps, stored
from harness.windows import Cut, WindowOracle, WindowTalk


def kinds(location: str) -> list:
    """Models with states of fixed size, growing states, contexts, counters and held inputs."""
    made = Made("STEP", "int64", ("N", 1), "steps", generated.steps())
    return [
        stored(models.lstm("kept_lstm"), location),
        stored(ledger("kept_ledger"), location, worker_count=2),
        stored(framed("kept_context", ["N", 6], (2, 1), (4,)), location),
        stored(counted("kept_counters", made), location),
    ]


@both_stores
def test_sequences_go_on_after_a_kill(deploy, location):
    """At the kill each client waits for an answer. The answers of the next server tell whether that step was made."""
    served = kinds(location)
    talks = [(model, Talk(None, model, 100 + number)) for number, model in enumerate(served)]
    asked: dict[int, list] = {}
    made = [0] * len(talks)

    def run(deployment, number: int, at_least: int, ready: threading.Barrier) -> None:
        model, talk = talks[number]
        talk.client = Unary(deployment)
        try:
            for count in range(10**9):
                if count == at_least:
                    ready.wait(60)
                inputs = model.draw(talk.rng)
                asked[number] = inputs
                # the oracle makes a step with each answer
                start = made[number] == 0
                answer = talk.client.ask(model.name, inputs, {"sequence_id": talk.sequence_id, "sequence_start": start})
                now, saved = steps(answer)
                assert saved == now
                if now == made[number] + 2:
                    # the step before the kill had been made
                    talk.oracle.step(lost[number])
                    made[number] += 1
                assert now == made[number] + 1
                talk.check(answer, inputs, start=start)
                made[number] += 1
        except Refused:
            # the server was killed
            assert deployment.stopped
        finally:
            talk.client.close()

    lost: dict[int, dict[str, np.ndarray]] = {}
    for _ in range(3):
        deployment = deploy(control_model=False)
        for model in served:
            deployment.serve(model)
        ready = threading.Barrier(len(talks) + 1)
        failed: list[BaseException] = []

        def guarded(number: int, deployment=deployment, ready=ready, failed=failed) -> None:
            try:
                run(deployment, number, 3 + number, ready)
            except BaseException as error:
                failed.append(error)
                ready.abort()

        threads = [threading.Thread(target=guarded, args=(number,)) for number in range(len(talks))]
        for thread in threads:
            thread.start()
        ready.wait(60)
        deployment.kill()
        for thread in threads:
            thread.join()
        assert not failed, failed
        lost = dict(asked)
    assert min(made) >= 9


@both_stores
def test_left_over_elements_and_held_inputs_are_kept(deploy, connect, location):
    windows = stored(cut("kept_windows", 5, 2), location)
    held = stored(ledger("kept_held"), location, held_inputs="SCALE")
    talk = WindowTalk(None, WindowOracle(windows, {"AUDIO": Cut(5)}), np.random.default_rng(7))
    booking = Talk(None, held, 7)
    first = deploy(control_model=False)
    for model in (windows, held):
        first.serve(model)
    talk.client = booking.client = connect(first)
    talk.ask(13, start=True)
    booking.start(booked(3, 5))
    assert talk.left()
    first.kill()
    second = deploy(control_model=False)
    for model in (windows, held):
        second.serve(model)
    talk.client = booking.client = connect(second)
    talk.ask(4)
    talk.ask(11, end=True)
    answer = booking.client.ask(held.name, booked(4, None), {"sequence_id": 7})
    booking.check(answer, booked(4, 5))


@both_stores
def test_an_end_and_a_new_start_are_there_after_a_kill(deploy, connect, location):
    model = stored(ledger("ended"), location, sequence_idle_timeout_ms=50, on_duplicate_start="restart")
    first = deploy(control_model=False)
    first.serve(model)
    ended, one_shot, started_over, failed = (Talk(connect(first), model, number) for number in (1, 2, 3, 4))
    ended.start()
    ended.end()
    one_shot.start()
    started_over.start()
    failed.start()
    # until they are idle: then they are only in the store
    first.settles("stateful_live_sequences", model, 0)
    one_shot.one_shot()
    started_over.start(booked(9))
    with pytest.raises(Refused):
        failed.start(booked(FAILS))
    first.kill()
    second = deploy(control_model=False)
    second.serve(model)
    for talk in (ended, one_shot, failed):
        talk.client = connect(second)
        with fails_with("SEQUENCE_MISSING", talk.sequence_id):
            talk.step()
    started_over.client = connect(second)
    assert steps(started_over.step(booked(1))) == (2, 2)


@both_stores
def test_an_idle_sequence_leaves_the_server_and_goes_on(deploy, connect, location):
    model = stored(ledger("idle"), location, sequence_idle_timeout_ms=30, max_sequence_number=1)
    deployment = deploy()
    deployment.serve(model)
    talks = [Talk(connect(deployment), model, number) for number in (1, 2)]
    for number in range(4):
        for talk in talks:
            deployment.settles("stateful_live_sequences", model, 0)
            talk.step(start=number == 0)


def replies_to(deployment, model, sent: list, worker_is: str) -> dict:
    """Sends requests of sequence 7. If the worker is busy, all wait first, and the STARTs among them run in one batch."""
    stream, other = Stream(deployment), Stream(deployment)
    if worker_is == "busy":
        other.send(model.name, fed(0, 6000), {"sequence_id": 8, "sequence_start": True})
        deployment.settles("stateful_live_sequences", model, 1)
    for inputs, parameters in sent:
        stream.send(model.name, inputs, {"sequence_id": 7, **parameters})
    if worker_is == "busy":
        deployment.settles("stateful_queued_requests", model, len(sent))
        other.reply()
    came = stream.all_replies(len(sent))
    stream.close()
    other.close()
    return came


@pytest.mark.parametrize("worker_is", ["free", "busy"])
@pytest.mark.parametrize("how", ["end", "restart"])
@both_stores
def test_a_start_does_not_touch_the_requests_that_were_sent_before_it(deploy, location, how, worker_is):
    """The older sequence has requests that wait when the younger one with its id is saved."""
    limits = {"max_queued_requests_per_sequence": 64, "worker_count": 1}
    model = stored(models.work("replaced"), location, on_duplicate_start="restart", **limits)
    deployment = deploy(control_model=False)
    deployment.serve(model)
    sent, wanted = [(fed(1, 200), {"sequence_start": True})], [1]
    for life in range(2, 5):
        for _ in range(3):
            sent.append((fed(10, 20), {}))
            wanted.append(wanted[-1] + 10)
        if how == "end":
            sent[-1][1]["sequence_end"] = True
        sent.append((fed(life), {"sequence_start": True}))
        wanted.append(life)
    came = replies_to(deployment, model, sent, worker_is)
    refused = [reply for reply in came.values() if isinstance(reply, Refused)]
    assert not refused, refused
    assert [total(came[number]) for number in range(len(sent))] == wanted


@pytest.mark.parametrize(("workers", "worker_is"), [(1, "free"), (1, "busy"), (2, "free")])
@both_stores
def test_a_start_that_fails_does_not_touch_the_requests_that_were_sent_before_it(deploy, location, workers, worker_is):
    """The STARTs are in one batch if the worker is busy. With two workers, the second START runs during the first one."""
    model = stored(models.work("not_replaced"), location, on_duplicate_start="restart", worker_count=workers)
    deployment = deploy(control_model=False)
    deployment.serve(model)
    sent = [(fed(1, 200), {"sequence_start": True}), *[(fed(10, 20), {})] * 3, (fed(FAILS), {"sequence_start": True})]
    came = replies_to(deployment, model, sent, worker_is)
    assert isinstance(came[4], Refused), came[4]
    assert [total(came[number]) for number in range(4)] == [1, 11, 21, 31]


def test_a_start_that_runs_late_replaces_no_younger_sequence_of_its_server(deploy, connect, valkey):
    """The older sequence waits for a busy worker. Its client has ended it, and has begun the next one."""
    store = valkey()
    model = stored(models.work("passed", max_batch_size=1), store.location, worker_count=2)
    deployment = deploy(control_model=False)
    deployment.serve(model)
    client, stream = connect(deployment), Stream(deployment)
    start, end = {"sequence_start": True}, {"sequence_end": True}
    # the second worker has a sequence, and the first one runs for long
    for number in (1, 2):
        client.ask(model.name, fed(0), {"sequence_id": number, **start})
    client.ask(model.name, fed(0), {"sequence_id": 1, **end})
    blocks = client.send(model.name, fed(0, 6000), {"sequence_id": 3, **start, **end})
    eventually(lambda: [key for key in store.ask("KEYS", "b*") if b":n3}" in key], bool)
    for parameters in (start, end):
        stream.send(model.name, fed(1), {"sequence_id": 7, **parameters})
    deployment.settles("stateful_queued_requests", model, 2)
    assert total(client.ask(model.name, fed(10), {"sequence_id": 7, **start})) == 10
    assert not blocks.future.done()
    came = stream.all_replies(2)
    assert [total(came[number]) for number in range(2)] == [1, 2]
    assert total(client.ask(model.name, fed(10), {"sequence_id": 7})) == 20
    deployment.kill()
    second = deploy(control_model=False)
    second.serve(model)
    assert total(connect(second).ask(model.name, fed(10), {"sequence_id": 7})) == 30
    stream.close()


def test_ids_that_the_server_gives_are_not_those_of_the_server_before(deploy, connect, location_of_file):
    model = stored(models.counter("fp32", "numbered"), location_of_file)
    ids = []
    for _ in range(2):
        deployment = deploy(control_model=False)
        deployment.serve(model)
        talk = Talk(connect(deployment), model)
        talk.start()
        ids.append(talk.sequence_id)
        deployment.kill()
    assert len({*ids}) == 2 and min(ids) > 1000


def test_a_reload_keeps_sequences(deploy, connect, location_of_file):
    model = stored(ledger("reloaded"), location_of_file)
    deployment = deploy()
    talk = Talk(connect(deployment), model, 5)
    for round in range(2):
        deployment.serve(model)
        talk.step(start=round == 0)
        deployment.unload(model)

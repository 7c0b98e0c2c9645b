"""Steps are saved after their answers: what a server that dies or stops leaves, and what a store that fails does."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from harness import models
from harness.deployment import eventually
from harness.models import booked, ledger
from harness.models.inputs import framed
from harness.models.windows import cut
from harness.own import FAILS, fails_with, fed, total
from harness.raw import Refused, Unary
from harness.stored import NEVER_MS, Diary, both_stores, saved_later, steps, stored, word
from harness.windows import Cut, WindowOracle, WindowTalk
from triton_stateful import Retry, Sequence


def refused(talk: Diary, wanted: str, code: str, **how) -> None:
    with pytest.raises(Refused) as error:
        talk.step(**how)
    assert (word(error.value), error.value.code) == (wanted, code), error.value


def not_saved(talk: Diary) -> None:
    refused(talk, "SEQUENCE_NOT_SAVED", "NOT_FOUND")


def all_saved(deployment, *served) -> None:
    """Waits until the store has all steps."""
    for model in served:
        deployment.settles("stateful_oldest_unsaved_step_seconds", model, 0)


@both_stores
def test_idle_sequences_are_saved_and_go_on_after_a_kill(deploy, location):
    served = [
        saved_later(models.lstm("later_lstm"), location),
        saved_later(ledger("later_ledger"), location, worker_count=2, held_inputs="SCALE"),
        saved_later(framed("later_context", ["N", 6], (2, 1), (4,)), location),
    ]
    talks = [Diary(None, model, 10 * at + number) for at, model in enumerate(served) for number in range(1, 5)]
    for made in (5, 9, 12):
        deployment = deploy(control_model=False)
        for model in served:
            deployment.serve(model)
        client = Unary(deployment)
        for talk in talks:
            talk.client = client
            while talk.answered < made:
                talk.step(start=talk.answered == 0)
        all_saved(deployment, *served)
        assert deployment.metric("stateful_states_saved_total", served[0]) >= 4
        client.close()
        deployment.kill()
    assert all(talk.lost == 0 for talk in talks)


@both_stores
def test_left_over_elements_are_kept(deploy, connect, location):
    model = saved_later(cut("later_windows", 5, 2), location)
    talk = WindowTalk(None, WindowOracle(model, {"AUDIO": Cut(5)}), np.random.default_rng(7))
    for sent in (13, 4, 11):
        deployment = deploy(control_model=False)
        deployment.serve(model)
        talk.client = connect(deployment)
        talk.ask(sent, start=sent == 13)
        all_saved(deployment, model)
        deployment.kill()


@both_stores
def test_a_kill_under_load_loses_no_step_that_was_said_to_be_saved(deploy, location):
    model = saved_later(models.lstm("later_killed"), location, 30)
    talks = [Diary(None, model, number) for number in range(1, 7)]
    for _ in range(3):
        deployment = deploy(control_model=False)
        deployment.serve(model)
        client = Unary(deployment)
        for talk in talks:
            talk.client = client
        # until each has saved steps of this server's, and some that are not
        before = [talk.answered for talk in talks]
        deadline = time.monotonic() + 60
        while any(talk.saved <= count for talk, count in zip(talks, before, strict=True)):
            for talk in talks:
                talk.step(start=talk.answered == 0)
            assert time.monotonic() < deadline, [(talk.answered, talk.saved) for talk in talks]
        client.close()
        deployment.kill()
    # `Diary` has checked each answer, and that no saved step was lost
    assert all(talk.answered > 3 for talk in talks)


@both_stores
def test_a_sequence_that_was_never_saved_is_not_an_older_one(deploy, connect, location):
    model = saved_later(ledger("never_saved"), location, NEVER_MS, on_duplicate_start="restart")
    saved_before = saved_later(ledger("never_saved"), location, on_duplicate_start="restart")
    first = deploy(control_model=False)
    first.serve(saved_before)
    talk, other = Diary(connect(first), model, 1), Diary(connect(first), model, 2)
    for one in (talk, other):
        one.start(booked(100))
        one.step()
    all_saved(first, saved_before)
    first.kill()
    second = deploy(control_model=False)
    second.serve(model)
    talk.client = other.client = connect(second)
    talk.start(booked(1))
    talk.step()
    assert talk.saved == 0
    with pytest.raises(Refused):
        other.start(booked(FAILS))
    second.kill()
    third = deploy(control_model=False)
    third.serve(model)
    talk.client = other.client = connect(third)
    not_saved(talk)
    talk.start(booked(1))
    talk.step()


@both_stores
@pytest.mark.parametrize("interval_ms", [NEVER_MS, None], ids=["interval", "drain"])
def test_a_server_that_stops_saves_its_sequences(deploy, connect, location, interval_ms):
    model = saved_later(models.lstm("stops"), location, interval_ms, worker_count=2)
    talks = [Diary(None, model, number) for number in range(1, 6)]
    for made in (3, 6):
        deployment = deploy(control_model=False)
        deployment.serve(model)
        for talk in talks:
            talk.client = connect(deployment)
            while talk.answered < made:
                talk.step(start=talk.answered == 0)
        deployment.stop()
    assert [(talk.lost, talk.saved) for talk in talks] == [(0, 3)] * 5


@both_stores
@pytest.mark.parametrize("interval_ms", [NEVER_MS, None], ids=["interval", "drain"])
def test_a_model_that_is_unloaded_saves_its_sequences(deploy, connect, location, interval_ms):
    model = saved_later(models.lstm("unloaded"), location, interval_ms, worker_count=2)
    deployment = deploy()
    talks = [Diary(connect(deployment), model, number) for number in range(1, 6)]
    for made in (3, 6):
        deployment.serve(model)
        for talk in talks:
            while talk.answered < made:
                talk.step(start=talk.answered == 0)
        deployment.unload(model)
    assert [(talk.lost, talk.saved) for talk in talks] == [(0, 3)] * 5


@both_stores
@pytest.mark.parametrize("levels", ["interval", "drain", "interval, then step"])
def test_a_model_that_is_loaded_again_loses_no_step(deploy, connect, location, levels):
    """Triton loads the new instance first. The older one goes when its last request has run, and has unsaved steps until then."""
    model = saved_later(models.work("again"), location, None if levels == "drain" else NEVER_MS, worker_count=2)
    later = stored(models.work("again"), location, worker_count=2) if "step" in levels else model
    deployment = deploy()
    deployment.serve(model)
    client = connect(deployment)
    sums = dict.fromkeys((1, 2, 3), 0)

    def added(number: int, value: int) -> int:
        sums[number] += value
        return sums[number]

    for number in sums:
        answer = client.ask(model.name, fed(5), {"sequence_id": number, "sequence_start": True})
        assert total(answer) == added(number, 5)
    for value in (10, 100):
        running = client.send(model.name, fed(value, 1000), {"sequence_id": 3})
        time.sleep(0.05)
        later.write(deployment.repository)
        # Triton loads a model again only if a file of a version has changed
        os.utime(deployment.repository / model.name / "1" / "model.onnx")
        deployment.admin.load_model(model.name)
        for number in (1, 2):
            answer = client.ask(model.name, fed(value), {"sequence_id": number})
            assert total(answer) == added(number, value)
        assert total(running.answer()) == added(3, value)


@both_stores
@pytest.mark.parametrize("interval_ms", [NEVER_MS, None], ids=["interval", "drain"])
def test_a_sequence_that_was_idle_for_too_long_is_saved(deploy, connect, location, interval_ms):
    model = saved_later(ledger("idle_later"), location, interval_ms, sequence_idle_timeout_ms=30, max_sequence_number=1)
    deployment = deploy()
    deployment.serve(model)
    talks = [Diary(connect(deployment), model, number) for number in (1, 2)]
    for number in range(4):
        for talk in talks:
            deployment.settles("stateful_live_sequences", model, 0)
            talk.step(start=number == 0)
    deployment.settles("stateful_live_sequences", model, 0)
    # the next request may come before its sequence has left
    for _ in range(20):
        talks[0].step()
    deployment.settles("stateful_live_sequences", model, 0)
    all_saved(deployment, model)
    deployment.kill()
    again = deploy(control_model=False)
    again.serve(model)
    talks[0].client = connect(again)
    talks[0].step()
    assert [talk.lost for talk in talks] == [0, 0]


@both_stores
def test_an_end_is_final(deploy, connect, location):
    model = saved_later(ledger("ended_later"), location)
    deployment = deploy(control_model=False)
    deployment.serve(model)
    talk, one_shot, failed = (Diary(connect(deployment), model, number) for number in (1, 2, 3))
    talk.start()
    one_shot.one_shot()
    with pytest.raises(Refused):
        failed.start(booked(FAILS))
    all_saved(deployment, model)
    assert steps(talk.end())[0] == 2
    for one in (talk, one_shot, failed):
        # here, and in the store
        for _ in range(3):
            with fails_with("SEQUENCE_MISSING"):
                one.step()
    deployment.stop()
    again = deploy(control_model=False)
    again.serve(model)
    for one in (talk, one_shot, failed):
        one.client = connect(again)
        with fails_with("SEQUENCE_MISSING"):
            one.step()


@both_stores
@pytest.mark.parametrize("durability", ["step", "interval", "drain"])
def test_an_end_that_is_refused_for_its_step_ends_nothing(deploy, connect, location, durability):
    """A server may have an older state than the client has seen. The client then makes the missing steps, and ends it."""
    how = {"interval": partial(saved_later, interval_ms=NEVER_MS), "drain": partial(saved_later, interval_ms=None)}
    model = how.get(durability, stored)(ledger("end_refused"), location, state_api="true")
    deployment = deploy(control_model=False)
    deployment.serve(model)
    talk = Diary(connect(deployment), model, 1)
    talk.start()
    for made in (1, 2, 3):
        ends = {"sequence_id": 1, "sequence_end": True, "sequence_step": 7}
        for _ in range(2):
            with pytest.raises(Refused, match=f"SEQUENCE_STEP_CONFLICT: .* which has made {made}; the request has not"):
                talk.client.ask(model.name, model.draw(talk.rng), ends)
        # the state has left the server, and is saved
        talk.step()
        assert (talk.answered, talk.lost) == (made + 1, 0) and talk.saved >= made
    talk.end()
    with fails_with("SEQUENCE_MISSING"):
        talk.step()


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_without_the_store_inference_goes_on_and_steps_are_saved_when_it_is_back(deploy, connect, valkey, how):
    store, deployment, other = valkey(), deploy(), deploy(control_model=False)
    model = saved_later(ledger("goes_on"), store.location)
    for one in (deployment, other):
        one.serve(model)
    live, elsewhere, theirs = (Diary(connect(deployment), model, number) for number in (1, 2, 3))
    live.start()
    theirs.client = connect(other)
    theirs.start()
    all_saved(deployment, model)
    all_saved(other, model)
    if how == "killed":
        store.kill()
    else:
        store.process.send_signal(signal.SIGSTOP)
    live.step()
    # the thread that writes finds it out, and says so once
    eventually(lambda: "steps are not saved, because the store" in deployment.server.log_text(), bool)
    born, mine = Diary(connect(deployment), model, 4), Diary(connect(deployment), model, 3)
    born.start()
    mine.start()
    for _ in range(20):
        for talk in (live, born, mine):
            talk.step()
    refused(elsewhere, "STATE_STORE_FAILED", "UNAVAILABLE")
    assert live.saved <= 1 and born.saved == mine.saved == 0
    eventually(lambda: deployment.metric("stateful_oldest_unsaved_step_seconds", model), lambda age: age > 0)
    assert deployment.server.log_text().count("steps are not saved, because the store") == 1
    if how == "killed":
        store.start()
    else:
        store.process.send_signal(signal.SIGCONT)
    all_saved(deployment, model)
    assert deployment.metric("stateful_store_errors_total", model) > 0
    # the store has another sequence with this id, so it is not saved
    assert deployment.metric("stateful_sequences_not_saved_total", model) == 1
    mine.step()
    assert mine.saved == 0
    live.step()
    born.step()
    assert live.saved == live.answered - 1 and born.saved == born.answered - 1
    all_saved(deployment, model)
    deployment.kill()
    for talk in (live, born):
        talk.client = connect(other)
        talk.step()
    theirs.step()
    assert (live.lost, born.lost, theirs.lost) == (0, 0, 0)


def taken_by_another_server(store) -> None:
    """The only sequence there is, as it is saved. Its owner isn't asked."""
    [record] = store.ask("KEYS", "o*")
    token = store.ask("HGET", record, "t")
    store.ask("RENAME", b"b" + record[1:] + token, b"b" + record[1:] + bytes(len(token)))
    store.ask("HSET", record, "t", bytes(len(token)), "o", "")


def test_a_request_that_runs_while_the_store_refuses_its_sequence_says_what_is_saved(deploy, valkey):
    """So its client knows that the step may be lost, keeps it, and sends it again."""
    store, deployment = valkey(), deploy(control_model=False)
    model = saved_later(models.work("refused_meanwhile"), store.location, state_api="true")
    deployment.serve(model)
    retry = Retry(attempts=50, backoff=0.001, longest=0.1)
    with Sequence(deployment.server.grpc_url, model.name, retry=retry) as sequence, ThreadPoolExecutor(1) as pool:
        sequence.step(fed(1))
        all_saved(deployment, model)
        taken_by_another_server(store)
        store.process.send_signal(signal.SIGSTOP)
        try:
            sequence.step(fed(2))
            # the state waits to be written
            eventually(lambda: deployment.metric("stateful_store_errors_total", model), lambda errors: errors > 0)
            # about a second
            running = pool.submit(sequence.step, fed(4, 2000))
            time.sleep(0.1)
        finally:
            store.process.send_signal(signal.SIGCONT)
        assert running.result().parameters["stateful_steps_saved"] == 1
        assert sequence.step(fed(8))["OUTPUT"].item() == 1 + 2 + 4 + 8


def test_an_end_follows_the_steps_that_its_server_does_not_have(deploy, connect, valkey):
    store, deployment = valkey(), deploy(control_model=False)
    model = saved_later(models.work("behind"), store.location, state_api="true")
    deployment.serve(model)
    retry = Retry(attempts=50, backoff=0.001, longest=0.1)
    with Sequence(deployment.server.grpc_url, model.name, retry=retry) as sequence:
        sequence.step(fed(1))
        all_saved(deployment, model)
        taken_by_another_server(store)
        sequence.step(fed(2))
        deployment.settles("stateful_live_sequences", model, 0)
        # the store has the state after one step
        assert sequence.step(fed(4), end=True)["OUTPUT"].item() == 1 + 2 + 4
    with fails_with("SEQUENCE_MISSING"):
        connect(deployment).ask(model.name, fed(8), {"sequence_id": sequence.id})


def test_a_store_that_is_down_at_load_is_used_when_it_is_up(deploy, connect, valkey):
    store, deployment = valkey(), deploy(control_model=False)
    store.kill()
    model = saved_later(ledger("late_later"), store.location)
    deployment.serve(model)
    talk = Diary(connect(deployment), model, 1)
    talk.start()
    talk.step()
    store.start()
    all_saved(deployment, model)
    talk.step()
    assert talk.saved == 2
    talk.end()

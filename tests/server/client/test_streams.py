"""Several sequences over one gRPC stream, whose requests don't wait for answers."""

from __future__ import annotations

import threading
import types

import numpy as np
import pytest

from client.proxy import LossyProxy
from harness import models
from harness.own import FAILS, fed
from harness.sequence_oracle import SequenceOracle, assert_same
from triton_stateful import (
    AnswerLost,
    Retry,
    Sequence,
    SequenceMissing,
    StatefulError,
    StepConflict,
    Stream,
    Unavailable,
)

AGAIN = Retry(attempts=20, backoff=0.001, longest=0.05)


@pytest.fixture
def stream(clients, deployment) -> Stream:
    return clients.client("stream", deployment.server)


@pytest.fixture
def lossy(clients, deployment):
    """A proxy, and a stream through it."""
    proxy = LossyProxy(deployment.server.grpc_url, "grpc")
    yield proxy, clients.client("stream", types.SimpleNamespace(grpc_url=proxy.url))
    proxy.close()


def test_sequences_share_a_stream_without_waiting(serve, stream, scheduling):
    model, rng = serve(models.work, scheduling), np.random.default_rng(1)
    sequences = [Sequence(stream, model.name) for _ in range(5)]
    oracles = [SequenceOracle(model, sequence.id) for sequence in sequences]
    asked = []
    for step in range(100):
        for sequence, oracle in zip(sequences, oracles, strict=True):
            inputs = model.draw(rng)
            commit = step % 7 != 3
            future = sequence.send(inputs, commit=commit, end=step == 99)
            before = oracle.sequence.state
            asked.append((future, oracle.step(inputs, start=step == 0)))
            if not commit:
                oracle.sequence.state = before
    for number, (future, expected) in enumerate(asked):
        assert_same(model, future.result(), expected, f"request {number}")


def test_steps_behind_one_that_fails_are_refused(serve, stream, scheduling):
    model = serve(models.work, scheduling)
    with Sequence(stream, model.name) as sequence:
        futures = [sequence.send(fed(FAILS if number == 4 else number)) for number in range(8)]
        assert [future.result()["OUTPUT"].item() for future in futures[:4]] == [0, 1, 3, 6]
        assert type(futures[4].exception()) is StatefulError
        assert [type(future.exception()) for future in futures[5:]] == [StepConflict] * 3
        assert sequence.step(fed(10))["OUTPUT"].item() == 16
        assert sequence.send(fed(10)).result()["OUTPUT"].item() == 26
        assert sequence.steps == sequence.info().steps == 6


def test_nothing_is_sent_behind_a_failure_until_the_caller_looks(serve, stream, scheduling):
    """In a list of steps, whenever failures are noticed, none of the later values runs in the place of an earlier one."""
    model = serve(models.work, scheduling)
    with Sequence(stream, model.name) as sequence:
        for round_, failing in enumerate(([3], [3, 5], [0, 1, 7])):
            made, futures = sequence.info().steps, []
            for number in range(8):
                futures.append(sequence.send(fed(FAILS if number in failing else 10**round_)))
                # The client notices each failure between two steps of the list.
                futures[-1].exception()
            first = failing[0]
            assert [future.exception() for future in futures[:first]] == [None] * first
            assert type(futures[first].exception()) is StatefulError
            for future in futures[first + 1 :]:
                with pytest.raises(StepConflict, match=r"info\(\) returns the number of steps"):
                    future.result()
            assert sequence.info().steps == sequence.steps == made + first
        assert sequence.state()["SUM_IN"].item() == 33


@pytest.mark.parametrize("call", ["info", "step", "state", "snapshot", "set_state", "reset", "restore"])
def test_a_call_that_waits_counts_the_steps(serve, stream, call):
    model = serve(models.work)
    with Sequence(stream, model.name) as sequence:
        sequence.step(fed(1))
        saved = sequence.snapshot()
        futures = [sequence.send(fed(value)) for value in (2, FAILS, 4)]
        assert futures[-1].exception() is not None
        assert type(sequence.send(fed(4)).exception()) is StepConflict
        expected = 3 + 10
        if call == "step":
            sequence.step(fed(5))
            expected += 5
        elif call == "set_state":
            sequence.set_state(SUM_IN=np.array([[50]], np.int64))
            expected = 50 + 10
        elif call == "reset":
            sequence.reset()
            expected = 10
        elif call == "restore":
            sequence.restore(saved)
            expected = 1 + 10
        else:
            getattr(sequence, call)()
        assert sequence.send(fed(10)).result()["OUTPUT"].item() == expected
        assert sequence.steps == sequence.info().steps


def test_an_end_is_not_sent_behind_a_failure(serve, stream, scheduling):
    model = serve(models.work, scheduling)
    with Sequence(stream, model.name) as sequence:
        futures = [sequence.send(fed(value)) for value in (1, FAILS)]
        assert type(futures[-1].exception()) is StatefulError
        assert type(sequence.send(fed(3), end=True).exception()) is StepConflict
        assert sequence.info().steps == 1
        assert sequence.send(fed(3), end=True).result()["OUTPUT"].item() == 4
        with pytest.raises(SequenceMissing, match="has ended"):
            sequence.send(fed(5))


def test_an_end_that_is_sent_before_a_failure_is_noticed_ends_the_sequence(serve, lossy, scheduling):
    model = serve(models.work, scheduling)
    proxy, stream = lossy
    with Sequence(stream, model.name) as sequence:
        sequence.step(fed(1))
        are_sent = threading.Event()
        proxy.lose = lambda: are_sent.wait() and "none"
        futures = [sequence.send(fed(value), end=value == 3) for value in (FAILS, 2, 3)]
        are_sent.set()
        errors = [type(future.exception()) for future in futures]
        assert errors == [StatefulError, StepConflict, StepConflict]
        with pytest.raises(SequenceMissing):
            sequence.info()


@pytest.mark.parametrize(("loss", "made"), [("request", 1), ("answer", 2)])
def test_nothing_is_sent_behind_a_broken_stream_until_the_caller_looks(serve, lossy, loss, made):
    model = serve(models.work)
    proxy, stream = lossy
    sequence = Sequence(stream, model.name, retry=AGAIN)
    assert sequence.step(fed(1))["OUTPUT"].item() == 1
    losses = iter([loss])
    proxy.lose = lambda: next(losses, "none")
    assert type(sequence.send(fed(10)).exception()) is Unavailable
    behind = [sequence.send(fed(value)) for value in (100, 500)]
    assert [type(future.exception()) for future in behind] == [StepConflict] * 2
    assert sequence.info().steps == made
    rest = [sequence.send(fed(value)) for value in (10, 100)[made - 1 :]]
    assert rest[-1].result()["OUTPUT"].item() == 111
    sequence.end()


@pytest.mark.parametrize("loss", ["request", "answer"])
def test_after_an_end_on_a_broken_stream_the_server_says_whether_the_sequence_lives(serve, lossy, loss):
    model = serve(models.work)
    proxy, stream = lossy
    with Sequence(stream, model.name, retry=AGAIN) as sequence:
        sequence.step(fed(1))
        losses = iter([loss])
        proxy.lose = lambda: next(losses, "none")
        assert type(sequence.send(fed(10), end=True).exception()) is Unavailable
        if loss == "request":
            assert sequence.info().steps == 1
            assert sequence.send(fed(10), end=True).result()["OUTPUT"].item() == 11
        else:
            with pytest.raises(SequenceMissing):
                sequence.info()


def test_without_the_state_api_steps_behind_one_that_fails_go_on(serve, stream):
    model = serve(models.work, state_api="false")
    sequence = Sequence(stream, model.name)
    futures = [sequence.send(fed(value)) for value in (1, FAILS, 3)]
    assert futures[2].result()["OUTPUT"].item() == 4
    assert sequence.step(fed(5), end=True)["OUTPUT"].item() == 9


def test_a_start_that_fails_leaves_nothing(serve, stream):
    model = serve(models.work)
    sequence = Sequence(stream, model.name)
    futures = [sequence.send(fed(FAILS)), sequence.send(fed(1))]
    for future in futures:
        with pytest.raises(StatefulError):
            future.result()
    with pytest.raises(StatefulError, match="SEQUENCE_MISSING"):
        sequence.step(fed(1))


def test_after_a_broken_stream_the_server_says_which_steps_are_made(serve, lossy):
    """Steps are sent ahead in portions while the stream breaks again and again; in the end each is made once."""
    model = serve(models.work)
    proxy, stream = lossy
    rng = np.random.default_rng(5)
    values = [int(value) for value in rng.integers(1, 100, 400)]
    sequence = Sequence(stream, model.name, retry=AGAIN)
    sequence.info()
    proxy.lose = lambda: str(rng.choice(["none", "request", "answer"], p=[0.9, 0.05, 0.05]))
    made = broken = 0
    while made < len(values):
        futures = [sequence.send(fed(value)) for value in values[made : made + 20]]
        for future in futures:
            error = future.exception()
            broken += isinstance(error, Unavailable)
            assert error is None or isinstance(error, (Unavailable, StepConflict, AnswerLost))
        # A request of a stream that is gone may still run, also between these calls.
        made, total = 0, None
        while total is None or sequence.info().steps != made:
            made = sequence.info().steps
            total = sequence.state()["SUM_IN"].item() if made else 0
        assert total == sum(values[:made])
    assert broken > 20
    sequence.end()


def test_threads_share_a_stream(serve, stream):
    model, answers = serve(models.work), {}

    def follow(number: int) -> None:
        with Sequence(stream, model.name) as sequence:
            answers[number] = [sequence.step(fed(number))["OUTPUT"].item() for _ in range(50)]

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: [number * step for step in range(1, 51)] for number in range(4)}


def test_an_answer_that_is_late_is_not_taken_for_another(serve, stream):
    model = serve(models.work)
    with Sequence(stream, model.name) as sequence:
        sequence.step(fed(1))
        with pytest.raises(Unavailable, match=r"no answer within 0\.001 s"):
            sequence.step(fed(2, work=400), timeout=0.001)
        with pytest.raises(AnswerLost):
            sequence.step(fed(2))
        assert sequence.step(fed(3))["OUTPUT"].item() == 6


def test_a_stream_that_is_closed(serve, deployment):
    model = serve(models.work)
    with Stream(deployment.server.grpc_url) as stream:
        sequence = Sequence(stream, model.name)
        futures = [sequence.send(fed(1)) for _ in range(20)]
    assert [future.result()["OUTPUT"].item() for future in futures] == list(range(1, 21))


def test_only_a_stream_sends_ahead(serve, deployment):
    with Sequence(deployment.server.grpc_url, serve().name) as sequence, pytest.raises(TypeError, match="a Stream"):
        sequence.send(np.ones((1, 4), np.float32))

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
from triton_stateful import AnswerLost, Retry, Sequence, StatefulError, StepConflict, Stream, Unavailable


@pytest.fixture
def stream(clients, deployment) -> Stream:
    return clients.client("stream", deployment.server)


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


def test_after_a_broken_stream_the_server_says_which_steps_are_made(serve, deployment, clients):
    """Steps are sent ahead in portions while the stream breaks again and again; in the end each is made once."""
    model = serve(models.work)
    proxy = LossyProxy(deployment.server.grpc_url, "grpc")
    try:
        stream = clients.client("stream", types.SimpleNamespace(grpc_url=proxy.url))
        rng = np.random.default_rng(5)
        values = [int(value) for value in rng.integers(1, 100, 400)]
        sequence = Sequence(stream, model.name, retry=Retry(attempts=20, backoff=0.001, longest=0.05))
        sequence.info()
        # A failure that comes while a portion is sent would give its later values the numbers of the failed ones.
        is_sent = threading.Event()
        is_sent.set()

        def lose() -> str:
            is_sent.wait()
            return str(rng.choice(["none", "request", "answer"], p=[0.9, 0.05, 0.05]))

        proxy.lose = lose
        made = broken = 0
        while made < len(values):
            is_sent.clear()
            futures = [sequence.send(fed(value)) for value in values[made : made + 20]]
            is_sent.set()
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
    finally:
        proxy.close()


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

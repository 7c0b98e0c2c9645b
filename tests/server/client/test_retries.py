"""Lost requests and answers: whatever the client raises, no step is made twice, and every step that it reports is made."""

from __future__ import annotations

import contextlib
import types

import numpy as np
import pytest

from client.proxy import LOSSES
from triton_stateful import AnswerLost, Retry, SequenceMissing, StateApiOff, Unavailable

STEPS = 300
AGAIN = Retry(attempts=30, backoff=0.001, longest=0.05)


def value(number):
    return np.array([[number, 0, -number, 2 * number]], np.float64)


def test_each_step_is_made_exactly_once(serve, begin, begin_lossy, proxy, scheduling):
    """Sums of doubles are exact here, so a step that is missing or made twice shows."""
    model = serve(type="fp64", scheduling=scheduling)
    begin(model.name).step(value(0), end=True)
    sequences = [begin_lossy(model.name, retry=AGAIN) for _ in range(4)]
    for sequence in sequences:
        sequence.info()  # the configuration and START; requests that are lost follow
    proxy.lose_at_random(seed=7)
    lost, total = 0, [value(0) * 0 for _ in sequences]
    for number in range(1, STEPS // len(sequences)):
        for index, sequence in enumerate(sequences):
            if number % 10 == 0:
                sequence.step(value(1000), commit=False)
            total[index] = total[index] + value(number)
            try:
                assert sequence.step(value(number))["OUTPUT"].tolist() == total[index].tolist()
            except AnswerLost:
                lost += 1
    for sequence, expected in zip(sequences, total, strict=True):
        assert sequence.state()["STATE_IN"].tolist() == expected.tolist()
        assert sequence.info().steps == sequence.steps == STEPS // len(sequences) - 1
        sequence.end()
    # Every kind of loss was there, and was noticed.
    assert min(proxy.counts[loss] for loss in LOSSES) > 20 and lost > 20


def test_sequences_begin_and_end_between_losses(serve, begin_lossy, proxy, protocol, scheduling):
    """START and END are lost, too. A clone and a snapshot have the state at their time.

    If core schedules, tritonclient's HTTP may send a START twice with one id, which may end the sequence.
    """
    rounds = 25
    may_end = (
        contextlib.suppress(SequenceMissing) if (protocol, scheduling) == ("http", "core") else contextlib.nullcontext()
    )
    model = serve(type="fp64", scheduling=scheduling)
    with begin_lossy(model.name) as first:
        first.step(value(0))
    proxy.lose_at_random(seed=8)
    for number in range(rounds):
        with may_end, begin_lossy(model.name, retry=AGAIN) as sequence:
            for _ in range(2):
                with contextlib.suppress(AnswerLost):
                    sequence.step(value(number))
            saved = sequence.snapshot()
            with sequence.clone() as copied, begin_lossy(model.name, snapshot=saved, retry=AGAIN) as resumed:
                for each in (copied, resumed):
                    assert each.info().steps == 2
                    assert each.state()["STATE_IN"].tolist() == (value(number) * 2).tolist()
            try:
                last = sequence.step(value(number), end=True)
                assert last["OUTPUT"].tolist() == (value(number) * 3).tolist()
            except (AnswerLost, SequenceMissing) as error:
                # tritonclient's HTTP has sent it again without telling
                assert isinstance(error, AnswerLost) or protocol == "http"
    assert min(proxy.counts[loss] for loss in LOSSES) > rounds // 3


def test_a_store_keeps_each_answer(serve, begin_lossy, proxy, tmp_path):
    """Those to START and END, too."""
    model = serve(type="fp64", parameters={"state_store": f"file:{tmp_path / 'store'}"})
    with begin_lossy(model.name) as first:
        first.step(value(0))
    proxy.lose_at_random(seed=9)
    for number in range(20):
        with begin_lossy(model.name, retry=AGAIN) as sequence:
            for step in range(1, 5):
                outputs = sequence.step(value(number), end=step == 4)
                assert outputs["OUTPUT"].tolist() == value(number * step).tolist()
                assert outputs.parameters["stateful_steps_made"] == step == sequence.steps
    assert min(proxy.counts[loss] for loss in LOSSES) > 5


def test_without_retry_a_caller_can_send_the_step_again(serve, begin_lossy, proxy):
    model = serve(type="fp64")
    with begin_lossy(model.name) as sequence:
        sequence.step(value(0))
        for number, loss in enumerate(LOSSES):
            losses = iter([loss])
            proxy.lose = lambda losses=losses: next(losses, "none")
            made = False
            while not made:
                with contextlib.suppress(Unavailable):
                    with contextlib.suppress(AnswerLost):
                        sequence.step(value(number))
                    made = True
            assert sequence.state()["STATE_IN"].tolist() == value(sum(range(number + 1))).tolist()
            assert sequence.info().steps == number + 2


@pytest.mark.parametrize("loss", ["request", "answer"])
def test_a_sequence_whose_start_was_lost_can_be_ended(serve, begin, begin_lossy, proxy, loss):
    model = serve(type="fp64")
    begin_lossy(model.name).step(value(0), end=True)
    losses = iter([loss])
    proxy.lose = lambda: next(losses, "none")
    sequence = begin_lossy(model.name)
    with contextlib.suppress(Unavailable, AnswerLost):
        sequence.step(value(1))
    ended = False
    while not ended:
        with contextlib.suppress(Unavailable):
            sequence.end()
            ended = True
    with pytest.raises(SequenceMissing):
        begin(model.name, clone_of=sequence.id).step(value(0))


def test_a_server_that_is_away_is_given_up(clients, protocol):
    away = types.SimpleNamespace(grpc_url="127.0.0.1:9", http_url="127.0.0.1:9")
    sequence = clients.connect(protocol, away)("model", retry=Retry(attempts=3, backoff=0.001))
    with pytest.raises(Unavailable), sequence:
        sequence.step(value(0))


@pytest.mark.parametrize(("attempts", "backoff"), [(0, 0.1), (-1, 0.1), (1, -0.1)])
def test_a_retry_has_attempts_and_time(attempts, backoff):
    with pytest.raises(ValueError, match="expected|must be"):
        Retry(attempts, backoff)


def test_pauses_grow_up_to_the_longest():
    pauses = [Retry(9, backoff=0.5, longest=3).pause(failed) for failed in (1, 2, 3, 4, 5, 5000)]
    assert pauses == [0.5, 1, 2, 3, 3, 3]


def test_a_retry_needs_the_state_api(serve, begin):
    model = serve(state_api="false")
    with pytest.raises(StateApiOff, match="a Retry"):
        begin(model.name, retry=Retry()).step(value(0).astype(np.float32))

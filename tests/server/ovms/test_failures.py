"""Runs that fail, and requests that are taken back: cases O40 to O42 of OpenVINO Model Server."""

import numpy as np
import pytest

from harness.conversations import together
from harness.deployment import eventually
from harness.own import FAILS, Talk, fails_with, fed, total
from harness.raw import Refused, take_back
from harness.ways import every_way, through_gateway


def fails():
    return pytest.raises(Refused, match="ONNX Runtime")


@every_way
def test_o40_a_start_that_fails_leaves_no_sequence(deployment, serve, connect, way):
    """In OpenVINO Model Server a broken one is left."""
    model = serve()
    talk = Talk(connect(), model, 42, way)
    with fails():
        talk.start(fed(FAILS))
    with fails_with("SEQUENCE_MISSING", 42):
        talk.step()
    deployment.settles("stateful_live_sequences", model, 0)
    assert total(talk.start(fed(5))) == 5


@every_way
def test_o41_a_request_that_fails_leaves_the_state_as_it_was(serve, connect, way):
    talk = Talk(connect(), serve(), 42, way)
    talk.start(fed(5))
    for _ in range(3):
        with fails():
            talk.step(fed(FAILS))
    assert total(talk.step(fed(7))) == 12


@every_way
def test_o42_an_end_that_fails_ends_the_sequence(deployment, serve, connect, way):
    """In OpenVINO Model Server the id can't be used again."""
    model = serve(parameters={"max_sequence_number": 1})
    talk = Talk(connect(), model, 42, way)
    talk.start(fed(5))
    with fails():
        talk.end(fed(FAILS))
    deployment.settles("stateful_live_sequences", model, 0)
    with fails_with("SEQUENCE_MISSING", 42):
        talk.end()
    assert total(talk.start(fed(3))) == 3


def test_a_sequence_of_one_request_that_fails_leaves_nothing(deployment, serve, connect):
    model = serve()
    talk = Talk(connect(), model, 42)
    with fails():
        talk.one_shot(fed(FAILS))
    with fails_with("SEQUENCE_MISSING", 42):
        talk.step()
    assert deployment.metric("stateful_live_sequences", model) == 0


def test_requests_queued_behind_a_start_that_fails_find_no_sequence(serve, connect):
    model, stream = serve(), connect("stream")
    stream.send(model.name, fed(FAILS, work=100), {"sequence_id": 42, "sequence_start": True})
    for _ in range(3):
        stream.send(model.name, fed(1), {"sequence_id": 42})
    stream.send(model.name, fed(1), {"sequence_id": 42, "sequence_end": True})
    replies = stream.all_replies(5)
    assert "ONNX Runtime" in replies[0].text
    assert all(replies[number].text.startswith("SEQUENCE_MISSING") for number in range(1, 5))


def test_requests_queued_behind_one_that_fails_go_on_from_the_state_before_it(serve, connect):
    model, stream = serve(), connect("stream")
    stream.send(model.name, fed(1), {"sequence_id": 42, "sequence_start": True})
    stream.send(model.name, fed(FAILS, work=100), {"sequence_id": 42})
    stream.send(model.name, fed(2), {"sequence_id": 42})
    stream.send(model.name, fed(4), {"sequence_id": 42, "sequence_end": True})
    replies = stream.all_replies(4)
    assert "ONNX Runtime" in replies[1].text
    assert [total(replies[number]) for number in (0, 2, 3)] == [1, 3, 7]


def test_a_sequence_started_behind_an_end_that_fails_is_not_touched(serve, connect):
    model, stream = serve(), connect("stream")
    stream.send(model.name, fed(1), {"sequence_id": 42, "sequence_start": True})
    stream.send(model.name, fed(FAILS, work=100), {"sequence_id": 42, "sequence_end": True})
    stream.send(model.name, fed(10), {"sequence_id": 42, "sequence_start": True})
    stream.send(model.name, fed(20), {"sequence_id": 42})
    replies = stream.all_replies(4)
    assert "ONNX Runtime" in replies[1].text
    assert [total(replies[number]) for number in (0, 2, 3)] == [1, 10, 30]


@through_gateway
def test_a_failing_sequence_costs_no_other_its_answer(serve, connect):
    model, client = serve(), connect()

    def good(sequence_id):
        talk = Talk(client, model, sequence_id)
        talk.whole(20)

    def bad(sequence_id):
        talk = Talk(client, model, sequence_id)
        talk.start()
        for _ in range(20):
            with fails():
                talk.step(fed(FAILS))
        talk.end()

    together(lambda of=of: (bad if of % 4 == 0 else good)(of) for of in range(1, 9))


# ---- taken back


def test_a_cancelled_request_is_not_run_or_run_once(deployment, serve, connect):
    """The client can't know which; a later answer tells."""
    model, client = serve(), connect()

    def talk(sequence_id):
        rng = np.random.default_rng(sequence_id)
        known = total(client.ask(model.name, fed(1), {"sequence_id": sequence_id, "sequence_start": True}))
        due = 0
        for _ in range(20):
            if rng.integers(2):
                take_back(deployment, model.name, fed(100, work=5), {"sequence_id": sequence_id}, after_s=0.005)
                due += 1
            else:
                came = total(client.ask(model.name, fed(0, work=5), {"sequence_id": sequence_id}))
                assert came in [known + 100 * ran for ran in range(due + 1)]
                due -= (came - known) // 100
                known = came
        client.ask(model.name, fed(0), {"sequence_id": sequence_id, "sequence_end": True})

    together(lambda of=of: talk(of) for of in range(1, 7))
    deployment.settles("stateful_live_sequences", model, 0)


def test_a_request_that_is_cancelled_before_its_turn_is_not_run(deployment, serve, connect):
    model, stream = serve(), connect("stream")

    def not_run() -> bool:
        stream.ask(model.name, fed(1), {"sequence_id": 42, "sequence_start": True})
        stream.send(model.name, fed(2, work=400), {"sequence_id": 42})
        take_back(deployment, model.name, fed(100), {"sequence_id": 42}, after_s=0.05)
        stream.reply()
        end = total(stream.ask(model.name, fed(4), {"sequence_id": 42, "sequence_end": True}))
        assert end in (7, 107)
        return end == 7

    eventually(not_run, bool)


def test_a_cancelled_start_leaves_a_whole_sequence_or_none(deployment, serve, connect):
    model, client = serve(), connect()
    for sequence_id in range(1, 30):
        how = {"sequence_id": sequence_id, "sequence_start": True}
        take_back(deployment, model.name, fed(100, work=20), how, after_s=0.005)
    # a last request, so that whatever of the others was to run has run or will
    Talk(client, model, 1000).one_shot(fed(1, work=20))
    seen = []
    for sequence_id in range(1, 30):
        try:
            seen.append(total(client.ask(model.name, fed(1), {"sequence_id": sequence_id, "sequence_end": True})))
        except Refused as error:
            assert error.text.startswith("SEQUENCE_MISSING")
    assert set(seen) <= {101}


def test_a_broken_stream_leaves_each_of_its_sequences_at_a_state_that_was_answered_or_due(serve, connect):
    model, stream, client = serve(), connect("stream"), connect()
    for sequence_id in (1, 2, 3):
        stream.send(model.name, fed(1), {"sequence_id": sequence_id, "sequence_start": True})
    stream.all_replies(3)
    for _ in range(10):
        for sequence_id in (1, 2, 3):
            stream.send(model.name, fed(10, work=20), {"sequence_id": sequence_id})
    stream.reply()
    stream.leave()
    for sequence_id in (1, 2, 3):
        came = total(client.ask(model.name, fed(0), {"sequence_id": sequence_id, "sequence_end": True}))
        assert came in [1 + 10 * ran for ran in range(11)]

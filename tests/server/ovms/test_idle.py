"""Sequences that their clients forget: cases O43 to O48 of OpenVINO Model Server, and `sequence_idle_timeout_ms`.

OpenVINO Model Server scans every few minutes, and removes a sequence that has done nothing between two scans. The tests
scan more often.
"""

import numpy as np
import pytest

from harness import models
from harness.conversations import outcome
from harness.deployment import eventually
from harness.own import FAILS, Talk, check_error, fails_with, fed, own, total
from harness.raw import Refused, Unary
from harness.ways import through_gateway

#: Minutes: 60 ms, and 1.2 s.
OFTEN, SELDOM = 0.001, 0.02

SCANS = {"sequence_cleaner_poll_wait_minutes": OFTEN}
PRECISE = {"sequence_idle_timeout_ms": 60}

both_rules = pytest.mark.parametrize("rule", [SCANS, PRECISE], ids=["scans", "precise"])


def expired(deployment, model) -> float:
    return deployment.metric("stateful_sequences_expired_total", model)


@through_gateway
@both_rules
def test_o43_an_idle_sequence_is_removed(deployment, serve, connect, rule):
    model = serve(parameters=rule)
    client = connect()
    talks = [Talk(client, model, sequence_id) for sequence_id in (1, 2, 3)]
    for talk in talks:
        talk.start()
    deployment.settles("stateful_sequences_expired_total", model, 3)
    deployment.settles("stateful_live_sequences", model, 0)
    for talk in talks:
        with fails_with("SEQUENCE_MISSING", talk.sequence_id):
            talk.step()
    # the ids are free
    assert total(talks[0].start(fed(5))) == 5


@through_gateway
@both_rules
def test_a_sequence_that_is_removed_makes_room(serve, connect, rule):
    model, client = serve(parameters={**rule, "max_sequence_number": 1}), connect()
    Talk(client, model, 1).start()

    def starts():
        return isinstance(outcome_of(lambda: Talk(client, model, 2).start()), Refused)

    eventually(starts, lambda refused: not refused)


@both_rules
def test_a_sequence_that_is_removed_makes_room_for_a_start_that_waits(serve, connect, rule):
    model, client = serve(parameters={**rule, "max_sequence_number": 1, "max_queue_size": 5}), connect()
    Talk(client, model, 1).start()
    for sequence_id in (2, 3):
        Talk(client, model, sequence_id).start()


@through_gateway
@pytest.mark.parametrize(
    "rule",
    [{"sequence_cleaner_poll_wait_minutes": SELDOM}, {"sequence_idle_timeout_ms": 5000}],
    ids=["scans", "precise"],
)
def test_o44_a_sequence_that_goes_on_is_not_removed(deployment, serve, connect, rule):
    """Until the clean-up has removed one that does nothing."""
    model, client = serve(parameters=rule), connect()
    talk = Talk(client, model, 42)
    talk.start()
    Talk(client, model, 43).start()
    while expired(deployment, model) == 0:
        talk.step()
    talk.step()
    talk.end()


@through_gateway
@both_rules
def test_o45_requests_that_fail_keep_no_sequence_alive(serve, connect, rule):
    talk = Talk(connect(), serve(parameters=rule), 42)
    talk.start()
    error = eventually(lambda: outcome_of(lambda: talk.step(fed(FAILS))), lambda error: "ONNX" not in error.text)
    check_error(error, "SEQUENCE_MISSING", 42)


@through_gateway
@both_rules
def test_requests_that_are_refused_keep_no_sequence_alive(serve, connect, rule):
    talk = Talk(connect(), serve(parameters=rule), 42)
    talk.start()
    # a START of a live sequence is refused; when it was removed, the START makes a new one
    eventually(lambda: outcome(lambda: outcome_of(talk.start)), lambda came: not isinstance(came, Refused))


@both_rules
def test_o46_a_sequence_with_requests_that_run_or_wait_is_not_removed(deployment, serve, connect, rule):
    """The first takes many times as long as an idle sequence may live."""
    model, stream = serve(parameters=rule), connect("stream")
    stream.send(model.name, fed(1), {"sequence_id": 42, "sequence_start": True})
    stream.send(model.name, fed(2, work=2000), {"sequence_id": 42})
    stream.send(model.name, fed(4), {"sequence_id": 42})
    stream.send(model.name, fed(8), {"sequence_id": 42, "sequence_end": True})
    replies = stream.all_replies(4)
    assert [total(replies[number]) for number in range(4)] == [1, 3, 7, 15]
    assert expired(deployment, model) == 0


@through_gateway
@pytest.mark.parametrize(
    "parameters",
    [{"sequence_cleaner_poll_wait_minutes": 0}, {**SCANS, "idle_sequence_cleanup": "false"}],
    ids=["no_scans", "no_cleanup"],
)
def test_o47_nothing_is_removed_where_that_is_configured(deployment, serve, connect, parameters):
    """For as long as another model needs to remove ten sequences, one after the other."""
    model, client = serve(parameters=parameters), connect()
    talk = Talk(client, model, 42)
    talk.start()
    other = deployment.serve(own(models.work(f"{model.name}_other"), **SCANS))
    for count in range(1, 11):
        Talk(client, other, 42).start()
        deployment.settles("stateful_sequences_expired_total", other, count)
    talk.step()
    talk.end()


@both_rules
def test_o48_an_end_that_runs_is_not_touched(deployment, serve, connect, rule):
    model, stream = serve(parameters=rule), connect("stream")
    stream.send(model.name, fed(1), {"sequence_id": 42, "sequence_start": True})
    stream.send(model.name, fed(2, work=2000), {"sequence_id": 42, "sequence_end": True})
    replies = stream.all_replies(2)
    assert [total(replies[number]) for number in range(2)] == [1, 3]
    deployment.settles("stateful_sequences_ended_total", model, 1)
    assert expired(deployment, model) == 0


def start_if_possible(client, model, sequence_id):
    """Starts the sequence, or gives the error."""
    return outcome_of(lambda: Talk(client, model, sequence_id).start())


@pytest.mark.parametrize(
    "rule",
    [{"sequence_cleaner_poll_wait_minutes": 0.005}, {"sequence_idle_timeout_ms": 300}],
    ids=["scans", "precise"],
)
def test_an_idle_sequence_makes_room_while_another_worker_runs(deployment, serve, connect, rule):
    """The first sequence goes to the first worker, which is busy for long, the second to the second."""
    model = serve(parameters={**rule, "worker_count": 2, "max_sequence_number": 2})
    client, other = connect(), connect()
    for attempt, work in enumerate((1000, 5000, 25000)):
        first, second, third = range(10 * attempt + 1, 10 * attempt + 4)
        deployment.settles("stateful_live_sequences", model, 0)
        Talk(client, model, first).start()
        Talk(client, model, second).start()
        busy = client.send(model.name, fed(1, work), {"sequence_id": first})
        eventually(
            lambda third=third: start_if_possible(other, model, third), lambda came: not isinstance(came, Refused)
        )
        in_time = not busy.future.done()
        outcome_of(busy.answer)
        if in_time:
            return
    pytest.fail("the place was free only when the first worker had time")


def test_the_server_may_say_how_often_sequences_are_removed(deploy):
    """As in OpenVINO Model Server, for all models whose configuration doesn't say it."""
    deployment = deploy(extra_args=["--backend-config=stateful,sequence_cleaner_poll_wait_minutes=0.001"])
    by_server = deployment.serve(own(models.work("by_server")))
    precise = deployment.serve(own(models.work("precise"), sequence_idle_timeout_ms=3_600_000))
    never = deployment.serve(own(models.work("never"), sequence_cleaner_poll_wait_minutes=0))
    client = Unary(deployment)
    for model in (precise, never, by_server):
        Talk(client, model, 42).start()
    deployment.settles("stateful_sequences_expired_total", by_server, 1)
    with fails_with("SEQUENCE_MISSING", 42):
        Talk(client, by_server, 42).step()
    for model in (precise, never):
        with fails_with("SEQUENCE_ALREADY_EXISTS", 42):
            Talk(client, model, 42).start()
    # core's batcher has its own rule
    by_core = deployment.serve(models.counter(name="by_core"))
    deployment.connect().step(by_core.name, 42, by_core.draw(np.random.default_rng(1)), start=True)
    client.close()


@pytest.mark.parametrize("value", ["soon", "-1", "inf"])
def test_a_wrong_time_on_the_command_line_is_refused(deploy, value):
    deployment = deploy(
        control_model=False, extra_args=[f"--backend-config=stateful,sequence_cleaner_poll_wait_minutes={value}"]
    )
    error = deployment.load_error(own(models.work("refused")))
    assert f"--backend-config=stateful,sequence_cleaner_poll_wait_minutes={value}: a number of minutes" in error


def outcome_of(task):
    """The task's result, or the error as a value."""
    try:
        return task()
    except Refused as error:
        return error

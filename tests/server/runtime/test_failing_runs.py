"""Runs that ONNX Runtime refuses: the requests at fault hear why, no state changes, and the others go on as before."""

import re
import time

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import models
from harness.batches import TOGETHER, four, runs_of
from harness.conversations import Conversation, outcome, together
from harness.deployment import eventually

pytestmark = pytest.mark.simulated_device

REASON = "out of data bounds"  # ONNX Runtime's words for an index that is not in the table


def asks(index: int) -> dict[str, np.ndarray]:
    return {"INPUT": np.array([[index]], np.int64)}


BAD = asks(99)


@pytest.fixture
def talk(deployment):
    model = deployment.serve(models.fails())
    return Conversation(deployment.connect(), model, np.random.default_rng(1))


def test_a_failed_run_tells_the_reason_and_keeps_the_state(talk):
    talk.start()
    talk.step()
    for _ in range(3):
        with pytest.raises(InferenceServerException, match=REASON):
            talk.step(BAD)
    talk.step()
    talk.end()


def test_a_sequence_whose_start_failed_does_not_exist(deployment):
    # No END comes before these STARTs, so their order is certain.
    model = deployment.serve(models.fails("fails_at_its_start"))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(1))
    with pytest.raises(InferenceServerException, match=REASON):
        talk.start(BAD)
    with pytest.raises(InferenceServerException) as unknown:
        talk.step()
    assert unknown.value.status() == "StatusCode.NOT_FOUND"
    talk.start()
    talk.end()


def test_an_end_that_fails_still_ends_the_sequence(deployment):
    model = deployment.serve(models.fails("fails_at_the_end"))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(2))
    talk.start()
    with pytest.raises(InferenceServerException, match=REASON):
        talk.end(BAD)
    deployment.settles("stateful_live_sequences", model, 0)
    with pytest.raises(InferenceServerException):
        talk.step()
    talk.start()
    talk.end()


def test_a_restart_that_fails_does_not_bring_the_old_state_back(deployment):
    # No END comes before these STARTs, so their order is certain.
    model = deployment.serve(models.fails("fails_at_a_restart"))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(1))
    talk.start()
    with pytest.raises(InferenceServerException, match=REASON):
        talk.start(BAD)
    with pytest.raises(InferenceServerException):
        talk.step()
    # A START that comes at once may be older than the one that failed.
    eventually(lambda: outcome(talk.start), lambda came: not isinstance(came, InferenceServerException), pause=0.6)
    talk.end()


def test_failed_sequences_of_one_request_leave_no_slot_taken(deployment):
    model = deployment.serve(models.fails("fails_in_one", max_candidates=4, max_batch_size=2))
    client = deployment.connect()
    rng = np.random.default_rng(3)
    for _ in range(12):
        with pytest.raises(InferenceServerException, match=REASON):
            Conversation(client, model, rng).step(BAD, start=True, end=True)
    deployment.settles("stateful_live_sequences", model, 0)
    Conversation(client, model, rng).whole(3)


def test_a_failed_run_of_a_batch_fails_only_the_request_at_fault(deployment):
    model = models.fails(
        "fails_together",
        max_batch_size=4,
        oldest="preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 1000000",
    )
    model = deployment.serve(model)
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng(i)) for i in range(4)]
    together(talk.start for talk in talks)

    fed = [BAD, asks(0), asks(1), asks(2)]
    came = together(
        lambda talk=talk, now=now: outcome(lambda: talk.step(now)) for talk, now in zip(talks, fed, strict=True)
    )
    assert isinstance(came[0], InferenceServerException)
    assert REASON in came[0].message()
    for answer in came[1:]:
        assert not isinstance(answer, Exception), answer

    together(talk.step for talk in talks)
    together(talk.end for talk in talks)


def status(error: InferenceServerException) -> str:
    return error.status().removeprefix("StatusCode.")


def all_at_once(talks, fed) -> list:
    """What came of each sequence's request, which run together."""
    return together(
        lambda talk=talk, now=now: outcome(lambda: talk.step(now)) for talk, now in zip(talks, fed, strict=True)
    )


def test_a_request_that_fails_while_others_run_is_at_fault_itself(deployment):
    model = deployment.serve(models.fails("fails_by_itself", **TOGETHER))
    talks = four(deployment, model)
    together(talk.start for talk in talks)
    for bad in ([0], [3], [1, 2], [0, 1, 3]):
        came = all_at_once(talks, [BAD if at in bad else asks(at) for at in range(4)])
        for at, answer in enumerate(came):
            if at in bad:
                assert status(answer) == "INVALID_ARGUMENT", answer
                assert REASON in answer.message() and "other requests of the same payload ran" in answer.message()
            else:
                assert not isinstance(answer, Exception), answer
    found = deployment.failures(model)
    assert (found["run"], found["input"]) == (0, 7)
    together(talk.end for talk in talks)


def test_without_others_that_ran_a_failed_run_may_be_the_fault_of_the_model(deployment):
    model = deployment.serve(models.fails("fails_for_all", **TOGETHER))
    talks = four(deployment, model)
    together(talk.start for talk in talks)
    for answer in all_at_once(talks, [BAD] * 4):
        assert status(answer) == "INTERNAL" and REASON in answer.message(), answer
    for _ in range(2):
        answer = outcome(lambda: talks[0].step(BAD))
        assert status(answer) == "INTERNAL", answer
    found = deployment.failures(model)
    assert (found["run"], found["input"]) == (6, 0)
    together(talk.end for talk in talks)


def one_bad(talks, bad):
    """A round in which all take a step at once but the first, for which `bad` fails."""

    def ask():
        came = together([bad, *(lambda talk=talk: outcome(talk.step) for talk in talks[1:])])
        assert REASON in came[0].message()
        for answer in came[1:]:
            assert not isinstance(answer, Exception), answer

    return ask


def test_a_sequence_that_fails_again_runs_alone_until_it_has_done_well(deployment):
    model = deployment.serve(models.fails("fails_again", **TOGETHER))
    talks = four(deployment, model)
    together(talk.start for talk in talks)
    bad = one_bad(talks, lambda: outcome(lambda: talks[0].step(BAD)))
    assert runs_of(deployment, model, bad) == {1: 1, 2: 1}, "the batch is halved, and the half that failed"
    for _ in range(5):
        assert runs_of(deployment, model, bad) == {3: 1}, "the others run once"

    def good():
        return runs_of(deployment, model, lambda: together(talk.step for talk in talks))

    assert good() == {3: 1, 1: 1}
    for _ in range(3):
        good()
    assert good() == {4: 1}, "all run together again"
    together(talk.end for talk in talks)


def test_bad_requests_under_new_ids_make_no_other_run_again(deployment):
    model = deployment.serve(models.fails("fails_anew", **TOGETHER))
    talks = four(deployment, model)
    together(talk.start for talk in talks[1:])

    def new():
        fresh = Conversation(talks[0].client, model, np.random.default_rng(5))
        return outcome(lambda: fresh.step(BAD, start=True, end=True))

    one_bad(talks, new)()
    for _ in range(5):
        assert runs_of(deployment, model, one_bad(talks, new)) == {3: 1}
    together(talk.end for talk in talks[1:])


def test_requests_that_fail_again_and_again_do_not_fill_the_log(deployment, talk):
    talk.start()
    log, began = len(deployment.server.log_text()), time.monotonic()
    for _ in range(200):
        assert REASON in outcome(lambda: talk.step(BAD)).message()
    lines = deployment.server.log_text()[log:].count(REASON)
    assert lines <= 10 * (2 + (time.monotonic() - began) / 10)
    assert REASON in deployment.server.log_text()
    talk.end()


def test_the_first_failed_run_of_a_model_is_logged_whatever_others_have_logged(deployment, talk):
    talk.start()
    for _ in range(20):
        assert REASON in outcome(lambda: talk.step(BAD)).message()
    talk.end()
    other = deployment.serve(models.fails("fails_for_the_first_time"))
    assert other.name not in failed_nodes(deployment)
    new = Conversation(deployment.connect(), other, np.random.default_rng(6))
    assert REASON in outcome(lambda: new.step(BAD, start=True, end=True)).message()
    assert other.name in failed_nodes(deployment)


def failed_nodes(deployment) -> set[str]:
    """The names of nodes that ONNX Runtime has reported as failed."""
    return set(re.findall(r"while running Gather node. Name:'(\w+)'", deployment.server.log_text()))


@pytest.mark.host_and_device
def test_failing_runs_beside_good_sequences_never_give_a_wrong_answer(deployment):
    model = deployment.serve(models.fails("fails_often"))
    client = deployment.connect()

    def talk(seed):
        rng = np.random.default_rng(seed)
        talk = Conversation(client, model, rng)
        while isinstance(outcome(talk.start), InferenceServerException):
            pass
        for _ in range(30):
            fed = BAD if rng.integers(6) == 0 else None
            came = outcome(lambda fed=fed: talk.step(fed))
            assert isinstance(came, InferenceServerException) == (fed is BAD), came

    together(lambda seed=seed: talk(seed) for seed in range(8))


@pytest.mark.host_and_device
def test_a_run_that_fails_half_way_has_changed_no_state_wherever_it_lay(deployment):
    """Alone, a sequence's large state is lent to the run, while the other one lies in a batch of two."""
    # short: single requests wait for it, too
    delay = "preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 200000"
    model = deployment.serve(models.half_way(max_batch_size=2, oldest=delay))
    rng = np.random.default_rng(4)
    talks = [Conversation(deployment.connect(), model, rng) for _ in range(2)]
    together(talk.start for talk in talks)
    for _ in range(3):
        together(talk.step for talk in talks)
        for talk in talks:
            bad = {**model.draw(rng), "INDEX": np.array([[9]], np.int64)}
            for _ in range(2):
                with pytest.raises(InferenceServerException, match=REASON):
                    talk.step(bad)
            talk.step()
    for talk in talks:
        talk.end()

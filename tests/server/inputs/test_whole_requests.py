"""Requests of several steps (`input_windows`): whole or not at all, and without making others wait. The calls of the State
API between two of them, in the middle of a window."""

import json
import re

import numpy as np
import pytest

from harness import models
from harness.clients import new_id
from harness.conversations import together
from harness.deployment import eventually
from harness.model import Model
from harness.raw import Answer, Refused, Stream, Unary, under_way
from harness.state_api import DIRECT, OLDEST, OWN, with_state_api
from harness.windows import Cut, WindowOracle, WindowTalk

pytestmark = pytest.mark.simulated_device

AUDIO = {"AUDIO": Cut(5)}
#: Steps that take a second or so.
MANY = 100_000
#: Steps that take minutes.
MINUTES = 5_000_000

every_scheduler = pytest.mark.parametrize("by", [OWN, OLDEST, DIRECT])


def served(deployment, name: str, by: str = OWN, **parameters) -> Model:
    model = models.cut(name, 5, 3)
    return deployment.serve(with_state_api(model.variant(f"{name}_{by}"), by, **parameters))


def talk_of(deployment, model: Model, seed: int = 1) -> WindowTalk:
    return WindowTalk(Unary(deployment), WindowOracle(model, AUDIO), np.random.default_rng(seed))


def long_request(talk: WindowTalk, steps: int = MANY) -> dict[str, np.ndarray]:
    return {**talk.draw(1), "AUDIO": np.ones((1, 5 * steps), np.float32)}


@every_scheduler
def test_a_timeout_between_two_steps_changes_nothing(deployment, by):
    talk = talk_of(deployment, served(deployment, "windows_timeout", by))
    talk.ask(8, start=True)
    error = talk.run_late(long_request(talk))
    assert re.search(rf"REQUEST_TIMEOUT.*step \d+ of {MANY}", error.text), error
    assert error.code == "UNAVAILABLE"
    talk.ask(12)
    talk.ask(12, end=True)


@every_scheduler
def test_a_request_that_is_cancelled_between_two_steps_changes_nothing(deployment, by):
    model = served(deployment, "windows_cancelled", by, max_steps_per_request=MINUTES)
    talk = talk_of(deployment, model)
    talk.ask(8, start=True)
    under_way(deployment, model, long_request(talk, MINUTES), {"sequence_id": talk.sequence_id}).leave()
    eventually(lambda: deployment.failures(model).get("cancelled"), lambda count: count == 1)
    talk.ask(12)
    talk.ask(12, end=True)


def test_a_long_request_lets_others_step(deployment):
    model = served(deployment, "windows_long", max_steps_per_request=MINUTES)
    long, short = talk_of(deployment, model), talk_of(deployment, model, seed=2)
    long.ask(1, start=True)
    short.ask(1, start=True)
    stream = under_way(deployment, model, long_request(long, MINUTES), {"sequence_id": long.sequence_id})
    for _ in range(20):
        short.ask(int(short.rng.integers(12)))
    stream.leave()
    # It was still making steps, or there would have been nothing to cancel.
    eventually(lambda: deployment.failures(model).get("cancelled"), lambda count: count == 1)
    call = Unary(deployment).send(model.name, long_request(long), {"sequence_id": long.sequence_id})
    for _ in range(20):
        short.ask(int(short.rng.integers(12)))
    short.ask(7, end=True)
    assert call.answer().parameters["steps"] == MANY


def test_requests_of_a_sequence_wait_for_a_long_one_and_an_end_too(deployment):
    model = served(deployment, "windows_in_order")
    talk = talk_of(deployment, model)
    # Only a stream keeps the order of requests that wait for no answer.
    stream = Stream(deployment)
    talk.ask(3, start=True)
    asked = [talk.draw(elements) for elements in (5000, 4, 2500, 7)]
    for at, inputs in enumerate(asked):
        end = {"sequence_end": True} if at == len(asked) - 1 else {}
        stream.send(model.name, inputs, {"sequence_id": talk.sequence_id, **end})
    replies = stream.all_replies(len(asked))
    for number, inputs in enumerate(asked):
        checked(talk, replies[number], inputs)
    stream.close()


@every_scheduler
def test_an_inference_that_does_not_commit_leaves_what_is_left_over(deployment, by):
    talk = talk_of(deployment, served(deployment, "windows_uncommitted", by))
    talk.ask(8, start=True)
    for elements in (0, 1, 4, 13, 27):
        talk.ask(elements, commit=False)
        talk.ask(elements)
    talk.ask(9, end=True)


@every_scheduler
def test_a_snapshot_is_taken_in_the_middle_of_a_window(deployment, by):
    model = served(deployment, "windows_snapshot", by)
    talk = talk_of(deployment, model)
    talk.ask(14, start=True)
    snapshot = talk.ask(4, snapshot=True).outputs["state_snapshot"]
    oracle = talk.oracle.copy()
    talk.ask(22, end=True)
    other = talk_of(deployment, model, seed=3)
    assert restored(other, oracle, snapshot, 12) == 3
    other.ask(0, end=True)
    # in a sequence that is live, and without elements
    live = talk_of(deployment, model, seed=4)
    live.ask(2, start=True)
    assert restored(live, oracle, snapshot, 0, start=False) == 0
    live.ask(21, end=True)


def restored(talk: WindowTalk, oracle: WindowOracle, snapshot, elements: int, start: bool = True) -> int:
    """Goes on from a snapshot. Returns the steps of the request."""
    talk.oracle = oracle.copy()
    inputs = talk.draw(elements)
    flags = {"sequence_start": True} if start else {}
    came = talk.client.ask(
        talk.model.name, {**inputs, "state_snapshot": snapshot}, {"sequence_id": talk.sequence_id, **flags}
    )
    return checked(talk, came, inputs)


def checked(talk: WindowTalk, came: Answer, inputs) -> int:
    outputs, said = talk.oracle.ask(inputs)
    assert {name: came.parameters[name] for name in said} == said
    for name, value in outputs.items():
        assert came.outputs[name].tolist() == value.tolist()
    return said["steps"]


@every_scheduler
def test_a_clone_has_what_is_left_over(deployment, by):
    talk = talk_of(deployment, served(deployment, "windows_clone", by))
    talk.ask(14, start=True)
    clone = talk_of(deployment, talk.model, seed=2)
    clone.oracle = talk.oracle.copy()
    inputs = clone.draw(11)
    came = clone.client.ask(
        clone.model.name,
        inputs,
        {"sequence_id": clone.sequence_id, "sequence_start": True, "clone_of": talk.sequence_id},
    )
    assert checked(clone, came, inputs) == 3
    for one in (talk, clone):
        one.ask(7)
        one.ask(9, end=True)


def test_a_clone_of_a_sequence_under_way_has_the_state_behind_the_whole_request(deployment):
    model = served(deployment, "windows_clone_of_busy")
    talk, clone = talk_of(deployment, model), talk_of(deployment, model, seed=2)
    talk.ask(3, start=True)
    inputs, of_clone = talk.draw(20_000), clone.draw(6)
    # Only a stream keeps the order of requests that wait for no answer.
    stream = Stream(deployment)
    long = stream.send(model.name, inputs, {"sequence_id": talk.sequence_id})
    start = {"sequence_id": clone.sequence_id, "sequence_start": True, "clone_of": talk.sequence_id}
    begins = stream.send(model.name, of_clone, start)
    replies = stream.all_replies(2)
    stream.close()
    checked(talk, replies[long], inputs)
    clone.oracle = talk.oracle.copy()
    checked(clone, replies[begins], of_clone)
    for one in (talk, clone):
        one.ask(9, end=True)


@every_scheduler
def test_a_reset_of_all_states_drops_what_is_left_over(deployment, by):
    talk = talk_of(deployment, served(deployment, "windows_reset", by))
    talk.ask(14, start=True)
    talk.oracle.begin()
    talk.ask(3, reset_state=True)
    talk.ask(9)
    talk.oracle.begin()
    talk.ask(17, reset_state=True)
    # one of them
    talk.oracle.steps.sequence.state["SUM_IN"] = np.zeros((1, 1), np.float32)
    talk.ask(9, reset_state="SUM_IN")
    talk.ask(6, end=True)


@every_scheduler
def test_states_are_set_and_read_around_requests_of_any_length(deployment, by):
    talk = talk_of(deployment, served(deployment, "windows_states", by))
    talk.ask(14, start=True)
    for elements in (0, 3, 13):
        talk.oracle.steps.sequence.state["SUM_IN"] = np.full((1, 1), 7, np.float32)
        inputs = talk.draw(elements)
        sent = {**inputs, "state.SUM_IN": np.full((1, 1), 7, np.float32)}
        came = talk.client.ask(talk.model.name, sent, {"sequence_id": talk.sequence_id, "get_state": True})
        checked(talk, came, inputs)
        assert came.outputs["state.SUM_IN"].tolist() == talk.oracle.steps.sequence.state["SUM_IN"].tolist()
        talk.ask(elements + 1)
    came = talk.ask(11, get_state=True, query_state=True, end=True)
    assert came.outputs["state.SUM_IN"].tolist() == talk.oracle.steps.sequence.state["SUM_IN"].tolist()


@every_scheduler
def test_steps_are_counted_for_retries(deployment, by):
    talk = talk_of(deployment, served(deployment, "windows_retries", by))
    talk.ask(17, start=True, sequence_step=0)
    talk.ask(0, sequence_step=3)
    talk.ask(9, sequence_step=3)
    with pytest.raises(Refused, match="SEQUENCE_STEP_CONFLICT"):
        talk.ask(9, sequence_step=3)
    # A request without a step changes only what is left over.
    talk.ask(3, sequence_step=5, sequence_left=1)
    with pytest.raises(Refused, match="SEQUENCE_STEP_CONFLICT.* for 1 left-over.*has made 5 steps and has 4 left over"):
        talk.ask(3, sequence_step=5, sequence_left=1)
    call = {"sequence_id": talk.sequence_id, "query_state": True, "sequence_left": 4}
    info = json.loads(talk.client.ask(talk.model.name, {}, call).outputs["state_info"].item())
    assert (info["steps"], info["left"]) == (5, 4)
    talk.ask(6, sequence_step=5, sequence_left=4)
    talk.ask(9, sequence_step=7, sequence_left=0, end=True)


def test_a_sequence_is_parked_in_the_middle_of_a_window(deployment):
    model = served(deployment, "windows_parked", sequence_idle_timeout_ms=100, park_ms=600_000)
    talk = talk_of(deployment, model)
    talk.ask(14, start=True)
    eventually(lambda: deployment.metric("stateful_parked_sequences", model), lambda count: count == 1)
    inputs = talk.draw(12)
    resumes = {"sequence_id": talk.sequence_id, "sequence_start": True, "resume": True}
    checked(talk, talk.client.ask(model.name, inputs, resumes), inputs)
    talk.ask(8, end=True)


@every_scheduler
def test_random_calls_give_what_the_oracle_gives(deployment, by):
    model = served(deployment, "windows_at_random", by)

    def talk(seed: int) -> None:
        one = talk_of(deployment, model, seed)
        one.sequence_id = new_id()
        one.ask(int(one.rng.integers(12)), start=True)
        for _ in range(25):
            if one.rng.integers(6) > 0:
                one.call_at_random()
                continue
            elements = int(one.rng.integers(one.rng.choice([3, 40])))
            snapshot = one.ask(elements, snapshot=True).outputs["state_snapshot"]
            oracle = one.oracle.copy()
            one.ask(13)
            restored(one, oracle, snapshot, elements, start=False)
        one.ask(3, end=True)

    together(lambda seed=seed: talk(seed) for seed in range(6))

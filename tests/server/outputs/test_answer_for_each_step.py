"""`model_transaction_policy { decoupled: true }`: each step of a request is answered when it is made."""

import dataclasses
import re

import numpy as np
import pytest

from harness import models
from harness.clients import new_id
from harness.conversations import together
from harness.deployment import eventually
from harness.each_step import TELL_END, Broken, EachStep, StepTalk, decoupled
from harness.model import Model
from harness.raw import Http, Refused, Stream, Unary
from harness.sequence_oracle import SequenceOracle, assert_same
from harness.state_api import DIRECT, OLDEST, OWN, with_state_api
from harness.windows import Cut

pytestmark = pytest.mark.simulated_device

AUDIO = {"AUDIO": Cut(5)}
#: Steps that take a second or so.
MANY = 30_000

every_scheduler = pytest.mark.parametrize("by", [OWN, OLDEST, DIRECT])


def served(deployment, name: str, by: str = OWN, *, of: Model | None = None, **parameters) -> Model:
    """Serves the model so. Returns it as if it answered once."""
    model = models.cut(name, 5, 3) if of is None else of
    model = with_state_api(model.variant(f"{name}_{by}"), by, **parameters)
    deployment.serve(decoupled(model))
    return model


def at_random(talk: StepTalk) -> None:
    """START, some requests and END, of random lengths; many of them make no step."""
    for n in range(10):
        elements = int(talk.rng.integers(0, int(talk.rng.choice([4, 42])) + 1))
        talk.ask(elements, start=n == 0, end=n == 9)
    talk.each.close()


def all_at_random(deployment, model: Model, cuts=AUDIO, **how) -> None:
    talks = [StepTalk(deployment, model, cuts, seed, **how) for seed in range(6)]
    together(lambda talk=talk: at_random(talk) for talk in talks)


def long_request(talk: StepTalk) -> dict[str, np.ndarray]:
    return {**talk.draw(1), "AUDIO": np.ones((1, 5 * MANY), np.float32)}


@every_scheduler
def test_each_step_has_its_answer(deployment, by):
    all_at_random(deployment, served(deployment, "each_step", by))


def test_the_last_answer_says_how_much_of_the_last_window_was_real(deployment):
    model = models.cut("each_filled_up", 5, 3, says="AUDIO=5:pad")
    all_at_random(deployment, served(deployment, model.name, of=model), pads=True)


def test_outputs_and_inputs_have_any_dims(deployment):
    model = models.cut("each_of_open", 5, 3, model_length="T")
    all_at_random(deployment, served(deployment, model.name, of=model))
    model = models.cut_pair("each_of_two")
    all_at_random(deployment, served(deployment, model.name, of=model), {"NEAR": Cut(4), "FAR": Cut(2, axis=2)})


def test_outputs_are_filled_in_as_the_model_has_them(deployment):
    model = models.cut("each_completed", 5, 3)
    bare = decoupled(with_state_api(model.variant("each_completed"), OWN))
    deployment.serve(dataclasses.replace(bare, inputs=(), outputs=()))
    outputs = deployment.admin.get_model_config(model.name).config.output
    dims = {output.name: list(output.dims) for output in outputs}
    assert (dims["TOTAL"], dims["WINDOW"]) == ([1], [8])
    all_at_random(deployment, model)


@every_scheduler
def test_an_error_is_the_last_answer_and_the_request_changes_nothing(deployment, by):
    model = served(deployment, "each_that_fails", by)
    talk, *others = (StepTalk(deployment, model, AUDIO, seed) for seed in range(3))
    for one in (talk, *others):
        one.ask(7, start=True)
    for failing in (1, 3, 4):
        error = talk.fail_beside(others, failing)
        assert isinstance(error, Broken)
        assert [answer.parameters["step"] for answer in error.before] == list(range(1, failing))
        talk.ask(12)
    for one in (talk, *others):
        one.ask(9, end=True)
        one.each.close()


@every_scheduler
def test_a_client_that_leaves_stops_the_steps(deployment, by):
    """The next step is slow, so no answer is on its way when the client leaves: tritonserver 2.51 can crash then
    (docs/inputs.md)."""
    how = {OWN: {"scheduling": ""}, OLDEST: {}, DIRECT: {"direct": ""}}[by]
    repeat = {"repeat": "<<<OUTPUT, INPUT>>>"}
    each = "model_transaction_policy { decoupled: true }"
    model = deployment.serve(
        models.slow(f"each_cancelled_{by}", 4000, slow_from=2, max_batch_size=1, parameters=repeat, more=each, **how)
    )
    stays, leaves, sequence = EachStep(deployment, model), EachStep(deployment, model), {"sequence_id": new_id()}
    one = {"INPUT": np.ones((1, 1), np.float32)}

    def sums(**parameters) -> list[float]:
        stays.send(one, {**sequence, **parameters})
        return [float(answer.outputs["OUTPUT"].item()) for answer in stays.answers()]

    assert sums(sequence_start=True, max_steps=3) == [1, 2, 4]
    leaves.send(one, {**sequence, "max_steps": 1000})
    answer, is_final = leaves.next()
    assert answer.outputs["OUTPUT"].item() == 5 and answer.parameters["step"] == 1 and not is_final
    leaves.leave()
    eventually(lambda: deployment.failures(model).get("cancelled"), lambda count: count == 1)
    assert sums(sequence_end=True, max_steps=2) == [5, 10]
    stays.close()


@every_scheduler
def test_a_timeout_ends_the_steps(deployment, by):
    talk = StepTalk(deployment, served(deployment, "each_late", by), AUDIO, 1)
    talk.ask(8, start=True)
    error = talk.run_late(long_request(talk))
    assert re.search(rf"REQUEST_TIMEOUT.*step \d+ of {MANY}", error.text), error
    assert isinstance(error, Broken) and f"step {len(error.before) + 1} of" in error.text
    talk.ask(12)
    talk.ask(12, end=True)
    talk.each.close()


def test_answers_of_sequences_that_share_runs_come_on_one_stream(deployment):
    model = served(deployment, "each_on_one_stream")
    stream, rng = Stream(deployment), np.random.default_rng(5)
    talks = [StepTalk(deployment, model, AUDIO, seed) for seed in range(4)]
    sent, came = {}, {}
    for round_ in range(6):
        for talk in talks:
            inputs = talk.draw(int(rng.integers(40)))
            start = {"sequence_start": True} if round_ == 0 else {}
            number = stream.send(model.name, inputs, {"sequence_id": talk.sequence_id, **start, **TELL_END})
            sent[number], came[number] = (talk, inputs, round_ == 0), []
    done = 0
    while done < len(sent):
        number, answer = stream.reply()
        assert not isinstance(answer, Refused), answer
        done += answer.parameters.pop("triton_final_response")
        if answer.parameters:
            came[number].append(answer)
    for number, (talk, inputs, start) in sent.items():
        outputs, _ = talk.oracle.ask(inputs, start=start)
        assert_same(model, talk.each.together(came[number]).outputs, outputs, str(number))
    stream.close()


@every_scheduler
def test_the_state_is_that_after_the_last_step(deployment, by):
    talk = StepTalk(deployment, served(deployment, "each_states", by), AUDIO, 1)
    talk.ask(14, start=True, sequence_step=0)
    for elements in (0, 3, 13, 0, 27):
        talk.each.send(talk.draw(elements), {"sequence_id": talk.sequence_id, "commit": False, "get_state": True})
        *before, last = talk.each.answers()
        assert all("state.SUM_IN" not in answer.outputs for answer in before)
        assert last.outputs["state.SUM_IN"].tolist() == state_of(talk)
        talk.ask(elements, commit=False)
        answer = talk.ask(elements, get_state=True)
        assert answer.outputs["state.SUM_IN"].tolist() == state_of(talk)
    snapshot = talk.ask(12, snapshot=True).outputs["state_snapshot"]
    before = talk.oracle.copy()
    talk.ask(22)
    talk.oracle = before
    inputs = talk.draw(33)
    answer = talk.each.ask(talk.model.name, {**inputs, "state_snapshot": snapshot}, {"sequence_id": talk.sequence_id})
    outputs, _ = talk.oracle.ask(inputs)
    assert_same(talk.model, {name: answer.outputs[name] for name in outputs}, outputs, "restored")
    with pytest.raises(Refused, match="SEQUENCE_STEP_CONFLICT"):
        talk.ask(9, sequence_step=3)
    talk.ask(9, end=True)
    talk.each.close()


def state_of(talk: StepTalk) -> list:
    return talk.oracle.steps.sequence.state["SUM_IN"].tolist()


@every_scheduler
def test_a_request_without_a_step_gets_nothing_but_the_end(deployment, by):
    model = served(deployment, "each_without", by)
    stream, sequence = Stream(deployment), {"sequence_id": new_id()}
    inputs = StepTalk(deployment, model, AUDIO, 1).draw(4)
    stream.send(model.name, inputs, {**sequence, "sequence_start": True})
    stream.send(model.name, inputs, {**sequence, **TELL_END})
    # a client that doesn't ask for it isn't told of the first one
    number, answer = stream.reply()
    assert number == 1 and answer.parameters["steps"] == 1 and answer.parameters["triton_final_response"]
    stream.send(model.name, {**inputs, "AUDIO": inputs["AUDIO"][:, :0]}, {**sequence, **TELL_END})
    number, answer = stream.reply()
    assert number == 2 and answer.outputs == {} and answer.parameters == {"triton_final_response": True}
    stream.close()


def test_other_protocols_are_refused_by_the_server(deployment):
    model = served(deployment, "each_elsewhere")
    inputs = StepTalk(deployment, model, AUDIO, 1).draw(9)
    for client in (Unary(deployment), Http(deployment)):
        with pytest.raises(Refused, match="decoupled"):
            client.ask(model.name, inputs, {"sequence_id": new_id(), "sequence_start": True})
        client.close()


@every_scheduler
def test_a_model_whose_requests_are_one_step_answers_once(deployment, by):
    how = {OWN: {"scheduling": ""}, OLDEST: {}, DIRECT: {"direct": ""}}[by]
    model = models.counter(name=f"each_once_{by}", **how)
    deployment.serve(model.variant(model.name, more="model_transaction_policy { decoupled: true }"))
    stream, rng, oracle = Stream(deployment), np.random.default_rng(1), SequenceOracle(model)
    sequence = {"sequence_id": new_id()}
    for n in range(5):
        flags = {"sequence_start": True} if n == 0 else {"sequence_end": True} if n == 4 else {}
        inputs = model.draw(rng, first=n == 0)
        answer = stream.ask(model.name, inputs, {**sequence, **flags})
        assert answer.parameters["triton_final_response"]
        assert_same(model, answer.outputs, oracle.step(inputs, start=n == 0), str(n))
    stream.close()


@every_scheduler
def test_random_calls_give_what_the_oracle_gives(deployment, by):
    model = served(deployment, "each_at_random", by)

    def talk(seed: int) -> None:
        one = StepTalk(deployment, model, AUDIO, seed)
        one.ask(int(one.rng.integers(12)), start=True)
        for _ in range(25):
            one.call_at_random()
        one.ask(3, end=True)
        one.each.close()

    together(lambda seed=seed: talk(seed) for seed in range(6))

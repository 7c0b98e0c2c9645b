"""`repeat`: an output of a step is an input of the next one of the same request, until something ends it."""

import dataclasses
import itertools
import re

import numpy as np
import pytest

from harness import models
from harness.clients import new_id
from harness.conversations import together
from harness.deployment import eventually
from harness.each_step import Broken, EachStep, decoupled
from harness.model import Control, Model, Tensor
from harness.models.generated import steps as counted_steps
from harness.models.repeated import LAST
from harness.raw import PROTOCOLS, Refused, Unary, under_way
from harness.refusals import refused
from harness.repeats import RepeatOracle, RepeatTalk
from harness.state_api import DIRECT, OLDEST, OWN, with_state_api

pytestmark = pytest.mark.simulated_device

FEEDS = {"NEXT": "TOKENS"}
#: Steps that take a second or so.
MANY = 100_000
#: Steps that take hours.
HOURS = 10**9

every_scheduler = pytest.mark.parametrize("by", [OWN, OLDEST, DIRECT])


def served(deployment, name: str, by: str = OWN, *, of: Model | None = None, each=False, **parameters) -> Model:
    """Serves the model. Returns it as if it answered once."""
    model = models.spoken(name) if of is None else of
    model = with_state_api(model.variant(f"{name}_{by}"), by, **parameters)
    deployment.serve(decoupled(model) if each else model)
    return model


def stops(outputs) -> bool:
    return bool(outputs["NEXT"].ravel()[0] == LAST)


def never(outputs) -> bool:
    return False


def talk_of(deployment, model: Model, seed: int = 1, *, each: bool = False, until=stops) -> RepeatTalk:
    client = EachStep(deployment, model) if each else Unary(deployment)
    return RepeatTalk(client, RepeatOracle(model, FEEDS, until), seed)


def at_random(talk: RepeatTalk, requests: int = 8) -> None:
    for n in range(requests):
        tokens = int(talk.rng.integers(1, 6))
        talk.ask(tokens, start=n == 0, end=n == requests - 1, max_steps=int(talk.rng.integers(1, 40)))


def all_at_random(deployment, model: Model, **how) -> None:
    talks = [talk_of(deployment, model, seed, **how) for seed in range(6)]
    together(lambda talk=talk: at_random(talk) for talk in talks)


@every_scheduler
@pytest.mark.parametrize("each", [False, True], ids=["one_answer", "each_step"])
def test_steps_feed_each_other_until_an_output_has_a_value(deployment, by, each):
    all_at_random(deployment, served(deployment, f"repeat_{each}".lower(), by, each=each), each=each)


@pytest.mark.parametrize(
    ("name", "until", "stop"),
    [
        ("bool", "IS_LAST", stops),
        ("several", "NEXT=[3, 5] MADE=30", lambda of: of["NEXT"].item() in (3, 5) or of["MADE"].item() == 30),
        ("never", None, never),
    ],
)
def test_what_ends_the_steps(deployment, name, until, stop):
    model = models.spoken(f"repeat_until_{name}", until=until)
    all_at_random(deployment, served(deployment, model.name, of=model), until=stop)


def test_without_max_steps_the_model_s_bound_ends_the_steps(deployment):
    model = served(deployment, "repeat_bounded", max_steps_per_request=7)
    talk = talk_of(deployment, model)
    talk.most = 7
    said = [talk.ask(2, start=n == 0).parameters for n in range(20)]
    assert {parameters["stopped"] for parameters in said} == {True, False}
    talk.ask(1, end=True)


@every_scheduler
@pytest.mark.parametrize("value", [0, -1, 8, "many", "", True], ids=str)
def test_a_wrong_number_of_steps_is_refused_by_name(deployment, by, value):
    model = served(deployment, "repeat_wrong_number", by, max_steps_per_request=7)
    talk = talk_of(deployment, model)
    talk.ask(2, start=True, max_steps=3)
    with pytest.raises(Refused, match=r"'max_steps' of the request is .*from 1 to 7.*max_steps_per_request"):
        talk.ask(2, max_steps=value)
    talk.ask(2, end=True, max_steps=7)


def test_without_an_end_each_request_has_to_say_how_many_steps_it_makes(deployment):
    model = models.spoken("repeat_endless", until=None)
    talk = talk_of(deployment, served(deployment, model.name, of=model), until=never)
    with pytest.raises(Refused, match=r"nothing ends the steps.*'max_steps'.*'repeat_until'"):
        talk.ask(2, start=True)
    talk.ask(2, start=True, max_steps=5)
    talk.ask(2, end=True, max_steps=1)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_carries_steps(deployment, protocol):
    model = served(deployment, "repeat_protocols")
    client = PROTOCOLS[protocol](deployment)
    at_random(RepeatTalk(client, RepeatOracle(model, FEEDS, stops), 1))
    client.close()


@pytest.mark.parametrize("changes", [{"max_batch_size": 1}, {"max_batch_size": 0}], ids=["alone", "unbatched"])
def test_models_with_one_row_are_repeated_too(deployment, changes):
    model = models.spoken(f"repeat_rows_{changes['max_batch_size']}", **changes)
    if model.max_batch_size == 0:
        model = dataclasses.replace(
            model,
            inputs=tuple(dataclasses.replace(tensor, dims=(1, *tensor.dims), ragged=False) for tensor in model.inputs),
            outputs=tuple(
                dataclasses.replace(tensor, dims=(1, -1) if tensor.name == "SEEN" else (-1, 1, 1))
                for tensor in model.outputs
            ),
        )
    all_at_random(deployment, served(deployment, model.name, of=model))


@pytest.mark.host_and_device
@every_scheduler
@pytest.mark.parametrize("grows", [True, False], ids=["growing", "fixed"])
@pytest.mark.parametrize("each", [False, True], ids=["one_answer", "each_step"])
def test_a_request_that_fails_in_the_middle_changes_nothing(deployment, by, grows, each):
    model = models.spoken(f"repeat_fails_{grows}_{each}".lower(), grows=grows, until=None)
    model = served(deployment, model.name, by, of=model, each=each)
    talk, *others = (talk_of(deployment, model, seed, each=each, until=never) for seed in range(4))
    for one in (talk, *others):
        one.ask(3, start=True, max_steps=2)
    made = 2
    for failing in (1, 2, 5):
        inputs = talk.draw(2)
        inputs["FAILS_AT"][...] = made + failing

        def fail(inputs=inputs):
            with pytest.raises(Refused) as caught:
                talk.ask(inputs, max_steps=9)
            return caught.value

        error, *_ = together([fail, *(lambda other=other: other.ask(1, max_steps=20) for other in others)])
        assert f"step {failing} of the request" in error.text
        if isinstance(error, Broken):
            assert [answer.parameters["step"] for answer in error.before] == list(range(1, failing))
        talk.ask(3, max_steps=4)
        made += 4
    for one in (talk, *others):
        one.ask(1, end=True, max_steps=3)


@every_scheduler
def test_a_start_that_fails_in_the_middle_leaves_no_sequence(deployment, by):
    talk = talk_of(deployment, served(deployment, "repeat_fails_at_start", by), until=never)
    inputs = talk.draw(2)
    inputs["FAILS_AT"][...] = 2
    with pytest.raises(Refused, match="step 2 of the request"):
        talk.ask(inputs, start=True, max_steps=4)
    with pytest.raises(Refused):
        talk.ask(1, max_steps=1)
    talk = talk_of(deployment, talk.model)
    talk.ask(2, start=True, max_steps=4)
    talk.ask(2, end=True, max_steps=4)


def endless(deployment, name: str, by: str, **parameters) -> RepeatTalk:
    model = models.spoken(name, grows=False, until=None)
    return talk_of(deployment, served(deployment, name, by, of=model, **parameters), until=never)


@every_scheduler
def test_a_timeout_between_two_steps_changes_nothing(deployment, by):
    talk = endless(deployment, "repeat_late", by)
    talk.ask(2, start=True, max_steps=3)
    error = talk.run_late(talk.draw(2), max_steps=MANY)
    assert re.search(r"REQUEST_TIMEOUT.*step \d+ of the request", error.text), error
    talk.ask(2, max_steps=3)
    talk.ask(2, end=True, max_steps=3)


@every_scheduler
def test_a_request_that_is_cancelled_between_two_steps_changes_nothing(deployment, by):
    talk = endless(deployment, "repeat_cancelled", by, max_steps_per_request=HOURS)
    talk.ask(2, start=True, max_steps=3)
    parameters = {"sequence_id": talk.sequence_id, "max_steps": HOURS}
    under_way(deployment, talk.model, talk.draw(2), parameters).leave()
    eventually(lambda: deployment.failures(talk.model).get("cancelled"), lambda count: count == 1)
    talk.ask(2, max_steps=3)
    talk.ask(2, end=True, max_steps=3)


def test_a_long_request_lets_others_step(deployment):
    model = models.spoken("repeat_long", grows=False, until=None)
    model = served(deployment, model.name, of=model, max_steps_per_request=HOURS)
    long, short = (talk_of(deployment, model, seed, until=never) for seed in (1, 2))
    for one in (long, short):
        one.ask(1, start=True, max_steps=1)
    stream = under_way(deployment, model, long.draw(1), {"sequence_id": long.sequence_id, "max_steps": HOURS})
    for _ in range(20):
        short.ask(1, max_steps=2)
    stream.leave()
    # It was still making steps, or there would have been nothing to cancel.
    eventually(lambda: deployment.failures(model).get("cancelled"), lambda count: count == 1)
    call = Unary(deployment).send(model.name, long.draw(1), {"sequence_id": long.sequence_id, "max_steps": MANY})
    for _ in range(20):
        short.ask(1, max_steps=2)
    short.ask(1, end=True, max_steps=2)
    assert call.answer().parameters["steps"] == MANY


@every_scheduler
@pytest.mark.parametrize("grows", [True, False], ids=["growing", "fixed"])
def test_the_state_api_sees_whole_requests(deployment, by, grows):
    model = models.spoken(f"repeat_states_{grows}".lower(), grows=grows)
    model = served(deployment, model.name, by, of=model)
    talk = talk_of(deployment, model)
    talk.ask(3, start=True, max_steps=12, commit=False)
    talk.ask(3, max_steps=12)
    for _ in range(6):
        talk.ask(2, max_steps=9, commit=False)
        answer = talk.ask(2, max_steps=9, get_state=True)
        assert answer.outputs["state.HASH_IN"].tolist() == state_of(talk, "HASH_IN")
        assert answer.outputs["state.MADE_IN"].tolist() == state_of(talk, "MADE_IN")
    snapshot = talk.ask(1, max_steps=5, snapshot=True).outputs["state_snapshot"]
    restored = talk.oracle.copy()
    made = talk.oracle.steps.context.steps
    talk.ask(1, max_steps=5)
    talk.oracle = restored
    inputs = talk.draw(2)
    came = talk.client.ask(
        model.name, {**inputs, "state_snapshot": snapshot}, {"sequence_id": talk.sequence_id, "max_steps": 4}
    )
    checked(talk, came, inputs, 4)
    clone = talk_of(deployment, model, 2)
    clone.oracle = talk.oracle.copy()
    inputs = clone.draw(2)
    starts = {"sequence_id": clone.sequence_id, "sequence_start": True, "clone_of": talk.sequence_id, "max_steps": 6}
    checked(clone, clone.client.ask(model.name, inputs, starts), inputs, 6)
    with pytest.raises(Refused, match="SEQUENCE_STEP_CONFLICT"):
        talk.ask(1, max_steps=3, sequence_step=made)
    for one in (talk, clone):
        one.ask(1, max_steps=3, end=True)


@every_scheduler
@pytest.mark.parametrize("grows", [True, False], ids=["growing", "fixed"])
def test_whatever_else_a_request_asks_for_it_changes_nothing_if_it_fails(deployment, by, grows):
    model = models.spoken(f"repeat_fails_with_{grows}".lower(), grows=grows, until=None)
    model = served(deployment, model.name, by, of=model)
    talk = talk_of(deployment, model, until=never)

    def fails(made: int, sent=None, **parameters) -> None:
        inputs = talk.draw(2)
        inputs["FAILS_AT"][...] = made + 3
        call = {"sequence_id": talk.sequence_id, "max_steps": 9, **parameters}
        with pytest.raises(Refused, match="step 3 of the request"):
            talk.client.ask(model.name, {**inputs, **(sent or {})}, call)

    fails(0, sequence_start=True, commit=False)
    with pytest.raises(Refused):
        talk.ask(1, max_steps=1)
    talk = talk_of(deployment, model, until=never)
    snapshot = talk.ask(2, start=True, max_steps=5, snapshot=True).outputs["state_snapshot"]
    talk.ask(2, max_steps=4)
    for sent, made, parameters in (
        ({}, 9, {"commit": False, "get_state": True}),
        ({}, 0, {"reset_state": True}),
        ({"state.MADE_IN": np.array([[100]])}, 100, {"commit": False}),
        ({"state.MADE_IN": np.array([[100]])}, 100, {"snapshot": True}),
        ({"state_snapshot": snapshot}, 5, {}),
    ):
        fails(made, sent, **parameters)
        answer = talk.ask(1, max_steps=3, commit=False, get_state=True, query_state=True)
        assert answer.outputs["state.MADE_IN"].tolist() == [[9]]
        assert answer.outputs["state.HASH_IN"].tolist() == state_of(talk, "HASH_IN")
    answer = talk.ask(1, max_steps=3, commit=False, get_state=True, end=True)
    assert answer.outputs["state.MADE_IN"].tolist() == [[9]]
    with pytest.raises(Refused):
        talk.ask(1, max_steps=1)


@every_scheduler
def test_what_finds_no_room_for_its_states_changes_nothing(deployment, by):
    model = models.spoken("repeat_without_room", until=None)
    model = served(deployment, model.name, by, of=model, max_state_bytes=200)
    talk = talk_of(deployment, model, until=never)
    # 80 bytes, and as many for what the next request gives back if it fails
    talk.ask(2, start=True, max_steps=10)
    for _ in range(3):
        with pytest.raises(Refused, match=r"max_state_bytes.*step 6 of the request"):
            talk.ask(2, max_steps=9)
    talk.ask(2, max_steps=5)
    with pytest.raises(Refused, match="max_state_bytes"):
        talk.ask(2, max_steps=2)
    # what ends its sequence gives nothing back
    talk.ask(2, max_steps=10, end=True)
    deployment.settles("stateful_growing_state_bytes", model, 0)


def state_of(talk: RepeatTalk, name: str) -> list:
    return talk.oracle.steps.sequence.state[name].tolist()


def checked(talk: RepeatTalk, came, inputs, most: int) -> None:
    talk.oracle.most = most
    outputs, said = talk.oracle.ask(inputs)
    assert {name: came.parameters[name] for name in said} == said
    for name, value in outputs.items():
        assert came.outputs[name].tolist() == value.tolist()


def test_an_input_for_start_says_so_in_the_first_step_only(deployment):
    begins = Control("FAILS_AT", "CONTROL_SEQUENCE_START", "int32", (0, 1))
    model = models.spoken("repeat_told_of_the_start", until=None)
    model = dataclasses.replace(model, inputs=model.inputs[:2], controls=(begins,))
    deployment.serve(model)
    tokens = {"TOKENS": np.array([[1]]), "GAIN": np.array([[1]])}
    with pytest.raises(Refused, match="step 1 of the request"):
        # the first step is number 1 of its sequence
        Unary(deployment).ask(model.name, tokens, {"sequence_id": new_id(), "sequence_start": True, "max_steps": 3})


def test_generated_inputs_count_steps(deployment):
    model = models.spoken("repeat_counted", until=None)
    model = dataclasses.replace(
        model,
        inputs=(model.inputs[0], model.inputs[2]),
        generated={"GAIN": lambda *of: [[counted_steps()(*of)]]},
        parameters={**model.parameters, "generated_inputs": "GAIN=steps"},
    )
    all_at_random(deployment, served(deployment, model.name, of=model), until=never)


@every_scheduler
@pytest.mark.parametrize("each", [False, True], ids=["one_answer", "each_step"])
def test_a_decoder_goes_on_by_itself_and_sequences_of_different_lengths_share_runs(deployment, by, each):
    model = models.greedy_decoder(f"repeat_decoder_{each}".lower())
    model = served(deployment, model.name, by, of=model, each=each, repeat_until="next_token=3")

    def ends(outputs) -> bool:
        return bool(outputs["next_token"].item() == 3)

    def talk(seed: int) -> int:
        client = EachStep(deployment, model) if each else Unary(deployment)
        one = RepeatTalk(client, RepeatOracle(model, {"next_token": "input_ids"}, ends), seed)
        made = 0
        for n in range(4):
            tokens, most = int(one.rng.integers(1, 9)), int(one.rng.integers(1, 30))
            made += int(one.ask(tokens, start=n == 0, end=n == 3, max_steps=most).parameters["steps"])
        return made

    made = 0
    for first in itertools.count(step=8):
        made += sum(together(lambda seed=seed: talk(seed) for seed in range(first, first + 8)))
        # Core's batcher may send each request alone. With the backend's scheduler, some requests meet sooner or later.
        if by != OWN or deployment.statistics(model).execution_count < made:
            break


def bare(name: str, **parameters) -> Model:
    """With another `repeat`."""
    return models.spoken(f"repeat_refused_{name}", until=None).with_parameters(f"repeat_refused_{name}", **parameters)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (bare("form", repeat="NEXT, TOKENS"), ["repeat", "'<<<output, input>>>'"]),
        (bare("output", repeat="<<<NEXTE, TOKENS>>>"), ["repeat", "no output 'NEXTE'", "SEEN"]),
        (bare("input", repeat="<<<NEXT, TOKEN>>>"), ["repeat", "no input 'TOKEN'", "TOKENS"]),
        (bare("order", repeat="<<<TOKENS, NEXT>>>"), ["repeat", "'TOKENS' is an input", "the output stands first"]),
        (bare("state", repeat="<<<HASH_OUT, TOKENS>>>"), ["repeat", "'HASH_OUT' is a state"]),
        (bare("of_state", repeat="<<<NEXT, HASH_IN>>>"), ["repeat", "'HASH_IN' is no input that requests carry"]),
        (bare("type", repeat="<<<IS_LAST, TOKENS>>>"), ["repeat", "TYPE_BOOL", "TYPE_INT64", "one type"]),
        (
            bare("dims", repeat="<<<SEEN, GAIN>>> <<<NEXT, TOKENS>>>", repeat_until="NEXT=x"),
            ["repeat_until", "'x' is no"],
        ),
        (bare("until", repeat_until="NEXTE=3"), ["repeat_until", "no output 'NEXTE'"]),
        (bare("until_value", repeat_until="IS_LAST=2"), ["repeat_until", "'2' is no TYPE_BOOL", "true or false"]),
        (bare("bare_until", repeat_until="NEXT"), ["repeat_until", "'true' is no TYPE_INT64"]),
        (bare("windows", input_windows="TOKENS=2"), ["repeat", "input_windows", "a step for each window"]),
        (bare("held", held_inputs="TOKENS", state_api="true"), ["repeat", "held_inputs"]),
        (bare("context", input_context="TOKENS=2"), ["repeat", "input_context"]),
        (
            models.spoken("repeat_refused_alone").with_parameters("repeat_refused_alone", repeat=""),
            ["repeat", "'<<<output, input>>>'"],
        ),
        (
            dataclasses.replace(
                models.spoken("repeat_refused_listed"),
                outputs=(Tensor("NEXT", "int64", (1,)), Tensor("SEEN", "int64", (-1,))),
            ),
            ["repeat", "NEXT", "[-1, 1]"],
        ),
        (
            dataclasses.replace(
                models.spoken("repeat_refused_end"),
                inputs=models.spoken("").inputs[:2],
                controls=(Control("FAILS_AT", "CONTROL_SEQUENCE_END", "int32", (0, 1)),),
            ),
            ["repeat", "FAILS_AT", "CONTROL_SEQUENCE_END", "constant_inputs"],
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Model) else "",
)
def test_what_cannot_be_repeated_is_refused_at_load(deployment, model, words):
    refused(deployment, model, *words)


@every_scheduler
def test_random_calls_give_what_the_oracle_gives(deployment, by):
    model = served(deployment, "repeat_at_random", by)

    def talk(seed: int) -> None:
        one = talk_of(deployment, model, seed)
        one.ask(int(one.rng.integers(1, 6)), start=True, max_steps=5)
        for _ in range(25):
            tokens, most = int(one.rng.integers(1, 6)), int(one.rng.integers(1, 12))
            match int(one.rng.integers(5)):
                case 0:
                    one.ask(tokens, max_steps=most, commit=False)
                case 1:
                    one.oracle.begin()
                    one.ask(tokens, max_steps=most, reset_state=True)
                case 2:
                    inputs = one.draw(tokens)
                    inputs["FAILS_AT"][...] = int(one.oracle.steps.sequence.state["MADE_IN"].item()) + 1
                    with pytest.raises(Refused):
                        one.ask(inputs, max_steps=most)
                case _:
                    one.ask(tokens, max_steps=most)
        one.ask(1, end=True, max_steps=2)

    together(lambda seed=seed: talk(seed) for seed in range(6))

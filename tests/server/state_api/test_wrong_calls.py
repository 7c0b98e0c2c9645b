"""Requests that the State API refuses: which words they get, and that nothing has changed, for any sequence."""

import re

import numpy as np
import pytest

from harness import models
from harness.models import booked, ledger
from harness.own import special
from harness.raw import Refused
from harness.refusals import refused as load_refused
from harness.state_api import OLDEST, OWN, StateSequence, both_schedulers, refused, with_state_api

FLAGS = ("commit", "delete", "query_state", "resume", "snapshot")
WORDS = ("get_state", "reset_state")


def sums(*values) -> np.ndarray:
    return np.array([values], np.int64)


def send(one: StateSequence, inputs, **parameters):
    """A request with parameters of any value."""
    return one.client.ask(one.model.name, inputs or {}, {"sequence_id": one.sequence_id, **parameters})


@pytest.fixture
def two(serve, connect):
    """Two sequences of `ledger` that have made a step, the second of which nothing is asked."""

    def made(by: str = OWN, protocol: str = "unary", **how) -> tuple[StateSequence, StateSequence]:
        model = serve(ledger, by, **how)
        talks = [StateSequence(connect(protocol), model, np.random.default_rng(seed)) for seed in (1, 2)]
        for talk in talks:
            talk.start()
        return talks[0], talks[1]

    return made


@pytest.mark.parametrize("protocol", ["unary", "stream", "http"])
@both_schedulers
def test_values_that_a_parameter_cannot_have(two, by, protocol):
    one, other = two(by, protocol)
    wrong = [(name, value) for name in FLAGS for value in (2, -1, 2**40, "", "yes", "1", "True ", "tru")]
    wrong += [(name, value) for name in WORDS for value in (2, -1)]
    wrong += [("sequence_step", value) for value in (True, -1, "", "-1", "1.5", "x", str(2**64))]
    wrong += [("clone_of", value) for value in (True, 0, "")]
    for name, value in wrong:
        said = f"'{value}'" if isinstance(value, str) else str(value).lower()
        for inputs in (booked(1), None):
            with refused("STATE_PARAMETER", f"'{name}'", said):
                send(one, inputs, **{name: value})
    one.states()
    other.states()


@both_schedulers
def test_values_of_other_types_are_refused(two, by):
    """HTTP knows numbers with a point."""
    one, other = two(by, "http")
    for name in (*FLAGS, *WORDS, "sequence_step", "clone_of"):
        with refused("STATE_PARAMETER", f"'{name}'", "another type"):
            send(one, booked(1), **{name: 1.5})
    one.states()
    other.states()


@both_schedulers
def test_words_for_true_and_false(two, by):
    one, _ = two(by)
    for yes, no in ((True, False), (1, 0), ("true", "false")):
        one.step(query_state=yes, get_state=yes, snapshot=yes, commit=no, reset_state=no, delete=no, resume=no)
        one.step(query_state=no, get_state=no, snapshot=no, commit=yes, reset_state=yes)


@both_schedulers
def test_names_that_are_no_states(two, by):
    one, other = two(by)
    for value in ("sum", "SUM;LOG", "SUM LOG", "SUM_OUT", "INPUT", "state.", "state.state.SUM", "x" * 150, "SÜM", "*"):
        for parameter in WORDS:
            for inputs in (booked(1), None):
                with refused("STATE_UNKNOWN", f"'{parameter}'", f"'{value}'", "SUM, BOTH, LOG"):
                    one.ask(inputs, **{parameter: value})
    # good names among the wrong ones have no effect either
    with one.refuses("STATE_UNKNOWN"):
        one.step(set={"BOTH": np.ones((1, 2, 1), np.int64)}, reset_state="SUM,NOTHING")
    other.states()
    one.ask(get_state=" SUM , LOG,, state.LOG ")


#: Each parameter of the State API.
PARAMETERS = (*FLAGS, *WORDS, "sequence_step", "clone_of")


@pytest.mark.parametrize("protocol", ["unary", "stream", "http"])
@pytest.mark.parametrize("bytes", [40_000, 1_000_000])
@both_schedulers
def test_an_error_repeats_the_ends_of_a_long_value(two, by, protocol, bytes):
    """Clients of gRPC get no text of more than 8 kB."""
    one, other = two(by, protocol)
    for name in PARAMETERS:
        for value in (f"begin{'x' * bytes}end", f"begin,{'ü,' * (bytes // 3)}end"):
            with pytest.raises(Refused) as caught:
                send(one, booked(1), **{name: value})
            text = caught.value.text
            word = "STATE_UNKNOWN" if name in WORDS else "STATE_PARAMETER"
            assert text.startswith(f"{word}: request parameter '{name}' ") and len(text) < 500, text
            assert re.search("'begin.* bytes .*end'", text), text
    one.states()
    other.states()


@pytest.mark.parametrize("protocol", ["unary", "http"])
def test_a_text_with_the_names_of_many_states_is_cut(serve, connect, protocol):
    make = lambda name, **changes: models.many_states(name=name, count=600, **changes)  # noqa: E731
    one = StateSequence(connect(protocol), serve(make))
    one.start()
    with pytest.raises(Refused) as caught:
        send(one, None, get_state="NOTHING")
    text = caught.value.text
    assert text.startswith("STATE_UNKNOWN: request parameter 'get_state' names 'NOTHING', but the model's states are ")
    assert " bytes ..." in text and len(text) < 2100, text


@both_schedulers
def test_a_list_may_be_as_long_as_the_names_of_all_states(two, by):
    """A longer one is not read, so that it doesn't hold up the other requests of the model."""
    one, _ = two(by)
    longest = "state.SUM, state.BOTH, state.LOG, "
    one.ask(get_state=longest)
    for value in (longest + " ", "," * 1_000_000, longest * 1000):
        for parameter in WORDS:
            with one.refuses("STATE_UNKNOWN", f"'{parameter}'", "SUM, BOTH, LOG"):
                send(one, None, **{parameter: value})


@both_schedulers
def test_an_id_to_clone_may_be_as_long_as_any_id(two, by):
    one, _ = two(by)
    long = StateSequence(one.client, one.model, sequence_id="i" * 128)
    long.start()
    long.clone()
    with refused("STATE_PARAMETER", "'clone_of'", "at most 128 bytes"):
        send(one, None, sequence_start=True, clone_of="i" * 129)


@both_schedulers
def test_tensors_that_do_not_fit(two, by):
    one, other = two(by)
    wrong = {
        "another_type": {"SUM": np.ones((1, 1), np.float32)},
        "a_dim_more": {"SUM": np.ones((1, 1, 1), np.int64)},
        "a_dim_less": {"BOTH": np.ones((1, 2), np.int64)},
        "another_dim": {"BOTH": np.ones((1, 3, 1), np.int64)},
        "the_dims_of_the_model": {"BOTH": np.ones((2, 1, 1), np.int64)},
        "no_rows": {"SUM": np.ones((0, 1), np.int64)},
        "no_such_state": {"TOTAL": sums(1)},
        "an_output": {"SUM_OUT": sums(1)},
    }
    for name, value in wrong.items():
        for inputs in (booked(1), None):
            with pytest.raises(Refused) as caught:
                one.ask(inputs, set={**value, "LOG": sums(1, 2, 3)})
            assert caught.value.code == "INVALID_ARGUMENT", (name, caught.value)
            assert re.search("state\\.|batch", caught.value.text), (name, caught.value)
        one.states()
    other.states()


@both_schedulers
def test_what_cannot_be_asked_for_together(two, by):
    one, other = two(by)
    saved = one.save()
    value = {"SUM": sums(3)}
    wrong = [
        {"set": value, "reset_state": True},
        {"set": value, "reset_state": "SUM"},
        {"restore": saved, "resume": True, "start": True},
        {"restore": saved, "clone_of": other, "start": True},
        {"clone_of": other},
        {"resume": True},
        {"delete": True, "commit": False},
        {"delete": True, "set": value},
        {"delete": True, "reset_state": "LOG"},
        {"delete": True, "restore": saved},
    ]
    fresh = one.other()
    for how in wrong:
        talk = fresh if how.get("start") else one
        for inputs in (booked(1), None):
            with refused("STATE_CONFLICT"):
                talk.ask(inputs, **how)
    one.states()
    other.states()
    with refused("SEQUENCE_MISSING") if by == OWN else pytest.raises(Refused):
        fresh.states()


@both_schedulers
def test_an_inference_needs_its_inputs(two, by):
    one, other = two(by)
    half = {"INPUT": sums(1)}
    wrong: list[tuple[dict, dict]] = [(half, {}), (half, {"get_state": True}), (half, {"set": {"SUM": sums(1)}})]
    # these ask for nothing but an inference
    wrong += [({}, {}), ({}, {"commit": False}), ({}, {"sequence_step": 1}), ({}, {"get_state": False})]
    for inputs, how in wrong:
        with one.refuses("is missing"):
            one.ask(inputs, **how)
    other.states()


@both_schedulers
def test_without_the_state_api_every_call_is_refused(serve, connect, by):
    model, client = serve(ledger, by, parameters={"state_api": None}), connect()
    at = {"sequence_id": 1}
    client.ask(model.name, booked(1), {**at, "sequence_start": True})
    calls = {name: True for name in (*FLAGS, *WORDS)} | {"sequence_step": 1, "clone_of": 1}
    for name, value in calls.items():
        with refused("STATE_API_OFF", f"'{name}'", "'state_api'"):
            client.ask(model.name, booked(1), {**at, name: value})
    for name in ("state.SUM", "state_snapshot"):
        with refused(name):
            client.ask(model.name, {**booked(1), name: sums(1)}, at)
    # other parameters are not ours
    came = client.ask(model.name, booked(1), {**at, "get_states": True, "state": "x"})
    assert came.outputs["OUTPUT"][0, 0] == 2 and set(came.outputs) == {"OUTPUT"}


@pytest.mark.parametrize("value", ["false", "0"])
def test_it_can_be_switched_off(serve, connect, value):
    model = serve(ledger, parameters={"state_api": value})
    with refused("STATE_API_OFF"):
        connect().ask(model.name, booked(1), {"sequence_id": 1, "sequence_start": True, "get_state": True})


@pytest.mark.parametrize("value", ["maybe", "2", ""])
def test_a_wrong_value_of_state_api_is_refused_at_load(deployment, value):
    load_refused(deployment, with_state_api(ledger("refused_state_api"), state_api=value), "state_api")


def test_requests_of_several_rows_do_without(serve, connect):
    """Each row of OpenVINO Model Server's inputs is of another sequence."""
    model, client = serve(models.work), connect()
    both = {"sequence_id": np.array([[71], [72]], np.uint64)}
    start = {"sequence_control_input": np.array([[1], [1]], np.uint32)}
    rows = {"INPUT": sums(1).repeat(2, 0), "WORK": sums(0).repeat(2, 0)}
    client.ask(model.name, {**rows, **both, **start}, {})
    for how in ({"get_state": True}, {"commit": False}, {"reset_state": "SUM_IN"}, {"delete": True}):
        with refused("STATE_CONFLICT", "several rows"):
            client.ask(model.name, {**rows, **both}, how)
        with refused("STATE_CONFLICT", "several rows"):
            client.ask(model.name, both, how)
    for count in (1, 2):
        with pytest.raises(Refused) as caught:
            client.ask(model.name, {**rows, **both, "state.SUM_IN": np.ones((count, 1), np.int64)}, {})
        assert caught.value.code == "INVALID_ARGUMENT", caught.value
    for sequence_id in (71, 72):
        came = client.ask(model.name, {}, {"sequence_id": sequence_id, "get_state": True})
        assert came.outputs["state.SUM_IN"].item() == 1
    one = {**special(model, 71), "state.SUM_IN": sums(5)}
    assert client.ask(model.name, one, {"get_state": True}).outputs["state.SUM_IN"].item() == 5


def listed(name: str, type: str, dims: str) -> str:
    return f'{{ name: "{name}" data_type: TYPE_{type} dims: [ {dims} ] }}'


def by_hand(name: str, inputs: dict[str, tuple[str, str]], outputs: dict[str, tuple[str, str]], by: str = OWN):
    """`ledger`, with these tensors of the State API in the configuration."""
    lines = [f"input {listed(name, *of)[:-2]} optional: true }}" for name, of in inputs.items()]
    lines += [f"output {listed(name, *of)}" for name, of in outputs.items()]
    made = with_state_api(ledger(name), by)
    plain = tuple(type(tensor)(tensor.name, tensor.type, tensor.dims, optional=True) for tensor in made.inputs)
    return made.variant(name, more="\n".join(lines), inputs=plain)


SUM, BOTH, LOG, TEXT = ("INT64", "1"), ("INT64", "2, 1"), ("INT64", "-1"), ("STRING", "1")


def test_without_auto_complete_what_is_listed_works(deploy, connect):
    own = deploy(extra_args=["--disable-auto-complete-config"])
    client = connect(to=own)
    all_inputs = {"state.SUM": SUM, "state.BOTH": BOTH, "state.LOG": LOG, "state_snapshot": TEXT}
    all_outputs = {**all_inputs, "state_info": TEXT}
    for by in (OWN, OLDEST):
        whole = StateSequence(client, own.serve(by_hand(f"whole_{by}", all_inputs, all_outputs, by)))
        whole.start(booked(1), get_state=True, query_state=True)
        saved = whole.save()
        whole.restored(saved, set={"LOG": sums(1)}).step(booked(2), get_state=True)
        part = StateSequence(client, own.serve(by_hand(f"part_{by}", {"state.SUM": SUM}, {"state.LOG": LOG}, by)))
        part.start(booked(1), get_state="LOG")
        for how, what in (
            ({"get_state": True}, "'state.SUM' is not listed under 'output'"),
            ({"get_state": "LOG,BOTH"}, "'state.BOTH'"),
            ({"snapshot": True}, "'state_snapshot'"),
            ({"query_state": True}, "'state_info'"),
        ):
            for inputs in (booked(1), None):
                with refused("STATE_NOT_LISTED", what, "--disable-auto-complete-config"):
                    part.ask(inputs, **how)
        with refused("unexpected inference input 'state.LOG'"):
            part.ask(set={"LOG": sums(1)})
        with refused("unexpected inference input 'state_snapshot'"):
            part.ask(restore=saved)
        part.ask(set={"SUM": sums(5)}, reset_state="BOTH", get_state="LOG")
        part.clone(booked(2), get_state="LOG").step(booked(3), get_state="LOG")


@pytest.mark.parametrize(
    ("inputs", "outputs", "words"),
    [
        ({"state.TOTAL": SUM}, {}, ["state.TOTAL", "state.SUM", "state.LOG"]),
        ({"state.SUM": ("FP32", "1")}, {}, ["state.SUM", "TYPE_FP32", "TYPE_INT64"]),
        ({"state.BOTH": ("INT64", "2, 1, 1")}, {}, ["state.BOTH", "[2, 1, 1]", "[2, 1]"]),
        ({}, {"state.LOG": ("INT64", "5")}, ["state.LOG", "[5]", "[-1]"]),
        ({}, {"state_info": ("INT64", "1")}, ["state_info", "TYPE_STRING"]),
        ({"state_snapshot": ("STRING", "2")}, {}, ["state_snapshot", "[2]", "[1]"]),
    ],
)
def test_a_tensor_that_does_not_fit_its_state_is_refused_at_load(deployment, inputs, outputs, words):
    load_refused(deployment, by_hand("refused_state_tensor", inputs, outputs), *words)

"""Configurations that are plausible and wrong, and models that mislead: each is served rightly, or said to be doubtful."""

import dataclasses
import re

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import models
from harness.conversations import talk
from harness.graphs import graph, node
from harness.logs import log_of_load, messages, warnings_of_load
from harness.model import END, START, Control, Tensor, parameter
from harness.models.exports import Bare

BACKEND = 'backend: "stateful"'
ROW = ["batch", 4]


LISTED = """input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }"""
WITHOUT_BATCH = """max_batch_size: 0
input { name: "x" data_type: TYPE_FP32 dims: [ 1, 4 ] }
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1, 4 ] }, { name: "places" data_type: TYPE_INT64 dims: [ 2, -1 ] } ]"""


def bare(name: str, build, states, written: str = "", outputs=("y",), **changes) -> Bare:
    row = (4,)
    made = [Tensor(output, "fp32", row) for output in outputs]
    return Bare(
        name,
        build,
        inputs=(Tensor("x", "fp32", row, (-9, 9)),),
        outputs=tuple(made),
        states=states,
        written=f"{BACKEND}\n{written}",
        **changes,
    )


def test_a_state_input_with_a_value_of_its_own_starts_with_it(deployment):
    learned = np.array([[1, -2, 3, 0.5]], np.float32)

    def build():
        nodes = [node("Add", "x s", "s_out"), node("Identity", "s_out", "y")]
        ends = [("x", "fp32", ROW), ("s", "fp32", ROW)]
        return graph(nodes, ends, [("y", "fp32", ROW), ("s_out", "fp32", ROW)], {"s": learned})

    pairs = parameter("state_pairs", "<<<s, s_out>>>")
    talk(deployment, bare("learned_start", build, (("s", "s_out"),), pairs, initial={"s": learned}))
    talk(deployment, bare("learned_start_found", build, (("s", "s_out"),), initial={"s": learned}))
    other = np.full((1, 4), 7, np.float32)
    written = f"{pairs}\n{parameter('initial_states', 's=7')}"
    talk(deployment, bare("learned_start_replaced", build, (("s", "s_out"),), written, initial={"s": other}))


def two_states(**weights):
    def build():
        nodes = [node("Add", "x a_in", "a_out"), node("Sub", "x b_in", "b_out"), node("Add", "a_out b_out", "y")]
        inputs = [("x", "fp32", ROW), ("a_in", "fp32", ROW), ("b_in", "fp32", ROW)]
        return graph(nodes, inputs, [("y", "fp32", ROW), ("a_out", "fp32", ROW), ("b_out", "fp32", ROW)], weights)

    return build


@pytest.mark.parametrize(
    ("pairs", "by_names"),
    [
        ("<<<a_in, b_out>>> <<<b_in, a_out>>>", "<<<a_in, a_out>>> <<<b_in, b_out>>>"),
        ("<<<a_in, y>>> <<<b_in, b_out>>>", "<<<a_in, a_out>>>"),
        ("<<<a_in, a_out>>> <<<b_in, b_out>>>", ""),
    ],
    ids=["crossed", "another", "as_named"],
)
def test_pairs_that_the_names_contradict_are_served_with_a_warning(deployment, pairs, by_names):
    name = f"names_say_{len(by_names)}_{len(pairs)}"
    states = tuple(tuple(pair.strip("<> ").split(", ")) for pair in pairs.split(">>>")[:-1])
    outputs = [output for output in ("y", "a_out", "b_out") if output not in dict(states).values()]
    made = bare(name, two_states(), states, parameter("state_pairs", pairs), outputs=outputs)
    warnings = [line for line in warnings_of_load(deployment, made) if "by the names of the model" in line]
    assert len(warnings) == (1 if by_names else 0)
    assert all(f"should have {by_names} instead of" in line for line in warnings)
    talk(deployment, made)


def test_an_output_that_may_be_the_state_in_place_of_the_one_that_was_found_is_told(deployment):
    def build():
        nodes = [node("Add", "x h", "following"), node("Mul", "following x", "h_out"), node("Neg", "h_out", "y")]
        outputs = [("y", "fp32", ROW), ("h_out", "fp32", ROW), ("following", "fp32", ROW)]
        return graph(nodes, [("x", "fp32", ROW), ("h", "fp32", ROW)], outputs)

    made = bare("left_over", build, (("h", "h_out"),), outputs=("y", "following"))
    notes = [line for line in messages(log_of_load(deployment, made)) if "more than one output has" in line]
    assert len(notes) == 1 and "<<<h, h_out>>> or <<<h, y>>>" in notes[0]


@pytest.mark.parametrize("names", [("length", "length"), ("past", "total"), (None, None)], ids=str)
def test_a_state_that_starts_empty_and_may_keep_its_length_is_doubted(deployment, names):
    """A cache of fixed length, exported with an open dimension, would start without elements."""
    before, after = names

    def build():
        nodes = [
            node("Unsqueeze", "x AXIS", "column"),
            node("Concat", "cache column", "longer", axis=2),
            node("Slice", "longer ONE END AXIS", "cache_out")
            if before == after
            else node("Identity", "longer", "cache_out"),
            node("ReduceSum", "longer AXIS", "y", keepdims=0),
        ]
        return graph(
            nodes,
            [("x", "fp32", ROW), ("cache", "fp32", ["batch", 4, before])],
            [("y", "fp32", ROW), ("cache_out", "fp32", ["batch", 4, after])],
            {"AXIS": np.array([2]), "ONE": np.array([1]), "END": np.array([2**31])},
        )

    name = f"empty_{before}_{after}"
    made = bare(name, build, (("cache", "cache_out"),))
    doubts = [line for line in warnings_of_load(deployment, made) if "have no elements" in line]
    assert len(doubts) == (0 if before == "past" else 1)
    assert all("'cache' [1, 4, 0]" in line and "state_dims" in line for line in doubts)


@pytest.mark.parametrize(("kind", "most"), [("uint32", 2**32 - 1), ("int32", 2**31 - 1)])
def test_an_id_that_the_control_input_cannot_hold_is_refused(deployment, kind, most):
    model, client = deployment.serve(models.controls(f"narrow_{kind}", corrid=kind)), deployment.connect()
    one = {"INPUT": np.array([[1]], np.int64)}
    assert client.step(model.name, most, one, start=True, end=True)["CORRID_SEEN"].item() == most
    with pytest.raises(InferenceServerException, match=f"sequence id {most + 1} is too large .* use at most {most}"):
        client.step(model.name, most + 1, one, start=True)


@pytest.mark.parametrize("scheduling", ["", "sequence_batching { oldest { } }"], ids=["own", "oldest"])
def test_a_state_that_half_precision_cannot_hold_is_an_error_and_changes_nothing(deployment, scheduling):
    def build():
        nodes = [node("Add", "x s", "s_out"), node("Identity", "s_out", "y")]
        return graph(nodes, [("x", "fp32", ROW), ("s", "fp32", ROW)], [("y", "fp32", ROW), ("s_out", "fp32", ROW)])

    name = f"half_{len(scheduling)}"
    written = f"{parameter('store_states_as_fp16', '1')}\n{scheduling}"
    model, client = deployment.serve(bare(name, build, (("s", "s_out"),), written)), deployment.connect()

    def fed(value):
        return {"x": np.full((1, 4), value, np.float32)}

    assert client.step(name, 7, fed(60_000), start=True)["y"].tolist() == [[60_000.0] * 4]
    with pytest.raises(InferenceServerException, match="'s' has numbers above 65504"):
        client.step(name, 7, fed(60_000))
    assert client.step(name, 7, fed(-32), end=True)["y"].tolist() == [[59_968.0] * 4]
    with pytest.raises(InferenceServerException, match="'s' has numbers above 65504"):
        client.step(name, 8, fed(1e6), start=True)
    assert model.name == name


def with_start(name: str, control: Control, default: bool = False) -> Bare:
    """A model with a flag `start`, which may have a value of its own."""

    def build():
        nodes = [node("Add", "x s", "z"), node("Add", "z start", "s_out"), node("Identity", "s_out", "y")]
        inputs = [("x", "fp32", ROW), ("s", "fp32", ROW), ("start", "fp32", [1, 1] if default else ["batch", 1])]
        weights = {"start": np.zeros((1, 1), np.float32)} if default else {}
        return graph(nodes, inputs, [("y", "fp32", ROW), ("s_out", "fp32", ROW)], weights)

    written = f"sequence_batching {{ oldest {{ }} control_input [ {control.config()} ] }}"
    controls = () if default else (control,)
    return bare(name, build, (("s", "s_out"),), written, controls=controls)


@pytest.mark.parametrize(
    ("control", "default", "doubt"),
    [
        (Control("strat", START, "fp32"), True, "'strat' is ignored, .* no such input; if 'start' is meant"),
        (
            Control("start", START, "fp32", (1, 0)),
            False,
            "'start' is 0 for the first request of a sequence and 1 in the others",
        ),
        (
            Control("start", END, "fp32"),
            False,
            "'start' is true in the last request .* CONTROL_SEQUENCE_START may be meant",
        ),
        (Control("start", START, "fp32"), False, None),
    ],
    ids=["misspelt", "inverted", "other_kind", "as_named"],
)
def test_a_control_that_its_name_contradicts_is_served_with_a_warning(deployment, request, control, default, doubt):
    made = with_start(f"doubtful_control_{request.node.callspec.id}", control, default)
    doubts = [line for line in warnings_of_load(deployment, made) if "control_input" in line]
    assert len(doubts) == (1 if doubt else 0)
    assert all(re.search(doubt, line) for line in doubts)
    talk(deployment, made)


def test_a_second_initial_value_is_said_to_count_for_nothing(deployment):
    def build():
        nodes = [node("Add", "x s", "s_out"), node("Identity", "s_out", "y")]
        return graph(nodes, [("x", "fp32", ROW), ("s", "fp32", ROW)], [("y", "fp32", ROW), ("s_out", "fp32", ROW)])

    initial = 'initial_state { name: "zeros" data_type: TYPE_FP32 dims: 4 zero_data: true }'
    state = f'input_name: "s" output_name: "s_out" data_type: TYPE_FP32 dims: 4 {initial}'
    written = f"sequence_batching {{ state {{ {state} }} }}\n{parameter('initial_states', 's=7')}"
    made = bare("two_initial_values", build, (("s", "s_out"),), written)
    [doubt] = [line for line in warnings_of_load(deployment, made) if "remove the one" in line]
    assert "state 's' has an initial_state in 'sequence_batching.state', which counts" in doubt
    talk(deployment, made)


def test_an_output_of_a_size_that_the_data_decide_is_served_without_a_batch(deployment):
    def build():
        nodes = [node("Add", "x s", "s_out"), node("Identity", "s_out", "y"), node("NonZero", "s_out", "places")]
        outputs = [("y", "fp32", ROW), ("s_out", "fp32", ROW), ("places", "int64", [2, "found"])]
        return graph(nodes, [("x", "fp32", ROW), ("s", "fp32", ROW)], outputs)

    text = deployment.load_error(bare("non_zero", build, (("s", "s_out"),)))
    assert "output 'places' is [2, 4] in a run of one row: it has no row for each request; leave it out" in text
    talk(deployment, bare("non_zero_left_out", build, (("s", "s_out"),), LISTED))
    without_batch = dataclasses.replace(
        bare("non_zero_without_batch", build, (("s", "s_out"),), WITHOUT_BATCH),
        inputs=(Tensor("x", "fp32", (1, 4), (-9, 9)),),
        outputs=(Tensor("y", "fp32", (1, 4)), Tensor("places", "int64", (2, -1))),
        max_batch_size=0,
    )
    talk(deployment, without_batch)


def test_a_state_whose_axes_are_in_another_order_than_the_model_takes_them_does_not_share_runs(deployment):
    """An LSTM takes [layers, batch, size]."""
    rng = np.random.default_rng(3)
    weights = {"AXIS": np.array([0]), "AXES": np.array([0, 1]), "W": (1, 16, 4), "R": (1, 16, 4)}
    weights = {
        name: rng.standard_normal(value).astype(np.float32) if isinstance(value, tuple) else value
        for name, value in weights.items()
    }

    def build():
        nodes = [
            node("Unsqueeze", "x AXIS", "step"),
            node("LSTM", "step W R - - h c", "all h_out c_out", hidden_size=4),
            node("Squeeze", "all AXES", "y"),
        ]
        state = ["batch", 1, 4]
        inputs = [("x", "fp32", ROW), ("h", "fp32", state), ("c", "fp32", state)]
        return graph(nodes, inputs, [("y", "fp32", ROW), ("h_out", "fp32", state), ("c_out", "fp32", state)], weights)

    states = (("h", "h_out"), ("c", "c_out"))
    text = deployment.load_error(bare("lstm_axes", build, states, "max_batch_size: 8"))
    assert "2 rows cannot share a run" in text and "LSTM 'all'" in text
    made = bare("lstm_axes_alone", build, states)
    assert [line for line in warnings_of_load(deployment, made) if "each sequence runs alone" in line]
    talk(deployment, made)


@pytest.mark.parametrize("scheduling", ["", "sequence_batching { oldest { } }"], ids=["own", "oldest"])
def test_a_growing_state_that_half_precision_cannot_hold_changes_nothing(deployment, request, scheduling):
    def build():
        nodes = [
            node("Unsqueeze", "x AXIS", "column"),
            node("Concat", "cache column", "cache_out", axis=2),
            node("ReduceSum", "cache_out AXIS", "y", keepdims=0),
        ]
        return graph(
            nodes,
            [("x", "fp32", ROW), ("cache", "fp32", ["batch", 4, "past"])],
            [("y", "fp32", ROW), ("cache_out", "fp32", ["batch", 4, "total"])],
            {"AXIS": np.array([2])},
        )

    name = f"half_growing_{request.node.callspec.id}"
    written = f"{parameter('store_states_as_fp16', '1')}\n{scheduling}"
    model = deployment.serve(bare(name, build, (("cache", "cache_out"),), written))
    client = deployment.connect()

    def fed(value):
        return {"x": np.full((1, 4), value, np.float32)}

    assert client.step(model.name, 7, fed(60_000), start=True)["y"].tolist() == [[60_000.0] * 4]
    with pytest.raises(InferenceServerException, match="'cache' has numbers above 65504"):
        client.step(model.name, 7, fed(70_000))
    assert client.step(model.name, 7, fed(32_000), end=True)["y"].tolist() == [[92_000.0] * 4]


def test_a_state_that_the_model_does_not_have_is_ignored_with_a_warning(deployment):
    def build():
        nodes = [node("Add", "x memory", "remembered"), node("Identity", "remembered", "y")]
        ends = [("x", "fp32", ROW), ("memory", "fp32", ROW)]
        outputs = [("y", "fp32", ROW), ("remembered", "fp32", ROW)]
        return graph(nodes, ends, outputs, {"memory": np.zeros((1, 4), np.float32)})

    state = 'input_name: "memry" output_name: "remembered" data_type: TYPE_FP32 dims: 4'
    made = bare("state_misspelt", build, (), f"sequence_batching {{ state {{ {state} }} }}")
    [doubt] = [line for line in warnings_of_load(deployment, made) if "'memry'" in line]
    assert (
        "'sequence_batching.state' 'memry' is ignored, because the model has no such input; if 'memory' is meant"
        in doubt
    )


def test_usual_names_of_the_batch_may_differ(deployment):
    def build():
        nodes = [node("Add", "x state_in", "state_out"), node("Identity", "state_out", "y")]
        of_requests, of_states = ["batch_size", 4], ["N", 4]
        inputs = [("x", "fp32", of_requests), ("state_in", "fp32", of_states)]
        return graph(nodes, inputs, [("y", "fp32", of_requests), ("state_out", "fp32", of_states)])

    made = deployment.serve(bare("two_batch_names", build, (("state_in", "state_out"),)))
    assert deployment.admin.get_model_config(made.name).config.max_batch_size == 64
    talk(deployment, made)


def test_the_states_of_layers_are_proposed_where_names_say_nothing(deployment):
    rng = np.random.default_rng(4)
    weights = {name: rng.standard_normal((1, 16, 4)).astype(np.float32) for name in ("W", "R")}

    def build():
        nodes = [
            node("Unsqueeze", "x AXIS", "step"),
            node("LSTM", "step W R - - wa wb", "all va vb", hidden_size=4),
            node("Squeeze", "all AXES", "y"),
        ]
        state = [1, "batch", 4]
        inputs = [("x", "fp32", ROW), ("wa", "fp32", state), ("wb", "fp32", state)]
        outputs = [("y", "fp32", ROW), ("va", "fp32", state), ("vb", "fp32", state)]
        return graph(nodes, inputs, outputs, weights | {"AXIS": np.array([0]), "AXES": np.array([0, 1])})

    states = (("wa", "va"), ("wb", "vb"))
    text = deployment.load_error(bare("layers_unnamed", build, states))
    assert "its layers carry states from 'wa' to 'va', from 'wb' to 'vb'" in text and "begins anew" not in text
    assert "write parameters { key: 'state_pairs' value { string_value: '<<<wa, va>>> <<<wb, vb>>>' } }" in text
    talk(deployment, bare("layers_named", build, states, parameter("state_pairs", "<<<wa, va>>> <<<wb, vb>>>")))

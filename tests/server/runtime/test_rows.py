"""Sequences that share a run never change each other's answers.

Each graph that mixes the rows of its batch is served in runs of one row if nothing is written, and is refused where the
configuration says that rows may share a run. Graphs that treat their rows one by one share runs.
"""

import dataclasses

import numpy as np
import pytest
from onnx import TensorProto, helper

from harness.conversations import Conversation, some_at_once, together
from harness.graphs import graph, node
from harness.logs import log_since, messages, warnings_of_load
from harness.model import Tensor, parameter
from harness.models.exports import Bare

BACKEND = 'backend: "stateful"'
WIDTH = 4
ROWS = ["batch", WIDTH]


def branch(factor: str):
    """A branch of an `If`: the input times a constant."""
    made = node("Mul", f"x {factor}", f"of_{factor}")
    output = helper.make_tensor_value_info(f"of_{factor}", TensorProto.FLOAT, None)
    return helper.make_graph([made], factor, [], [output])


#: Of each kind: the nodes that make `z` of `x` and of the weights below, or of the state `s`, too.
MIXED = {
    "peak": [
        node("Abs", "x", "a"),
        node("ReduceMax", "a", "m", keepdims=0),
        node("Add", "m ONE", "n"),
        node("Div", "x n", "z"),
    ],
    "mean": [node("ReduceMean", "x", "m", axes=[0]), node("Sub", "x m", "z")],
    "norm": [node("ReduceL2", "x", "m", axes=[0]), node("Add", "m ONE", "n"), node("Div", "x n", "z")],
    "softmax": [node("Softmax", "x", "z", axis=0)],
    "running_sum": [node("CumSum", "x ZERO", "z")],
    "argmax": [
        node("ArgMax", "x", "i", axis=0),
        node("Cast", "i", "f", to=TensorProto.FLOAT),
        node("Add", "x f", "z"),
    ],
    "best": [node("TopK", "x ONES", "v i", axis=0), node("Add", "x v", "z")],
    "flip": [node("Slice", "x LAST FAR ROW_AXIS BACK", "z")],
    "attention": [
        node("MatMul", "x MATRIX", "k"),
        node("Transpose", "k", "t", perm=[1, 0]),
        node("MatMul", "x t", "c"),
        node("Softmax", "c", "w", axis=1),
        node("MatMul", "w x", "z"),
    ],
    "gemm": [
        node("Gemm", "x x", "g", transB=1),
        node("ReduceSum", "g COLUMN_AXIS", "r"),
        node("Tanh", "r", "h"),
        node("Add", "x h", "z"),
    ],
    "einsum": [
        node("Einsum", "x x", "g", equation="ij,kj->i"),
        node("Unsqueeze", "g COLUMN_AXIS", "r"),
        node("Tanh", "r", "h"),
        node("Add", "x h", "z"),
    ],
    "normalized": [node("MeanVarianceNormalization", "x", "z", axes=[0])],
    "size": [
        node("Shape", "x", "d"),
        node("Gather", "d ZERO", "n"),
        node("Cast", "n", "f", to=TensorProto.FLOAT),
        node("Mul", "x f", "z"),
    ],
    "first": [node("Gather", "x ZERO", "f", axis=0), node("Add", "x f", "z")],
    "if_any": [
        node("ReduceSum", "x", "t", keepdims=0),
        node("Greater", "t NOTHING", "c"),
        node("If", "c", "z", then_branch=branch("ONE"), else_branch=branch("TWO")),
    ],
    "reset_if_any": [
        node("ReduceMax", "x", "m", keepdims=0),
        node("Greater", "m LIMIT", "c"),
        node("Where", "c NOTHING s", "k"),
        node("Add", "k x", "z"),
    ],
    "if_any_is_loud": [
        node("Abs", "x", "a"),
        node("ReduceMax", "a", "m", keepdims=0),
        node("Greater", "m HALF", "c"),
        node("Where", "c x NOTHING", "z"),
    ],
    # Exported with a batch of 1, and the axis opened afterwards.
    "view": [
        node("Reshape", "x AS_STEPS", "v"),
        node("Transpose", "v", "t", perm=[0, 2, 1]),
        node("Conv", "t KERNEL", "c", pads=[1, 0]),
        node("Transpose", "c", "u", perm=[0, 2, 1]),
        node("Reshape", "u AS_ROWS", "z"),
    ],
}

APART = {
    "layer": [node("LayerNormalization", "x SCALE", "z", axis=1)],
    "softmax": [node("Softmax", "x", "z", axis=1)],
    "peak": [
        node("Abs", "x", "a"),
        node("ReduceMax", "a", "m", axes=[1]),
        node("Add", "m ONE", "n"),
        node("Div", "x n", "z"),
    ],
    "gemm": [node("Gemm", "x MATRIX ZEROS", "g"), node("Tanh", "g", "z")],
    "reversed": [
        node("ReduceMin", "x", "m", axes=[1], keepdims=0),
        node("Mul", "m NOTHING", "n"),
        node("Add", "n TWO", "f"),
        node("Cast", "f", "lengths", to=TensorProto.INT64),
        node("ReverseSequence", "x lengths", "z", batch_axis=0, time_axis=1),
    ],
    "unused": [node("Softmax", "x", "mixed", axis=0), node("Neg", "x", "z")],
    "reshaped": [
        node("Shape", "x", "d"),
        node("Gather", "d FIRST", "n"),
        node("Concat", "n MINUS", "to", axis=0),
        node("Reshape", "x AS_PAIRS", "p"),
        node("ReduceSum", "p LAST_AXIS", "r"),
        node("Reshape", "r to", "q"),
        node("Concat", "q q", "z", axis=1),
    ],
    "zeros": [
        node("Shape", "x", "d"),
        node("ConstantOfShape", "d", "o"),
        node("Sub", "o x", "z"),
    ],
    "inference": [node("BatchNormalization", "x SCALE ZEROS ZEROS SCALE", "z")],
    "window": [
        node("Unsqueeze", "x COLUMN_AXIS", "t"),
        node("Conv", "t LINE", "c", pads=[1, 0]),
        node("Squeeze", "c COLUMN_AXIS", "z"),
    ],
    "where": [node("Greater", "x NOTHING", "c"), node("Where", "c x s", "z")],
    # What is left of a mean that is zero is rounding.
    "centred": [
        node("ReduceMean", "x", "m", axes=[1]),
        node("Sub", "x m", "d"),
        node("ReduceMean", "d", "n", axes=[1]),
        node("Mul", "x NOTHING", "o"),
        node("Add", "o n", "z"),
    ],
    # The largest of the batch decides how much is computed, and not what comes out.
    "as_far_as_needed": [
        node("ReduceMax", "x", "m", keepdims=0),
        node("Sub", "m m", "o"),
        node("IsNaN", "o", "b"),
        node("Where", "b NOTHING o", "k"),
        node("Add", "x k", "z"),
    ],
}

WEIGHTS = {
    "ONE": np.float32(1),
    "TWO": np.float32(2),
    "NOTHING": np.float32(0),
    "LIMIT": np.float32(5),
    "HALF": np.float32(0.5),
    "ZERO": np.int64(0),
    "ONES": np.array([1]),
    "LAST": np.array([-1]),
    "FAR": np.array([-1000]),
    "ROW_AXIS": np.array([0]),
    "COLUMN_AXIS": np.array([1]),
    "LAST_AXIS": np.array([2]),
    "BACK": np.array([-1]),
    "FIRST": np.array([0]),
    "MINUS": np.array([-1]),
    "AS_STEPS": np.array([1, -1, WIDTH]),
    "AS_ROWS": np.array([-1, WIDTH]),
    "AS_PAIRS": np.array([-1, 2, 2]),
    "SCALE": np.array([1, 2, 3, 0.5], np.float32),
    "ZEROS": np.zeros(WIDTH, np.float32),
    "MATRIX": np.random.default_rng(1).standard_normal((WIDTH, WIDTH)).astype(np.float32),
    "KERNEL": np.random.default_rng(2).standard_normal((WIDTH, WIDTH, 2)).astype(np.float32),
    "LINE": np.array([[[0.5, -1.5]]], np.float32),
}


def model(name: str, nodes: list, written: str = "") -> Bare:
    """y is the state and what the nodes make of x, and the next state."""

    def build():
        made = [*nodes, node("Add", "s z", "s_out"), node("Identity", "s_out", "y")]
        used = {source for one in made for source in one.input}
        used |= {source for one in made for of in one.attribute for inner in of.g.node for source in inner.input}
        weights = {key: value for key, value in WEIGHTS.items() if key in used}
        return graph(
            made, [("x", "fp32", ROWS), ("s", "fp32", ROWS)], [("y", "fp32", ROWS), ("s_out", "fp32", ROWS)], weights
        )

    rows = (WIDTH,)
    return Bare(
        name,
        build,
        inputs=(Tensor("x", "fp32", rows, (-9, 9)),),
        outputs=(Tensor("y", "fp32", rows),),
        states=(("s", "s_out"),),
        tolerance=1e-4,
        written=f"{BACKEND}\n{written}",
    )


def with_lengths(name: str, *, ignored: bool, written: str = "") -> Bare:
    """A GRU over the steps of x. Without `sequence_lens`, its state is that behind the padding of a shorter row."""

    def build():
        rng = np.random.default_rng(4)
        draw = lambda *dims: rng.standard_normal(dims).astype(np.float32)  # noqa: E731
        lengths = "-" if ignored else "n"
        return graph(
            [
                node("Transpose", "x", "t", perm=[1, 0, 2]),
                node("Unsqueeze", "s ROW_AXIS", "h"),
                node("GRU", f"t W R B {lengths} h", "g g_h", hidden_size=WIDTH),
                node("Squeeze", "g COLUMN_AXIS", "q"),
                node("Transpose", "q", "u", perm=[1, 0, 2]),
                node("Squeeze", "g_h ROW_AXIS", "s_out"),
                node("Unsqueeze", "n COLUMN_AXES", "w"),
                node("Cast", "w", "f", to=TensorProto.FLOAT),
                node("Mul", "f NOTHING", "o"),
                node("Add", "u o", "y"),
            ],
            [("x", "fp32", ["batch", "time", WIDTH]), ("n", "int32", ["batch"]), ("s", "fp32", ROWS)],
            [("y", "fp32", ["batch", "time", WIDTH]), ("s_out", "fp32", ROWS)],
            {
                "W": draw(1, 3 * WIDTH, WIDTH),
                "R": draw(1, 3 * WIDTH, WIDTH),
                "B": draw(1, 6 * WIDTH),
                "ROW_AXIS": np.array([0]),
                "COLUMN_AXIS": np.array([1]),
                "COLUMN_AXES": np.array([1, 2]),
                "NOTHING": np.float32(0),
            },
        )

    return Bare(
        name,
        build,
        inputs=(Tensor("x", "fp32", (-1, WIDTH), (-9, 9), lengths=("n", 1)),),
        outputs=(Tensor("y", "fp32", (-1, WIDTH)),),
        states=(("s", "s_out"),),
        tolerance=1e-4,
        written=f"{BACKEND}\n{parameter('padded_inputs', 'x=n')}\n{written}",
    )


def of_steps(name: str, x: list, written: str = "") -> Bare:
    """y is x and the sum of all its steps; the state is that sum. The steps are in front of the batch in x."""

    def build():
        return graph(
            [
                node("ReduceSum", "x ROW_AXIS", "t", keepdims=0),
                node("Add", "t s", "s_out"),
                node("Add", "x s_out", "y"),
            ],
            [("x", "fp32", x), ("s", "fp32", ROWS)],
            [("y", "fp32", x), ("s_out", "fp32", ROWS)],
            {"ROW_AXIS": np.array([0])},
        )

    states = (("s", "s_out"),)
    inputs, outputs = (Tensor("x", "fp32", (1, WIDTH)),), (Tensor("y", "fp32", (1, WIDTH)),)
    return Bare(name, build, inputs=inputs, outputs=outputs, states=states, written=f"{BACKEND}\n{written}")


def with_phrases(name: str, phrases: str | None, written: str = "") -> Bare:
    """A second input, of which the model takes the sum over all phrases."""

    def build():
        return graph(
            [
                node("ReduceSum", "c ROW_AXIS", "t"),
                node("Add", "x t", "z"),
                node("Add", "z s", "s_out"),
                node("Identity", "s_out", "y"),
            ],
            [("x", "fp32", ROWS), ("c", "fp32", [phrases, WIDTH]), ("s", "fp32", ROWS)],
            [("y", "fp32", ROWS), ("s_out", "fp32", ROWS)],
            {"ROW_AXIS": np.array([0])},
        )

    row = (WIDTH,)
    return Bare(
        name,
        build,
        inputs=(Tensor("x", "fp32", row, (-9, 9)), Tensor("c", "fp32", row, (-9, 9))),
        outputs=(Tensor("y", "fp32", row),),
        states=(("s", "s_out"),),
        written=f"{BACKEND}\n{written}",
    )


LISTED = """max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "c" data_type: TYPE_FP32 dims: [ 4 ] } ]
output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }"""


def eight_at_once(deployment, served) -> None:
    talks = [Conversation(deployment.connect(), served, np.random.default_rng(seed)) for seed in range(8)]
    together(talk.start for talk in talks)
    some_at_once(talks, np.random.default_rng(9), 4)
    together(talk.end for talk in talks)


@pytest.mark.parametrize("kind", MIXED)
def test_a_graph_that_mixes_its_rows_runs_one_row_at_a_time(deployment, kind):
    served = deployment.serve(model(f"mixed_{kind}", MIXED[kind]))
    assert deployment.admin.get_model_config(served.name).config.max_batch_size == 1
    (warning,) = [line for line in warnings_of_load(deployment, served) if "each sequence runs alone" in line]
    assert "'y'" in warning or "'s_out'" in warning
    eight_at_once(deployment, served)


@pytest.mark.parametrize("kind", MIXED)
def test_a_batch_that_is_written_is_refused_where_the_graph_mixes_its_rows(deployment, kind):
    text = deployment.load_error(model(f"refused_{kind}", MIXED[kind], "max_batch_size: 8"))
    assert "would change each other's answers" in text
    assert "'max_batch_size: 1'" in text and "'max_rows_per_run' to 1" in text and "'trust_batch'" in text


@pytest.mark.parametrize("kind", APART)
def test_a_graph_that_treats_its_rows_one_by_one_keeps_its_batch_size(deployment, kind):
    served = deployment.serve(model(f"apart_{kind}", APART[kind]))
    assert deployment.admin.get_model_config(served.name).config.max_batch_size == 64
    assert warnings_of_load(deployment, served) == []
    eight_at_once(deployment, served)


@pytest.mark.parametrize("rows", ["max_batch_size: 1", "max_batch_size: 8\n" + parameter("max_rows_per_run", "1")])
def test_runs_of_one_row_are_what_the_refusal_advises(deployment, rows):
    eight_at_once(deployment, deployment.serve(model(f"advised_{len(rows)}", MIXED["mean"], rows)))


def test_who_trusts_the_batch_gets_it_with_a_warning(deployment):
    written = f"max_batch_size: 8\n{parameter('trust_batch', 'true')}"
    served = deployment.serve(model("trusted", MIXED["mean"], written))
    (warning,) = warnings_of_load(deployment, served)
    assert "change each other's answers" in warning and "ReduceMean 'm'" in warning


def test_padded_inputs_are_refused_where_the_model_ignores_the_lengths(deployment):
    text = deployment.load_error(with_lengths("padded_ignored", ignored=True, written="max_batch_size: 8"))
    assert "would change each other's answers" in text and "'s_out'" in text
    served = deployment.serve(with_lengths("padded_ignored_alone", ignored=True))
    assert deployment.admin.get_model_config(served.name).config.max_batch_size == 1
    eight_at_once(deployment, served)


def test_padded_inputs_share_runs_where_the_model_heeds_the_lengths(deployment):
    served = deployment.serve(with_lengths("padded_heeded", ignored=False))
    assert deployment.admin.get_model_config(served.name).config.max_batch_size == 64
    eight_at_once(deployment, served)


def test_steps_in_front_of_the_batch_are_no_rows(deployment):
    served = deployment.serve(of_steps("steps_unnamed", [None, None, WIDTH]))
    assert deployment.admin.get_model_config(served.name).config.max_batch_size == 1
    eight_at_once(deployment, served)
    text = deployment.load_error(of_steps("steps_written", [None, None, WIDTH], "max_batch_size: 8"))
    assert "'y' is [1, 2, 4] instead of [1, 1, 4]" in text and "ReduceSum 't'" in text
    named = deployment.serve(of_steps("steps_named", ["time", "batch", WIDTH]))
    config = deployment.admin.get_model_config(named.name).config
    assert (config.max_batch_size, list(config.input[0].dims)) == (64, [-1, -1, WIDTH])


@pytest.mark.parametrize("phrases", ["phrases", None])
def test_an_input_whose_first_dimension_is_not_the_batch_is_refused(deployment, phrases):
    text = deployment.load_error(with_phrases(f"phrases_{phrases}", phrases, LISTED))
    assert "would change each other's answers" in text


def of_sequence(name: str, nodes: list, weights: dict, written: str = "", *, x: list | None = None, y="fp32") -> Bare:
    """Nodes that make `y` of x [batch, time, 4], beside a state that is the sum of the first steps."""
    dims = x or ["batch", "time", WIDTH]

    def build():
        first = [node("Gather", "x FIRST", "f", axis=1), node("Add", "f s", "s_out")] if x is None else []
        kept = first or [node("Identity", "s", "s_out")]
        constants = {"FIRST": np.int64(0)} if first else {}
        return graph(
            [*nodes, *kept],
            [("x", "fp32", dims), ("s", "fp32", ROWS)],
            [("y", y, dims), ("s_out", "fp32", ROWS)],
            weights | constants,
        )

    open_dims = (-1,) * (len(dims) - 2)
    return Bare(
        name,
        build,
        inputs=(Tensor("x", "fp32", (*open_dims, -1 if x else WIDTH), (-9, 9)),),
        outputs=(Tensor("y", y, (*open_dims, -1 if x else WIDTH)),),
        states=(("s", "s_out"),),
        written=f"{BACKEND}\n{written}",
    )


def test_a_string_output_is_compared_row_by_row(deployment):
    nodes = [node("Cast", "x", "y", to=TensorProto.STRING)]
    served = deployment.serve(of_sequence("labels", nodes, {}, y="string"))
    assert deployment.admin.get_model_config(served.name).config.max_batch_size == 64


def test_a_model_that_fails_on_every_length_loads_with_a_warning(deployment):
    """Its inputs would be huge at the largest length that is tried."""
    nodes = [node("Reshape", "x ODD", "r"), node("Reshape", "r BACK", "y")]
    weights = {"ODD": np.array([-1, 7919]), "BACK": np.array([-1, 1, 1, 7919])}
    served = deployment.serve(of_sequence("volume", nodes, weights, x=["batch", "a", "b", "c"]))
    (warning,) = [line for line in warnings_of_load(deployment, served) if "may change each other" in line]
    assert "Reshape" in warning and "random data can't show it" in warning


def test_a_filter_that_reads_the_padding_of_shorter_rows_is_refused(deployment):
    """A bias makes zeros other numbers, and a kernel behind it reads them."""
    nodes = [
        node("Transpose", "x", "t", perm=[0, 2, 1]),
        node("Conv", "t POINT BIAS", "p"),
        node("Conv", "p WIDE", "c", dilations=[8], pads=[8, 8]),
        node("Transpose", "c", "u", perm=[0, 2, 1]),
        node("Mul", "n NOTHING", "o"),
        node("Unsqueeze", "o AXES", "q"),
        node("Add", "u q", "y"),
        node("Gather", "x FIRST", "f", axis=1),
        node("Add", "f s", "s_out"),
    ]
    rng = np.random.default_rng(6)

    def build():
        steps = ["batch", "time", WIDTH]
        return graph(
            [node("Cast", "lengths", "n", to=TensorProto.FLOAT), *nodes],
            [("x", "fp32", steps), ("lengths", "int32", ["batch"]), ("s", "fp32", ROWS)],
            [("y", "fp32", steps), ("s_out", "fp32", ROWS)],
            {
                "POINT": rng.standard_normal((WIDTH, WIDTH, 1)).astype(np.float32),
                "BIAS": np.ones(WIDTH, np.float32),
                "WIDE": rng.standard_normal((WIDTH, WIDTH, 3)).astype(np.float32),
                "NOTHING": np.float32(0),
                "AXES": np.array([1, 2]),
                "FIRST": np.int64(0),
            },
        )

    made = with_lengths("padded_filter", ignored=True, written="max_batch_size: 8")
    made = dataclasses.replace(
        made, build=build, written=f"{BACKEND}\nmax_batch_size: 8\n{parameter('padded_inputs', 'x=lengths')}"
    )
    assert "'y'" in deployment.load_error(made)


def test_a_node_that_mixes_rows_is_refused_even_if_its_part_is_too_small_to_be_seen(deployment):
    nodes = [node("Softmax", "x", "w", axis=0), node("Mul", "w TINY", "t"), node("Add", "x t", "y")]
    weights = {"TINY": np.float32(1e-9)}
    assert "Softmax 'w' takes a softmax over the batch" in deployment.load_error(
        of_sequence("hidden_written", nodes, weights, "max_batch_size: 8")
    )
    served = deployment.serve(of_sequence("hidden", nodes, weights))
    assert deployment.admin.get_model_config(served.name).config.max_batch_size == 1


def test_a_loop_that_never_ends_on_random_data_holds_no_load_up(deployment):
    """It ends when a row is larger than what random data have."""
    body = helper.make_graph(
        [
            node("Add", "held ONE", "more"),
            node("ReduceMax", "x", "largest", keepdims=0),
            node("Less", "largest FAR", "goes_on"),
        ],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("was_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("held", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("goes_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("more", TensorProto.FLOAT, None),
        ],
    )
    nodes = [node("Loop", "- YES x", "y", body=body)]
    weights = {"YES": np.bool_(True), "ONE": np.float32(1), "FAR": np.float32(1e9)}
    served = deployment.serve(of_sequence("endless", nodes, weights))
    (warning,) = [line for line in warnings_of_load(deployment, served) if "may change each other" in line]
    assert "a run takes longer than 10 s" in warning
    talk = Conversation(deployment.connect(), served, np.random.default_rng(8))
    talk.start({"x": np.full((1, 3, WIDTH), 2e9, np.float32)})


def test_rows_that_only_fill_a_window_together_run_one_by_one(deployment):
    nodes = [
        node("Shape", "x", "d"),
        node("Reshape", "x WINDOWS", "w"),
        node("Softmax", "w", "v", axis=1),
        node("Reshape", "v d", "y"),
    ]
    served = deployment.serve(of_sequence("halves", nodes, {"WINDOWS": np.array([-1, 2 * WIDTH])}))
    assert deployment.admin.get_model_config(served.name).config.max_batch_size == 1
    [warning] = [line for line in warnings_of_load(deployment, served) if "runs alone" in line]
    assert "two rows of length 1 can share a run, but each fails alone" in warning


def test_windows_of_fixed_length_are_named_because_they_may_lie_in_two_rows(deployment):
    nodes = [
        node("Shape", "x", "d"),
        node("Reshape", "x WINDOWS", "w"),
        node("ReduceMax", "w", "m", axes=[1]),
        node("Sub", "w m", "v"),
        node("Reshape", "v d", "y"),
    ]
    served = deployment.serve(of_sequence("windows", nodes, {"WINDOWS": np.array([-1, 8, WIDTH])}))
    [line] = [line for line in messages(log_since(deployment, served.name)) if "rows: " in line]
    assert "the graph doesn't prove it: Reshape 'w'" in line

"""Chunks of different lengths in flight together: apart, or filled up to one length where the model takes lengths."""

import dataclasses

import numpy as np
import pytest
from onnx import helper
from tritonclient.utils import InferenceServerException

from harness import models
from harness.batches import TOGETHER, four, runs_of, steps
from harness.conversations import Conversation, interleave, together
from harness.graphs import BATCH, graph, node
from harness.model import TYPES, Model, Tensor
from harness.refusals import refused
from harness.strategies import both_strategies

LENGTHS = (1, 4, 4, 7)


def x(length: int, value: float = 1) -> dict[str, np.ndarray]:
    return {"X": np.arange(value, value + length, dtype=np.float32)[None]}


def of_lengths(talks, lengths, step: int, **how):
    return steps(talks, [x(length, 10 * number + step) for number, length in enumerate(lengths)], **how)


@pytest.mark.parametrize("lengths", ["int32", "int64"])
def test_rows_of_different_lengths_share_a_run_and_are_as_if_alone(deployment, lengths):
    model = deployment.serve(models.masked(f"padded_{lengths}", lengths, **TOGETHER))
    talks = four(deployment, model)
    assert runs_of(deployment, model, of_lengths(talks, LENGTHS, 0, start=True)) == {4: 1}
    for step, of in enumerate([(7, 1, 2, 2), (3, 3, 3, 3), (1, 9, 1, 9)]):
        assert runs_of(deployment, model, of_lengths(talks, of, step)) == {4: 1}
    of_lengths(talks, LENGTHS, 9, end=True)()


def test_states_of_a_padded_lstm_are_the_rows_own(deployment):
    model = deployment.serve(models.padded_lstm("padded_lstm", **TOGETHER))
    talks = four(deployment, model)

    def asked(lengths):
        return [
            {"X": talk.rng.standard_normal((1, n, 3)).astype(np.float32)}
            for talk, n in zip(talks, lengths, strict=True)
        ]

    assert runs_of(deployment, model, steps(talks, asked(LENGTHS), start=True)) == {4: 1}
    for lengths in [(5, 1, 3, 2), (2, 2, 2, 2), (6, 1, 1, 1)]:
        steps(talks, asked(lengths))()
    steps(talks, asked(LENGTHS), end=True)()


@pytest.mark.parametrize(
    ("name", "outputs", "says"),
    [
        ("by_length", (models.HALVES,), "HALVES=HALF_LENGTHS"),
        ("both", (models.HALVES, models.LENGTH), "HALVES=HALF_LENGTHS"),
    ],
)
def test_an_output_is_cut_to_what_another_says_of_the_row(deployment, name, outputs, says):
    model = models.masked(f"padded_{name}", **TOGETHER)
    model = model.variant(model.name, outputs=(*model.outputs, *outputs))
    model = deployment.serve(model.with_parameters(model.name, padded_outputs=says))

    def cut(talk, length, **how):
        client, fed = talk.client, x(length)
        came = client.step(model.name, talk.sequence_id, fed, **how)
        right = talk.oracle.step(fed, **how)
        np.testing.assert_array_equal(came["HALVES"], right["HALVES"][:, : (length + 1) // 2])
        np.testing.assert_array_equal(came["SUMS"], right["SUMS"])

    talks = four(deployment, model)
    for how in ({"start": True}, {}, {"end": True}):
        together(lambda talk=talk, n=n: cut(talk, n, **how) for talk, n in zip(talks, LENGTHS, strict=True))


def test_an_output_that_is_all_of_the_rows_is_sent_as_wide_as_the_run(deployment):
    model = models.masked("padded_all", **TOGETHER)
    model = model.variant(model.name, outputs=(models.RAW, models.WIDTH))
    model = deployment.serve(model.with_parameters(model.name, padded_outputs="RAW=all", trust_batch="true"))
    talks = four(deployment, model)

    def wide(talk, length):
        came = talk.client.step(model.name, talk.sequence_id, x(length), start=True)
        width = came["WIDTH"].item()
        assert came["RAW"].shape == (1, width)
        np.testing.assert_array_equal(came["RAW"][:, :length], x(length)["X"])
        assert not came["RAW"][:, length:].any(), "what fills up is zeros"
        return width

    widths = together(lambda talk=talk, n=n: wide(talk, n) for talk, n in zip(talks, LENGTHS, strict=True))
    assert widths == [7] * 4


def test_a_row_without_elements_is_not_filled_up(deployment):
    # this model makes no state of it, which is an error of that row alone
    model = deployment.serve(models.masked("padded_empty", **TOGETHER))
    talks = four(deployment, model)
    of_lengths(talks, LENGTHS, 0, start=True)()

    def fails(talk):
        with pytest.raises(InferenceServerException, match="TOTAL_OUT"):
            talk.client.step(model.name, talk.sequence_id, x(0))

    others = [lambda talk=talk, n=n: talk.step(x(n)) for talk, n in zip(talks[1:], (2, 3, 5), strict=True)]
    together([lambda: fails(talks[0]), *others])
    of_lengths(talks, LENGTHS, 2, end=True)()


def test_context_and_padding_go_together(deployment):
    model = models.masked("padded_context", context=3, **TOGETHER)
    model = deployment.serve(model.with_parameters(model.name, input_context="X=3"))
    talks = four(deployment, model)
    assert runs_of(deployment, model, of_lengths(talks, LENGTHS, 0, start=True)) == {4: 1}
    for step, of in enumerate([(2, 1, 5, 1), (1, 1, 1, 1), (9, 2, 1, 4)]):
        of_lengths(talks, of, step)()
    of_lengths(talks, LENGTHS, 9, end=True)()


def test_with_growing_states_nothing_is_filled_up_and_the_lengths_are_fed(deployment):
    model = deployment.serve(models.cached("padded_never", **TOGETHER))
    talks = four(deployment, model)
    runs = runs_of(deployment, model, of_lengths(talks, LENGTHS, 0, start=True))
    assert runs == {1: 2, 2: 1}, "the two of one length share a run"
    for step, of in enumerate([(2, 1, 1, 5), (3, 3, 3, 3)]):
        of_lengths(talks, of, step)()
    of_lengths(talks, LENGTHS, 9, end=True)()


def test_without_padding_rows_of_one_length_share_a_run(deployment):
    model = models.accumulate("unpadded", **TOGETHER)
    [tensor] = model.inputs
    model = deployment.serve(model.variant(model.name, inputs=(type(tensor)(**{**vars(tensor), "ragged": True}),)))
    talks = four(deployment, model)
    asked = [{"INPUT": np.ones((1, length), np.float32)} for length in LENGTHS]
    assert runs_of(deployment, model, steps(talks, asked, start=True)) == {1: 2, 2: 1}


def test_a_run_that_fails_fails_its_row_only(deployment):
    model = deployment.serve(models.masked("padded_failing", **TOGETHER))
    talks = four(deployment, model)
    of_lengths(talks, LENGTHS, 0, start=True)()

    def fails(talk):
        with pytest.raises(InferenceServerException, match="ONNX Runtime"):
            talk.client.step(model.name, talk.sequence_id, x(3, 2000))

    together(
        [lambda: fails(talks[0]), *(lambda t=t, n=n: t.step(x(n)) for t, n in zip(talks[1:], LENGTHS[1:], strict=True))]
    )
    of_lengths(talks, LENGTHS, 1, end=True)()


@both_strategies
def test_many_sequences_of_random_chunks_are_right(deployment, direct):
    model = models.masked(f"padded_many_{'oldest' if direct is None else 'direct'}", direct=direct, instances=2)
    interleave(deployment.connect(), deployment.serve(model), np.random.default_rng(1), sequences=12)


REFUSED = {
    "input_unknown": ({"padded_inputs": "Z=LENGTHS"}, ["padded_inputs", "Z", "X"]),
    "lengths_unknown": ({"padded_inputs": "X=NONE"}, ["padded_inputs", "NONE"]),
    "lengths_not_whole": ({"padded_inputs": "X=TOTAL_IN"}, ["padded_inputs", "TOTAL_IN", "whole numbers"]),
    "axis_not_open": ({"padded_inputs": "X=LENGTHS@3"}, ["padded_inputs", "axis 3"]),
    "axis_no_number": ({"padded_inputs": "X=LENGTHS@T"}, ["padded_inputs", "'T'"]),
    "form": ({"padded_inputs": "X"}, ["padded_inputs", "lengths_input"]),
    "output_unknown": ({"padded_outputs": "Z=all"}, ["padded_outputs", "Z"]),
    "output_lengths_unknown": ({"padded_outputs": "SUMS=NONE"}, ["padded_outputs", "NONE"]),
    "output_lengths_not_whole": ({"padded_outputs": "SUMS=RAW"}, ["padded_outputs", "RAW", "whole numbers"]),
    "outputs_alone": ({"padded_inputs": None, "padded_outputs": "SUMS=all"}, ["padded_outputs", "padded_inputs"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_padding_is_refused_by_name_value_and_rule(deployment, case):
    parameters, words = REFUSED[case]
    model = models.masked(f"refused_padding_{case}")
    refused(deployment, model.variant(model.name, parameters={**model.parameters, **parameters}), *words)


def test_an_output_of_which_nobody_says_what_belongs_to_a_row_is_refused(deployment):
    model = models.masked("refused_padding_untold")
    refused(deployment, model.variant(model.name, outputs=(models.HALVES,)), "HALVES", "padded_outputs", "all")


# ---- rows that come back as they were fed: what was filled up, cut off or mixed up would show


def told(
    name: str, shape: list, dims: tuple[int, ...], says: str = "X=LENGTHS", type: str = "fp32", **changes
) -> Model:
    """Answers X `shape` and LENGTHS as the model was fed them, and counts its runs. The open dim that
    is called T is the one that LENGTHS tells."""

    def build():
        one = [BATCH, 1]
        return graph(
            [
                node("Identity", "X", "SEEN"),
                node("Unsqueeze", "LENGTHS LAST", "LENGTH"),
                node("Add", "COUNT_IN ONE", "COUNT_OUT"),
            ],
            [("X", type, shape), ("LENGTHS", "int64", [BATCH]), ("COUNT_IN", "int64", one)],
            [("SEEN", type, shape), ("LENGTH", "int64", one), ("COUNT_OUT", "int64", one)],
            {"ONE": np.array(1, np.int64), "LAST": np.array([-1], np.int64)},
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("X", type, dims, ragged=True, lengths=("LENGTHS", shape.index("T"))),),
        outputs=(Tensor("SEEN", type, dims), Tensor("LENGTH", "int64", (1,)), Tensor("COUNT_OUT", "int64", (1,))),
        states=(("COUNT_IN", "COUNT_OUT"),),
        parameters={"padded_inputs": says},
    )
    return dataclasses.replace(model, **changes)


def rows(model: Model, lengths, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """A request of each length, the open dim of the configuration."""
    rng = np.random.default_rng(seed)
    (tensor,) = model.inputs
    shapes = [(1, *(n if dim < 0 else dim for dim in tensor.dims)) for n in lengths]
    if tensor.type == "string":
        return [{"X": rng.integers(0, 999, shape).astype(str).astype(np.object_)} for shape in shapes]
    return [{"X": rng.integers(-50, 50, shape).astype(TYPES[tensor.type][0])} for shape in shapes]


SHAPES = {
    "features_behind": ([BATCH, "T", 4], (-1, 4), "X=LENGTHS"),
    "features_before": ([BATCH, 4, "T"], (4, -1), "X=LENGTHS"),
    "features_around": ([BATCH, 2, "T", 3], (2, -1, 3), "X=LENGTHS"),
    "named": ([BATCH, "T"], (-1,), "X=LENGTHS@1"),
    "named_first_of_two": ([BATCH, "T", "F"], (-1, 4), "X=LENGTHS@1"),
    "named_last_of_two": ([BATCH, "F", "T"], (4, -1), "X=LENGTHS@2"),
}


@pytest.mark.parametrize("what", SHAPES)
def test_the_open_dimension_may_stand_anywhere(deployment, what):
    shape, dims, says = SHAPES[what]
    model = deployment.serve(told(f"padded_{what}", shape, dims, says, **TOGETHER))
    talks = four(deployment, model)
    assert runs_of(deployment, model, steps(talks, rows(model, LENGTHS), start=True)) == {4: 1}
    assert runs_of(deployment, model, steps(talks, rows(model, (3, 5, 2, 2)))) == {4: 1}
    assert runs_of(deployment, model, steps(talks, rows(model, (2, 2, 2, 2)), end=True)) == {4: 1}


@pytest.mark.parametrize("type", ["bool", "int8", "int16", "uint8", "fp16", "int64", "fp64", "string"])
def test_rows_of_any_type_are_filled_up(deployment, type):
    model = deployment.serve(told(f"padded_of_{type}", [BATCH, "T", 2], (-1, 2), type=type, **TOGETHER))
    talks = four(deployment, model)
    assert runs_of(deployment, model, steps(talks, rows(model, LENGTHS), start=True)) == {4: 1}
    steps(talks, rows(model, (5, 1, 9, 2)), end=True)()


def test_a_row_without_elements_runs_by_itself(deployment):
    model = deployment.serve(told("padded_nothing", [BATCH, "T"], (-1,), **TOGETHER))
    talks = four(deployment, model)
    assert runs_of(deployment, model, steps(talks, rows(model, (3, 0, 2, 5)), start=True)) == {1: 1, 3: 1}
    steps(talks, rows(model, (0, 0, 0, 0)))()
    steps(talks, rows(model, (0, 4, 0, 1)), end=True)()


def test_starts_and_ends_may_stand_beside_others_of_other_lengths(deployment):
    model = deployment.serve(models.masked("padded_mixed", **TOGETHER))
    talks = four(deployment, model)
    of_lengths(talks, LENGTHS, 0, start=True)()

    def mixed():
        together(
            [
                lambda: talks[0].start(x(5, 3)),
                lambda: talks[1].end(x(2, 4)),
                lambda: talks[2].step(x(1, 5)),
                lambda: talks[3].step(x(6, 6)),
            ]
        )

    assert runs_of(deployment, model, mixed) == {4: 1}
    of_lengths([talks[0], talks[2], talks[3]], (1, 2, 3), 1, end=True)()


def test_rows_that_fill_up_a_batch_beside_rows_that_are_filled_up_change_nothing(deployment):
    model = models.masked("padded_twice", **TOGETHER).with_parameters("padded_twice", always_pad_to_max_batch=1)
    model = deployment.serve(model)
    talks = four(deployment, model)
    of_lengths(talks, LENGTHS, 0, start=True)()
    of_lengths(talks[:3], LENGTHS[:3], 1)()
    of_lengths(talks, LENGTHS, 2, end=True)()


def test_padded_rows_come_back_over_streams(deployment):
    model = deployment.serve(told("padded_over_streams", [BATCH, "T"], (-1,), **TOGETHER))
    talks = [Conversation(deployment.connect("stream"), model, np.random.default_rng(seed)) for seed in range(4)]
    assert runs_of(deployment, model, steps(talks, rows(model, LENGTHS), start=True)) == {4: 1}
    steps(talks, rows(model, (6, 1, 2, 3)), end=True)()


def test_direct_rows_of_different_lengths_share_a_run(deployment):
    delay = "max_queue_delay_microseconds: 1000000 minimum_slot_utilization: 1.0"
    model = deployment.serve(told("padded_direct", [BATCH, "T"], (-1,), max_batch_size=4, direct=delay))
    talks = four(deployment, model)
    steps(talks, rows(model, LENGTHS), start=True)()
    for seed, lengths in enumerate([(5, 1, 2, 9), (1, 1, 1, 1), (2, 3, 2, 3)]):
        steps(talks, rows(model, lengths, seed))()
    runs = runs_of(deployment, model, steps(talks, rows(model, (4, 3, 2, 1)), end=True))
    assert max(runs) > 1, f"rows of different lengths never shared a run: {runs}"


# ---- several inputs


def two_padded(name: str, says: str, both: bool = True, **changes) -> Model:
    """X [N, T] with X_LENGTHS, Z [N, 3, S] with Z_LENGTHS (or, not `both`, without lengths); all of it
    comes back as it was fed."""
    lengths = ["X", "Z"] if both else ["X"]

    def build():
        one = [BATCH, 1]
        shapes = {"X": [BATCH, "T"], "Z": [BATCH, 3, "S"]}
        return graph(
            [
                *(node("Identity", of, f"{of}_SEEN") for of in shapes),
                *(node("Unsqueeze", f"{of}_LENGTHS LAST", f"{of}_LENGTH") for of in lengths),
                node("Add", "COUNT_IN ONE", "COUNT_OUT"),
            ],
            [
                *((of, "fp32", shape) for of, shape in shapes.items()),
                *((f"{of}_LENGTHS", "int32", [BATCH]) for of in lengths),
                ("COUNT_IN", "int64", one),
            ],
            [
                *((f"{of}_SEEN", "fp32", shape) for of, shape in shapes.items()),
                *((f"{of}_LENGTH", "int32", one) for of in lengths),
                ("COUNT_OUT", "int64", one),
            ],
            {"ONE": np.array(1, np.int64), "LAST": np.array([-1], np.int64)},
        )

    model = Model(
        name,
        build,
        inputs=(
            Tensor("X", "fp32", (-1,), ragged=True, lengths=("X_LENGTHS", 1)),
            Tensor("Z", "fp32", (3, -1), ragged=True, lengths=("Z_LENGTHS", 2) if both else None),
        ),
        outputs=(
            Tensor("X_SEEN", "fp32", (-1,)),
            Tensor("Z_SEEN", "fp32", (3, -1)),
            *(Tensor(f"{of}_LENGTH", "int32", (1,)) for of in lengths),
        ),
        states=(("COUNT_IN", "COUNT_OUT"),),
        parameters={"padded_inputs": says},
    )
    return dataclasses.replace(model, **changes)


def both(lengths_of_x, lengths_of_z) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(5)
    return [
        {
            "X": rng.standard_normal((1, n)).astype(np.float32),
            "Z": rng.standard_normal((1, 3, m)).astype(np.float32),
        }
        for n, m in zip(lengths_of_x, lengths_of_z, strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "says"),
    [("spaces", "X=X_LENGTHS Z=Z_LENGTHS"), ("commas", "Z=Z_LENGTHS@2,X=X_LENGTHS@1")],
)
def test_several_inputs_have_lengths_of_their_own(deployment, name, says):
    model = deployment.serve(two_padded(f"padded_inputs_by_{name}", says, **TOGETHER))
    talks = four(deployment, model)
    asked = both((1, 5, 3, 2), (4, 1, 1, 6))
    assert runs_of(deployment, model, steps(talks, asked, start=True)) == {4: 1}
    steps(talks, both((2, 2, 3, 9), (7, 7, 7, 7)), end=True)()


def test_what_the_list_does_not_cover_runs_apart(deployment):
    model = two_padded("padded_in_part", "X=X_LENGTHS", both=False, **TOGETHER)
    model = deployment.serve(model.with_parameters(model.name, padded_outputs="Z_SEEN=all"))
    talks = four(deployment, model)
    asked = both((1, 5, 3, 2), (4, 1, 4, 1))
    assert runs_of(deployment, model, steps(talks, asked, start=True)) == {2: 2}
    asked = both((1, 5, 3, 2), (2, 2, 2, 2))
    assert runs_of(deployment, model, steps(talks, asked, end=True)) == {4: 1}


# ---- lengths of outputs, and what is wrong


def test_an_output_cut_by_its_lengths_is_what_the_row_gives_alone(deployment):
    model = models.masked("padded_halves", **TOGETHER)
    model = model.variant(model.name, outputs=(*model.outputs, models.HALVES, models.LENGTH))
    model = deployment.serve(model.with_parameters(model.name, padded_outputs="HALVES=HALF_LENGTHS"))
    talks = four(deployment, model)
    assert runs_of(deployment, model, of_lengths(talks, LENGTHS, 0, start=True)) == {4: 1}
    for step, lengths in enumerate([(2, 9, 5, 6), (1, 1, 1, 1)]):
        of_lengths(talks, lengths, step)()
    of_lengths(talks, (8, 3, 2, 1), 9, end=True)()


def test_lengths_that_the_output_does_not_have_are_an_error_and_change_nothing(deployment):
    model = models.masked("padded_lies", **TOGETHER)
    model = model.variant(model.name, outputs=(*model.outputs, models.HALVES, models.WIDTH))
    says = {"padded_outputs": "HALVES=TWICE_LENGTHS", "trust_batch": "true"}
    model = deployment.serve(model.with_parameters(model.name, **says))
    talk = four(deployment, model)[0]

    def lies(**how):
        with pytest.raises(InferenceServerException, match="HALVES"):
            talk.client.step(model.name, talk.sequence_id, x(4), **how)

    lies(start=True)
    with pytest.raises(InferenceServerException) as unknown:
        talk.client.step(model.name, talk.sequence_id, x(4))
    assert unknown.value.status() == "StatusCode.NOT_FOUND"

    # of no element they are true: HALVES has none, either
    model = told("padded_lies_not", [BATCH, "T"], (-1,), **TOGETHER)
    Conversation(talk.client, deployment.serve(model), np.random.default_rng(1)).whole(3)


def padded(says: str, **changes) -> Model:
    model = models.masked("")
    return dataclasses.replace(model, parameters={"padded_inputs": says}, **changes)


def two_open(says: str, dims: tuple[int, ...] = (-1, -1)) -> Model:
    return told("", [BATCH, "T", "F"], dims, says)


def lengths_of(type: str, shape: list) -> Model:
    """LENGTHS of another type or shape, which the graph itself does not mind."""
    model = told("", [BATCH, "T"], (-1,))

    def build():
        made = model.build()
        (lengths,) = (found for found in made.graph.input if found.name == "LENGTHS")
        lengths.CopyFrom(helper.make_tensor_value_info("LENGTHS", TYPES[type][1], shape))
        (unsqueeze,) = (found for found in made.graph.node if found.op_type == "Unsqueeze")
        made.graph.node.remove(unsqueeze)
        made.graph.node.extend([node("Identity", "COUNT_IN", "LENGTH"), node("Identity", "LENGTHS", "UNUSED")])
        return made

    return dataclasses.replace(model, build=build)


REFUSED_MORE = {
    "no_lengths": (padded("X="), ["padded_inputs", "X"]),
    "twice": (padded("X=LENGTHS X=LENGTHS"), ["padded_inputs", "X"]),
    "lengths_is_the_input": (padded("X=X"), ["padded_inputs", "X"]),
    "lengths_listed_too": (
        padded("X=LENGTHS", inputs=(*models.masked("").inputs, Tensor("LENGTHS", "int64", (1,), unbatched=()))),
        ["LENGTHS"],
    ),
    "a_state": (padded("TOTAL_IN=LENGTHS"), ["padded_inputs", "TOTAL_IN"]),
    "an_output": (padded("SUMS=LENGTHS"), ["padded_inputs", "SUMS"]),
    "several_open_dims": (two_open("X=LENGTHS"), ["padded_inputs", "X", "@"]),
    "axis_of_the_batch": (padded("X=LENGTHS@0"), ["padded_inputs", "X", "0"]),
    "axis_negative": (padded("X=LENGTHS@-1"), ["padded_inputs", "X", "-1"]),
    "axis_missing": (padded("X=LENGTHS@"), ["padded_inputs", "X"]),
    "axis_fixed": (
        dataclasses.replace(told("", [BATCH, "T", 4], (-1, 4)), parameters={"padded_inputs": "X=LENGTHS@2"}),
        ["padded_inputs", "X", "2"],
    ),
    "nothing_open": (
        dataclasses.replace(models.knob("", "int64", (1,)), parameters={"padded_inputs": "INPUT=KNOB"}),
        ["padded_inputs", "INPUT"],
    ),
    "lengths_of_floats": (lengths_of("fp32", [BATCH]), ["padded_inputs", "LENGTHS", "FP32"]),
    "lengths_of_booleans": (lengths_of("bool", [BATCH]), ["padded_inputs", "LENGTHS", "BOOL"]),
    "lengths_of_two_dims": (lengths_of("int64", [BATCH, 2]), ["padded_inputs", "LENGTHS"]),
    "lengths_of_no_dims": (lengths_of("int64", []), ["padded_inputs", "LENGTHS"]),
    "output_without_a_rule": (
        padded("X=LENGTHS", outputs=(*models.masked("").outputs, models.RAW)),
        ["RAW", "padded_outputs"],
    ),
}


@pytest.mark.parametrize("case", REFUSED_MORE)
def test_padding_that_cannot_be_is_refused_by_name(deployment, case):
    model, words = REFUSED_MORE[case]
    refused(deployment, model.variant(f"refused_padding_more_{case}"), *words)

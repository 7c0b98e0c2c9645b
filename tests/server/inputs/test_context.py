"""`input_context`: what a model wants of the last chunk in front of the next one.

Most models here answer the very tensor that they were fed, so every element of the context shows.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import models
from harness.batches import TOGETHER, batch_sizes, four, runs_of, steps
from harness.clients import new_id
from harness.conversations import Conversation, interleave, outcome, script, together, windowed
from harness.graphs import BATCH, graph, node
from harness.model import Model, Tensor
from harness.refusals import refused
from harness.strategies import both_strategies

pytestmark = pytest.mark.simulated_device

# what -> (the graph's shape, the oracle's elements and axis, config.pbtxt's dims, its words, more)
AXES: dict[str, tuple[list, tuple[int, int], tuple[int, ...], str | None, dict[str, Any]]] = {
    "fixed": ([BATCH, 8], (3, 1), (5,), None, {}),
    "fixed_and_longer_than_the_chunk": ([BATCH, 8], (6, 1), (2,), None, {}),
    "open": ([BATCH, "T"], (3, 1), (-1,), None, {}),
    "open_in_the_model_only": ([BATCH, "T"], (3, 1), (5,), None, {"out": (-1,)}),
    "fixed_before_features": ([BATCH, 7, 4], (2, 1), (5, 4), None, {}),
    "open_before_features": ([BATCH, "T", 4], (3, 1), (-1, 4), None, {}),
    "open_after_features": ([BATCH, 4, "T"], (3, 2), (4, -1), None, {}),
    "fixed_last_of_three": ([BATCH, 2, 3, 7], (5, 3), (2, 3, 2), None, {}),
    "named": ([BATCH, "T"], (3, 1), (-1,), "FRAMES=3@1", {}),
    "named_first_of_two": ([BATCH, "T", "F"], (2, 1), (-1, 4), "FRAMES=2@1", {}),
    "named_last_of_two": ([BATCH, "F", "T"], (2, 2), (4, -1), "FRAMES=2@2", {}),
    "batch_inside": ([6, BATCH, 5], (2, 0), (4, -1, 5), None, {"batch_inside": True}),
    "batch_inside_and_open": (["seq", BATCH, 5], (2, 0), (4, -1, 5), None, {"batch_inside": True}),
    "batch_inside_and_last": ([3, BATCH, 9], (4, 2), (3, -1, 5), None, {"batch_inside": True}),
    "one_element": ([BATCH, "T"], (1, 1), (-1,), None, {}),
    "many_elements": ([BATCH, "T"], (100, 1), (-1,), None, {}),
}


def of(what: str, name: str, **changes) -> Model:
    shape, context, dims, says, more = AXES[what]
    return models.framed(name, shape, context, dims, says, **more, **changes)


def chunk(length: int, value: float = 1) -> dict[str, np.ndarray]:
    """A request of [N, T]: so many elements, counting up from the value."""
    return {"FRAMES": np.arange(value, value + length, dtype=np.float32).reshape(1, length)}


@both_strategies
@pytest.mark.parametrize("what", AXES)
def test_the_end_of_the_last_chunk_stands_before_the_next(deployment, what, direct):
    model = of(what, f"context_{what}_{'oldest' if direct is None else 'direct'}", direct=direct)
    interleave(deployment.connect(), deployment.serve(model), np.random.default_rng(1), sequences=6)


@pytest.mark.parametrize("type", ["bool", "int8", "int16", "int64", "uint8", "fp16", "fp64"])
def test_a_context_may_have_any_type(deployment, type):
    model = models.framed(f"context_of_{type}", [BATCH, "T"], (3, 1), (-1,), type=type)
    interleave(deployment.connect(), deployment.serve(model), np.random.default_rng(2), sequences=4)


def test_strings_have_no_context(deployment):
    model = models.framed("refused_context_of_words", [BATCH, "T"], (2, 1), (-1,), type="string")
    refused(deployment, model, "input_context", "FRAMES", "TYPE_STRING", "numbers")


@pytest.fixture
def open_length(deployment) -> Model:
    """[N, T] with a context of 3, T open."""
    return deployment.serve(of("open", "context_open"))


def test_chunks_may_be_shorter_than_the_context_and_change_their_length(deployment, open_length):
    talk = Conversation(deployment.connect(), open_length, np.random.default_rng(4))
    talk.start(chunk(1))
    for length in (1, 1, 2, 7, 3, 1, 2, 1, 4, 40, 1, 2):
        talk.step(chunk(length, value=100 * length))
    talk.end(chunk(1))


def test_a_start_begins_with_zeros(deployment, open_length):
    client = deployment.connect()
    rng = np.random.default_rng(5)
    talk = Conversation(client, open_length, rng)
    first = talk.start(chunk(2, value=5))["WINDOW"]
    assert first.tolist() == [[0, 0, 0, 5, 6]]
    assert talk.step(chunk(1, value=9))["WINDOW"].tolist() == [[0, 5, 6, 9]]
    # over again, without an END
    assert talk.start(chunk(2, value=7))["WINDOW"].tolist() == [[0, 0, 0, 7, 8]]
    assert talk.step(chunk(1))["WINDOW"].tolist() == [[0, 7, 8, 1]]
    # and after one
    assert talk.end(chunk(1, value=2))["WINDOW"].tolist() == [[7, 8, 1, 2]]
    assert talk.start(chunk(1))["WINDOW"].tolist() == [[0, 0, 0, 1]]
    talk.end()
    # in one request
    for _ in range(3):
        answer = Conversation(client, open_length, rng).step(chunk(4), start=True, end=True)
        assert answer["WINDOW"].tolist() == [[0, 0, 0, 1, 2, 3, 4]]


def test_an_id_used_again_without_waiting_never_sees_the_old_context(deployment):
    model = deployment.serve(of("open", "context_reused", max_candidates=200))
    rng = np.random.default_rng(6)
    scripts = [script(model, rng, new_id(), lives=6) for _ in range(5)]
    windowed(deployment.connect("stream"), model, rng, scripts, window=8)


def test_a_chunk_without_elements_harms_nobody(deployment, open_length):
    talk = Conversation(deployment.connect(), open_length, np.random.default_rng(7))
    talk.start(chunk(5))
    nothing = {"FRAMES": np.zeros((1, 0), np.float32)}
    came = outcome(lambda: talk.step(nothing))  # answered rightly, or refused
    if not isinstance(came, InferenceServerException):
        assert came["WINDOW"].tolist() == [[3, 4, 5]]
    assert talk.step(chunk(1, value=9))["WINDOW"].tolist() == [[3, 4, 5, 9]]
    talk.end()


@pytest.mark.parametrize("what", ["fixed", "open", "open_before_features", "batch_inside"])
def test_a_batch_of_one_row_keeps_it_too(deployment, what):
    model = deployment.serve(of(what, f"context_{what}_of_one", max_batch_size=1))
    interleave(deployment.connect(), model, np.random.default_rng(8), sequences=5)


@pytest.mark.parametrize(
    ("name", "shape", "dims", "says"),
    [
        ("fixed", [1, 8], (1, 5), None),
        ("open", [1, "T"], (1, -1), None),
        ("open_batch", [BATCH, "T"], (1, -1), "FRAMES=3@1"),
    ],
)
def test_a_model_without_triton_s_batch_dimension_keeps_it_too(deployment, name, shape, dims, says):
    model = models.framed(
        f"context_{name}_unbatched",
        shape,
        (3, 1),
        dims,
        says,
        out=(1, -1),
        max_batch_size=0,
    )
    counted = (model.outputs[0], Tensor("COUNT", "int64", (1, 1)))
    model = deployment.serve(dataclasses.replace(model, outputs=counted))
    interleave(deployment.connect(), model, np.random.default_rng(9), sequences=5)


def two_contexts(name: str, says: str) -> Model:
    """LEFT [N, T] with a context of 2, RIGHT [N, S, 3] with one of 5 along S, PLAIN without one.

    All of it goes into one running sum, and LEFT and RIGHT come back as they were fed.
    """

    def build():
        one = [BATCH, 1]
        return graph(
            [
                node("ReduceSum", "LEFT LAST", "FROM_LEFT", keepdims=1),
                node("ReduceSum", "RIGHT LAST_TWO", "RIGHT_ALONE", keepdims=0),
                node("Unsqueeze", "RIGHT_ALONE LAST", "FROM_RIGHT"),
                node("Add", "FROM_LEFT FROM_RIGHT", "BOTH"),
                node("Mul", "BOTH PLAIN", "GROWTH"),
                node("Add", "SUM_IN GROWTH", "SUM_OUT"),
                node("Identity", "LEFT", "LEFT_SEEN"),
                node("Identity", "RIGHT", "RIGHT_SEEN"),
            ],
            [
                ("LEFT", "fp32", [BATCH, "T"]),
                ("RIGHT", "fp32", [BATCH, "S", 3]),
                ("PLAIN", "fp32", one),
                ("SUM_IN", "fp32", one),
            ],
            [
                ("LEFT_SEEN", "fp32", [BATCH, "T"]),
                ("RIGHT_SEEN", "fp32", [BATCH, "S", 3]),
                ("SUM_OUT", "fp32", one),
            ],
            {"LAST": np.array([-1], np.int64), "LAST_TWO": np.array([1, 2], np.int64)},
        )

    return Model(
        name,
        build,
        inputs=(
            Tensor("LEFT", "fp32", (-1,), between=(-9, 9), context=(2, 1)),
            Tensor("RIGHT", "fp32", (-1, 3), between=(-9, 9), context=(5, 1)),
            Tensor("PLAIN", "fp32", (1,), between=(-9, 9)),
        ),
        outputs=(
            Tensor("LEFT_SEEN", "fp32", (-1,)),
            Tensor("RIGHT_SEEN", "fp32", (-1, 3)),
            Tensor("SUM_OUT", "fp32", (1,)),
        ),
        states=(("SUM_IN", "SUM_OUT"),),
        parameters={"input_context": says},
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [("spaces", "LEFT=2 RIGHT=5"), ("commas", "RIGHT=5,LEFT=2"), ("axes", "LEFT=2@1, RIGHT=5@1")],
)
def test_several_inputs_have_contexts_of_their_own(deployment, name, says):
    model = deployment.serve(two_contexts(f"contexts_by_{name}", says))
    interleave(deployment.connect(), model, np.random.default_rng(10), sequences=6)


def silero_like(name: str, **changes) -> Model:
    """Signature of Silero VAD: 512 new samples behind 64 old ones, a state [2, N, 8], a scalar rate."""
    weight = np.random.default_rng(12).standard_normal((576, 8)).astype(np.float32) / 24

    def build():
        return graph(
            [
                node("MatMul", "input WEIGHT", "MIXED"),
                node("Unsqueeze", "MIXED FIRST", "BY_LAYER"),
                node("Cast", "sr", "RATE", to=1),
                node("Div", "state RATE", "FADED"),
                node("Add", "FADED BY_LAYER", "GROWN"),
                node("Tanh", "GROWN", "stateN"),
                node("ReduceMean", "stateN", "MEAN", axes=[0], keepdims=0),
                node("ReduceMean", "MEAN", "output", axes=[1], keepdims=1),
            ],
            [("input", "fp32", [BATCH, 576]), ("state", "fp32", [2, BATCH, 8]), ("sr", "int64", [])],
            [("output", "fp32", [BATCH, 1]), ("stateN", "fp32", [2, BATCH, 8])],
            {"WEIGHT": weight, "FIRST": np.array([0], np.int64)},
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("input", "fp32", (512,), context=(64, 1)),),
        outputs=(Tensor("output", "fp32", (1,)),),
        states=(("state", "stateN"),),
        constants={"sr": 4},
        parameters={"input_context": "input=64"},
        tolerance=1e-5,
    )
    return dataclasses.replace(model, **changes)


def test_a_speech_model_gets_its_context_together_with_its_state(deployment):
    model = silero_like("context_of_speech", oldest="preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 2000")
    deployment.serve(model)
    client = deployment.connect()
    together(lambda seed=seed: Conversation(client, model, np.random.default_rng(seed)).whole(8) for seed in range(16))
    assert max(batch_sizes(deployment, model)) > 1


def test_the_other_dims_of_a_context_have_to_be_known(deployment):
    model = models.framed("refused_context_of_any", [BATCH, "T", "F"], (2, 1), (-1, -1), "FRAMES=2@1")
    refused(deployment, model, "input_context", "FRAMES=2", "axis 2 of", "is open: write its length")


# ---- batches


@pytest.mark.parametrize("what", ["fixed", "open", "open_before_features", "batch_inside"])
def test_rows_of_one_batch_have_contexts_of_their_own(deployment, what):
    model = deployment.serve(of(what, f"context_{what}_together", **TOGETHER))
    talks = four(deployment, model)
    tensor = model.inputs[0]

    def asked(seed):
        dims = [dim if dim > 0 else 1 if tensor.batch_inside else 2 for dim in tensor.dims]
        return {"FRAMES": np.random.default_rng(seed).standard_normal((1, *dims)).astype(np.float32)}

    for seed in (0, 10, 20):
        fed = [asked(seed + i) for i in range(4)]
        assert runs_of(deployment, model, steps(talks, fed, start=seed == 0)) == {4: 1}
    # in one batch: a restart, an end, and two that go on
    together(
        [
            lambda: talks[0].start(asked(30)),
            lambda: talks[1].end(asked(31)),
            lambda: talks[2].step(asked(32)),
            lambda: talks[3].step(asked(33)),
        ]
    )
    talks[1] = Conversation(deployment.connect(), model, np.random.default_rng(9))
    together([talks[0].step, talks[1].start, talks[2].end, talks[3].step])


def test_many_sequences_with_chunks_of_any_length_are_all_right(deployment):
    model = deployment.serve(
        of("open", "context_crowd", oldest="preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 2000")
    )
    client = deployment.connect()

    def talk(seed):
        rng = np.random.default_rng(seed)
        for _ in range(3):
            Conversation(client, model, rng).whole(int(rng.integers(1, 8)))

    together(lambda seed=seed: talk(seed) for seed in range(12))


@pytest.mark.host_and_device
def test_direct_rows_that_share_batches_keep_their_contexts(deployment):
    delay = "max_queue_delay_microseconds: 20000 minimum_slot_utilization: 1.0"
    model = deployment.serve(of("fixed", "context_direct_crowd", direct=delay, max_batch_size=4))
    client = deployment.connect()

    def talk(seed):
        rng = np.random.default_rng(seed)
        for _ in range(4):
            Conversation(client, model, rng).whole(int(rng.integers(1, 5)))

    together(lambda seed=seed: talk(seed) for seed in range(4))
    assert max(batch_sizes(deployment, model)) > 1


# ---- failures


REASON = "out of data bounds"


def said(index: int, length: int = 2, value: float = 1) -> dict[str, np.ndarray]:
    return {**chunk(length, value), "INDEX": np.array([[index]], np.int64)}


def test_a_failed_run_leaves_the_context_as_it_was(deployment):
    model = deployment.serve(models.framed_or_fails("context_fails"))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(13))
    talk.start(said(1, 4))
    for length in (1, 5):
        with pytest.raises(InferenceServerException, match=REASON):
            talk.step(said(99, length, value=50))
    assert talk.step(said(0, 1, value=9))["WINDOW"].tolist() == [[2, 3, 4, 9]]
    talk.end()


def test_a_refused_request_leaves_the_context_as_it_was(deployment):
    model = deployment.serve(of("fixed", "context_refuses"))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(14))
    talk.start(chunk(5))
    for length in (4, 6, 8):
        with pytest.raises(InferenceServerException):
            talk.step(chunk(length, value=50))
    assert talk.step(chunk(5, value=11))["WINDOW"].tolist() == [[3, 4, 5, 11, 12, 13, 14, 15]]
    talk.end()


def test_a_start_that_fails_leaves_no_context(deployment):
    model = deployment.serve(models.framed_or_fails("context_fails_at_start"))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(15))
    talk.start(said(0, 4))
    with pytest.raises(InferenceServerException, match=REASON):
        talk.start(said(99, 4, value=50))
    with pytest.raises(InferenceServerException):
        talk.step()
    assert talk.start(said(0, 1, value=9))["WINDOW"].tolist() == [[0, 0, 0, 9]]
    talk.end()


@pytest.mark.host_and_device
def test_the_context_of_the_others_goes_on_when_one_of_a_batch_fails(deployment):
    model = deployment.serve(models.framed_or_fails("context_fails_together", **TOGETHER))
    talks = four(deployment, model)
    steps(talks, [said(0, 2, 10 * i) for i in range(4)], start=True)()
    asked = [said(99, 2, 50), said(1, 2, 60), said(2, 2, 70), said(3, 2, 80)]
    came = together(
        lambda talk=talk, fed=fed: outcome(lambda: talk.step(fed)) for talk, fed in zip(talks, asked, strict=True)
    )
    assert isinstance(came[0], InferenceServerException)
    assert not any(isinstance(answer, Exception) for answer in came[1:]), came
    steps(talks, [said(0)] * 4)()
    steps(talks, [said(0)] * 4, end=True)()


# ---- configurations that are wrong


def saying(what: str, says: str, **changes) -> Model:
    model = of(what, "")
    return dataclasses.replace(model, parameters={"input_context": says}, **changes)


def with_dims(what: str, *dims: int) -> Model:
    model = of(what, "")
    return dataclasses.replace(model, inputs=(dataclasses.replace(model.inputs[0], dims=dims),))


PARAMETER = "input_context"

REFUSED = {
    "unknown_input": (saying("open", "NOISE=3"), [PARAMETER, "NOISE"]),
    "output": (saying("open", "WINDOW=3"), [PARAMETER, "WINDOW"]),
    "no_number": (saying("open", "FRAMES"), [PARAMETER, "FRAMES"]),
    "empty_number": (saying("open", "FRAMES="), [PARAMETER, "FRAMES"]),
    "not_a_number": (saying("open", "FRAMES=some"), [PARAMETER, "FRAMES", "some"]),
    "fraction": (saying("open", "FRAMES=1.5"), [PARAMETER, "FRAMES", "1.5"]),
    "zero": (saying("open", "FRAMES=0"), [PARAMETER, "FRAMES", "0"]),
    "negative": (saying("open", "FRAMES=-3"), [PARAMETER, "FRAMES", "-3"]),
    "huge": (saying("open", "FRAMES=99999999999999999999999"), [PARAMETER, "FRAMES"]),
    "more_than_memory_can_be": (saying("open", "FRAMES=9223372036854775807"), ["FRAMES"]),
    "twice": (saying("open", "FRAMES=3 FRAMES=4"), [PARAMETER, "FRAMES"]),
    "axis_not_a_number": (saying("open", "FRAMES=3@last"), [PARAMETER, "FRAMES", "last"]),
    "axis_missing": (saying("open", "FRAMES=3@"), [PARAMETER, "FRAMES"]),
    "axis_negative": (saying("open", "FRAMES=3@-1"), [PARAMETER, "FRAMES", "-1"]),
    "axis_out_of_range": (saying("open", "FRAMES=3@2"), [PARAMETER, "FRAMES", "2"]),
    "axis_of_the_batch": (saying("open", "FRAMES=3@0"), [PARAMETER, "FRAMES", "0", "batch"]),
    "axis_of_the_batch_inside": (saying("batch_inside", "FRAMES=2@1"), [PARAMETER, "FRAMES", "1", "batch"]),
    "several_open_dims": (saying("named_first_of_two", "FRAMES=2"), [PARAMETER, "FRAMES", "@"]),
    "a_state": (saying("open", "COUNT_IN=1"), [PARAMETER, "COUNT_IN"]),
    "a_constant": (
        saying("open", "FRAMES=3", constants={"FRAMES": 1}, inputs=(Tensor("FRAMES", "fp32", (-1,)),)),
        ["FRAMES"],
    ),
    "a_constant_that_is_not_listed": (
        dataclasses.replace(silero_like(""), parameters={PARAMETER: "sr=1"}),
        [PARAMETER, "sr"],
    ),
    "larger_than_the_model": (saying("fixed", "FRAMES=9"), ["FRAMES", "9", "8"]),
    "as_large_as_the_model": (saying("fixed", "FRAMES=8"), ["FRAMES", "8"]),
    "dims_and_context_are_too_few": (saying("fixed", "FRAMES=2"), ["FRAMES", "5", "2", "8"]),
    "dims_and_context_are_too_many": (saying("fixed", "FRAMES=4"), ["FRAMES", "5", "4", "8"]),
    "dims_of_what_the_model_sees": (with_dims("fixed", 8), ["FRAMES", "8"]),
    "dims_of_another_rank": (with_dims("fixed", 5, 1), ["FRAMES"]),
    "dims_that_differ_twice": (with_dims("fixed_before_features", 5, 3), ["FRAMES", "4"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_context_is_refused_by_name_value_and_rule(deployment, case):
    model, words = REFUSED[case]
    refused(deployment, model.variant(f"refused_context_{case}"), *words)

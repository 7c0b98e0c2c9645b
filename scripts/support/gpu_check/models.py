"""Models that show what the checks look for: each answer depends on states, in a way that a GPU computes exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.bench.models import BATCH, CACHE_STEPS, MODELS, STEPS, WIDTH, BenchModel, State, Tensor, graph_of

if TYPE_CHECKING:
    from onnx import ModelProto

#: Rows of the cache that an answer has.
NEWEST = 8
#: Floats of a token: 16 KiB, so that a state of 2,000 tokens is much larger than what allocators round to.
TOKEN = 4096
#: More inputs than a Concat passes to its kernel by value: it copies a table of them from pinned memory.
JOINED = 40


def _cache() -> ModelProto:
    """The cache of the benchmark, with its newest rows as the answer."""
    import numpy as np
    from onnx import helper

    node = helper.make_node
    ints = lambda *values: np.array(values, np.int64)  # noqa: E731
    return graph_of(
        [
            node("Slice", ["CACHE_IN", "one", "end", "axis"], ["kept"]),
            node("Concat", ["kept", "X"], ["CACHE_OUT"], axis=1),
            node("Slice", ["CACHE_OUT", "newest", "end", "axis"], ["Y"]),
        ],
        [("X", ["batch", 1, WIDTH]), ("CACHE_IN", ["batch", CACHE_STEPS, WIDTH])],
        [("Y", ["batch", NEWEST, WIDTH]), ("CACHE_OUT", ["batch", CACHE_STEPS, WIDTH])],
        {"one": ints(1), "newest": ints(-NEWEST), "end": ints(2**31), "axis": ints(1)},
    )


def _growing() -> ModelProto:
    """A state that grows by a token with each step; the answer is the first token."""
    import numpy as np
    from onnx import helper

    node = helper.make_node
    ints = lambda *values: np.array(values, np.int64)  # noqa: E731
    return graph_of(
        [
            node("Concat", ["PAST_IN", "X"], ["PAST_OUT"], axis=1),
            node("Slice", ["PAST_OUT", "first", "one", "axis"], ["oldest"]),
            node("Squeeze", ["oldest", "axis"], ["Y"]),
        ],
        [("X", ["batch", 1, TOKEN]), ("PAST_IN", ["batch", "steps", TOKEN])],
        [("Y", ["batch", TOKEN]), ("PAST_OUT", ["batch", "steps_and_one", TOKEN])],
        {"first": ints(0), "one": ints(1), "axis": ints(1)},
    )


def _concat() -> ModelProto:
    """A sum, many times beside itself."""
    from onnx import helper

    node = helper.make_node
    return graph_of(
        [node("Add", ["X", "SUM_IN"], ["SUM_OUT"]), node("Concat", ["SUM_OUT"] * JOINED, ["Y"], axis=1)],
        [("X", ["batch", WIDTH]), ("SUM_IN", ["batch", WIDTH])],
        [("Y", ["batch", JOINED * WIDTH]), ("SUM_OUT", ["batch", WIDTH])],
    )


def _uncapturable() -> ModelProto:
    """A sum, with a NonZero whose result nothing depends on: its kernel reads the number of what it found on the host."""
    import numpy as np
    from onnx import TensorProto, helper

    node = helper.make_node
    row = ["batch", WIDTH]
    return graph_of(
        [
            node("Add", ["X", "SUM_IN"], ["SUM_OUT"]),
            node("NonZero", ["X"], ["places"]),
            node("Cast", ["places"], ["numbers"], to=TensorProto.FLOAT),
            node("ReduceSum", ["numbers"], ["number"], keepdims=0),
            node("Mul", ["number", "zero"], ["nothing"]),
            node("Add", ["SUM_OUT", "nothing"], ["Y"]),
        ],
        [("X", row), ("SUM_IN", row)],
        [("Y", row), ("SUM_OUT", row)],
        {"zero": np.zeros(1, np.float32)},
    )


_SUM = (State("SUM_IN", "SUM_OUT", (BATCH, WIDTH)),)
CACHE_STATE = (State("CACHE_IN", "CACHE_OUT", (BATCH, CACHE_STEPS, WIDTH)),)
PAST = (State("PAST_IN", "PAST_OUT", (BATCH, STEPS, TOKEN)),)
_X, _TOKEN = (Tensor("X", (WIDTH,)),), (Tensor("X", (1, TOKEN)),)

CHECKED = {
    model.name: model
    for model in (
        MODELS["accumulate"],
        MODELS["lstm"],
        BenchModel("cache", _cache, (Tensor("X", (1, WIDTH)),), (Tensor("Y", (NEWEST, WIDTH)),), CACHE_STATE),
        BenchModel("growing", _growing, _TOKEN, (Tensor("Y", (TOKEN,)),), PAST),
        BenchModel("concat", _concat, _X, (Tensor("Y", (JOINED * WIDTH,)),), _SUM),
        BenchModel("uncapturable", _uncapturable, _X, (Tensor("Y", (WIDTH,)),), _SUM),
    )
}

"""States that change their size."""

from __future__ import annotations

import dataclasses

import numpy as np
from onnx import TensorProto

from harness.graphs import BATCH, checked_gather, graph, node, numbers
from harness.model import Model, Tensor


def append(type: str = "fp32", name: str | None = None, layout: str = "NTW", width: int = 2, **changes) -> Model:
    """Keeps every chunk that came: CACHE is what there was and INPUT [N, chunk, width] after it.

    `layout` is the order of the cache's axes: N the batch, T the time, W the width. The answer
    is the whole cache, batch first.
    """

    def build():
        axes = {"N": BATCH, "T": "T", "W": width}
        return graph(
            [
                node("Transpose", "INPUT", "CHUNK", perm=["NTW".index(axis) for axis in layout]),
                node("Concat", "CACHE_IN CHUNK", "CACHE_OUT", axis=layout.index("T")),
                node("Transpose", "CACHE_OUT", "OUTPUT", perm=[layout.index(axis) for axis in "NTW"]),
            ],
            [
                ("INPUT", type, [BATCH, "chunk", width]),
                ("CACHE_IN", type, [axes[axis] for axis in layout]),
            ],
            [
                ("OUTPUT", type, [BATCH, "T_new", width]),
                ("CACHE_OUT", type, [{**axes, "T": "T_new"}[axis] for axis in layout]),
            ],
        )

    model = Model(
        name or f"append_{type}_{layout}",
        build,
        inputs=(Tensor("INPUT", type, (-1, width)),),
        outputs=(Tensor("OUTPUT", type, (-1, width)),),
        states=(("CACHE_IN", "CACHE_OUT"),),
        lengths_at_start={"T": 0},
    )
    return dataclasses.replace(model, **changes)


def queue(name: str = "queue", **changes) -> Model:
    """PUSH comes in at the end, and as many as DROP is long go out in front: it grows, shrinks and
    is empty now and then. The answer is what is left."""

    def build():
        return graph(
            [
                node("Concat", "QUEUE_IN PUSH", "ALL", axis=1),
                node("Shape", "DROP", "COUNT", start=1, end=2),
                node("Slice", "ALL COUNT END TIME", "QUEUE_OUT"),
                node("Identity", "QUEUE_OUT", "OUTPUT"),
            ],
            [
                ("PUSH", "int64", [BATCH, "pushed", 2]),
                ("DROP", "uint8", [BATCH, "dropped"]),
                ("QUEUE_IN", "int64", [BATCH, "length", 2]),
            ],
            [("QUEUE_OUT", "int64", [BATCH, None, 2]), ("OUTPUT", "int64", [BATCH, None, 2])],
            {"END": np.array([2**62], np.int64), "TIME": np.array([1], np.int64)},
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("PUSH", "int64", (-1, 2)), Tensor("DROP", "uint8", (-1,))),
        outputs=(Tensor("OUTPUT", "int64", (-1, 2)),),
        states=(("QUEUE_IN", "QUEUE_OUT"),),
        lengths_at_start={"length": 0},
    )
    return dataclasses.replace(model, **changes)


def caches(name: str = "caches", **changes) -> Model:
    """Four states: FAST [N, F, 2] keeps every chunk, SLOW [2, S, N] one element a request, LAST
    [N, L] no more than three, and COUNT [N, 1] has one size. Each has an answer of its own."""

    def build():
        return graph(
            [
                node("Concat", "FAST_IN INPUT", "FAST_OUT", axis=1),
                node("Add", "COUNT_IN ONE", "COUNT_OUT"),
                node("Cast", "COUNT_OUT", "COUNT_64", to=TensorProto.INT64),
                node("Transpose", "COUNT_64", "COUNT_T", perm=[1, 0]),
                node("Unsqueeze", "COUNT_T AXIS_0", "COUNT_3"),
                node("Neg", "COUNT_3", "COUNT_NEG"),
                node("Concat", "COUNT_3 COUNT_NEG", "COUNT_BOTH", axis=0),
                node("Concat", "SLOW_IN COUNT_BOTH", "SLOW_OUT", axis=1),
                node("ReduceSum", "INPUT AXES_12", "SUM", keepdims=0),
                node("Greater", "SUM ZERO", "POSITIVE"),
                node("Unsqueeze", "POSITIVE AXIS_1", "POSITIVE_2"),
                node("Concat", "LAST_IN POSITIVE_2", "LAST_ALL", axis=1),
                node("Slice", "LAST_ALL THREE END AXIS_1", "LAST_OUT"),
                node("Identity", "FAST_OUT", "FAST"),
                node("Transpose", "SLOW_OUT", "SLOW", perm=[2, 1, 0]),
                node("Identity", "LAST_OUT", "LAST"),
                node("Identity", "COUNT_OUT", "COUNT"),
            ],
            [
                ("INPUT", "fp32", [BATCH, "chunk", 2]),
                ("COUNT_IN", "fp32", [BATCH, 1]),
                ("FAST_IN", "fp32", [BATCH, "F", 2]),
                ("SLOW_IN", "int64", [2, "S", BATCH]),
                ("LAST_IN", "bool", [BATCH, "L"]),
            ],
            [
                ("FAST", "fp32", [BATCH, "F_new", 2]),
                ("SLOW", "int64", [BATCH, "S_new", 2]),
                ("LAST", "bool", [BATCH, "L_new"]),
                ("COUNT", "fp32", [BATCH, 1]),
                ("FAST_OUT", "fp32", [BATCH, "F_new", 2]),
                ("SLOW_OUT", "int64", [2, "S_new", BATCH]),
                ("LAST_OUT", "bool", [BATCH, "L_new"]),
                ("COUNT_OUT", "fp32", [BATCH, 1]),
            ],
            {
                "ONE": np.array(1, np.float32),
                "ZERO": np.array(0, np.float32),
                "AXIS_0": np.array([0], np.int64),
                "AXIS_1": np.array([1], np.int64),
                "AXES_12": np.array([1, 2], np.int64),
                "THREE": np.array([-3], np.int64),
                "END": np.array([2**62], np.int64),
            },
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "fp32", (-1, 2), between=(-9, 9)),),
        outputs=(
            Tensor("FAST", "fp32", (-1, 2)),
            Tensor("SLOW", "int64", (-1, 2)),
            Tensor("LAST", "bool", (-1,)),
            Tensor("COUNT", "fp32", (1,)),
        ),
        states=(
            ("COUNT_IN", "COUNT_OUT"),
            ("FAST_IN", "FAST_OUT"),
            ("SLOW_IN", "SLOW_OUT"),
            ("LAST_IN", "LAST_OUT"),
        ),
        lengths_at_start={"F": 0, "S": 0, "L": 0},
    )
    return dataclasses.replace(model, **changes)


def attention(name: str = "attention", heads: int = 2, width: int = 4, **changes) -> Model:
    """One layer of attention with its caches of keys and values, [N, heads, T, width]."""

    def build():
        rng = np.random.default_rng(11)
        all_heads = heads * width
        nodes = []
        for part in "QKV":
            nodes += [
                node("MatMul", f"INPUT {part}_WEIGHT", f"{part}_FLAT"),
                node("Reshape", f"{part}_FLAT SPLIT", f"{part}_SPLIT"),
                node("Transpose", f"{part}_SPLIT", part, perm=[0, 2, 1, 3]),  # [N, heads, chunk, width]
            ]
        nodes += [
            node("Concat", "past_key K", "present_key", axis=2),
            node("Concat", "past_value V", "present_value", axis=2),
            node("Transpose", "present_key", "KEYS", perm=[0, 1, 3, 2]),
            node("MatMul", "Q KEYS", "SCORES"),
            node("Softmax", "SCORES", "SHARES", axis=-1),
            node("MatMul", "SHARES present_value", "MIXED"),
            node("Transpose", "MIXED", "BY_TIME", perm=[0, 2, 1, 3]),
            node("Reshape", "BY_TIME JOIN", "OUTPUT"),
        ]
        past, present = [BATCH, heads, "past", width], [BATCH, heads, "past + chunk", width]
        return graph(
            nodes,
            [
                ("INPUT", "fp32", [BATCH, "chunk", all_heads]),
                ("past_key", "fp32", past),
                ("past_value", "fp32", past),
            ],
            [
                ("OUTPUT", "fp32", [BATCH, "chunk", all_heads]),
                ("present_key", "fp32", present),
                ("present_value", "fp32", present),
            ],
            {
                **{f"{part}_WEIGHT": rng.standard_normal((all_heads, all_heads)).astype(np.float32) for part in "QKV"},
                "SPLIT": np.array([0, 0, heads, width], np.int64),
                "JOIN": np.array([0, 0, all_heads], np.int64),
            },
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "fp32", (-1, heads * width)),),
        outputs=(Tensor("OUTPUT", "fp32", (-1, heads * width)),),
        states=(("past_key", "present_key"), ("past_value", "present_value")),
        lengths_at_start={"past": 0},
        tolerance=1e-5,
    )
    return dataclasses.replace(model, **changes)


def looked_up(name: str = "looked_up", **changes) -> Model:
    """Appends TABLE[INPUT] to its cache: an INPUT of 4 and more is out of the table, and Run fails."""

    def build():
        return graph(
            [
                *checked_gather("TABLE", "INPUT", "WORTH", TensorProto.INT32),
                node("Concat", "CACHE_IN WORTH", "CACHE_OUT", axis=1),
                node("Identity", "CACHE_OUT", "OUTPUT"),
            ],
            [("INPUT", "int64", [BATCH, "chunk"]), ("CACHE_IN", "int32", [BATCH, "T"])],
            [("OUTPUT", "int32", [BATCH, "T_new"]), ("CACHE_OUT", "int32", [BATCH, "T_new"])],
            {"TABLE": numbers(1, 10, 100, 1000)},
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "int64", (-1,), between=(0, 3)),),
        outputs=(Tensor("OUTPUT", "int32", (-1,)),),
        states=(("CACHE_IN", "CACHE_OUT"),),
        lengths_at_start={"T": 0},
    )
    return dataclasses.replace(model, **changes)


def half_way(name: str = "half_way", **changes) -> Model:
    """Its run fails, for an INDEX of 4 and more, after it has written the next MIDDLE, whose batch axis is the second; CACHE
    keeps every CHUNK of 4 KiB."""

    def build():
        return graph(
            [
                node("Unsqueeze", "INPUT AXIS_0", "ROWS"),
                node("Add", "MIDDLE_IN ROWS", "MIDDLE_OUT"),
                node("Transpose", "MIDDLE_OUT", "BY_ROW", perm=[1, 0, 2]),
                node("Reshape", "BY_ROW SIX", "FLAT"),
                node("ReduceSum", "FLAT LAST", "TOTAL", keepdims=1),
                node("Mul", "TOTAL NOTHING", "NO_STEP"),
                node("Cast", "NO_STEP", "OFFSET", to=TensorProto.INT64),
                node("Add", "INDEX OFFSET", "AT"),
                *checked_gather("TABLE", "AT", "WEIGHT", TensorProto.FLOAT),
                node("Add", "FLAT WEIGHT", "OUTPUT"),
                node("Concat", "CACHE_IN CHUNK", "CACHE_OUT", axis=1),
                node("Identity", "CACHE_OUT", "KEPT"),
            ],
            [
                ("INPUT", "fp32", [BATCH, 2]),
                ("INDEX", "int64", [BATCH, 1]),
                ("CHUNK", "fp32", [BATCH, 1, 1024]),
                ("MIDDLE_IN", "fp32", [3, BATCH, 2]),
                ("CACHE_IN", "fp32", [BATCH, "T", 1024]),
            ],
            [
                ("OUTPUT", "fp32", [BATCH, 6]),
                ("KEPT", "fp32", [BATCH, "T_new", 1024]),
                ("MIDDLE_OUT", "fp32", [3, BATCH, 2]),
                ("CACHE_OUT", "fp32", [BATCH, "T_new", 1024]),
            ],
            {
                "AXIS_0": np.array([0], np.int64),
                "SIX": np.array([-1, 6], np.int64),
                "LAST": np.array([1], np.int64),
                "NOTHING": np.array(0, np.float32),
                "TABLE": numbers(0, 0, 0, 0),
            },
        )

    model = Model(
        name,
        build,
        inputs=(
            Tensor("INPUT", "fp32", (2,), between=(-8, 8)),
            Tensor("INDEX", "int64", (1,), between=(0, 3)),
            Tensor("CHUNK", "fp32", (1, 1024)),
        ),
        outputs=(Tensor("OUTPUT", "fp32", (6,)), Tensor("KEPT", "fp32", (-1, 1024))),
        states=(("MIDDLE_IN", "MIDDLE_OUT"), ("CACHE_IN", "CACHE_OUT")),
        lengths_at_start={"T": 0},
    )
    return dataclasses.replace(model, **changes)

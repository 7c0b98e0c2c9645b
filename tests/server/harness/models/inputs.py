"""Inputs that are more than a new row: without a batch dimension, with a default, with a context in front."""

from __future__ import annotations

import dataclasses

import numpy as np
from onnx import TensorProto

from harness.graphs import BATCH, checked_gather, graph, node, numbers
from harness.model import Model, Tensor


def knob(name: str, type: str = "fp32", shape: tuple[int, ...] = (), **changes) -> Model:
    """STATE_OUT = STATE_IN + INPUT * KNOB, where KNOB has no batch dimension: [], [1] or [2].

    A KNOB of strings is a word with a number: "one", "two", "three".
    """

    def build():
        if type == "string":
            words = {"keys_strings": ["one", "two", "three"], "values_floats": [1.0, 2.0, 3.0]}
            factor = node("LabelEncoder", "KNOB", "FACTOR", domain="ai.onnx.ml", **words)
        else:
            factor = node("Cast", "KNOB", "FACTOR", to=TensorProto.FLOAT)
        row = [BATCH, 2]
        return graph(
            [
                factor,
                node("Mul", "INPUT FACTOR", "GROWTH"),
                node("Add", "STATE_IN GROWTH", "STATE_OUT"),
                node("Identity", "STATE_OUT", "OUTPUT"),
            ],
            [("INPUT", "fp32", row), ("STATE_IN", "fp32", row), ("KNOB", type, list(shape))],
            [("OUTPUT", "fp32", row), ("STATE_OUT", "fp32", row)],
        )

    between = None if type in ("bool", "string") else (1, 3)
    model = Model(
        name,
        build,
        inputs=(
            Tensor("INPUT", "fp32", (2,), between=(-100, 100)),
            Tensor("KNOB", type, shape or (1,), between, unbatched=shape),
        ),
        outputs=(Tensor("OUTPUT", "fp32", (2,)),),
        states=(("STATE_IN", "STATE_OUT"),),
    )
    return dataclasses.replace(model, **changes)


def defaults(name: str, **changes) -> Model:
    """STATE_OUT = STATE_IN + INPUT * GAIN + OFFSET: both have a default in the model (2 and 100),
    an initializer that is a graph input too. No request carries them."""

    def build():
        row = [BATCH, 2]
        return graph(
            [
                node("Mul", "INPUT GAIN", "GAINED"),
                node("Add", "GAINED OFFSET", "GROWTH"),
                node("Add", "STATE_IN GROWTH", "STATE_OUT"),
                node("Identity", "STATE_OUT", "OUTPUT"),
            ],
            [
                ("INPUT", "fp32", row),
                ("STATE_IN", "fp32", row),
                ("GAIN", "fp32", [1]),
                ("OFFSET", "fp32", []),
            ],
            [("OUTPUT", "fp32", row), ("STATE_OUT", "fp32", row)],
            {"GAIN": np.array([2], np.float32), "OFFSET": np.array(100, np.float32)},
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "fp32", (2,), between=(-100, 100)),),
        outputs=(Tensor("OUTPUT", "fp32", (2,)),),
        states=(("STATE_IN", "STATE_OUT"),),
    )
    return dataclasses.replace(model, **changes)


def framed(
    name: str,
    shape: list,
    context: tuple[int, int],
    dims: tuple[int, ...],
    says: str | None = None,
    *,
    type: str = "fp32",
    batch_inside: bool = False,
    out: tuple[int, ...] | None = None,
    first: str = "zeros",
    window: int | None = None,
    **changes,
) -> Model:
    """Answers FRAMES `shape` as the model was fed it, context and all, and counts its runs.

    `context` is what the oracle goes by: elements, and the graph's axis. `says` is what the
    configuration says: the elements alone where nothing is given.
    """

    def build():
        one = [BATCH, 1]
        return graph(
            [
                node("Identity", "FRAMES", "WINDOW"),
                node("Add", "COUNT_IN ONE", "COUNT_OUT"),
                node("Identity", "COUNT_OUT", "COUNT"),
            ],
            [("FRAMES", type, shape), ("COUNT_IN", "int64", one)],
            [("WINDOW", type, shape), ("COUNT_OUT", "int64", one), ("COUNT", "int64", one)],
            {"ONE": np.array(1, np.int64)},
        )

    if out is None:
        graph_dims = tuple(-1 if isinstance(dim, str) else dim for dim in shape)
        out = graph_dims if batch_inside else graph_dims[1:]
    model = Model(
        name,
        build,
        inputs=(Tensor("FRAMES", type, dims, batch_inside=batch_inside, context=context, first=first, window=window),),
        outputs=(Tensor("WINDOW", type, out, batch_inside=batch_inside), Tensor("COUNT", "int64", (1,))),
        states=(("COUNT_IN", "COUNT_OUT"),),
        parameters={"input_context": says or f"FRAMES={context[0]}"},
    )
    return dataclasses.replace(model, **changes)


def framed_or_fails(name: str, **changes) -> Model:
    """SUM of what came with its context of 3, weighed by TABLE[INDEX]: an INDEX of 4 and more is
    out of the table, and Run fails."""

    def build():
        one = [BATCH, 1]
        return graph(
            [
                *checked_gather("TABLE", "INDEX", "WEIGHT", TensorProto.FLOAT),
                node("ReduceSum", "FRAMES LAST", "LOUDNESS", keepdims=1),
                node("Mul", "LOUDNESS WEIGHT", "WEIGHED"),
                node("Add", "SUM_IN WEIGHED", "SUM_OUT"),
                node("Identity", "FRAMES", "WINDOW"),
            ],
            [("FRAMES", "fp32", [BATCH, "T"]), ("INDEX", "int64", one), ("SUM_IN", "fp32", one)],
            [("WINDOW", "fp32", [BATCH, "T"]), ("SUM_OUT", "fp32", one)],
            {"TABLE": numbers(1, 10, 100, 1000), "LAST": np.array([-1], np.int64)},
        )

    model = Model(
        name,
        build,
        inputs=(
            Tensor("FRAMES", "fp32", (-1,), between=(-9, 9), context=(3, 1)),
            Tensor("INDEX", "int64", (1,), between=(0, 3)),
        ),
        outputs=(Tensor("WINDOW", "fp32", (-1,)), Tensor("SUM_OUT", "fp32", (1,))),
        states=(("SUM_IN", "SUM_OUT"),),
        parameters={"input_context": "FRAMES=3"},
    )
    return dataclasses.replace(model, **changes)


def voiced(name: str, width: int = 1024, **changes) -> Model:
    """OUTPUT is the sum of INPUT over a sequence. VOICE has `width` numbers, of which the first is added to each INPUT."""

    def build():
        one = [BATCH, 1]
        return graph(
            [
                node("Gather", "VOICE FIRST", "LOUDNESS", axis=1),
                node("Add", "INPUT LOUDNESS", "ADDED"),
                node("Add", "SUM_IN ADDED", "SUM_OUT"),
                node("Identity", "SUM_OUT", "OUTPUT"),
            ],
            [("INPUT", "fp32", one), ("VOICE", "fp32", [BATCH, width]), ("SUM_IN", "fp32", one)],
            [("OUTPUT", "fp32", one), ("SUM_OUT", "fp32", one)],
            {"FIRST": np.array([0], np.int64)},
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "fp32", (1,), between=(-9, 9)), Tensor("VOICE", "fp32", (width,), between=(-9, 9))),
        outputs=(Tensor("OUTPUT", "fp32", (1,)),),
        states=(("SUM_IN", "SUM_OUT"),),
    )
    return dataclasses.replace(model, **changes)

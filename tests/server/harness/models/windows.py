"""Models with `input_windows`: their requests bring any number of elements."""

from __future__ import annotations

import dataclasses

import numpy as np
from onnx import TensorProto

from harness.graphs import BATCH, graph, node
from harness.model import Model, Tensor

#: The first element of a window from which on a run fails.
FAILS = 1000.0


def cut(
    name: str,
    length: int = 5,
    context: int = 0,
    *,
    says: str | None = None,
    model_length: int | str | None = None,
    type: str = "fp32",
    **changes,
) -> Model:
    """Gets AUDIO in windows, with so many elements of the last one in front. TOTAL is the sum over a sequence of the new
    elements times GAIN, which each request carries once. WINDOW is what the model was fed. A window whose last element is
    FAILS or more can't be run."""
    fed = length + context if model_length is None else model_length

    def build():
        row, one = [BATCH, fed], [BATCH, 1]
        return graph(
            [
                node("Slice", "AUDIO START END AXIS", "NEW"),
                node("ReduceSum", "NEW AXIS", "LOUDNESS", keepdims=1),
                node("Slice", "AUDIO LAST END AXIS", "MARK"),
                node("Cast", "MARK", "INDEX", to=TensorProto.INT64),
                node("Gather", "TABLE INDEX", "ONE"),
                node("Mul", "LOUDNESS GAIN", "GAINED"),
                node("Mul", "GAINED ONE", "GROWTH"),
                node("Add", "SUM_IN GROWTH", "SUM_OUT"),
                node("Identity", "SUM_OUT", "TOTAL"),
                node("Identity", "AUDIO", "WINDOW"),
            ],
            [("AUDIO", "fp32", row), ("GAIN", "fp32", one), ("SUM_IN", "fp32", one)],
            [("TOTAL", "fp32", one), ("WINDOW", "fp32", row), ("SUM_OUT", "fp32", one)],
            {
                "START": np.array([context], np.int64),
                "END": np.array([np.iinfo(np.int64).max], np.int64),
                "LAST": np.array([-1], np.int64),
                "AXIS": np.array([1], np.int64),
                "TABLE": np.ones(int(FAILS), np.float32),
            },
        )

    parameters = {"input_windows": says or f"AUDIO={length}"}
    if context:
        parameters["input_context"] = f"AUDIO={context}"
    window = (-1,) if isinstance(fed, str) else (-1, fed)
    model = Model(
        name,
        build,
        inputs=(
            Tensor("AUDIO", "fp32", (-1,), context=(context, 1) if context else None, ragged=True),
            Tensor("GAIN", "fp32", (1,), between=(1, 3)),
        ),
        outputs=(Tensor("TOTAL", "fp32", (-1, 1)), Tensor("WINDOW", "fp32", window)),
        states=(("SUM_IN", "SUM_OUT"),),
        parameters=parameters,
    )
    return dataclasses.replace(model, **changes)


def cut_pair(name: str, **changes) -> Model:
    """Gets NEAR in windows of 4, FAR in windows of 2 along its last axis, and a WORD that is the same for all steps of a
    request. HISTORY grows by a number with each step: the sum of NEAR. MIXED is FAR times that."""

    def build():
        one, far = [BATCH, 1], [BATCH, 3, "T"]
        return graph(
            [
                node("ReduceSum", "NEAR AXIS", "SUM", keepdims=1),
                node("Concat", "PAST SUM", "HISTORY", axis=1),
                node("Unsqueeze", "SUM AXIS", "WIDE"),
                node("Mul", "FAR WIDE", "MIXED"),
                node("Identity", "WORD", "SAID"),
                node("Identity", "SUM", "LOUDNESS"),
            ],
            [
                ("NEAR", "fp32", [BATCH, 4]),
                ("FAR", "fp32", far),
                ("WORD", "string", one),
                ("PAST", "fp32", [BATCH, "past"]),
            ],
            [
                ("MIXED", "fp32", far),
                ("SAID", "string", one),
                ("LOUDNESS", "fp32", one),
                ("HISTORY", "fp32", [BATCH, "now"]),
            ],
            {"AXIS": np.array([1], np.int64)},
        )

    model = Model(
        name,
        build,
        inputs=(
            Tensor("NEAR", "fp32", (-1,), ragged=True),
            Tensor("FAR", "fp32", (3, -1), ragged=True),
            Tensor("WORD", "string", (1,)),
        ),
        outputs=(
            Tensor("MIXED", "fp32", (3, -1)),
            Tensor("SAID", "string", (-1, 1)),
            Tensor("LOUDNESS", "fp32", (-1, 1)),
            Tensor("HISTORY", "fp32", (-1,)),
        ),
        states=(("PAST", "HISTORY"),),
        lengths_at_start={"past": 0},
        parameters={"input_windows": "NEAR=4 FAR=2@2"},
    )
    return dataclasses.replace(model, **changes)


def echo_canceller(name: str, **changes) -> Model:
    """Takes 160 elements of NEAR and 80 of FAR. CLEAN is NEAR, louder by the sum of FAR so far."""

    def build():
        return graph(
            [
                node("ReduceSum", "FAR AXIS", "NOW", keepdims=1),
                node("Add", "LEVEL_IN NOW", "LEVEL_OUT"),
                node("Add", "NEAR LEVEL_OUT", "CLEAN"),
            ],
            [
                ("NEAR", "fp32", [BATCH, 160]),
                ("FAR", "fp32", [BATCH, 80]),
                ("LEVEL_IN", "fp32", [BATCH, 1]),
            ],
            [("CLEAN", "fp32", [BATCH, 160]), ("LEVEL_OUT", "fp32", [BATCH, 1])],
            {"AXIS": np.array([1], np.int64)},
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("NEAR", "fp32", (160,)), Tensor("FAR", "fp32", (80,))),
        outputs=(Tensor("CLEAN", "fp32", (160,)),),
        states=(("LEVEL_IN", "LEVEL_OUT"),),
    )
    return dataclasses.replace(model, **changes)


def cut_counted(name: str, **changes) -> Model:
    """Gets AUDIO in windows of 5. NUMBER says which step of its sequence a step is, from 0, and BEFORE how many elements
    there were before it."""

    def build():
        one = [BATCH, 1]
        return graph(
            [
                node("ReduceSum", "AUDIO AXIS", "LOUDNESS", keepdims=1),
                node("Add", "SUM_IN LOUDNESS", "SUM_OUT"),
                node("Identity", "STEP", "NUMBER"),
                node("Identity", "HAD", "BEFORE"),
            ],
            [("AUDIO", "fp32", [BATCH, 5]), ("STEP", "int64", one), ("HAD", "int64", one), ("SUM_IN", "fp32", one)],
            [("NUMBER", "int64", one), ("BEFORE", "int64", one), ("SUM_OUT", "fp32", one)],
            {"AXIS": np.array([1], np.int64)},
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("AUDIO", "fp32", (-1,), ragged=True),),
        outputs=(Tensor("NUMBER", "int64", (-1, 1)), Tensor("BEFORE", "int64", (-1, 1))),
        states=(("SUM_IN", "SUM_OUT"),),
        generated={
            "STEP": lambda context, fed, state: np.array([[context.steps]]),
            "HAD": lambda context, fed, state: np.array([[context.had("AUDIO", 1)]]),
        },
        parameters={"input_windows": "AUDIO=5", "generated_inputs": "STEP=steps HAD=elements(AUDIO)"},
    )
    return dataclasses.replace(model, **changes)

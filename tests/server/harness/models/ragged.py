"""Inputs of different lengths in one batch: the model takes the lengths."""

from __future__ import annotations

import dataclasses

import numpy as np
from onnx import TensorProto

from harness.graphs import BATCH, graph, node
from harness.model import Model, Tensor


def masked(name: str, lengths: str = "int64", context: int = 0, **changes) -> Model:
    """The running sum of X + 1 over all of a sequence: SUMS has it after each element, as long as X.

    LENGTHS says how long each row is; what stands behind counts nothing, and would if it weren't
    masked. The other outputs are not listed: HALVES has every second element of SUMS and
    HALF_LENGTHS how many these are, in each row; RAW is X as it came; LENGTH is LENGTHS, and
    WIDTH how wide the run is. Whole numbers: the sums are exact. An X of 1000 and more fails Run.
    """

    def build():
        one = [BATCH, 1]
        return graph(
            [
                node("Shape", "X", "WIDTH_ALONE", start=1, end=2),
                node("Squeeze", "WIDTH_ALONE", "WIDTH_SCALAR"),
                node("Range", "ZERO WIDTH_SCALAR STEP", "STEPS"),
                node("Cast", "LENGTHS", "LONG", to=TensorProto.INT64),
                node("Unsqueeze", "LONG LAST", "LENGTH"),
                node("Less", "STEPS LENGTH", "MASK"),
                node("GreaterOrEqual", "X THOUSAND", "TOO_LOUD"),
                node("Cast", "TOO_LOUD", "INDEX", to=TensorProto.INT64),
                node("Gather", "ONE INDEX", "ONES"),
                node("Add", "X ONES", "MORE"),
                node("Where", "MASK MORE NOTHING", "KEPT"),
                node("CumSum", "KEPT AXIS", "WITHIN"),
                node("Add", "TOTAL_IN WITHIN", "SUMS"),
                node("ReduceSum", "KEPT LAST", "NEW", keepdims=1),
                node("Add", "TOTAL_IN NEW", "TOTAL_OUT"),
                node("Slice", "SUMS START END SECOND TWO", "HALVES"),
                node("Add", "LONG STEP", "LONGER"),
                node("Div", "LONGER TWO", "HALF_LENGTHS"),
                node("Mul", "LONG TWO", "TWICE_LENGTHS"),
                node("Identity", "X", "RAW"),
                node("Sub", "LENGTH LENGTH", "NAUGHT"),
                node("Add", "NAUGHT WIDTH_ALONE", "WIDTH"),
            ],
            [("X", "fp32", [BATCH, "T"]), ("LENGTHS", lengths, [BATCH]), ("TOTAL_IN", "fp32", one)],
            [
                ("SUMS", "fp32", [BATCH, "T"]),
                ("TOTAL_OUT", "fp32", one),
                ("HALVES", "fp32", [BATCH, "H"]),
                ("HALF_LENGTHS", "int64", [BATCH]),
                ("TWICE_LENGTHS", "int64", [BATCH]),
                ("RAW", "fp32", [BATCH, "R"]),
                ("LENGTH", "int64", one),
                ("WIDTH", "int64", one),
            ],
            {
                "ZERO": np.array(0, np.int64),
                "STEP": np.array(1, np.int64),
                "LAST": np.array([-1], np.int64),
                "AXIS": np.array(1, np.int64),
                "ONE": np.array([1], np.float32),
                "THOUSAND": np.array(1000, np.float32),
                "NOTHING": np.array(0, np.float32),
                "START": np.array([0], np.int64),
                "END": np.array([2**31], np.int64),
                "SECOND": np.array([1], np.int64),
                "TWO": np.array([2], np.int64),
            },
        )

    model = Model(
        name,
        build,
        inputs=(
            Tensor(
                "X",
                "fp32",
                (-1,),
                between=(-100, 100),
                ragged=True,
                context=(context, 1) if context else None,
                lengths=("LENGTHS", 1),
            ),
        ),
        outputs=(Tensor("SUMS", "fp32", (-1,)),),
        states=(("TOTAL_IN", "TOTAL_OUT"),),
        parameters={"padded_inputs": "X=LENGTHS"},
    )
    return dataclasses.replace(model, **changes)


# what `masked` can answer too
HALVES = Tensor("HALVES", "fp32", (-1,))
RAW = Tensor("RAW", "fp32", (-1,))
LENGTH = Tensor("LENGTH", "int64", (1,))
WIDTH = Tensor("WIDTH", "int64", (1,))


def padded_lstm(name: str, features: int = 3, hidden: int = 8, **changes) -> Model:
    """An LSTM over [N, T, features] that takes the lengths of its rows (int32, as ONNX says)."""
    rng = np.random.default_rng(11)
    weights = {
        "W": rng.standard_normal((1, 4 * hidden, features)).astype(np.float32) * 0.3,
        "R": rng.standard_normal((1, 4 * hidden, hidden)).astype(np.float32) * 0.3,
        "B": rng.standard_normal((1, 8 * hidden)).astype(np.float32) * 0.3,
        "DIRECTION": np.array([1], np.int64),
    }

    def build():
        state = [1, BATCH, hidden]
        return graph(
            [
                node("Transpose", "X", "BY_TIME", perm=[1, 0, 2]),
                node("LSTM", "BY_TIME W R B LENGTHS H_IN C_IN", "Y H_OUT C_OUT", hidden_size=hidden),
                node("Squeeze", "Y DIRECTION", "FLAT"),
                node("Transpose", "FLAT", "OUTPUT", perm=[1, 0, 2]),
            ],
            [
                ("X", "fp32", [BATCH, "T", features]),
                ("LENGTHS", "int32", [BATCH]),
                ("H_IN", "fp32", state),
                ("C_IN", "fp32", state),
            ],
            [
                ("OUTPUT", "fp32", [BATCH, "T", hidden]),
                ("H_OUT", "fp32", state),
                ("C_OUT", "fp32", state),
            ],
            weights,
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("X", "fp32", (-1, features), ragged=True, lengths=("LENGTHS", 1)),),
        outputs=(Tensor("OUTPUT", "fp32", (-1, hidden)),),
        states=(("H_IN", "H_OUT"), ("C_IN", "C_OUT")),
        parameters={"padded_inputs": "X=LENGTHS"},
        tolerance=1e-5,
    )
    return dataclasses.replace(model, **changes)


def cached(name: str, **changes) -> Model:
    """Keeps all that came: CACHE grows by X (as long as LENGTHS says), and ANSWER adds its sum to X."""

    def build():
        return graph(
            [
                node("Concat", "CACHE_IN X", "CACHE_OUT", axis=1),
                node("ReduceSum", "CACHE_OUT LAST", "SUM", keepdims=1),
                node("Add", "X SUM", "ANSWER"),
                node("Identity", "LENGTHS", "SAME"),
                node("Unsqueeze", "SAME LAST", "LENGTH"),
            ],
            [
                ("X", "fp32", [BATCH, "T"]),
                ("LENGTHS", "int64", [BATCH]),
                ("CACHE_IN", "fp32", [BATCH, "P"]),
            ],
            [
                ("ANSWER", "fp32", [BATCH, "T"]),
                ("LENGTH", "int64", [BATCH, 1]),
                ("CACHE_OUT", "fp32", [BATCH, "P_and_T"]),
            ],
            {"LAST": np.array([-1], np.int64)},
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("X", "fp32", (-1,), between=(-100, 100), ragged=True, lengths=("LENGTHS", 1)),),
        outputs=(Tensor("ANSWER", "fp32", (-1,)), LENGTH),
        states=(("CACHE_IN", "CACHE_OUT"),),
        parameters={"padded_inputs": "X=LENGTHS"},
    )
    return dataclasses.replace(model, **changes)

"""States of several kinds in one model, which plain numpy can follow."""

from __future__ import annotations

import dataclasses

import numpy as np
from onnx import TensorProto

from harness.graphs import BATCH, checked_gather, graph, node, numbers
from harness.model import Model, Tensor


def ledger(name: str = "ledger", **changes) -> Model:
    """Books INPUT * SCALE: SUM [N, 1] adds it, BOTH [2, N, 1] adds it and takes it away, and LOG [N, T] keeps each.

    OUTPUT is the sum, and behind it the log. An INPUT of 1000 and more fails Run.
    """

    def build():
        one = [BATCH, 1]
        return graph(
            [
                node("GreaterOrEqual", "INPUT THOUSAND", "TOO_LARGE"),
                node("Cast", "TOO_LARGE", "INDEX", to=TensorProto.INT64),
                *checked_gather("NOTHING", "INDEX", "ADDED", TensorProto.INT64),
                node("Add", "INPUT ADDED", "GOOD"),
                node("Mul", "GOOD SCALE", "BOOKED"),
                node("Add", "SUM BOOKED", "SUM_OUT"),
                node("Unsqueeze", "BOOKED AXIS_0", "PLUS"),
                node("Neg", "PLUS", "MINUS"),
                node("Concat", "PLUS MINUS", "BOTH_SIDES", axis=0),
                node("Add", "BOTH BOTH_SIDES", "BOTH_OUT"),
                node("Concat", "LOG BOOKED", "LOG_OUT", axis=1),
                node("Concat", "SUM_OUT LOG_OUT", "OUTPUT", axis=1),
            ],
            [
                ("INPUT", "int64", one),
                ("SCALE", "int64", one),
                ("SUM", "int64", one),
                ("BOTH", "int64", [2, BATCH, 1]),
                ("LOG", "int64", [BATCH, "T"]),
            ],
            [
                ("OUTPUT", "int64", [BATCH, "T_after"]),
                ("SUM_OUT", "int64", one),
                ("BOTH_OUT", "int64", [2, BATCH, 1]),
                ("LOG_OUT", "int64", [BATCH, "T_new"]),
            ],
            {
                "THOUSAND": np.array(1000, np.int64),
                "NOTHING": numbers(0),
                "AXIS_0": np.array([0], np.int64),
            },
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "int64", (1,), between=(-99, 99)), Tensor("SCALE", "int64", (1,), between=(1, 5))),
        outputs=(Tensor("OUTPUT", "int64", (-1,)),),
        states=(("SUM", "SUM_OUT"), ("BOTH", "BOTH_OUT"), ("LOG", "LOG_OUT")),
        lengths_at_start={"T": 0},
    )
    return dataclasses.replace(model, **changes)


def booked(value: int, scale: int | None = 1) -> dict[str, np.ndarray]:
    """What `ledger` takes; without a scale, what its sequence holds."""
    inputs = {"INPUT": np.array([[value]], np.int64)}
    return inputs if scale is None else inputs | {"SCALE": np.array([[scale]], np.int64)}

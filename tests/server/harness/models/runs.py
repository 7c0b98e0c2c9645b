"""What a run can do: take long, fail, or let the rows of a batch change each other."""

from __future__ import annotations

import dataclasses

import numpy as np
from onnx import TensorProto, helper

from harness.graphs import BATCH, branch, checked_gather, graph, node, numbers
from harness.model import Model, Tensor


def slow(name: str = "slow", products: int = 250, slow_from: float | None = None, **changes) -> Model:
    """Exact like `counter`, and some milliseconds long: requests pile up while it runs.

    A chain of matrix products runs beside the sum and can't change it, which ONNX Runtime
    does not know. With `slow_from`, only a run with an input of that size or more is slow.
    """
    size, last = 512, f"LINK_{products}"

    def build():
        rng = np.random.default_rng(3)
        nodes = [node("Sub", "SPREAD INPUT", "LINK_0")]
        for i in range(products):
            nodes += [
                node("MatMul", f"LINK_{i} WEIGHT", f"PRODUCT_{i}"),
                node("Tanh", f"PRODUCT_{i}", f"LINK_{i + 1}"),
            ]
        if slow_from is not None:
            then, otherwise = branch(nodes, last), branch([node("Tanh", "INPUT", "FAST")], "FAST")
            nodes = [
                node("ReduceMax", "INPUT", "LARGEST", keepdims=0),
                node("GreaterOrEqual", "LARGEST SLOW_FROM", "IS_SLOW"),
                node("If", "IS_SLOW", "EITHER", then_branch=then, else_branch=otherwise),
            ]
        nodes += [
            node("ReduceMax", last if slow_from is None else "EITHER", "HIGHEST", axes=[1], keepdims=1),
            node("Greater", "HIGHEST TWO", "NEVER"),  # tanh is at most one
            node("Add", "STATE_IN INPUT", "SUM"),
            node("Where", "NEVER TWO SUM", "STATE_OUT"),
            node("Identity", "STATE_OUT", "OUTPUT"),
        ]
        one = [BATCH, 1]
        return graph(
            nodes,
            [("INPUT", "fp32", one), ("STATE_IN", "fp32", one)],
            [("OUTPUT", "fp32", one), ("STATE_OUT", "fp32", one)],
            {
                "SPREAD": rng.standard_normal((1, size)).astype(np.float32),
                "WEIGHT": rng.standard_normal((size, size)).astype(np.float32) / size**0.5,
                "TWO": np.array(2, np.float32),
                "SLOW_FROM": np.array(0 if slow_from is None else slow_from, np.float32),
            },
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "fp32", (1,)),),
        outputs=(Tensor("OUTPUT", "fp32", (1,)),),
        states=(("STATE_IN", "STATE_OUT"),),
    )
    return dataclasses.replace(model, **changes)


def fails(name: str = "fails", **changes) -> Model:
    """A running sum of TABLE[INPUT]: an INPUT of 4 and more is out of the table, and Run fails.

    The node that fails has the model's name.
    """

    def build():
        one = [BATCH, 1]
        return graph(
            [
                *checked_gather("TABLE", "INPUT", "WORTH", TensorProto.INT32, name=name),
                node("Add", "SUM_IN WORTH", "SUM_OUT"),
                node("Identity", "SUM_OUT", "OUTPUT"),
            ],
            [("INPUT", "int64", one), ("SUM_IN", "int32", one)],
            [("OUTPUT", "int32", one), ("SUM_OUT", "int32", one)],
            {"TABLE": numbers(1, 10, 100, 1000)},
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "int64", (1,), between=(0, 3)),),
        outputs=(Tensor("OUTPUT", "int32", (1,)),),
        states=(("SUM_IN", "SUM_OUT"),),
    )
    return dataclasses.replace(model, **changes)


def work(name: str = "work", **changes) -> Model:
    """OUTPUT is the sum of INPUT over a sequence. An INPUT of 1000 and more fails Run.

    The run takes as many rounds of about half a millisecond as the largest WORK of its batch says.

    A loop of matrix products runs beside the sum and can't change it, which ONNX Runtime does not know.
    """
    size = 256
    square = [size, size]

    def build():
        tensor = helper.make_tensor_value_info
        body = helper.make_graph(
            [
                node("Identity", "GO_ON", "GOES_ON"),
                node("MatMul", "LINK WEIGHT", "PRODUCT"),
                node("Tanh", "PRODUCT", "NEXT_LINK"),
            ],
            "body",
            [
                tensor("ROUND", TensorProto.INT64, []),
                tensor("GO_ON", TensorProto.BOOL, []),
                tensor("LINK", TensorProto.FLOAT, square),
            ],
            [tensor("GOES_ON", TensorProto.BOOL, []), tensor("NEXT_LINK", TensorProto.FLOAT, square)],
        )
        one = [BATCH, 1]
        rng = np.random.default_rng(3)
        return graph(
            [
                node("ReduceMax", "WORK", "ROUNDS", keepdims=0),
                node("Loop", "ROUNDS - FIRST_LINK", "LAST_LINK", body=body),
                node("ReduceMax", "LAST_LINK", "HIGHEST", keepdims=0),
                node("Greater", "HIGHEST TWO", "NEVER"),  # tanh is at most one
                node("GreaterOrEqual", "INPUT THOUSAND", "TOO_LARGE"),
                node("Cast", "TOO_LARGE", "INDEX", to=TensorProto.INT64),
                *checked_gather("NOTHING", "INDEX", "ADDED", TensorProto.INT64),
                node("Add", "INPUT ADDED", "GOOD"),
                node("Add", "SUM_IN GOOD", "SUM"),
                node("Where", "NEVER WORK SUM", "SUM_OUT"),
                node("Identity", "SUM_OUT", "OUTPUT"),
            ],
            [("INPUT", "int64", one), ("WORK", "int64", one), ("SUM_IN", "int64", one)],
            [("OUTPUT", "int64", one), ("SUM_OUT", "int64", one)],
            {
                "FIRST_LINK": rng.uniform(-1, 1, square).astype(np.float32),
                "WEIGHT": rng.standard_normal(square).astype(np.float32) / size**0.5,
                "TWO": np.array(2, np.float32),
                "THOUSAND": np.array(1000, np.int64),
                "NOTHING": numbers(0),
            },
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "int64", (1,), between=(-99, 99)), Tensor("WORK", "int64", (1,), between=(0, 0))),
        outputs=(Tensor("OUTPUT", "int64", (1,)),),
        states=(("SUM_IN", "SUM_OUT"),),
    )
    return dataclasses.replace(model, **changes)


def quantized(name: str = "quantized", **changes) -> Model:
    """The sum of the inputs so far, rounded to 8 bits with a scale that is taken over the whole batch."""

    def build():
        row = [BATCH, 4]
        return graph(
            [
                node("Add", "x state", "sum"),
                node("DynamicQuantizeLinear", "sum", "rounded scale zero", name="rounding"),
                node("DequantizeLinear", "rounded scale zero", "y"),
                node("Identity", "y", "next_state"),
            ],
            [("x", "fp32", row), ("state", "fp32", row)],
            [("y", "fp32", row), ("next_state", "fp32", row)],
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("x", "fp32", (4,)),),
        outputs=(Tensor("y", "fp32", (4,)),),
        states=(("state", "next_state"),),
    )
    return dataclasses.replace(model, **changes)

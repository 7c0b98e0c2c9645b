"""Outputs that are more than a row of numbers: several, unlisted ones, scalars, shapes that only a run tells."""

from __future__ import annotations

import dataclasses

import numpy as np
from onnx import TensorProto, helper

from harness.graphs import BATCH, graph, node
from harness.model import Model, Tensor


def two_inputs(name: str = "two_inputs", **changes) -> Model:
    """Two inputs, two outputs, a state that is itself an output, and an output left unlisted."""

    def build():
        shape = [BATCH, 2]
        return graph(
            [
                node("Sub", "LEFT RIGHT", "DIFFERENCE"),
                node("Add", "TOTAL_IN DIFFERENCE", "TOTAL_OUT"),
                node("Neg", "TOTAL_OUT", "UNLISTED"),
            ],
            [("LEFT", "fp32", shape), ("RIGHT", "fp32", shape), ("TOTAL_IN", "fp32", shape)],
            [
                ("DIFFERENCE", "fp32", shape),
                ("TOTAL_OUT", "fp32", shape),
                ("UNLISTED", "fp32", shape),
            ],
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("LEFT", "fp32", (2,)), Tensor("RIGHT", "fp32", (2,))),
        outputs=(Tensor("DIFFERENCE", "fp32", (2,)), Tensor("TOTAL_OUT", "fp32", (2,))),
        states=(("TOTAL_IN", "TOTAL_OUT"),),
    )
    return dataclasses.replace(model, **changes)


def with_a_loss(name: str = "with_a_loss", **changes) -> Model:
    """A counter that also gives the mean of its whole batch, a scalar."""

    def build():
        shape = [BATCH, 2]
        return graph(
            [
                node("Add", "STATE_IN INPUT", "STATE_OUT"),
                node("Identity", "STATE_OUT", "OUTPUT"),
                node("ReduceMean", "STATE_OUT", "LOSS", keepdims=0),
            ],
            [("STATE_IN", "fp32", shape), ("INPUT", "fp32", shape)],
            [("STATE_OUT", "fp32", shape), ("OUTPUT", "fp32", shape), ("LOSS", "fp32", [])],
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "fp32", (2,), between=(-9, 9)),),
        outputs=(Tensor("OUTPUT", "fp32", (2,)), Tensor("LOSS", "fp32", (1,))),
        states=(("STATE_IN", "STATE_OUT"),),
    )
    return dataclasses.replace(model, **changes)


def open_shapes(name: str, ranks: bool = True, **changes) -> Model:
    """STATE_OUT = STATE_IN + INPUT, whose dims (or whose rank too) only a run tells: the model cuts
    all of it down to as many columns as WIDTH says, of five. STATE_IN has four."""

    def build():
        row = [BATCH, 4]
        nodes = [
            node("Add", "STATE_IN INPUT", "SUM"),
            node("Concat", "SUM WIDTH", "FIVE", axis=1),
            node("ReduceMax", "WIDTH", "END_FLOAT", axes=[0], keepdims=0),
            node("Cast", "END_FLOAT", "END", to=TensorProto.INT64),
            node("Slice", "FIVE START END SECOND", "CUT"),
        ]
        if ranks:
            nodes += [node("Identity", "CUT", "STATE_OUT"), node("Neg", "CUT", "OUTPUT")]
        else:
            # two branches of different ranks: the rank is known only after a run
            spread = graph_of("spread", [node("Unsqueeze", "CUT SECOND", "SPREAD")], "SPREAD")
            plain = graph_of("plain", [node("Identity", "CUT", "PLAIN")], "PLAIN")
            nodes += [
                node("Greater", "END_FLOAT MANY", "NEVER_ALONE"),
                node("Squeeze", "NEVER_ALONE", "NEVER"),
                node("If", "NEVER", "STATE_OUT", then_branch=spread, else_branch=plain),
                node("Neg", "STATE_OUT", "OUTPUT"),
            ]
        shape = [None, None]
        made = graph(
            nodes,
            [("INPUT", "fp32", row), ("STATE_IN", "fp32", row), ("WIDTH", "fp32", [BATCH, 1])],
            [("OUTPUT", "fp32", shape), ("STATE_OUT", "fp32", shape)],
            {
                "START": np.array([0], np.int64),
                "SECOND": np.array([1], np.int64),
                "MANY": np.array([1000], np.float32),
            },
        )
        if not ranks:  # which onnx's checker would not have
            for output in made.graph.output:
                output.type.tensor_type.ClearField("shape")
        return made

    def graph_of(called: str, nodes, output: str):
        return helper.make_graph(nodes, called, [], [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)])

    model = Model(
        name,
        build,
        inputs=(
            Tensor("INPUT", "fp32", (4,), between=(-100, 100)),
            Tensor("WIDTH", "fp32", (1,), between=(4, 4)),
        ),
        outputs=(Tensor("OUTPUT", "fp32", (4,)),),
        states=(("STATE_IN", "STATE_OUT"),),
    )
    return dataclasses.replace(model, **changes)

"""ONNX graphs in few words."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from harness.model import TYPES

BATCH = "N"  # the symbolic batch dimension of every graph


def graph(nodes, inputs, outputs, weights: Mapping[str, np.ndarray] | None = None) -> onnx.ModelProto:
    """A checked model of opset 17. Inputs and outputs: (name, type, shape) each."""
    made = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(name, TYPES[t][1], shape) for name, t, shape in inputs],
        [helper.make_tensor_value_info(name, TYPES[t][1], shape) for name, t, shape in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (weights or {}).items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 2)]
    model = helper.make_model(made, opset_imports=opsets, ir_version=8)
    onnx.checker.check_model(model)
    return model


def node(op: str, inputs: str, outputs: str, **attributes):
    """`node("Add", "A B", "C")`; a dash is an optional input that is left out."""
    sources = ["" if text == "-" else text for text in inputs.split()]
    return helper.make_node(op, sources, outputs.split(), **attributes)


def branch(nodes, output: str):
    """A branch of an `If`, with one float output."""
    return helper.make_graph(nodes, output, [], [helper.make_tensor_value_info(output, TYPES["fp32"][1], None)])


def checked_gather(table: str, index: str, output: str, to: int, **attributes):
    """Two nodes that gather from a table of `numbers`. An index beyond it fails Run, on a GPU too: tables of strings are on
    the host, and the Gather of a GPU checks nothing."""
    text = f"{output}_text"
    return [node("Gather", f"{table} {index}", text, **attributes), node("Cast", text, output, to=to)]


def numbers(*values: int) -> np.ndarray:
    """A table for `checked_gather`."""
    return np.array([str(value) for value in values], object)

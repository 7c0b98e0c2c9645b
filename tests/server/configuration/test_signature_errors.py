"""Configurations that disagree with the ONNX model: each disagreement has its own clear error."""

import dataclasses

import numpy as np
import pytest

from harness import models
from harness.graphs import BATCH, graph, node
from harness.model import CORRID, END, READY, START, TYPES, Control, Model, Tensor
from harness.refusals import refused

BASE = models.two_inputs()
LEFT, RIGHT = BASE.inputs
DIFFERENCE, TOTAL = BASE.outputs


def replaced(name: str, **changes) -> Model:
    return dataclasses.replace(BASE, name=f"disagrees_{name}", **changes)


def states_that_differ(name: str, type_in="fp32", type_out="fp32", shape_in=None, shape_out=None) -> Model:
    """A state whose ends have other types or shapes; the model itself is valid."""
    shape_in = shape_in or [BATCH, 2]
    shape_out = shape_out or [BATCH, 2]

    def build():
        target = TYPES[type_out][1]
        dims = [1 if dim == BATCH else dim for dim in shape_out]
        return graph(
            [
                node("Identity", "INPUT", "OUTPUT"),
                node("ReduceMax", "STATE_IN", "TOP", keepdims=0),
                node("Cast", "TOP", "SAME", to=target),
                node("Expand", "SAME SHAPE", "STATE_OUT"),
            ],
            [("INPUT", "fp32", [BATCH, 1]), ("STATE_IN", type_in, shape_in)],
            [("OUTPUT", "fp32", [BATCH, 1]), ("STATE_OUT", type_out, shape_out)],
            {"SHAPE": np.array(dims, np.int64)},
        )

    return Model(
        f"disagrees_{name}",
        build,
        inputs=(Tensor("INPUT", "fp32", (1,)),),
        outputs=(Tensor("OUTPUT", "fp32", (1,)),),
        states=(("STATE_IN", "STATE_OUT"),),
    )


CASES = [
    (replaced("input_missing", inputs=(LEFT, RIGHT, Tensor("UPPER", "fp32", (2,)))), ["UPPER", "input"]),
    (
        replaced("output_missing", outputs=(DIFFERENCE, Tensor("QUOTIENT", "fp32", (2,)))),
        ["QUOTIENT", "output"],
    ),
    (replaced("input_type", inputs=(LEFT, Tensor("RIGHT", "int32", (2,)))), ["RIGHT", "INT32", "FP32"]),
    (
        replaced("output_type", outputs=(Tensor("DIFFERENCE", "fp16", (2,)), TOTAL)),
        ["DIFFERENCE", "FP16", "FP32"],
    ),
    (replaced("input_rank", inputs=(LEFT, Tensor("RIGHT", "fp32", (2, 2)))), ["RIGHT", "2, 2"]),
    (replaced("input_dims", inputs=(LEFT, Tensor("RIGHT", "fp32", (3,)))), ["RIGHT", "3", "2"]),
    (replaced("output_rank", outputs=(Tensor("DIFFERENCE", "fp32", (1, 2)), TOTAL)), ["DIFFERENCE", "1, 2"]),
    (replaced("output_dims", outputs=(Tensor("DIFFERENCE", "fp32", (5,)), TOTAL)), ["DIFFERENCE", "5", "2"]),
    (replaced("input_unfed", inputs=(LEFT,)), ["RIGHT"]),
    (replaced("pair_of_no_input", states=(("NOWHERE_IN", "TOTAL_OUT"),)), ["NOWHERE_IN"]),
    (replaced("pair_of_no_output", states=(("TOTAL_IN", "NOWHERE_OUT"),)), ["NOWHERE_OUT"]),
    (replaced("pair_is_also_input", inputs=(*BASE.inputs, Tensor("TOTAL_IN", "fp32", (2,)))), ["TOTAL_IN"]),
    (dataclasses.replace(models.accumulate("disagrees_reset_unfed"), controls=(Control("REST"),)), ["RESET"]),
    (replaced("constant_is_also_input", constants={"LEFT": 1}), ["LEFT"]),
    (
        dataclasses.replace(
            models.controls("disagrees_id_type"),
            controls=(
                Control("START", START, "int32"),
                Control("END", END, "fp32"),
                Control("READY", READY, "bool"),
                Control("CORRID", CORRID, "int32"),
            ),
        ),
        ["CORRID", "INT32", "UINT64"],
    ),
    (states_that_differ("state_type", type_out="int32"), ["STATE_IN", "STATE_OUT", "FP32", "INT32"]),
    (states_that_differ("state_dims", shape_out=[BATCH, 3]), ["STATE_IN", "STATE_OUT", "2", "3"]),
    (states_that_differ("state_rank", shape_out=[BATCH, 2, 1]), ["STATE_IN", "STATE_OUT"]),
    (states_that_differ("state_axis", shape_in=[BATCH, 2], shape_out=[2, BATCH]), ["STATE_IN", "STATE_OUT"]),
    (
        states_that_differ("state_without_batch", shape_in=[3, 2], shape_out=[3, 2]),
        ["STATE_IN", "batch"],
    ),
]


IDS = [model.name.removeprefix("disagrees_") for model, _ in CASES]


@pytest.mark.parametrize(("model", "words"), CASES, ids=IDS)
def test_a_disagreement_is_refused_and_names_the_tensor(deployment, model, words):
    refused(deployment, model, *words)


def test_a_swapped_pair_is_told_from_a_name_that_is_missing(deployment):
    model = models.accumulate("swapped_pair")
    ((state_in, state_out),) = model.states
    swapped = model.variant(model.name, states=((state_out, state_in),))
    refused(deployment, swapped, f"'{state_out}' is an output", f"write <<<{state_in}, {state_out}>>>")

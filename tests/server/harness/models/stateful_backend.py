"""The example models of NVIDIA's stateful_backend."""

from __future__ import annotations

import dataclasses

import numpy as np

from harness.graphs import graph, node
from harness.model import CORRID, END, START, TYPES, Control, Model, Tensor


def summed(
    name: str,
    parts: dict[str, tuple[str, str]],
    width: int,
    *,
    corrid: str = "uint64",
    initial: tuple[float, ...] = (),
    **changes,
) -> Model:
    """The signature of NVIDIA's own example models: inputs [seq, batch, width], batch inside.

    `parts` has, for each suffix of the names, the type of the input and of its state. The
    state is the sum of all that came in a sequence, over the first axis; the answer is the
    sum plus the input. ResetSequence puts `initial` (zeros by default) in the place of the
    state. The controls are written as int32, which the model's BOOL input is not.
    """
    initial = initial or (0,) * width

    def named(what: str, suffix: str) -> str:
        return f"{what}_{suffix}" if suffix else what

    def build():
        nodes, inputs, outputs, weights = [], [], [], {"FIRST": np.array([0], np.int64)}
        for suffix, (type, state) in parts.items():
            text = {
                what: named(what, suffix)
                for what in (
                    "Input",
                    "Output",
                    "Accumulate_In",
                    "Accumulate_Out",
                    "WIDE",
                    "SUM",
                    "OLD",
                    "INITIAL",
                )
            }
            weights[text["INITIAL"]] = np.array(initial, TYPES[state][0])
            total = named("TOTAL", suffix)
            nodes += [
                node("Cast", text["Input"], text["WIDE"], to=TYPES[state][1]),
                node("ReduceSum", f"{text['WIDE']} FIRST", text["SUM"], keepdims=0),
                node("Where", f"ResetSequence {text['INITIAL']} {text['Accumulate_In']}", text["OLD"]),
                node("Add", f"{text['SUM']} {text['OLD']}", text["Accumulate_Out"]),
                node("Add", f"{text['WIDE']} {text['Accumulate_Out']}", total),
                node("Cast", total, text["Output"], to=TYPES[type][1]),
            ]
            inputs += [
                (text["Input"], type, ["seq", "batch", width]),
                (text["Accumulate_In"], state, ["batch", width]),
            ]
            outputs += [
                (text["Output"], type, ["seq", "batch", width]),
                (text["Accumulate_Out"], state, ["batch", width]),
            ]
        return graph(nodes, [*inputs, ("ResetSequence", "bool", ["batch", 1])], outputs, weights)

    def tensor(what: str, suffix: str) -> Tensor:
        type = parts[suffix][0]
        between = None if type == "bool" else (0, 3)
        return Tensor(named(what, suffix), type, (4, -1, width), between, batch_inside=True)

    model = Model(
        name,
        build,
        inputs=tuple(tensor("Input", suffix) for suffix in parts),
        outputs=tuple(tensor("Output", suffix) for suffix in parts),
        states=tuple((named("Accumulate_In", suffix), named("Accumulate_Out", suffix)) for suffix in parts),
        controls=(
            Control("ResetSequence", START, "int32"),
            Control("EndSequence", END, "int32"),
            Control("CORRID", CORRID, corrid),
        ),
        max_batch_size=16,
        max_candidates=1280,
        idle_us=100_000_000,
        oldest="max_queue_delay_microseconds: 2000",
    )
    return dataclasses.replace(model, **changes)


def accumulate_fp32(name: str = "accumulate_fp32", **changes) -> Model:
    return summed(name, {"": ("fp32", "fp32")}, 5, **changes)


def accumulate_int32(name: str = "accumulate_int32", **changes) -> Model:
    return summed(name, {"": ("int32", "int32")}, 5, **changes)


def mixed_io_bool_int8(name: str = "mixed_io_bool_int8", **changes) -> Model:
    return summed(name, {"bool": ("bool", "fp32"), "int8": ("int8", "fp32")}, 3, corrid="string", **changes)


def mixed_io_int32_fp16(name: str = "mixed_io_int32_fp16", **changes) -> Model:
    return summed(name, {"int32": ("int32", "int32"), "fp16": ("fp16", "fp16")}, 7, corrid="string", **changes)

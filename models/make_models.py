"""Writes the ONNX file of every model in this repository; the config.pbtxt files beside them are kept by hand.

Deterministic, and quick when nothing is to do. `lstm` and `accumulate` return the model, for benches and tests that
want other sizes.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import ModelProto

HERE = Path(__file__).resolve().parent
OPSET = 17
IR_VERSION = 8  # read by every ONNX Runtime since 1.13


def accumulate(columns: int = 4, summed: int = 5) -> ModelProto:
    """The running sum of Input [B, columns, summed] over its last axis, in Accumulate [B, columns].

    ResetSequence [B, 1], a boolean, lets a row start from zero.
    """
    from onnx import TensorProto, helper

    tensor = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Where", ["ResetSequence", "zero", "Accumulate_In"], ["before"]),
        helper.make_node("ReduceSum", ["Input", "last_axis"], ["sum"], keepdims=0),
        helper.make_node("Add", ["before", "sum"], ["Accumulate_Out"]),
        helper.make_node("Identity", ["Accumulate_Out"], ["Output"]),
    ]
    graph = helper.make_graph(
        nodes,
        "accumulate",
        inputs=[
            tensor("Input", TensorProto.FLOAT, ["B", columns, summed]),
            tensor("ResetSequence", TensorProto.BOOL, ["B", 1]),
            tensor("Accumulate_In", TensorProto.FLOAT, ["B", columns]),
        ],
        outputs=[
            tensor("Output", TensorProto.FLOAT, ["B", columns]),
            tensor("Accumulate_Out", TensorProto.FLOAT, ["B", columns]),
        ],
        initializer=[
            helper.make_tensor("zero", TensorProto.FLOAT, [], [0.0]),
            helper.make_tensor("last_axis", TensorProto.INT64, [1], [-1]),
        ],
    )
    return _model(graph)


def lstm(features: int = 80, hidden: int = 64, layers: int = 2, seed: int = 1) -> ModelProto:
    """One step of a stack of LSTM layers with random weights: input [B, features], output [B, hidden].

    States h and c of shape [layers, B, hidden]. Nothing resets them but the one who keeps them.
    """
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(seed)
    constants = [numpy_helper.from_array(np.array([0], np.int64), "first")]

    def constant(name: str, *shape: int) -> str:
        values = random.uniform(-1, 1, shape) / np.sqrt(hidden)
        constants.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name

    h_before, c_before = ([f"{state}_before_{n}" for n in range(layers)] for state in "hc")
    h_after, c_after = ([f"{state}_after_{n}" for n in range(layers)] for state in "hc")
    nodes = [
        helper.make_node("Unsqueeze", ["input", "first"], ["x_0"]),
        helper.make_node("Split", ["h_in"], h_before, axis=0),
        helper.make_node("Split", ["c_in"], c_before, axis=0),
    ]
    for n in range(layers):
        width = features if n == 0 else hidden
        weights = [
            constant(f"W_{n}", 1, 4 * hidden, width),
            constant(f"R_{n}", 1, 4 * hidden, hidden),
            constant(f"B_{n}", 1, 8 * hidden),
        ]
        nodes += [
            helper.make_node(
                "LSTM",
                [f"x_{n}", *weights, "", h_before[n], c_before[n]],
                ["", h_after[n], c_after[n]],
                hidden_size=hidden,
            ),
            # one time step: the last hidden state [1, B, hidden] is the next layer's input
            helper.make_node("Identity", [h_after[n]], [f"x_{n + 1}"]),
        ]
    nodes += [
        helper.make_node("Squeeze", [f"x_{layers}", "first"], ["output"]),
        helper.make_node("Concat", h_after, ["h_out"], axis=0),
        helper.make_node("Concat", c_after, ["c_out"], axis=0),
    ]
    tensor = helper.make_tensor_value_info
    state: list[str | int | None] = [layers, "B", hidden]
    graph = helper.make_graph(
        nodes,
        "lstm",
        inputs=[
            tensor("input", TensorProto.FLOAT, ["B", features]),
            tensor("h_in", TensorProto.FLOAT, state),
            tensor("c_in", TensorProto.FLOAT, state),
        ],
        outputs=[
            tensor("output", TensorProto.FLOAT, ["B", hidden]),
            tensor("h_out", TensorProto.FLOAT, state),
            tensor("c_out", TensorProto.FLOAT, state),
        ],
        initializer=constants,
    )
    return _model(graph)


#: What `speller` has read.
WORDS = (
    "state states stated stateful statement start started station stream streams streaming sequence sequences sequel "
    "server servers serve served service step steps steep stem snapshot snap clone cloned close clear resume result "
    "request requests require model models mode modern memory measure answer answers another batch batches beam beams"
)
#: A letter's number is its place here; the space stands before and behind each word.
LETTERS = " abcdefghijklmnopqrstuvwxyz"


def speller() -> ModelProto:
    """Letters after letters: LETTER [B, 1], a number, gives LOG_PROBABILITIES [B, 27] of the letter after it.

    The state BEFORE [B, 1] is the letter before LETTER; zero, the space, at first.
    """
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    count = len(LETTERS)
    seen = np.full((count, count, count), 0.01, np.float32)
    for word in WORDS.split():
        numbers = [LETTERS.index(letter) for letter in f"  {word} "]
        for three in zip(numbers, numbers[1:], numbers[2:], strict=False):
            seen[three] += 1
    table = np.log(seen / seen.sum(axis=2, keepdims=True)).reshape(count * count, count)
    nodes = [
        helper.make_node("Mul", ["BEFORE", "count"], ["row_of_before"]),
        helper.make_node("Add", ["row_of_before", "LETTER"], ["row"]),
        helper.make_node("Squeeze", ["row", "last_axis"], ["rows"]),
        helper.make_node("Gather", ["table", "rows"], ["LOG_PROBABILITIES"]),
        helper.make_node("Identity", ["LETTER"], ["BEFORE_NEXT"]),
    ]
    tensor = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "speller",
        inputs=[tensor("LETTER", TensorProto.INT64, ["B", 1]), tensor("BEFORE", TensorProto.INT64, ["B", 1])],
        outputs=[
            tensor("LOG_PROBABILITIES", TensorProto.FLOAT, ["B", count]),
            tensor("BEFORE_NEXT", TensorProto.INT64, ["B", 1]),
        ],
        initializer=[
            numpy_helper.from_array(table, "table"),
            numpy_helper.from_array(np.array(count, np.int64), "count"),
            numpy_helper.from_array(np.array([-1], np.int64), "last_axis"),
        ],
    )
    return _model(graph)


def _model(graph) -> ModelProto:
    import onnx
    from onnx import helper

    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="triton-stateful",
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def _write(path: Path, build: Callable[[], ModelProto]) -> None:
    """Writes what build() answers, unless the file is newer than this script."""
    if path.exists() and path.stat().st_mtime >= Path(__file__).stat().st_mtime:
        return
    _place(path, lambda new: new.write_bytes(build().SerializeToString(deterministic=True)))


def _copy(path: Path, source: Path) -> None:
    """The same file, byte by byte."""
    if not (path.exists() and filecmp.cmp(source, path, shallow=False)):
        _place(path, lambda new: shutil.copyfile(source, new))


def _place(path: Path, fill: Callable[[Path], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    fill(new)
    os.replace(new, path)
    print(f"models: wrote {path.relative_to(HERE)}", file=sys.stderr)


def main() -> None:
    """Brings every model.onnx up to date. Wants scripts/ in PYTHONPATH, for the place of the speech model."""
    from support import paths

    _copy(HERE / "silero_vad/1/model.onnx", paths.SILERO_VAD)
    _write(HERE / "accumulate/1/model.onnx", accumulate)
    _write(HERE / "lstm/1/model.onnx", lstm)
    _write(HERE / "speller/1/model.onnx", speller)


if __name__ == "__main__":
    main()

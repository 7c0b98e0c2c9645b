"""States of one size, whole numbers and simple sums: what most tests need."""

from __future__ import annotations

import dataclasses

import numpy as np
from onnx import TensorProto

from harness.graphs import BATCH, graph, node
from harness.model import START, TYPES, Control, Model, Tensor


def accumulate(name: str = "accumulate", reset: str = "bool", **changes) -> Model:
    """The original backend's example: the running sum of all that came, over the last dimension.

    The model's own reset input (START) clears the sum. Whole numbers are drawn, so the sums
    are exact in whatever order they are made.
    """

    def build():
        is_reset = (
            [node("Identity", "RESET", "CLEAR")]
            if reset == "bool"
            else [node("Cast", "RESET", "CLEAR", to=TensorProto.BOOL)]
        )
        return graph(
            [
                *is_reset,
                node("Where", "CLEAR ZERO SUM_IN", "KEPT"),
                node("ReduceSum", "INPUT LAST", "NEW", keepdims=1),
                node("Add", "KEPT NEW", "SUM_OUT"),
                node("Identity", "SUM_OUT", "OUTPUT"),
            ],
            [
                ("INPUT", "fp32", [BATCH, "length"]),
                ("RESET", reset, [BATCH, 1]),
                ("SUM_IN", "fp32", [BATCH, 1]),
            ],
            [("OUTPUT", "fp32", [BATCH, 1]), ("SUM_OUT", "fp32", [BATCH, 1])],
            {"ZERO": np.zeros((1, 1), np.float32), "LAST": np.array([-1], np.int64)},
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "fp32", (-1,), between=(-1000, 1000)),),
        outputs=(Tensor("OUTPUT", "fp32", (1,)),),
        states=(("SUM_IN", "SUM_OUT"),),
        controls=(Control("RESET", START, reset),),
    )
    return dataclasses.replace(model, **changes)


def counter(type: str = "fp32", name: str | None = None, width: int = 4, **changes) -> Model:
    """OUTPUT = STATE + INPUT element by element (XOR for bool), in the given data type.

    No reset input: a sequence starts from zeros because the backend says so. ONNX Runtime
    adds only some types itself; the others are added in int32 or fp32 between casts.
    """
    via = {"int8": "int32", "uint8": "int32", "fp16": "fp32"}.get(type)

    def build():
        if type == "bool":
            nodes = [node("Xor", "STATE_IN INPUT", "STATE_OUT")]
        elif via is None:
            nodes = [node("Add", "STATE_IN INPUT", "STATE_OUT")]
        else:
            nodes = [
                node("Cast", "STATE_IN", "WIDE_STATE", to=TYPES[via][1]),
                node("Cast", "INPUT", "WIDE_INPUT", to=TYPES[via][1]),
                node("Add", "WIDE_STATE WIDE_INPUT", "WIDE_SUM"),
                node("Cast", "WIDE_SUM", "STATE_OUT", to=TYPES[type][1]),
            ]
        shape = [BATCH, width]
        return graph(
            [*nodes, node("Identity", "STATE_OUT", "OUTPUT")],
            [("INPUT", type, shape), ("STATE_IN", type, shape)],
            [("OUTPUT", type, shape), ("STATE_OUT", type, shape)],
        )

    between = {"int8": (-4, 4), "uint8": (0, 9)}.get(type)
    model = Model(
        name or f"counter_{type}",
        build,
        inputs=(Tensor("INPUT", type, (width,), between=between),),
        outputs=(Tensor("OUTPUT", type, (width,)),),
        states=(("STATE_IN", "STATE_OUT"),),
    )
    return dataclasses.replace(model, **changes)


def echo(type: str = "fp32", name: str | None = None, dims: tuple[int, ...] = (4,), **changes) -> Model:
    """Answers what came in the request before (zeros at first): nothing is computed, so every
    bit of what is kept shows."""

    def build():
        shape = [BATCH, *dims]
        return graph(
            [node("Identity", "STATE_IN", "OUTPUT"), node("Identity", "INPUT", "STATE_OUT")],
            [("INPUT", type, shape), ("STATE_IN", type, shape)],
            [("OUTPUT", type, shape), ("STATE_OUT", type, shape)],
        )

    model = Model(
        name or f"echo_{type}",
        build,
        inputs=(Tensor("INPUT", type, dims),),
        outputs=(Tensor("OUTPUT", type, dims),),
        states=(("STATE_IN", "STATE_OUT"),),
    )
    return dataclasses.replace(model, **changes)


def lstm(name: str = "lstm", features: int = 6, hidden: int = 16, **changes) -> Model:
    """Two LSTM layers whose states are [2, N, hidden]: the batch axis is the second.

    The answers may differ from the oracle's in the last bits: ONNX Runtime's own matrix
    products sum in another order at another batch size.
    """
    rng = np.random.default_rng(7)

    def weight(*shape):
        return rng.standard_normal(shape).astype(np.float32) * 0.3

    weights = {"ZERO_AXIS": np.array([0], np.int64)}
    for layer, width in ((0, features), (1, hidden)):
        weights[f"W{layer}"] = weight(1, 4 * hidden, width)
        weights[f"R{layer}"] = weight(1, 4 * hidden, hidden)
        weights[f"B{layer}"] = weight(1, 8 * hidden)

    def build():
        def layer(index, source):
            return [
                node(
                    "LSTM",
                    f"{source} W{index} R{index} B{index} - H{index} C{index}",
                    f"Y{index} HN{index} CN{index}",
                    hidden_size=hidden,
                ),
                node("Squeeze", f"Y{index} ZERO_AXIS", f"SEQUENCE{index}"),
            ]

        nodes = [
            node("Unsqueeze", "INPUT ZERO_AXIS", "X0"),
            node("Split", "H_IN", "H0 H1", axis=0),
            node("Split", "C_IN", "C0 C1", axis=0),
            *layer(0, "X0"),
            *layer(1, "SEQUENCE0"),
            node("Concat", "HN0 HN1", "H_OUT", axis=0),
            node("Concat", "CN0 CN1", "C_OUT", axis=0),
            node("Squeeze", "SEQUENCE1 ZERO_AXIS", "OUTPUT"),
        ]
        state = [2, BATCH, hidden]
        return graph(
            nodes,
            [("INPUT", "fp32", [BATCH, features]), ("H_IN", "fp32", state), ("C_IN", "fp32", state)],
            [("OUTPUT", "fp32", [BATCH, hidden]), ("H_OUT", "fp32", state), ("C_OUT", "fp32", state)],
            weights,
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "fp32", (features,)),),
        outputs=(Tensor("OUTPUT", "fp32", (hidden,)),),
        states=(("H_IN", "H_OUT"), ("C_IN", "C_OUT")),
        tolerance=1e-5,
    )
    return dataclasses.replace(model, **changes)


def crossed(name: str = "crossed", **changes) -> Model:
    """Two states of one shape whose inputs sort A, B and whose outputs sort the other way.

    A counts what came, B subtracts twice that: pairing by sort order swaps them.
    """

    def build():
        shape = [BATCH, 3]
        return graph(
            [
                node("Add", "A_IN INPUT", "Z_OUT"),
                node("Mul", "INPUT TWO", "DOUBLE"),
                node("Sub", "B_IN DOUBLE", "Y_OUT"),
                node("Concat", "Z_OUT Y_OUT", "OUTPUT", axis=1),
            ],
            [("INPUT", "fp32", shape), ("A_IN", "fp32", shape), ("B_IN", "fp32", shape)],
            [("OUTPUT", "fp32", [BATCH, 6]), ("Z_OUT", "fp32", shape), ("Y_OUT", "fp32", shape)],
            {"TWO": np.array(2, np.float32)},
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "fp32", (3,)),),
        outputs=(Tensor("OUTPUT", "fp32", (6,)),),
        states=(("A_IN", "Z_OUT"), ("B_IN", "Y_OUT")),
    )
    return dataclasses.replace(model, **changes)


def axes(name: str = "axes", **changes) -> Model:
    """Three states with the batch first, in the middle and last; the answer shows every element."""

    def build():
        return graph(
            [
                node("Add", "FIRST_IN INPUT", "FIRST_OUT"),
                node("Unsqueeze", "INPUT AXIS_0", "ROWS"),
                node("Mul", "ROWS PACE_0", "SCALED_ROWS"),
                node("Add", "MIDDLE_IN SCALED_ROWS", "MIDDLE_OUT"),
                node("Transpose", "INPUT", "COLUMNS", perm=[1, 0]),
                node("Unsqueeze", "COLUMNS AXIS_1", "SPREAD"),
                node("Mul", "SPREAD PACE_1", "SCALED_SPREAD"),
                node("Sub", "LAST_IN SCALED_SPREAD", "LAST_OUT"),
                node("Transpose", "MIDDLE_OUT", "MIDDLE_BY_ROW", perm=[1, 0, 2]),
                node("Reshape", "MIDDLE_BY_ROW SIX", "MIDDLE_FLAT"),
                node("Transpose", "LAST_OUT", "LAST_BY_ROW", perm=[2, 0, 1]),
                node("Reshape", "LAST_BY_ROW SIX", "LAST_FLAT"),
                node("Concat", "FIRST_OUT MIDDLE_FLAT LAST_FLAT", "OUTPUT", axis=1),
            ],
            [
                ("INPUT", "fp32", [BATCH, 2]),
                ("FIRST_IN", "fp32", [BATCH, 2]),
                ("MIDDLE_IN", "fp32", [3, BATCH, 2]),
                ("LAST_IN", "fp32", [2, 3, BATCH]),
            ],
            [
                ("OUTPUT", "fp32", [BATCH, 14]),
                ("FIRST_OUT", "fp32", [BATCH, 2]),
                ("MIDDLE_OUT", "fp32", [3, BATCH, 2]),
                ("LAST_OUT", "fp32", [2, 3, BATCH]),
            ],
            {
                "AXIS_0": np.array([0], np.int64),
                "AXIS_1": np.array([1], np.int64),
                "SIX": np.array([-1, 6], np.int64),
                "PACE_0": np.array([1.0, 0.5, -3.0], np.float32).reshape(3, 1, 1),
                "PACE_1": np.array([1.0, 0.5, -3.0], np.float32).reshape(1, 3, 1),
            },
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "fp32", (2,)),),
        outputs=(Tensor("OUTPUT", "fp32", (14,)),),
        states=(("FIRST_IN", "FIRST_OUT"), ("MIDDLE_IN", "MIDDLE_OUT"), ("LAST_IN", "LAST_OUT")),
    )
    return dataclasses.replace(model, **changes)


def many_states(name: str = "many_states", count: int = 40, **changes) -> Model:
    """Forty small states of widths 1 to 5, each growing at its own pace."""

    def build():
        nodes, inputs, outputs, weights = [], [("INPUT", "fp32", [BATCH, 1])], [], {}
        for i in range(count):
            shape = [BATCH, 1 + i % 5]
            weights[f"PACE_{i}"] = np.array(i + 1, np.float32)
            nodes += [
                node("Mul", f"INPUT PACE_{i}", f"GROWTH_{i}"),
                node("Add", f"S{i}_IN GROWTH_{i}", f"S{i}_OUT"),
            ]
            inputs.append((f"S{i}_IN", "fp32", shape))
            outputs.append((f"S{i}_OUT", "fp32", shape))
        nodes.append(node("Concat", " ".join(f"S{i}_OUT" for i in range(count)), "OUTPUT", axis=1))
        outputs.append(("OUTPUT", "fp32", [BATCH, width]))
        return graph(nodes, inputs, outputs, weights)

    width = sum(1 + i % 5 for i in range(count))
    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "fp32", (1,)),),
        outputs=(Tensor("OUTPUT", "fp32", (width,)),),
        states=tuple((f"S{i}_IN", f"S{i}_OUT") for i in range(count)),
    )
    return dataclasses.replace(model, **changes)


def speech_like(name: str = "speech_like", rate: int = 16000, **changes) -> Model:
    """Signature of Silero VAD: a scalar input, a state [2, N, 8] and outputs whose dims are open.

    `gain` is a vector that no request carries either.
    """

    def build():
        return graph(
            [
                node("Cast", "sr", "RATE", to=TensorProto.FLOAT),
                node("Div", "RATE THOUSAND", "FACTOR"),
                node("ReduceSum", "input LAST", "LOUDNESS", keepdims=1),
                node("Mul", "LOUDNESS FACTOR", "WEIGHED"),
                node("Mul", "WEIGHED gain", "GAINED"),  # [N, 2]
                node("Transpose", "GAINED", "BY_LAYER", perm=[1, 0]),
                node("Unsqueeze", "BY_LAYER LAST", "SPREAD"),  # [2, N, 1]
                node("Add", "state SPREAD", "stateN"),
                node("Transpose", "stateN", "BY_ROW", perm=[1, 0, 2]),
                node("Reshape", "BY_ROW FLAT", "output"),
            ],
            [
                ("input", "fp32", [BATCH, "samples"]),
                ("state", "fp32", [2, BATCH, 8]),
                ("sr", "int64", []),
                ("gain", "fp32", [2]),
            ],
            [("output", "fp32", [None, None]), ("stateN", "fp32", [None, None, None])],
            {
                "THOUSAND": np.array(1000, np.float32),
                "LAST": np.array([-1], np.int64),
                "FLAT": np.array([-1, 16], np.int64),
            },
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("input", "fp32", (-1,), between=(-8, 8)),),
        outputs=(Tensor("output", "fp32", (16,)),),
        states=(("state", "stateN"),),
        constants={"sr": rate, "gain": [1.5, -2]},
    )
    return dataclasses.replace(model, **changes)

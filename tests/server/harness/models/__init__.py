"""The models that these tests serve: small graphs, each with one thing worth testing.

Each function takes the model's name and, as keywords, any other field of `Model`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from onnx import TensorProto, helper

from harness.graphs import BATCH, graph, node
from harness.model import CORRID, END, READY, START, TYPES, Control, Model, State, Tensor


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


# unusual values for no and yes, which nobody can guess
UNUSUAL = {"bool": (0, 1), "int32": (5, -7), "fp32": (0.25, 2.5)}


def controls(
    name: str = "controls",
    start: str = "int32",
    end: str = "fp32",
    ready: str = "bool",
    corrid: str = "uint64",
    counts: bool = True,
    **changes,
) -> Model:
    """Takes START, END, READY and the id, each of the given type, and answers what it was fed.

    `counts` adds what the requests carry up; without it there is no state.
    """
    types = {START: start, END: end, READY: ready, CORRID: corrid}
    fed = tuple(Control(kind.rpartition("_")[2], kind, type, UNUSUAL.get(type, (0, 1))) for kind, type in types.items())

    added = "COUNT_IN" if counts else "INPUT"

    def build():
        one = [BATCH, 1]
        return graph(
            [
                node("Add", f"{added} INPUT", "COUNT_OUT"),
                *(node("Identity", control.name, f"{control.name}_SEEN") for control in fed),
            ],
            [
                *((name, "int64", one) for name in dict.fromkeys(["INPUT", added])),
                *((control.name, control.type, one) for control in fed),
            ],
            [
                ("COUNT_OUT", "int64", one),
                *((f"{control.name}_SEEN", control.type, one) for control in fed),
            ],
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "int64", (1,)),),
        outputs=(
            Tensor("COUNT_OUT", "int64", (1,)),
            *(Tensor(f"{control.name}_SEEN", control.type, (1,)) for control in fed),
        ),
        states=(("COUNT_IN", "COUNT_OUT"),) if counts else (),
        controls=fed,
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


def fails(name: str = "fails", **changes) -> Model:
    """A running sum of TABLE[INPUT]: an INPUT of 4 and more is out of the table, and Run fails."""

    def build():
        one = [BATCH, 1]
        return graph(
            [
                node("Gather", "TABLE INPUT", "WORTH"),
                node("Add", "SUM_IN WORTH", "SUM_OUT"),
                node("Identity", "SUM_OUT", "OUTPUT"),
            ],
            [("INPUT", "int64", one), ("SUM_IN", "int32", one)],
            [("OUTPUT", "int32", one), ("SUM_OUT", "int32", one)],
            {"TABLE": np.array([1, 10, 100, 1000], np.int32)},
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "int64", (1,), between=(0, 3)),),
        outputs=(Tensor("OUTPUT", "int32", (1,)),),
        states=(("SUM_IN", "SUM_OUT"),),
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


def slow(name: str = "slow", products: int = 250, **changes) -> Model:
    """Exact like `counter`, and some milliseconds long: requests pile up while it runs.

    A chain of matrix products runs beside the sum and can't change it, which ONNX Runtime
    does not know.
    """
    size = 512

    def build():
        rng = np.random.default_rng(3)
        nodes = [node("Sub", "SPREAD INPUT", "LINK_0")]
        for i in range(products):
            nodes += [
                node("MatMul", f"LINK_{i} WEIGHT", f"PRODUCT_{i}"),
                node("Tanh", f"PRODUCT_{i}", f"LINK_{i + 1}"),
            ]
        nodes += [
            node("ReduceMax", f"LINK_{products}", "HIGHEST", axes=[1], keepdims=1),
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


# ---- inputs that no plain [batch, ...] tensor is: without a batch dimension, with a default, with
# ---- what came before in front, of any length


def knob(name: str, type: str = "fp32", shape: tuple[int, ...] = (), **changes) -> Model:
    """STATE_OUT = STATE_IN + INPUT * KNOB, where KNOB has no batch dimension: [], [1] or [2].

    A KNOB of strings is a word with a number: "one", "two", "three".
    """

    def build():
        if type == "string":
            words = {"keys_strings": ["one", "two", "three"], "values_floats": [1.0, 2.0, 3.0]}
            factor = node("LabelEncoder", "KNOB", "FACTOR", domain="ai.onnx.ml", **words)
        else:
            factor = node("Cast", "KNOB", "FACTOR", to=TensorProto.FLOAT)
        row = [BATCH, 2]
        return graph(
            [
                factor,
                node("Mul", "INPUT FACTOR", "GROWTH"),
                node("Add", "STATE_IN GROWTH", "STATE_OUT"),
                node("Identity", "STATE_OUT", "OUTPUT"),
            ],
            [("INPUT", "fp32", row), ("STATE_IN", "fp32", row), ("KNOB", type, list(shape))],
            [("OUTPUT", "fp32", row), ("STATE_OUT", "fp32", row)],
        )

    between = None if type in ("bool", "string") else (1, 3)
    model = Model(
        name,
        build,
        inputs=(
            Tensor("INPUT", "fp32", (2,), between=(-100, 100)),
            Tensor("KNOB", type, shape or (1,), between, unbatched=shape),
        ),
        outputs=(Tensor("OUTPUT", "fp32", (2,)),),
        states=(("STATE_IN", "STATE_OUT"),),
    )
    return dataclasses.replace(model, **changes)


def defaults(name: str, **changes) -> Model:
    """STATE_OUT = STATE_IN + INPUT * GAIN + OFFSET: both have a default in the model (2 and 100),
    an initializer that is a graph input too. No request carries them."""

    def build():
        row = [BATCH, 2]
        return graph(
            [
                node("Mul", "INPUT GAIN", "GAINED"),
                node("Add", "GAINED OFFSET", "GROWTH"),
                node("Add", "STATE_IN GROWTH", "STATE_OUT"),
                node("Identity", "STATE_OUT", "OUTPUT"),
            ],
            [
                ("INPUT", "fp32", row),
                ("STATE_IN", "fp32", row),
                ("GAIN", "fp32", [1]),
                ("OFFSET", "fp32", []),
            ],
            [("OUTPUT", "fp32", row), ("STATE_OUT", "fp32", row)],
            {"GAIN": np.array([2], np.float32), "OFFSET": np.array(100, np.float32)},
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "fp32", (2,), between=(-100, 100)),),
        outputs=(Tensor("OUTPUT", "fp32", (2,)),),
        states=(("STATE_IN", "STATE_OUT"),),
    )
    return dataclasses.replace(model, **changes)


def framed(
    name: str,
    shape: list,
    context: tuple[int, int],
    dims: tuple[int, ...],
    says: str | None = None,
    *,
    type: str = "fp32",
    batch_inside: bool = False,
    out: tuple[int, ...] | None = None,
    **changes,
) -> Model:
    """Answers FRAMES `shape` as the model was fed it, context and all, and counts its runs.

    `context` is what the oracle goes by: elements, and the graph's axis. `says` is what the
    configuration says: the elements alone where nothing is given.
    """

    def build():
        one = [BATCH, 1]
        return graph(
            [
                node("Identity", "FRAMES", "WINDOW"),
                node("Add", "COUNT_IN ONE", "COUNT_OUT"),
                node("Identity", "COUNT_OUT", "COUNT"),
            ],
            [("FRAMES", type, shape), ("COUNT_IN", "int64", one)],
            [("WINDOW", type, shape), ("COUNT_OUT", "int64", one), ("COUNT", "int64", one)],
            {"ONE": np.array(1, np.int64)},
        )

    if out is None:
        graph_dims = tuple(-1 if isinstance(dim, str) else dim for dim in shape)
        out = graph_dims if batch_inside else graph_dims[1:]
    model = Model(
        name,
        build,
        inputs=(Tensor("FRAMES", type, dims, batch_inside=batch_inside, context=context),),
        outputs=(Tensor("WINDOW", type, out, batch_inside=batch_inside), Tensor("COUNT", "int64", (1,))),
        states=(("COUNT_IN", "COUNT_OUT"),),
        parameters={"input_context": says or f"FRAMES={context[0]}"},
    )
    return dataclasses.replace(model, **changes)


def framed_or_fails(name: str, **changes) -> Model:
    """SUM of what came with its context of 3, weighed by TABLE[INDEX]: an INDEX of 4 and more is
    out of the table, and Run fails."""

    def build():
        one = [BATCH, 1]
        return graph(
            [
                node("Gather", "TABLE INDEX", "WEIGHT"),
                node("ReduceSum", "FRAMES LAST", "LOUDNESS", keepdims=1),
                node("Mul", "LOUDNESS WEIGHT", "WEIGHED"),
                node("Add", "SUM_IN WEIGHED", "SUM_OUT"),
                node("Identity", "FRAMES", "WINDOW"),
            ],
            [("FRAMES", "fp32", [BATCH, "T"]), ("INDEX", "int64", one), ("SUM_IN", "fp32", one)],
            [("WINDOW", "fp32", [BATCH, "T"]), ("SUM_OUT", "fp32", one)],
            {"TABLE": np.array([1, 10, 100, 1000], np.float32), "LAST": np.array([-1], np.int64)},
        )

    model = Model(
        name,
        build,
        inputs=(
            Tensor("FRAMES", "fp32", (-1,), between=(-9, 9), context=(3, 1)),
            Tensor("INDEX", "int64", (1,), between=(0, 3)),
        ),
        outputs=(Tensor("WINDOW", "fp32", (-1,)), Tensor("SUM_OUT", "fp32", (1,))),
        states=(("SUM_IN", "SUM_OUT"),),
        parameters={"input_context": "FRAMES=3"},
    )
    return dataclasses.replace(model, **changes)


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
            # two branches of different ranks: nobody can say which one it will be
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


# ---- states of Triton's own configuration


def implicit(model: Model, name: str, inside: bool = False, **changes) -> Model:
    """The model with its states in `sequence_batching.state`, dims as its graph has them.

    `inside`: the dims have -1 in the batch's place; otherwise they are written without it.
    `changes` are those of the entries, for all of them.
    """
    types = {onnx_type: type for type, (_, onnx_type) in TYPES.items()}
    tensors = {tensor.name: tensor.type.tensor_type for tensor in model.build().graph.input}

    def dims(name: str) -> tuple[int, ...]:
        written = [(-1 if dim.dim_param else dim.dim_value, dim.dim_param == BATCH) for dim in tensors[name].shape.dim]
        return tuple(dim for dim, batch in written if inside or not batch)

    entries = tuple(
        State(source, target, types[tensors[source].elem_type], dims(source), **changes)
        for source, target in model.states
    )
    return model.variant(name, implicit=entries)


# ---- states that change their size


def half_way(name: str = "half_way", **changes) -> Model:
    """Its run fails, for an INDEX of 4 and more, after it has written the next MIDDLE, whose batch axis is the second; CACHE
    keeps every CHUNK of 4 KiB."""

    def build():
        return graph(
            [
                node("Unsqueeze", "INPUT AXIS_0", "ROWS"),
                node("Add", "MIDDLE_IN ROWS", "MIDDLE_OUT"),
                node("Transpose", "MIDDLE_OUT", "BY_ROW", perm=[1, 0, 2]),
                node("Reshape", "BY_ROW SIX", "FLAT"),
                node("ReduceSum", "FLAT LAST", "TOTAL", keepdims=1),
                node("Mul", "TOTAL NOTHING", "NO_STEP"),
                node("Cast", "NO_STEP", "OFFSET", to=TensorProto.INT64),
                node("Add", "INDEX OFFSET", "AT"),
                node("Gather", "TABLE AT", "WEIGHT"),
                node("Add", "FLAT WEIGHT", "OUTPUT"),
                node("Concat", "CACHE_IN CHUNK", "CACHE_OUT", axis=1),
                node("Identity", "CACHE_OUT", "KEPT"),
            ],
            [
                ("INPUT", "fp32", [BATCH, 2]),
                ("INDEX", "int64", [BATCH, 1]),
                ("CHUNK", "fp32", [BATCH, 1, 1024]),
                ("MIDDLE_IN", "fp32", [3, BATCH, 2]),
                ("CACHE_IN", "fp32", [BATCH, "T", 1024]),
            ],
            [
                ("OUTPUT", "fp32", [BATCH, 6]),
                ("KEPT", "fp32", [BATCH, "T_new", 1024]),
                ("MIDDLE_OUT", "fp32", [3, BATCH, 2]),
                ("CACHE_OUT", "fp32", [BATCH, "T_new", 1024]),
            ],
            {
                "AXIS_0": np.array([0], np.int64),
                "SIX": np.array([-1, 6], np.int64),
                "LAST": np.array([1], np.int64),
                "NOTHING": np.array(0, np.float32),
                "TABLE": np.zeros(4, np.float32),
            },
        )

    model = Model(
        name,
        build,
        inputs=(
            Tensor("INPUT", "fp32", (2,), between=(-8, 8)),
            Tensor("INDEX", "int64", (1,), between=(0, 3)),
            Tensor("CHUNK", "fp32", (1, 1024)),
        ),
        outputs=(Tensor("OUTPUT", "fp32", (6,)), Tensor("KEPT", "fp32", (-1, 1024))),
        states=(("MIDDLE_IN", "MIDDLE_OUT"), ("CACHE_IN", "CACHE_OUT")),
        lengths_at_start={"T": 0},
    )
    return dataclasses.replace(model, **changes)


def append(type: str = "fp32", name: str | None = None, layout: str = "NTW", width: int = 2, **changes) -> Model:
    """Keeps every chunk that came: CACHE is what there was and INPUT [N, chunk, width] after it.

    `layout` is the order of the cache's axes: N the batch, T the time, W the width. The answer
    is the whole cache, batch first.
    """

    def build():
        axes = {"N": BATCH, "T": "T", "W": width}
        return graph(
            [
                node("Transpose", "INPUT", "CHUNK", perm=["NTW".index(axis) for axis in layout]),
                node("Concat", "CACHE_IN CHUNK", "CACHE_OUT", axis=layout.index("T")),
                node("Transpose", "CACHE_OUT", "OUTPUT", perm=[layout.index(axis) for axis in "NTW"]),
            ],
            [
                ("INPUT", type, [BATCH, "chunk", width]),
                ("CACHE_IN", type, [axes[axis] for axis in layout]),
            ],
            [
                ("OUTPUT", type, [BATCH, "T_new", width]),
                ("CACHE_OUT", type, [{**axes, "T": "T_new"}[axis] for axis in layout]),
            ],
        )

    model = Model(
        name or f"append_{type}_{layout}",
        build,
        inputs=(Tensor("INPUT", type, (-1, width)),),
        outputs=(Tensor("OUTPUT", type, (-1, width)),),
        states=(("CACHE_IN", "CACHE_OUT"),),
        lengths_at_start={"T": 0},
    )
    return dataclasses.replace(model, **changes)


def queue(name: str = "queue", **changes) -> Model:
    """PUSH comes in at the end, and as many as DROP is long go out in front: it grows, shrinks and
    is empty now and then. The answer is what is left."""

    def build():
        return graph(
            [
                node("Concat", "QUEUE_IN PUSH", "ALL", axis=1),
                node("Shape", "DROP", "COUNT", start=1, end=2),
                node("Slice", "ALL COUNT END TIME", "QUEUE_OUT"),
                node("Identity", "QUEUE_OUT", "OUTPUT"),
            ],
            [
                ("PUSH", "int64", [BATCH, "pushed", 2]),
                ("DROP", "uint8", [BATCH, "dropped"]),
                ("QUEUE_IN", "int64", [BATCH, "length", 2]),
            ],
            [("QUEUE_OUT", "int64", [BATCH, None, 2]), ("OUTPUT", "int64", [BATCH, None, 2])],
            {"END": np.array([2**62], np.int64), "TIME": np.array([1], np.int64)},
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("PUSH", "int64", (-1, 2)), Tensor("DROP", "uint8", (-1,))),
        outputs=(Tensor("OUTPUT", "int64", (-1, 2)),),
        states=(("QUEUE_IN", "QUEUE_OUT"),),
        lengths_at_start={"length": 0},
    )
    return dataclasses.replace(model, **changes)


def caches(name: str = "caches", **changes) -> Model:
    """Four states: FAST [N, F, 2] keeps every chunk, SLOW [2, S, N] one element a request, LAST
    [N, L] no more than three, and COUNT [N, 1] has one size. Each has an answer of its own."""

    def build():
        return graph(
            [
                node("Concat", "FAST_IN INPUT", "FAST_OUT", axis=1),
                node("Add", "COUNT_IN ONE", "COUNT_OUT"),
                node("Cast", "COUNT_OUT", "COUNT_64", to=TensorProto.INT64),
                node("Transpose", "COUNT_64", "COUNT_T", perm=[1, 0]),
                node("Unsqueeze", "COUNT_T AXIS_0", "COUNT_3"),
                node("Neg", "COUNT_3", "COUNT_NEG"),
                node("Concat", "COUNT_3 COUNT_NEG", "COUNT_BOTH", axis=0),
                node("Concat", "SLOW_IN COUNT_BOTH", "SLOW_OUT", axis=1),
                node("ReduceSum", "INPUT AXES_12", "SUM", keepdims=0),
                node("Greater", "SUM ZERO", "POSITIVE"),
                node("Unsqueeze", "POSITIVE AXIS_1", "POSITIVE_2"),
                node("Concat", "LAST_IN POSITIVE_2", "LAST_ALL", axis=1),
                node("Slice", "LAST_ALL THREE END AXIS_1", "LAST_OUT"),
                node("Identity", "FAST_OUT", "FAST"),
                node("Transpose", "SLOW_OUT", "SLOW", perm=[2, 1, 0]),
                node("Identity", "LAST_OUT", "LAST"),
                node("Identity", "COUNT_OUT", "COUNT"),
            ],
            [
                ("INPUT", "fp32", [BATCH, "chunk", 2]),
                ("COUNT_IN", "fp32", [BATCH, 1]),
                ("FAST_IN", "fp32", [BATCH, "F", 2]),
                ("SLOW_IN", "int64", [2, "S", BATCH]),
                ("LAST_IN", "bool", [BATCH, "L"]),
            ],
            [
                ("FAST", "fp32", [BATCH, "F_new", 2]),
                ("SLOW", "int64", [BATCH, "S_new", 2]),
                ("LAST", "bool", [BATCH, "L_new"]),
                ("COUNT", "fp32", [BATCH, 1]),
                ("FAST_OUT", "fp32", [BATCH, "F_new", 2]),
                ("SLOW_OUT", "int64", [2, "S_new", BATCH]),
                ("LAST_OUT", "bool", [BATCH, "L_new"]),
                ("COUNT_OUT", "fp32", [BATCH, 1]),
            ],
            {
                "ONE": np.array(1, np.float32),
                "ZERO": np.array(0, np.float32),
                "AXIS_0": np.array([0], np.int64),
                "AXIS_1": np.array([1], np.int64),
                "AXES_12": np.array([1, 2], np.int64),
                "THREE": np.array([-3], np.int64),
                "END": np.array([2**62], np.int64),
            },
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "fp32", (-1, 2), between=(-9, 9)),),
        outputs=(
            Tensor("FAST", "fp32", (-1, 2)),
            Tensor("SLOW", "int64", (-1, 2)),
            Tensor("LAST", "bool", (-1,)),
            Tensor("COUNT", "fp32", (1,)),
        ),
        states=(
            ("COUNT_IN", "COUNT_OUT"),
            ("FAST_IN", "FAST_OUT"),
            ("SLOW_IN", "SLOW_OUT"),
            ("LAST_IN", "LAST_OUT"),
        ),
        lengths_at_start={"F": 0, "S": 0, "L": 0},
    )
    return dataclasses.replace(model, **changes)


def attention(name: str = "attention", heads: int = 2, width: int = 4, **changes) -> Model:
    """One layer of attention with its caches of keys and values, [N, heads, T, width]."""

    def build():
        rng = np.random.default_rng(11)
        all_heads = heads * width
        nodes = []
        for part in "QKV":
            nodes += [
                node("MatMul", f"INPUT {part}_WEIGHT", f"{part}_FLAT"),
                node("Reshape", f"{part}_FLAT SPLIT", f"{part}_SPLIT"),
                node("Transpose", f"{part}_SPLIT", part, perm=[0, 2, 1, 3]),  # [N, heads, chunk, width]
            ]
        nodes += [
            node("Concat", "past_key K", "present_key", axis=2),
            node("Concat", "past_value V", "present_value", axis=2),
            node("Transpose", "present_key", "KEYS", perm=[0, 1, 3, 2]),
            node("MatMul", "Q KEYS", "SCORES"),
            node("Softmax", "SCORES", "SHARES", axis=-1),
            node("MatMul", "SHARES present_value", "MIXED"),
            node("Transpose", "MIXED", "BY_TIME", perm=[0, 2, 1, 3]),
            node("Reshape", "BY_TIME JOIN", "OUTPUT"),
        ]
        past, present = [BATCH, heads, "past", width], [BATCH, heads, "past + chunk", width]
        return graph(
            nodes,
            [
                ("INPUT", "fp32", [BATCH, "chunk", all_heads]),
                ("past_key", "fp32", past),
                ("past_value", "fp32", past),
            ],
            [
                ("OUTPUT", "fp32", [BATCH, "chunk", all_heads]),
                ("present_key", "fp32", present),
                ("present_value", "fp32", present),
            ],
            {
                **{f"{part}_WEIGHT": rng.standard_normal((all_heads, all_heads)).astype(np.float32) for part in "QKV"},
                "SPLIT": np.array([0, 0, heads, width], np.int64),
                "JOIN": np.array([0, 0, all_heads], np.int64),
            },
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "fp32", (-1, heads * width)),),
        outputs=(Tensor("OUTPUT", "fp32", (-1, heads * width)),),
        states=(("past_key", "present_key"), ("past_value", "present_value")),
        lengths_at_start={"past": 0},
        tolerance=1e-5,
    )
    return dataclasses.replace(model, **changes)


def looked_up(name: str = "looked_up", **changes) -> Model:
    """Appends TABLE[INPUT] to its cache: an INPUT of 4 and more is out of the table, and Run fails."""

    def build():
        return graph(
            [
                node("Gather", "TABLE INPUT", "WORTH"),
                node("Concat", "CACHE_IN WORTH", "CACHE_OUT", axis=1),
                node("Identity", "CACHE_OUT", "OUTPUT"),
            ],
            [("INPUT", "int64", [BATCH, "chunk"]), ("CACHE_IN", "int32", [BATCH, "T"])],
            [("OUTPUT", "int32", [BATCH, "T_new"]), ("CACHE_OUT", "int32", [BATCH, "T_new"])],
            {"TABLE": np.array([1, 10, 100, 1000], np.int32)},
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "int64", (-1,), between=(0, 3)),),
        outputs=(Tensor("OUTPUT", "int32", (-1,)),),
        states=(("CACHE_IN", "CACHE_OUT"),),
        lengths_at_start={"T": 0},
    )
    return dataclasses.replace(model, **changes)

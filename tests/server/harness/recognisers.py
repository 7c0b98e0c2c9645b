"""Recognisers as several graphs with random weights, and the plain loops that find their tokens."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from harness.graphs import graph, node
from support.paths import CONVERT

TOKENS, WIDE, FRAMES = 12, 8, 6
RNG = np.random.default_rng(5)
KINDS = {TensorProto.FLOAT: "fp32", TensorProto.INT32: "int32"}


def weight(*shape: int) -> np.ndarray:
    return RNG.uniform(-1, 1, shape).astype(np.float32)


def bias(blank: int, tokens: int = TOKENS) -> np.ndarray:
    """About every second frame is blank."""
    return np.where(np.arange(tokens) == blank, 0.8, 0).astype(np.float32)


def encoder(output: str, *, swapped: bool) -> onnx.ModelProto:
    """A chunk of frames and the last frame before it give frames, `[N, frames, 8]` or `[N, 8, frames]`."""
    last = node("Transpose", "all", output, perm=[0, 2, 1]) if swapped else node("Identity", "all", output)
    nodes = [
        node("MatMul", "x w", "product"),
        node("Add", "product cache", "sum"),
        node("Tanh", "sum", "all"),
        node("Slice", "all from to axis", "new_cache"),
        last,
    ]
    weights = {"w": weight(4, WIDE), "from": np.array([-1]), "to": np.array([2**62]), "axis": np.array([1])}
    shape = ["N", WIDE, FRAMES] if swapped else ["N", FRAMES, WIDE]
    state = ["N", 1, WIDE]
    return graph(
        nodes,
        [("x", "fp32", ["N", FRAMES, 4]), ("cache", "fp32", state)],
        [(output, "fp32", shape), ("new_cache", "fp32", state)],
        weights,
    )


def decoder() -> onnx.ModelProto:
    """icefall's predictor: the last two tokens."""
    nodes = [
        node("Gather", "table y", "rows"),
        node("Reshape", "rows flat", "both"),
        node("MatMul", "both w", "decoder_out"),
    ]
    weights = {"table": weight(TOKENS, 4), "flat": np.array([0, 8]), "w": weight(8, WIDE)}
    return graph(nodes, [("y", "int64", ["N", 2])], [("decoder_out", "fp32", ["N", WIDE])], weights)


def joiner() -> onnx.ModelProto:
    nodes = [
        node("Add", "encoder_out decoder_out", "sum"),
        node("Tanh", "sum", "joined"),
        node("MatMul", "joined w", "scores"),
        node("Add", "scores b", "logit"),
    ]
    inputs = [(name, "fp32", ["N", WIDE]) for name in ("encoder_out", "decoder_out")]
    return graph(nodes, inputs, [("logit", "fp32", ["N", TOKENS])], {"w": weight(WIDE, TOKENS), "b": bias(0)})


def decoder_joint(blank: int, wide: int = WIDE, tokens: int = TOKENS) -> onnx.ModelProto:
    """NeMo's predictor and joint: an LSTM over the last token, whose states count only if a token is found."""
    nodes = [
        node("Gather", "table targets", "rows"),
        node("Transpose", "rows", "by_time", perm=[1, 0, 2]),
        node(
            "LSTM",
            "by_time w r - - input_states_1 input_states_2",
            "all output_states_1 output_states_2",
            hidden_size=wide,
        ),
        node("Squeeze", "all one", "g"),
        node("Transpose", "g", "by_row", perm=[1, 0, 2]),
        node("Unsqueeze", "by_row one", "g4"),
        node("Transpose", "encoder_outputs", "f", perm=[0, 2, 1]),
        node("Unsqueeze", "f two", "f4"),
        node("Add", "f4 g4", "sum"),
        node("Tanh", "sum", "joined"),
        node("MatMul", "joined out", "scores"),
        node("Add", "scores b", "outputs"),
        node("Identity", "target_length", "prednet_lengths"),
    ]
    weights = {
        "table": weight(tokens, 4),
        "w": weight(1, 4 * wide, 4),
        "r": weight(1, 4 * wide, wide),
        "out": weight(wide, tokens),
        "b": bias(blank, tokens),
        "one": np.array([1]),
        "two": np.array([2]),
    }
    state = [1, "B", wide]
    return graph(
        nodes,
        [
            ("encoder_outputs", "fp32", ["B", wide, "T"]),
            ("targets", "int32", ["B", "U"]),
            ("target_length", "int32", ["B"]),
            ("input_states_1", "fp32", state),
            ("input_states_2", "fp32", state),
        ],
        [
            ("outputs", "fp32", ["B", "T", "U", tokens]),
            ("prednet_lengths", "int32", ["B"]),
            ("output_states_1", "fp32", state),
            ("output_states_2", "fp32", state),
        ],
        weights,
    )


def separate(blank: int) -> dict[str, onnx.ModelProto]:
    """The predictor and the joint of [`decoder_joint`] as two graphs, as sherpa-onnx exports NeMo's models."""
    whole = decoder_joint(blank)
    of = {value.name: value for value in (*whole.graph.input, *whole.graph.output)}
    weights = {weight.name: numpy_helper.to_array(weight) for weight in whole.graph.initializer}

    def part(nodes: list, inputs: str, outputs: str) -> onnx.ModelProto:
        used = {name for made in nodes for name in made.input}

        def values(names: str) -> list:
            tensors = [(name, of[name].type.tensor_type) for name in names.split()]
            return [
                (name, KINDS[of_type.elem_type], [dim.dim_param or dim.dim_value for dim in of_type.shape.dim])
                for name, of_type in tensors
            ]

        own = {name: weight for name, weight in weights.items() if name in used}
        return graph(nodes, values(inputs), values(outputs), own)

    passed = helper.make_tensor_value_info("decoder_outputs", TensorProto.FLOAT, ["B", WIDE, "U"])
    of["decoder_outputs"] = passed
    nodes = list(whole.graph.node)
    at = next(index for index, made in enumerate(nodes) if made.output[0] == "by_row")
    states = "input_states_1 input_states_2"
    predictor = [*nodes[:at], node("Transpose", "g", "decoder_outputs", perm=[1, 2, 0]), nodes[-1]]
    joint = [node("Transpose", "decoder_outputs", "by_row", perm=[0, 2, 1]), *nodes[at + 1 : -1]]
    return {
        "decoder": part(
            predictor,
            f"targets target_length {states}",
            f"decoder_outputs prednet_lengths {states.replace('input', 'output')}",
        ),
        "joiner": part(joint, "encoder_outputs decoder_outputs", "outputs"),
    }


def ctc() -> onnx.ModelProto:
    nodes = [node("MatMul", "hidden w", "scores"), node("Add", "scores b", "probs")]
    shape = ["B", "T", TOKENS]
    weights = {"w": weight(WIDE, TOKENS), "b": bias(0)}
    return graph(nodes, [("hidden", "fp32", ["B", "T", WIDE])], [("probs", "fp32", shape)], weights)


class Plain:
    """The graphs in a plain loop, for one sequence: what a client would write."""

    blank: int
    search: str

    def __init__(self, sessions):
        self.sessions = sessions
        self.cache = np.zeros((1, 1, WIDE), np.float32)

    def encoded(self, x):
        frames, self.cache = self.sessions[0].run(None, {"x": x, "cache": self.cache})
        return frames


class Stateless(Plain):
    blank, search = 0, "transducer blank=0 max_tokens=1"

    def __init__(self, sessions):
        super().__init__(sessions)
        self.last = [0, 0]

    def tokens(self, x):
        found = []
        for at, frame in enumerate(self.encoded(x)[0]):
            [predicted] = self.sessions[1].run(None, {"y": np.array([self.last])})
            [logit] = self.sessions[2].run(None, {"encoder_out": frame[None], "decoder_out": predicted})
            token = int(logit.argmax())
            if token != self.blank:
                self.last = [self.last[1], token]
                found.append((token, at))
        return found


class Lstm(Plain):
    blank, search = TOKENS - 1, f"transducer blank={TOKENS - 1} max_tokens=3"

    def __init__(self, sessions):
        super().__init__(sessions)
        self.last = self.blank
        self.states = [np.zeros((1, 1, WIDE), np.float32)] * 2

    def logits(self, frame):
        feeds = {
            "encoder_outputs": frame,
            "targets": np.array([[self.last]], np.int32),
            "target_length": np.array([1], np.int32),
            "input_states_1": self.states[0],
            "input_states_2": self.states[1],
        }
        outputs, _, *states = self.sessions[1].run(None, feeds)
        return outputs.reshape(-1), states

    def tokens(self, x):
        found = []
        frames = self.encoded(x)
        for at in range(frames.shape[2]):
            for _ in range(3):
                logits, states = self.logits(frames[:, :, at : at + 1])
                token = int(logits.argmax())
                if token == self.blank:
                    break
                self.last, self.states = token, states
                found.append((token, at))
        return found


class Separate(Lstm):
    """The predictor and the joint are two graphs."""

    def logits(self, frame):
        feeds = {
            "targets": np.array([[self.last]], np.int32),
            "target_length": np.array([1], np.int32),
            "input_states_1": self.states[0],
            "input_states_2": self.states[1],
        }
        predicted, _, *states = self.sessions[1].run(None, feeds)
        [outputs] = self.sessions[2].run(None, {"encoder_outputs": frame, "decoder_outputs": predicted})
        return outputs.reshape(-1), states


class Tdt(Lstm):
    """The last three logits are durations, so the tokens are 0 to 8. A jump may end in the next chunk."""

    blank, durations, search = 8, (0, 1, 3), "transducer blank=8 max_tokens=3 durations=0,1,3"

    def __init__(self, sessions):
        super().__init__(sessions)
        self.at = 0

    def tokens(self, x):
        found, of_frame = [], 0
        frames = self.encoded(x)
        while self.at < FRAMES:
            logits, states = self.logits(frames[:, :, self.at : self.at + 1])
            token, duration = int(logits[:9].argmax()), self.durations[logits[9:].argmax()]
            if token != self.blank:
                self.last, self.states = token, states
                found.append((token, self.at))
                of_frame += 1
            if token == self.blank or duration or of_frame == 3:
                self.at, of_frame = self.at + max(duration, 1), 0
        self.at -= FRAMES
        return found


class Ctc(Plain):
    blank, search = 0, "ctc blank=0"

    def __init__(self, sessions):
        super().__init__(sessions)
        self.last = self.blank

    def tokens(self, x):
        found = []
        [probs] = self.sessions[1].run(None, {"hidden": self.encoded(x)})
        for at, token in enumerate(probs[0].argmax(-1).tolist()):
            if token not in (self.blank, self.last):
                found.append((token, at))
            self.last = token
        return found


#: The plain loop, its graphs by name, and the wires.
RECOGNISERS = {
    "stateless": (
        Stateless,
        {"encoder": encoder("encoder_out", swapped=False), "decoder": decoder(), "joiner": joiner()},
        "",
    ),
    "lstm": (
        Lstm,
        {"encoder": encoder("outputs", swapped=True), "decoder_joint": decoder_joint(Lstm.blank)},
        "<<<encoder.outputs, decoder_joint.encoder_outputs>>>",
    ),
    "separate": (
        Separate,
        {"encoder": encoder("outputs", swapped=True), **separate(Separate.blank)},
        "<<<encoder.outputs, joiner.encoder_outputs>>>",
    ),
    "durations": (
        Tdt,
        {"encoder": encoder("outputs", swapped=True), "decoder_joint": decoder_joint(Tdt.blank)},
        "<<<encoder.outputs, decoder_joint.encoder_outputs>>>",
    ),
    "ctc": (Ctc, {"encoder": encoder("hidden", swapped=False), "ctc": ctc()}, ""),
}


def written(kind: str, folder: Path) -> list[Path]:
    """Writes the graphs of a recogniser into a folder."""
    graphs = RECOGNISERS[kind][1]
    for name, model in graphs.items():
        onnx.save(model, folder / f"{name}.onnx")
    return [folder / f"{name}.onnx" for name in graphs]


def joined(kind: str, folder: Path, output: Path) -> list[onnxruntime.InferenceSession]:
    """Joins the graphs of a recogniser with the command, and opens each of them alone."""
    plain, _, wires = RECOGNISERS[kind]
    files = written(kind, folder)
    [library] = Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*")
    command = [str(CONVERT), "join", *map(str, files), "-o", str(output), "--search", plain.search]
    command += ["--wires", wires] if wires else []
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"ORT_DYLIB_PATH": str(library)})
    assert done.returncode == 0, done.stderr
    return [onnxruntime.InferenceSession(file) for file in files]


def assert_found(answer, row: int, expected: list[tuple[int, int]]) -> None:
    count = int(answer["tokens_length"].reshape(-1)[row])
    found = [answer[name][row].tolist() for name in ("tokens", "frames")]
    assert list(zip(*(values[:count] for values in found), strict=True)) == expected
    assert all(value == -1 for values in found for value in values[count:])

"""Models of whole sequences, as real exporters made them, and how they are served in steps once they have states."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx
import onnxruntime
from tritonclient.utils import InferenceServerException

from harness.clients import Client, new_id
from harness.conversations import outcome, together
from harness.graphs import graph, node
from support.paths import ROOT

EXPORTS = ROOT / "crates" / "convert" / "tests" / "exports"
STEPS = 24
#: Lengths of the requests of a sequence, in turn; each is a multiple of what strides need.
CHUNKS = [4, 8, 4]

TIME_FIRST = {"torch_lstm_time_major", "torch_script_loop", "dynamo_scan"}
#: The output is that of the last step.
LAST = {"torch_lstm_last"}


def whole(name: str, x: np.ndarray) -> np.ndarray:
    """What the original gives for all steps of one row, in the order batch, time."""
    session = onnxruntime.InferenceSession(EXPORTS / f"{name}.onnx")
    fed = x.swapaxes(0, 1) if name in TIME_FIRST else x
    answer = session.run(None, {"x": np.ascontiguousarray(fed)})[0]
    return answer.swapaxes(0, 1) if name == "torch_lstm_time_major" else answer


def steps(client: Client, model: str, name: str, rows: list[np.ndarray], time: int) -> list[list[np.ndarray]]:
    """The answers to sequences that take turns, chunk by chunk."""
    ids = [new_id() for _ in rows]
    answers: list[list[np.ndarray]] = [[] for _ in rows]
    start, turn = 0, 0
    while start < STEPS:
        count = min(CHUNKS[turn % len(CHUNKS)], STEPS - start)
        for row, sequence_id in enumerate(ids):
            part = np.take(rows[row], range(start, start + count), axis=time)
            # Triton's batch dimension stands in front of a model's that has it elsewhere.
            fed = {"x": part.swapaxes(0, 1)[None] if name in TIME_FIRST else part}
            said = client.step(model, sequence_id, fed, start=start == 0, end=start + count == STEPS)
            [answer] = [said[key] for key in said if key in ("y", "output", "Identity:0")]
            answers[row].append(answer)
        start, turn = start + count, turn + 1
    return answers


def assert_steps_are_the_whole(client: Client, model: str, name: str) -> None:
    """Sequences of the served model, in steps and in turns, get the original's answers to whole sequences."""
    rng = np.random.default_rng(5)
    if name in TIME_FIRST:
        time, shape = 1, (1, STEPS, 4)
    else:
        time, shape = (2, (1, 4, STEPS)) if name == "torch_tcn" else (1, (1, STEPS, 4))
    rows = [rng.normal(size=shape).astype(np.float32) for _ in range(3)]
    for row, answers in zip(rows, steps(client, model, name, rows, time), strict=True):
        expected = whole(name, row)
        if name in TIME_FIRST:
            # Where the batch is in an answer depends on the model; it is one row.
            expected = np.squeeze(expected)
            came = np.concatenate([answer.reshape(-1, answer.shape[-1]) for answer in answers])
        else:
            came = answers[-1] if name in LAST else np.concatenate(answers, axis=time)
        assert came.shape == expected.shape
        np.testing.assert_allclose(came, expected, rtol=0, atol=1e-6)


def assert_only_multiples_are_taken(client: Client, model: str, name: str, multiple: int) -> None:
    """A request with another number of steps is refused, and changes neither its own sequence nor those beside it."""
    rng = np.random.default_rng(6)
    rows = [rng.normal(size=(1, STEPS, 4)).astype(np.float32) for _ in range(3)]
    ids = [new_id() for _ in rows]
    answers: list[list[np.ndarray]] = [[] for _ in rows]

    def step(row: int, start: int, end: int) -> np.ndarray:
        fed = {"x": rows[row][:, start:end]}
        return client.step(model, ids[row], fed, start=start == 0, end=end == STEPS)["y"]

    for start in range(0, STEPS, 2 * multiple):
        end = start + 2 * multiple
        refused, *others = together(
            [partial(outcome, partial(step, 0, start, end - 1))] + [partial(step, row, start, end) for row in (1, 2)]
        )
        assert isinstance(refused, InferenceServerException)
        expected = f"input 'x' has {2 * multiple - 1} steps along axis 1 of the model, but a multiple of {multiple} is"
        assert expected in refused.message()
        for row, answer in enumerate([step(0, start, end), *others]):
            answers[row].append(answer)
    for x, parts in zip(rows, answers, strict=True):
        np.testing.assert_allclose(np.concatenate(parts, axis=1), whole(name, x), rtol=0, atol=1e-6)


def keras_with_states() -> onnx.ModelProto:
    """Keras' LSTM with `return_state` and its states as inputs, as tf2onnx writes it: each tensor has another name for the
    batch, and the names of the states don't tell the pairs, which are KERAS_PAIRS."""
    rng = np.random.default_rng(3)
    shapes = {"W": (1, 64, 4), "R": (1, 64, 16), "B": (1, 128)}
    weights = {key: rng.normal(scale=0.3, size=shape).astype(np.float32) for key, shape in shapes.items()}
    axes = {"front": np.array([0], np.int64), "direction": np.array([1], np.int64)}
    nodes = [
        node("Transpose", "x", "steps", perm=[1, 0, 2]),
        node("Unsqueeze", "h front", "first_h"),
        node("Unsqueeze", "c front", "first_c"),
        node("LSTM", "steps W R B - first_h first_c", "all last_h last_c", hidden_size=16, name="lstm_4"),
        node("Squeeze", "all direction", "flat"),
        node("Transpose", "flat", "y", perm=[1, 0, 2]),
        node("Squeeze", "last_h front", "lstm_4_1"),
        node("Squeeze", "last_c front", "lstm_4_2"),
    ]
    given = {"x": ("unk__575", "unk__576", 4), "h": ("unk__577", 16), "c": ("unk__578", 16)}
    made = {"y": ("unk__579", "unk__580", 16), "lstm_4_1": ("unk__581", 16), "lstm_4_2": ("unk__582", 16)}
    inputs, outputs = ([(name, "fp32", dims) for name, dims in of.items()] for of in (given, made))
    return graph(nodes, inputs, outputs, weights | axes)


KERAS_PAIRS = "<<<h, lstm_4_1>>> <<<c, lstm_4_2>>>"


def assert_sequences_get_their_own_answers(client: Client, served: str, model: onnx.ModelProto) -> None:
    """Sequences of `keras_with_states` that send at the same time get what the model gives to each alone."""
    rng = np.random.default_rng(6)
    ids = [new_id() for _ in range(4)]
    rows = rng.normal(size=(4, 1, 6, 4)).astype(np.float32)
    came: list[list[np.ndarray]] = [[] for _ in ids]
    for start in range(0, 6, 2):
        ends = {"start": start == 0, "end": start == 4}
        said = together(
            partial(client.step, served, sequence_id, {"x": row[:, start : start + 2]}, outputs=["y"], **ends)
            for sequence_id, row in zip(ids, rows, strict=True)
        )
        for parts, answer in zip(came, said, strict=True):
            parts.append(answer["y"])
    session = onnxruntime.InferenceSession(model.SerializeToString())
    zeros = np.zeros((1, 16), np.float32)
    for row, parts in zip(rows, came, strict=True):
        expected = session.run(["y"], {"x": row, "h": zeros, "c": zeros})[0]
        np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, rtol=0, atol=1e-6)

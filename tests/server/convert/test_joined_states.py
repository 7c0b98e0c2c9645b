"""Recognisers that are joined at load, over many chunks: their tokens and states are those of the graphs in a plain loop, while
other sequences begin and end."""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from harness.conversations import together
from harness.recognisers import FRAMES, RECOGNISERS, Lstm, Separate, Stateless, Tdt, assert_found, written
from harness.repetitions import repeated
from triton_stateful import Sequence

#: Chunks of a sequence, and rounds without one before the next sequence.
CHUNKS, PAUSE = (3, 30), (0, 3)


def kept(talk) -> dict[str, np.ndarray]:
    """The states of a plain loop, as a row of the joined model has them."""
    last = np.array([talk.last if isinstance(talk, Stateless) else [talk.last]])
    states = {"encoder.cache": talk.cache, "search.last": last}
    if isinstance(talk, Lstm):
        predictor = "decoder" if isinstance(talk, Separate) else "decoder_joint"
        states |= {f"{predictor}.input_states_{1 + number}": state for number, state in enumerate(talk.states)}
    if isinstance(talk, Tdt):
        states["search.skip"] = np.array([talk.at])
    return states


def serve(deployment, name: str, kind: str, graphs: Path) -> None:
    plain, names, wires = RECOGNISERS[kind]
    parameters = {"join": " ".join(f"{graph}.onnx" for graph in names), "search": plain.search, "state_api": "true"}
    parameters |= {"wires": wires} if wires else {}
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()]
    shutil.copytree(graphs, Path(deployment.repository) / name / "1")
    (Path(deployment.repository) / name / "config.pbtxt").write_text("\n".join(['backend: "stateful"', *lines]))
    deployment.admin.load_model(name)


class Speaker:
    """Sequences, one after the other, each beside its plain loop."""

    def __init__(self, address: str, model: str, kind: str, sessions, seed: int):
        self.open = partial(Sequence, address, model)
        self.plain = lambda: RECOGNISERS[kind][0](sessions)
        self.chance, self.rng = random.Random(seed), np.random.default_rng(seed)
        self.sequence: Sequence | None = None
        self.talk: Any = None
        self.left = self.pause = self.found = self.ended = 0

    def step(self) -> None:
        if self.pause:
            self.pause -= 1
            return
        if self.sequence is None:
            self.sequence, self.talk, self.left = self.open(), self.plain(), self.chance.randint(*CHUNKS)
        x = self.rng.normal(size=(1, FRAMES, 4)).astype(np.float32)
        answer, expected = self.sequence.step({"encoder.x": x}), self.talk.tokens(x)
        assert_found(answer, 0, expected)
        self.found += len(expected)
        self.left -= 1
        if not self.left:
            self.end()

    def end(self) -> None:
        if self.sequence is None:
            return
        states = self.sequence.state()
        self.sequence.end()
        for name, value in kept(self.talk).items():
            # Triton's batch dimension comes first, the row's own where the graph has it.
            row = states[name].reshape(value.shape)
            if value.dtype.kind == "f":
                # Sums of few rows may be rounded otherwise than those of many.
                np.testing.assert_allclose(row, value, rtol=0, atol=1e-6)
            else:
                np.testing.assert_array_equal(row, value)
        self.sequence, self.pause = None, self.chance.randint(*PAUSE)
        self.ended += 1


# The plain loops of 32,000 chunks take minutes.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [(8, 40), *repeated((1, 1000), (8, 1000), (32, 1000))], ids=str)
@pytest.mark.parametrize("kind", RECOGNISERS)
def test_chunks_of_sequences_that_begin_and_end_leave_the_states_of_a_plain_loop(deployment, kind, size, tmp_path):
    rows, rounds = size
    sessions = [onnxruntime.InferenceSession(file) for file in written(kind, tmp_path)]
    name = f"joined_states_{kind}_{rows}_{rounds}"
    serve(deployment, name, kind, tmp_path)
    speakers = [Speaker(deployment.server.grpc_url, name, kind, sessions, seed) for seed in range(rows)]
    for _ in range(rounds):
        together(speaker.step for speaker in speakers)
    together(speaker.end for speaker in speakers)
    assert sum(speaker.found for speaker in speakers) > 0.2 * rows * rounds
    assert min(speaker.ended for speaker in speakers) > rounds / (CHUNKS[1] + PAUSE[1])

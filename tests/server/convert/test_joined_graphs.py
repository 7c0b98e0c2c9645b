"""Recognisers whose graphs stateful-convert joined: one request a chunk gives the tokens of the graphs in a plain loop."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from harness.clients import new_id
from harness.conversations import together
from harness.recognisers import FRAMES, RECOGNISERS, assert_found, joined
from harness.repetitions import repeated


# A plain loop over a thousand chunks of 32 rows takes minutes.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [(1, 1000), (8, 1000), (32, 100), *repeated((32, 1000))], ids=str)
@pytest.mark.parametrize("kind", RECOGNISERS)
def test_a_thousand_chunks_have_the_tokens_of_a_plain_loop(kind, size, tmp_path):
    rows, runs = size
    sessions = joined(kind, tmp_path, tmp_path / "joined.onnx")
    model = onnxruntime.InferenceSession(tmp_path / "joined.onnx")
    talks = [RECOGNISERS[kind][0](sessions) for _ in range(rows)]
    inputs = {info.name: info for info in model.get_inputs()}
    outputs = [info.name for info in model.get_outputs()]
    types = {"tensor(float)": np.float32, "tensor(int32)": np.int32, "tensor(int64)": np.int64}
    states = {}
    for name, info in inputs.items():
        shape = [dim if isinstance(dim, int) else rows for dim in info.shape]
        states[name] = np.full(shape, talks[0].blank if name == "search.last" else 0, types[info.type])
    pairs = {
        "encoder.cache": "encoder.new_cache",
        "search.last": "search.last_next",
        "search.skip": "search.skip_next",
    }
    predictors = [f"{graph}.input_states_{number}" for graph in ("decoder", "decoder_joint") for number in (1, 2)]
    pairs |= {name: name.replace("input", "output") for name in predictors}
    rng = np.random.default_rng(6)
    found = 0
    for _ in range(runs):
        x = rng.normal(size=(rows, FRAMES, 4)).astype(np.float32)
        answer = dict(zip(outputs, model.run(None, states | {"encoder.x": x}), strict=True))
        for row, talk in enumerate(talks):
            expected = talk.tokens(x[row : row + 1])
            assert_found(answer, row, expected)
            found += len(expected)
        states = {name: answer[pairs[name]] for name in states if name != "encoder.x"}
    assert 0.3 * runs * rows < found


@pytest.mark.parametrize("kind", RECOGNISERS)
def test_sequences_that_share_runs_get_their_own_tokens(deployment, kind, tmp_path):
    name = f"joined_{kind}"
    output = Path(deployment.repository) / name / "1" / "model.onnx"
    sessions = joined(kind, tmp_path, output)
    deployment.admin.load_model(name)
    assert deployment.admin.get_model_config(name).config.max_batch_size > 1
    client = deployment.connect()
    rng = np.random.default_rng(7)
    # They start and end at different times.
    talks = [(new_id(), RECOGNISERS[kind][0](sessions), start, start + 12) for start in range(8)]
    for step in range(19):
        tasks, expected = [], []
        for sequence_id, talk, start, end in talks:
            if start <= step < end:
                x = rng.normal(size=(1, FRAMES, 4)).astype(np.float32)
                how = {"start": step == start, "end": step == end - 1}
                tasks.append(partial(client.step, name, sequence_id, {"encoder.x": x}, **how))
                expected.append(talk.tokens(x))
        for answer, tokens in zip(together(tasks), expected, strict=True):
            assert_found(answer, 0, tokens)

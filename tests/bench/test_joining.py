"""The recogniser of the benchmark of joined graphs. No server."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

from support.bench import joining, report


def session(model) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model.SerializeToString())


def test_a_quarter_to_a_half_of_the_frames_have_a_token():
    encoder, joint = session(joining.encoder()), session(joining.decoder_joint())
    states = {f"{name}{layer}_in": np.zeros((1, 1, joining.WIDE), np.float32) for layer in (1, 2) for name in "hc"}
    predictor = [np.zeros((1, 1, joining.WIDE), np.float32)] * 2
    last, found, rng = joining.BLANK, [], np.random.default_rng(4)
    names = [info.name for info in encoder.get_outputs()]
    for _ in range(30):
        made = dict(zip(names, encoder.run(None, {"x": joining.chunk(rng), **states}), strict=True))
        states = {name: made[name.replace("_in", "_out")] for name in states}
        for at in range(joining.FRAMES):
            feeds = {
                "encoder_outputs": made["outputs"][:, :, at : at + 1],
                "targets": np.array([[last]], np.int32),
                "target_length": np.array([1], np.int32),
                "input_states_1": predictor[0],
                "input_states_2": predictor[1],
            }
            logits, _, *new = joint.run(None, feeds)
            token = int(logits.argmax())
            if token != joining.BLANK:
                last, predictor = token, new
                found.append(token)
    assert 2 < len(found) / 30 < 7
    # Else the predictor would say nothing.
    assert len(set(found)) > 20


def test_every_column_of_the_table_is_measured():
    counted = joining.Counted(100, [1.0, 2.0, 3.0], 2.0, 0.5)
    row = counted.row("joined", 8, 0) | {"tokens_per_chunk": 4.0}
    assert set(report.COLUMNS["join"]) <= set(row)
    assert row["chunks_per_s"] == 50 and row["p50_us"] == 2 and row["server_cpu_us_per_chunk"] == pytest.approx(5000)

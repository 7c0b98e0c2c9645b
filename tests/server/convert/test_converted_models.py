"""Models of whole sequences that stateful-convert gave states: served in steps, they answer as in one run."""

import os
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from harness.clients import new_id
from harness.conversations import together
from support.paths import CONVERT, ROOT

EXPORTS = ROOT / "convert" / "tests" / "exports"
STEPS = 24
#: Lengths of the requests of a sequence, in turn; each is a multiple of what strides need.
CHUNKS = [4, 8, 4]

TIME_FIRST = {"torch_lstm_time_major", "torch_script_loop", "dynamo_scan"}
#: The output is that of the last step.
LAST = {"torch_lstm_last"}


def converted(deployment, name: str, *options: str) -> str:
    """The name under which a converted model is served, with the configuration that the command wrote."""
    served = f"converted_{name}"
    folder = Path(deployment.repository) / served
    if not folder.exists():
        (folder / "1").mkdir(parents=True)
        [library] = Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*")
        command = [str(CONVERT), str(EXPORTS / f"{name}.onnx"), "-o", str(folder / "1" / "model.onnx"), *options]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"ORT_DYLIB_PATH": str(library)})
    deployment.admin.load_model(served)
    return served


def whole(name: str, x: np.ndarray) -> np.ndarray:
    """What the original gives for all steps of one row, in the order batch, time."""
    session = onnxruntime.InferenceSession(EXPORTS / f"{name}.onnx")
    fed = x.swapaxes(0, 1) if name in TIME_FIRST else x
    answer = session.run(None, {"x": np.ascontiguousarray(fed)})[0]
    return answer.swapaxes(0, 1) if name == "torch_lstm_time_major" else answer


def steps(client, model: str, name: str, rows: list[np.ndarray], time: int) -> list[list[np.ndarray]]:
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


@pytest.mark.parametrize(
    "name",
    [
        "torch_lstm2",
        "torch_lstm_last",
        "torch_lstm_learned",
        "torch_conv_gru",
        "torch_strided",
        "torch_tcn",
        "dynamo_lstm",
        "dynamo_lstm_learned",
        "keras_lstm2",
        "keras_gru_reset_before",
        "keras_masking",
    ],
)
def test_a_converted_model_answers_in_steps_as_at_once(deployment, name):
    model = converted(deployment, name)
    rng = np.random.default_rng(5)
    time = 2 if name == "torch_tcn" else 1
    shape = (1, 4, STEPS) if time == 2 else (1, STEPS, 4)
    rows = [rng.normal(size=shape).astype(np.float32) for _ in range(3)]
    for row, answers in zip(rows, steps(deployment.connect(), model, name, rows, time), strict=True):
        expected = whole(name, row)
        came = answers[-1] if name in LAST else np.concatenate(answers, axis=time)
        assert came.shape == expected.shape
        np.testing.assert_allclose(came, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", sorted(TIME_FIRST))
def test_a_model_with_time_in_front_answers_in_steps_as_at_once(deployment, name):
    model = converted(deployment, name)
    rng = np.random.default_rng(6)
    rows = [rng.normal(size=(1, STEPS, 4)).astype(np.float32) for _ in range(2)]
    for row, answers in zip(rows, steps(deployment.connect(), model, name, rows, 1), strict=True):
        expected = np.squeeze(whole(name, row))
        # Where the batch is in an answer depends on the model; it is one row.
        came = np.concatenate([answer.reshape(-1, answer.shape[-1]) for answer in answers])
        np.testing.assert_allclose(came, expected, rtol=0, atol=1e-6)


def test_an_opened_batch_shares_runs(deployment):
    model = converted(deployment, "torch_lstm_batch_one", "--open-batch")
    config = deployment.admin.get_model_config(model).config
    assert config.max_batch_size > 1
    rng = np.random.default_rng(7)
    rows = [rng.normal(size=(1, STEPS, 4)).astype(np.float32) for _ in range(3)]
    for row, answers in zip(rows, steps(deployment.connect(), model, "", rows, 1), strict=True):
        np.testing.assert_allclose(
            np.concatenate(answers, axis=1), whole("torch_lstm_batch_one", row), rtol=0, atol=1e-6
        )


def test_sequences_of_a_denoiser_whose_batch_was_opened_share_runs(deployment):
    model = converted(deployment, "torch_dual_path", "--open-batch", "--states", "<<<inter_cache, inter_cache_out>>>")
    original = onnxruntime.InferenceSession(EXPORTS / "torch_dual_path.onnx")
    rng = np.random.default_rng(8)
    client = deployment.connect()
    talks = [(new_id(), np.zeros((2, 1, 16, 8), np.float32)) for _ in range(4)]
    for step in range(6):
        fed = [rng.normal(size=(1, 1, 16, 2)).astype(np.float32) for _ in talks]
        tasks = [
            partial(client.step, model, sequence_id, {"x": x}, outputs=["y"], start=step == 0, end=step == 5)
            for (sequence_id, _), x in zip(talks, fed, strict=True)
        ]
        answers = together(tasks)
        for row, (answer, x) in enumerate(zip(answers, fed, strict=True)):
            sequence_id, cache = talks[row]
            expected, cache = original.run(["y", "inter_cache_out"], {"x": x, "inter_cache": cache})
            talks[row] = sequence_id, cache
            np.testing.assert_allclose(answer["y"], expected, rtol=0, atol=1e-6)

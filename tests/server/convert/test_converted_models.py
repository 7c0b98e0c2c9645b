"""Models of whole sequences that stateful-convert gave states: served in steps, they answer as in one run."""

import os
import re
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from tritonclient.utils import InferenceServerException

from harness.clients import new_id
from harness.conversations import together
from harness.whole_sequences import (
    EXPORTS,
    KERAS_PAIRS,
    STEPS,
    TIME_FIRST,
    assert_only_multiples_are_taken,
    assert_sequences_get_their_own_answers,
    assert_steps_are_the_whole,
    keras_with_states,
    steps,
    whole,
)
from support.paths import CONVERT, ROOT


def converted(deployment, name: str, *options: str, served: str = "", file: Path | None = None) -> str:
    """The name under which a converted model is served, with the configuration that the command wrote."""
    served = served or f"converted_{name}"
    file = file or EXPORTS / f"{name}.onnx"
    folder = Path(deployment.repository) / served
    if not (folder / "1").exists():
        (folder / "1").mkdir(parents=True)
        [library] = Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*")
        command = [str(CONVERT), str(file), "-o", str(folder / "1" / "model.onnx"), *options]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"ORT_DYLIB_PATH": str(library)})
    deployment.admin.load_model(served)
    return served


@pytest.mark.parametrize("name", ["torch_lstm_learned", "dynamo_lstm_learned"])
def test_a_model_does_not_load_without_the_line_for_its_initial_states(deployment, name):
    served = f"without_initial_{name}"
    config = Path(deployment.repository) / served / "config.pbtxt"
    config.parent.mkdir()
    config.write_text('backend: "stateful"\n')
    with pytest.raises(InferenceServerException) as refused:
        converted(deployment, name, "--no-config", served=served)
    assert "'stateful.initial_states'" in refused.value.message()
    [line] = re.findall(r"parameters \{ key: 'initial_state_model'.*? \} \}", refused.value.message())
    config.write_text(config.read_text() + line)
    assert_steps_are_the_whole(deployment.connect(), converted(deployment, name, served=served), name)


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
        *sorted(TIME_FIRST),
    ],
)
def test_a_converted_model_answers_in_steps_as_at_once(deployment, name):
    assert_steps_are_the_whole(deployment.connect(), converted(deployment, name), name)


def test_a_request_must_have_a_multiple_of_the_strides_over_time(deployment):
    model = converted(deployment, "torch_strided")
    assert_only_multiples_are_taken(deployment.connect(), model, "torch_strided", 4)


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


def test_states_with_names_of_their_own_for_the_batch_share_runs(deployment, tmp_path):
    onnx.save(keras_with_states(), tmp_path / "keras.onnx")
    model = converted(deployment, "keras_states", "--states", KERAS_PAIRS, file=tmp_path / "keras.onnx")
    assert deployment.admin.get_model_config(model).config.max_batch_size > 1
    assert_sequences_get_their_own_answers(deployment.connect(), model, keras_with_states())


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


def test_the_client_of_the_page_gets_what_the_original_gives(deployment):
    converted(deployment, "torch_gru", served="tagger")
    [client] = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs" / "convert.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert client.count("localhost:8001") == 1
    made: dict = {}
    exec(client.replace("localhost:8001", deployment.server.grpc_url), made)
    np.testing.assert_allclose(made["y"], whole("torch_gru", made["x"]), rtol=0, atol=1e-6)


def test_a_request_has_tritons_axis_in_front_of_the_time_and_an_answer_has_not(deployment):
    model = converted(deployment, "torch_lstm_time_major")
    rng = np.random.default_rng(9)
    x = rng.normal(size=(1, STEPS, 1, 4)).astype(np.float32)
    answer = deployment.connect().step(model, new_id(), {"x": x}, start=True, end=True)
    np.testing.assert_allclose(
        answer["y"].swapaxes(0, 1), whole("torch_lstm_time_major", x[0].swapaxes(0, 1)), rtol=0, atol=1e-6
    )

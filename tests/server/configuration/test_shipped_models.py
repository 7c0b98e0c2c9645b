"""The models in `models/`, with the configurations that are shipped."""

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness.clients import new_id
from harness.deployment import Deployment
from harness.logs import log_of_shipped
from support.speech import CHUNK_SAMPLES, inputs_of, read_recording, silero_oracle


@pytest.fixture
def silero(deployment) -> Deployment:
    log_of_shipped(deployment, "silero_vad")
    return deployment


@pytest.mark.parametrize("samples", [320, 512, 1, 5000])
def test_the_speech_model_takes_any_length_and_answers_as_onnx_runtime_does(silero, samples):
    recording = read_recording()[: 40 * CHUNK_SAMPLES if samples > 1 else CHUNK_SAMPLES + 1]
    client, sequence, came = silero.connect(), new_id(), []
    for at in range(0, len(recording), samples):
        sent, end = recording[None, at : at + samples], at + samples >= len(recording)
        answer = client.step("silero_vad", sequence, {"input": sent}, start=at == 0, end=end)["output"]
        whole = min(at + samples, len(recording)) // CHUNK_SAMPLES
        assert answer.shape == (1, whole - len(came), 1)
        came.extend(answer.ravel())
    oracle = silero_oracle().new_sequence()
    right = [oracle.step({"input": chunk[None]})["output"].item() for chunk in inputs_of(recording)]
    assert came == pytest.approx(right, abs=1e-5)


def test_a_chunk_without_the_batch_dimension_is_refused_as_the_page_of_errors_says(silero):
    chunk = np.zeros(512, np.float32)
    with pytest.raises(InferenceServerException, match="inference request batch-size must be <= 64 for 'silero_vad'"):
        silero.connect().step("silero_vad", new_id(), {"input": chunk}, start=True)

"""The models in `models/`, with the configurations that are shipped."""

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness.clients import new_id
from harness.deployment import Deployment
from harness.logs import log_of_shipped
from support.speech import CHUNK_SAMPLES, CONTEXT_SAMPLES, inputs_of, read_recording, silero_oracle


@pytest.fixture
def silero(deployment) -> Deployment:
    log_of_shipped(deployment, "silero_vad")
    return deployment


@pytest.mark.parametrize("samples", [480, 576, 64, 0])
def test_the_speech_model_takes_no_chunk_that_it_was_not_trained_on(silero, samples):
    """It would run on any, and answer wrongly."""
    chunk = np.zeros((1, samples), np.float32)
    with pytest.raises(InferenceServerException, match=rf"'input'.*Expected \[-1,512\], got \[1,{samples}\]"):
        silero.connect().step("silero_vad", new_id(), {"input": chunk}, start=True)


def test_the_speech_model_answers_as_onnx_runtime_does(silero):
    fed = inputs_of(read_recording()[: 40 * CHUNK_SAMPLES])
    oracle, client, sequence = silero_oracle().new_sequence(), silero.connect(), new_id()
    for step, inputs in enumerate(fed):
        answer = client.step(
            "silero_vad", sequence, {"input": inputs[None, CONTEXT_SAMPLES:]}, start=step == 0, end=step == 39
        )
        assert answer["output"] == pytest.approx(oracle.step({"input": inputs[None]})["output"], abs=1e-5)


def test_a_chunk_without_the_batch_dimension_is_refused_as_the_page_of_errors_says(silero):
    chunk = np.zeros(512, np.float32)
    with pytest.raises(InferenceServerException, match="inference request batch-size must be <= 64 for 'silero_vad'"):
        silero.connect().step("silero_vad", new_id(), {"input": chunk}, start=True)

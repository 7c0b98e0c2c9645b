"""A script of the Python backend ("business logic") that calls a stateful model for its own clients' sequences."""

from __future__ import annotations

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import models
from harness.clients import PROTOCOLS, new_id
from harness.conversations import together
from harness.deployment import Deployment
from harness.python_backend import with_python_backend
from harness.sequence_oracle import SequenceOracle, assert_same

# Each request has two steps of the sequence: the first with the request's START, the second with its END.
SCRIPT = """
import numpy as np
import triton_python_backend_utils as pb_utils

START = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
END = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        both = pb_utils.get_input_tensor_by_name(request, "BOTH").as_numpy()
        outputs = []
        for i, flags in ((0, request.flags() & START), (1, request.flags() & END)):
            response = pb_utils.InferenceRequest(
                model_name="INNER",
                requested_output_names=["OUTPUT"],
                inputs=[pb_utils.Tensor("INPUT", both[:, i])],
                correlation_id=request.correlation_id(),
                flags=flags,
            ).exec()
            if response.has_error():
                return pb_utils.InferenceResponse(error=response.error())
            outputs.append(pb_utils.get_output_tensor_by_name(response, "OUTPUT").as_numpy())
        answer = pb_utils.Tensor("ANSWERS", np.stack(outputs, axis=1))
        return pb_utils.InferenceResponse(output_tensors=[answer])
"""

# A batcher of the script's own keeps a sequence on one instance, and so its requests in order.
SEQUENCE_BATCHING = "sequence_batching { max_sequence_idle_microseconds: 60000000 direct { } }"


@pytest.fixture
def own(deploy, tmp_path) -> Deployment:
    """A server with both backends."""
    return with_python_backend(deploy, tmp_path)


def serve_script(own: Deployment, name: str, inner, more: str) -> None:
    folder = own.repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(SCRIPT.replace("INNER", inner.name))
    (folder / "config.pbtxt").write_text(
        f"""name: "{name}"
backend: "python"
max_batch_size: {inner.max_batch_size}
input {{ name: "BOTH" data_type: TYPE_FP32 dims: [ 2, -1 ] }}
output {{ name: "ANSWERS" data_type: TYPE_FP32 dims: [ 2, -1 ] }}
{more}
"""
    )
    own.admin.load_model(name)


class ScriptedConversation:
    """One sequence of the script; both of a request's steps are held against the oracle of the model it calls."""

    def __init__(self, client, name: str, inner, seed: int, sequence_id=None):
        self.client, self.name, self.inner = client, name, inner
        self.rng = np.random.default_rng(seed)
        self.sequence_id = new_id() if sequence_id is None else sequence_id
        self.oracle = SequenceOracle(inner, self.sequence_id)

    def step(self, *, start=False, end=False) -> None:
        drawn = [self.inner.draw(self.rng)["INPUT"] for _ in range(2)]
        fed = {"BOTH": np.stack(drawn, axis=1)}
        answers = self.client.step(self.name, self.sequence_id, fed, start=start, end=end)["ANSWERS"]
        for i, flags in ((0, {"start": start}), (1, {"end": end})):
            expected = self.oracle.step({"INPUT": drawn[i]}, **flags)
            assert_same(self.inner, {"OUTPUT": answers[:, i]}, expected, f"{self.sequence_id!r}, {flags}")

    def whole(self, length: int) -> None:
        for i in range(length):
            self.step(start=i == 0, end=i == length - 1)


@pytest.mark.parametrize("more", ["", "instance_group { kind: KIND_CPU count: 2 }\n" + SEQUENCE_BATCHING])
def test_a_script_passes_sequences_on(own, more):
    inner = own.serve(models.lstm())
    serve_script(own, "script", inner, more)
    client = own.connect()

    # one after another, shuffled into each other
    talks = [ScriptedConversation(client, "script", inner, seed) for seed in range(2)]
    talks.append(ScriptedConversation(client, "script", inner, 2, sequence_id="a name"))
    for i in range(5):
        for talk in talks:
            talk.step(start=i == 0, end=i == 4)

    # at once, and over every protocol
    together(
        lambda protocol=protocol, seed=seed: ScriptedConversation(own.connect(protocol), "script", inner, seed).whole(6)
        for protocol in PROTOCOLS
        for seed in range(3)
    )
    own.settles("stateful_live_sequences", inner, 0)
    started = own.metric("stateful_sequences_started_total", inner)
    assert started == len(talks) + 3 * len(PROTOCOLS)


def test_a_refusal_reaches_the_scripts_client(own):
    inner = own.serve(models.lstm())
    serve_script(own, "script", inner, "")
    stray = ScriptedConversation(own.connect(), "script", inner, 0)
    with pytest.raises(InferenceServerException, match="START"):
        stray.step()
    stray.whole(3)

"""A panic in the backend: an error for those it hits, and the server lives.

Runs a library built with the feature `fault-injection` (`scripts/test` builds it), which panics at the stage that a
request names in its parameter `inject_panic`.
"""

import contextlib

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from support import paths
from tritonclient.utils import InferenceServerException

import models

FAULTS = paths.BUILD / "backends-faults"

pytestmark = pytest.mark.skipif(
    not (FAULTS / "stateful" / "libtriton_stateful.so").exists(),
    reason="no library with injected faults: scripts/build --out build/backends-faults --features fault-injection",
)


@pytest.mark.parametrize("stage", ["gather", "run", "respond"])
def test_a_panic_is_an_error_and_the_server_lives(deploy, stage):
    deployed = deploy(backends=FAULTS)
    model = deployed.serve(models.accumulate())
    client = grpcclient.InferenceServerClient(deployed.server.grpc_url)

    def add(value, sequence_id, parameters=None, **flags):
        tensor = grpcclient.InferInput("INPUT", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.array([[value]], np.float32))
        answer = client.infer(model.name, [tensor], sequence_id=sequence_id, parameters=parameters, **flags)
        return float(answer.as_numpy("OUTPUT").item())

    assert add(1, 1, sequence_start=True) == 1
    assert add(5, 2, sequence_start=True) == 5
    if stage == "respond":
        # The answer was on its way, and the state kept.
        assert add(10, 1, {"inject_panic": stage}) == 11
        assert add(100, 1) == 111
    else:
        with pytest.raises(InferenceServerException, match=f"panicked: injected at {stage}"):
            add(10, 1, {"inject_panic": stage})
        assert add(100, 1) == 101, "the state is as before the request"
    assert add(5, 2) == 10
    with pytest.raises(InferenceServerException, match="panicked") if stage != "respond" else contextlib.nullcontext():
        add(1, 3, {"inject_panic": stage}, sequence_start=True)
    assert add(1000, 1, sequence_end=True) in (1101, 1111)
    deployed.settles("stateful_live_sequences", model, 1 if stage != "respond" else 2)
    assert deployed.server.is_alive()

"""A panic in the backend: an error for those it hits, and the server lives.

Runs a library built with the feature `fault-injection` (`scripts/build --tests` builds it), which panics at the stage that a
request names in its parameter `inject_panic`.
"""

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from harness import models
from harness.batches import TOGETHER
from harness.conversations import outcome, together
from support import paths

FAULTS = paths.TEST_BACKENDS

pytestmark = pytest.mark.skipif(
    not (FAULTS / "stateful" / "libtriton_stateful.so").exists(),
    reason="no library with injected faults; scripts/test builds it",
)


@pytest.fixture
def served(deploy):
    deployed = deploy(backends=FAULTS)
    return deployed, grpcclient.InferenceServerClient(deployed.server.grpc_url)


def add(client, model, value, sequence_id, parameters=None, **flags):
    tensor = grpcclient.InferInput("INPUT", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.array([[value]], np.float32))
    answer = client.infer(model.name, [tensor], sequence_id=sequence_id, parameters=parameters, **flags)
    return float(answer.as_numpy("OUTPUT").item())


def test_a_panic_is_an_error_of_its_request_and_leaves_the_state_as_it_was(served):
    deployed, client = served
    for stage in ("decode", "gather", "run", "respond"):
        model = deployed.serve(models.accumulate(f"panics_at_{stage}"))
        assert add(client, model, 1, 1, sequence_start=True) == 1
        assert add(client, model, 5, 2, sequence_start=True) == 5
        with pytest.raises(InferenceServerException, match=f"panicked: injected at {stage}"):
            add(client, model, 10, 1, {"inject_panic": stage})
        assert add(client, model, 100, 1) == 101
        assert add(client, model, 5, 2) == 10
        with pytest.raises(InferenceServerException, match="panicked"):
            add(client, model, 1, 3, {"inject_panic": stage}, sequence_start=True)
        assert add(client, model, 1000, 1, sequence_end=True) == 1101
        deployed.settles("stateful_live_sequences", model, 1)


def test_a_panic_in_a_batch_costs_no_other_request(served):
    deployed, client = served
    model = deployed.serve(models.accumulate("panics_in_a_batch", **TOGETHER))

    def at_once(value, parameters, **flags):
        ask = [
            lambda id=id, of=of: outcome(lambda: add(client, model, value, id, of, **flags))
            for id, of in parameters.items()
        ]
        return together(ask)

    assert at_once(1, dict.fromkeys((1, 2, 3, 4)), sequence_start=True) == [1, 1, 1, 1]
    for count, stage in enumerate(("gather", "run", "respond"), start=2):
        came = at_once(1, {1: None, 2: {"inject_panic": stage}, 3: None, 4: None})
        assert f"panicked: injected at {stage}" in came.pop(1).message()
        assert came == [count] * 3
    assert at_once(1, dict.fromkeys((1, 2, 3, 4)), sequence_end=True) == [5, 2, 5, 5]

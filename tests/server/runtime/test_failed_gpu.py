"""A GPU that this process can't use any more: the simulated device fails, as after an illegal access, once a file exists."""

from __future__ import annotations

from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from harness import models
from harness.deployment import Deployment, eventually
from harness.own import fed, own, total
from harness.raw import PROTOCOLS, Refused

START, NEXT = {"sequence_id": 7, "sequence_start": True}, {"sequence_id": 7}

SCHEDULES = {
    "own": own,
    "oldest": lambda model: model,
    "direct": lambda model: model.variant(model.name, scheduling=models.work("", direct="").scheduling),
}


@pytest.fixture
def failure(tmp_path) -> Path:
    """The file that makes the device fail."""
    return tmp_path / "failure"


@pytest.fixture
def on_device(deploy, failure) -> Deployment:
    env = {"TRITON_STATEFUL_SIMULATED_DEVICES": "1", "TRITON_STATEFUL_SIMULATED_FAILURE": str(failure)}
    return deploy(env=env, control_model=False)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_request_says_to_restart_the_server(on_device, failure, schedule):
    model = on_device.serve(SCHEDULES[schedule](models.work("served")))
    idle = on_device.serve(models.work("idle"))
    client = PROTOCOLS["unary"](on_device)
    assert total(client.ask(model.name, fed(1), START)) == 1
    assert on_device.metric("stateful_gpu_failed", model) == 0
    failure.touch()
    with pytest.raises(Refused, match="illegal memory access.*restart the server") as refused:
        client.ask(model.name, fed(2), NEXT)
    assert refused.value.code == "UNAVAILABLE"
    on_device.settles("stateful_gpu_failed", model, 1)
    # Also without the file: nothing but another process can use the device.
    failure.unlink()
    for name in (model.name, idle.name):
        with pytest.raises(Refused, match="restart the server"):
            client.ask(name, fed(2), {"sequence_id": 8, "sequence_start": True})
    on_device.settles("stateful_gpu_failed", idle, 1)
    client.close()
    with pytest.raises(InferenceServerException, match="restart the server"):
        on_device.serve(models.work("late"))
    for of in (model, idle):
        on_device.unload(of)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_process_ends_where_the_model_says_so(on_device, failure, schedule):
    model = SCHEDULES[schedule](models.work("served"))
    model = model.variant("ending", parameters={**model.parameters, "exit_on_gpu_failure": "1"})
    on_device.serve(model)
    client = PROTOCOLS["unary"](on_device)
    assert total(client.ask(model.name, fed(1), START)) == 1
    failure.touch()
    with pytest.raises(Refused):
        client.ask(model.name, fed(2), NEXT)
    client.close()
    on_device.stopped = True
    eventually(on_device.server.is_alive, lambda alive: not alive)
    assert on_device.server.exit_code == 1
    log = on_device.server.log_text()
    assert "restart the server; the process ends, as 'exit_on_gpu_failure' says" in log

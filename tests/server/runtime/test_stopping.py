"""SIGTERM with live sequences: what docs/reliability.md says about a server that stops.

Core tells a backend of the stop only when it unloads the models. By then it has refused requests for some time, so
these tests show what core does, and that deploy/kubernetes/triton.yaml waits before core gets the signal.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess

import pytest

from harness import models
from harness.deployment import Deployment, eventually
from harness.own import fed, own, total
from harness.raw import PROTOCOLS, Refused
from harness.strategies import both_strategies
from support.paths import ROOT

START = {"sequence_id": 7, "sequence_start": True}
NEXT = {"sequence_id": 7}
END = {"sequence_id": 7, "sequence_end": True}

#: Core has stopped its schedulers, and counts what is in flight.
STOPPED = "model versions that have in-flight inferences"


def terminated(deployed: Deployment, until: str) -> None:
    """Sends SIGTERM, and waits until the log has the text."""
    deployed.admin.close()
    os.kill(deployed.server.pid, signal.SIGTERM)
    eventually(deployed.server.log_text, lambda text: until in text)


def exit_code(deployed: Deployment) -> int | None:
    # longer than the longest --exit-timeout-secs here, so that the server, not this limit, decides
    eventually(deployed.server.is_alive, lambda alive: not alive, seconds=90)
    deployed.stopped = True
    return deployed.server.exit_code


@both_strategies
@pytest.mark.parametrize("protocol", ["unary", "stream"])
def test_core_refuses_sequences_of_the_backend_and_lets_its_own_go_on(deploy, server_version, protocol, direct):
    if server_version >= (2, 58):
        pytest.skip("from 25.05 on, gRPC itself refuses every request after SIGTERM")
    deployed = deploy(extra_args=["--exit-timeout-secs=60"])
    ours, cores = deployed.serve(own(models.work("ours"))), deployed.serve(models.work("cores", direct=direct))
    client = PROTOCOLS[protocol](deployed)
    for model in (ours, cores):
        client.ask(model.name, fed(1), START)
    terminated(deployed, STOPPED)
    with pytest.raises(Refused, match="Server is stopping"):
        client.ask(ours.name, fed(2), NEXT)
    with pytest.raises(Refused, match="Server is stopping"):
        client.ask(cores.name, fed(2), {**START, "sequence_id": 8})
    assert total(client.ask(cores.name, fed(2), NEXT)) == 3
    assert total(client.ask(cores.name, fed(3), END)) == 6
    client.close()
    assert exit_code(deployed) == 0


@pytest.mark.parametrize("schedule", [own, lambda model: model], ids=["ours", "cores"])
def test_while_an_http_connection_is_open_everything_is_served(deploy, schedule):
    deployed = deploy(extra_args=["--exit-timeout-secs=60"])
    model = deployed.serve(schedule(models.work("served")))
    client = PROTOCOLS["http"](deployed)
    client.ask(model.name, fed(1), START)
    terminated(deployed, "HTTP service connections")
    assert total(client.ask(model.name, fed(2), NEXT)) == 3
    client.ask(model.name, fed(5), {**START, "sequence_id": 8})
    client.ask(model.name, fed(5), {**END, "sequence_id": 8})
    assert total(client.ask(model.name, fed(3), END)) == 6
    client.close()
    assert exit_code(deployed) == 0


def test_an_open_stream_holds_up_the_exit_after_the_models_are_gone(deploy, server_version):
    if server_version >= (2, 58):
        pytest.skip("from 25.05 on, gRPC waits for streams before core stops")
    deployed = deploy(extra_args=["--exit-timeout-secs=60"])
    model = deployed.serve(own(models.work("ours")))
    stream = PROTOCOLS["stream"](deployed)
    stream.ask(model.name, fed(1), START)
    terminated(deployed, "Found 0 live models")
    with pytest.raises(Refused, match="no available versions"):
        stream.ask(model.name, fed(2), NEXT)
    stream.close()
    # Its exit code is not certain: tritonserver's own threads still run while it ends.
    exit_code(deployed)


def pre_stop(deployed: Deployment) -> subprocess.Popen:
    """The command that Kubernetes runs before SIGTERM, for this server and without its first pause."""
    manifest = (ROOT / "deploy/kubernetes/triton.yaml").read_text()
    [(program, option, script)] = re.findall(r"- (sh)\n +- (-c)\n +- \|\n((?: {20}.*\n)+)", manifest)
    script, pauses = re.subn(r"^ {20}sleep \d+$", "", script, flags=re.MULTILINE)
    script, addresses = re.subn(r"localhost:8002", deployed.server.metrics_url, script)
    assert (pauses, addresses) == (1, 1)
    return subprocess.Popen([program, option, script])


@pytest.mark.parametrize("schedule", [own, lambda model: model], ids=["ours", "cores"])
def test_the_pre_stop_command_of_the_manifest_waits_for_live_sequences(deploy, schedule):
    deployed = deploy()
    model = deployed.serve(schedule(models.work("live")))
    with_parked = deployed.serve(
        models.work("parks").variant(
            "parks",
            scheduling="",
            parameters={"state_api": "true", "park_ms": "600000", "sequence_idle_timeout_ms": "1"},
        )
    )
    client = PROTOCOLS["unary"](deployed)
    client.ask(with_parked.name, fed(1), START)
    deployed.settles("stateful_parked_sequences", with_parked, 1)
    client.ask(model.name, fed(1), START)
    waits = pre_stop(deployed)
    with pytest.raises(subprocess.TimeoutExpired):
        waits.wait(2)
    assert total(client.ask(model.name, fed(2), END)) == 3
    assert waits.wait(30) == 0
    client.close()


def test_the_pre_stop_command_does_not_wait_for_a_server_that_is_gone(deploy):
    deployed = deploy()
    deployed.stop()
    assert pre_stop(deployed).wait(30) == 0

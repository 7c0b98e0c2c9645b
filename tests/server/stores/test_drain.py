"""`drain: true` and `stateful-drain`: a server saves its sequences and lets them go, before it is stopped."""

from __future__ import annotations

import re
import subprocess
import threading

import numpy as np
import pytest
import tritonclient.grpc as grpc_client

from harness import models
from harness.deployment import Deployment, eventually
from harness.own import fed, own, total
from harness.raw import Refused
from harness.stored import NEVER_MS, Diary, saved_later, word
from support.paths import DRAIN


def drain(deployment: Deployment, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(DRAIN), "--url", deployment.server.http_url, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def leveled(model, location, level, **parameters):
    """The model with this durability. Nothing is saved by time."""
    if level == "step":
        return own(model, state_store=location, **parameters)
    return saved_later(model, location, NEVER_MS if level == "interval" else None, **parameters)


@pytest.mark.parametrize("level", ["step", "interval", "drain"])
def test_all_sequences_leave_and_nothing_is_lost(two, connect, location_of_valkey, level):
    """Even if the server is killed as soon as the command has ended."""
    model = leveled(models.lstm("drained"), location_of_valkey, level, worker_count=2, state_api="true")
    other = leveled(models.counter(name="drained_too"), location_of_valkey, level, state_api="true")
    for deployment in two:
        deployment.serve(model)
        deployment.serve(other)
    old, new = (connect(deployment) for deployment in two)
    talks = [Diary(old, of, number) for of in (model, other) for number in range(1, 20)]
    for talk in talks:
        talk.start()
        talk.step()
    ran = drain(two[0])
    assert ran.returncode == 0, ran.stderr
    said = re.findall(r"model '(\w+)' version 1: (\d+) sequences are left", ran.stdout)
    assert [left for name, left in said if name == model.name][-1] == "0" and len({name for name, _ in said}) == 2
    for of in (model, other):
        assert two[0].metric("stateful_live_sequences", of) == 0
    for send in (talks[0].step, Diary(old, model, 100).start):
        with pytest.raises(Refused) as refused:
            send()
        assert word(refused.value) == "SEQUENCE_MOVED" and refused.value.code == "UNAVAILABLE"
        assert "another server" in refused.value.text
    two[0].kill()
    for talk in talks:
        talk.client = new
        talk.step()
        talk.end()
    assert sum(talk.lost for talk in talks) == 0


def test_requests_that_run_are_answered_and_those_behind_them_sent_on(two, connect, location_of_valkey):
    model = saved_later(models.work("drains_work"), location_of_valkey, None, state_api="true")
    for deployment in two:
        deployment.serve(model)
    old, new = (connect(deployment) for deployment in two)
    sequence = {"sequence_id": 1}
    assert total(old.ask(model.name, fed(1), {**sequence, "sequence_start": True})) == 1
    running = old.send(model.name, fed(10, 600), sequence)
    begins = old.send(model.name, fed(2, 600), {"sequence_id": 2, "sequence_start": True})
    two[0].settles("stateful_live_sequences", model, 2)
    ran = drain(two[0], "--model", model.name)
    assert ran.returncode == 0, ran.stderr
    assert total(running.answer()) == 11 and total(begins.answer()) == 2
    assert total(new.ask(model.name, fed(100), sequence)) == 111
    assert total(new.ask(model.name, fed(5), {"sequence_id": 2})) == 7


def test_what_cannot_be_drained_is_named(deploy, tmp_path):
    deployment = deploy(control_model=False)
    by_core = deployment.serve(models.counter(name="drains_by_core"))
    no_api = deployment.serve(own(models.counter(name="drains_without_api"), state_store=f"file:{tmp_path / 'a'}"))
    no_store = deployment.serve(own(models.counter(name="drains_no_store"), state_api="true"))
    ran = drain(deployment)
    assert ran.returncode == 1 and f"model '{no_api.name}' version 1: its configuration has no" in ran.stderr
    # such models keep nothing
    assert by_core.name not in ran.stderr and no_store.name not in ran.stderr
    deployment.unload(no_api)
    ran = subprocess.run([DRAIN, f"--url=http://{deployment.server.http_url}/"])
    assert ran.returncode == 0
    for arguments, why in (
        (("--model", by_core.name), "no parameter 'state_api'"),
        (("--model", no_store.name), "STATE_CONFLICT: 'drain' saves all sequences"),
        (("--model", "nosuch"), "model 'nosuch' is not ready"),
        (("--timeout=-1",), "a number of seconds is expected"),
    ):
        ran = drain(deployment, *arguments)
        assert ran.returncode != 0 and why in ran.stderr, ran.stderr
    ran = subprocess.run([DRAIN, "--url=127.0.0.1:9"], capture_output=True, text=True)
    assert ran.returncode == 1 and "http://127.0.0.1:9/v2/repository/index does not answer" in ran.stderr


def test_a_model_that_is_being_unloaded_is_waited_for(two, connect, location_of_valkey):
    model = saved_later(models.work("drains_unloading"), location_of_valkey, None, state_api="true", worker_count=2)
    for deployment in two:
        deployment.serve(model)
    old, new = (connect(deployment) for deployment in two)
    assert total(old.ask(model.name, fed(1), {"sequence_id": 1, "sequence_start": True})) == 1
    running = old.send(model.name, fed(2, 2000), {"sequence_id": 2, "sequence_start": True})
    two[0].settles("stateful_live_sequences", model, 2)
    unload = threading.Thread(target=two[0].admin.unload_model, args=[model.name])
    unload.start()
    index = two[0].admin.get_model_repository_index
    eventually(
        lambda: [of.state for of in index().models if of.name == model.name], lambda states: states == ["UNLOADING"]
    )
    ran = drain(two[0])
    assert ran.returncode == 0, ran.stderr
    two[0].kill()
    unload.join()
    assert total(running.answer()) == 2
    assert total(new.ask(model.name, fed(10), {"sequence_id": 1})) == 11


@pytest.mark.repetition
def test_more_states_than_may_wait_are_saved(two, location_of_valkey):
    """640 MB, of which 512 MiB may wait."""
    width = 8_000_000
    model = saved_later(models.counter(name="drains_much", width=width), location_of_valkey, None, state_api="true")
    for deployment in two:
        deployment.serve(model)
    tensor = grpc_client.InferInput("INPUT", [1, width], "FP32").set_data_from_numpy(np.ones((1, width), np.float32))

    def ask(to: Deployment, number: int, start: bool = False) -> float:
        answer = to.admin.infer(model.name, [tensor], sequence_id=number, sequence_start=start)
        return answer.as_numpy("OUTPUT").ravel()[-1]

    for number in range(1, 21):
        assert ask(two[0], number, start=True) == 1
    ran = drain(two[0])
    assert ran.returncode == 0, ran.stderr
    two[0].kill()
    for number in range(1, 21):
        assert ask(two[1], number) == 2


def test_without_the_store_the_command_says_what_is_left(deploy, connect, valkey):
    store, deployment = valkey(), deploy(control_model=False)
    model = deployment.serve(saved_later(models.lstm("drains_late"), store.location, None, state_api="true"))
    talk = Diary(connect(deployment), model, 1)
    talk.start()
    talk.step()
    store.stop()
    ran = drain(deployment, "--timeout", 0.5)
    assert ran.returncode == 1 and "1 sequences are left" in ran.stdout and "0.5 s are over" in ran.stderr, ran.stderr
    store.start()
    ran = drain(deployment)
    assert ran.returncode == 0, ran.stderr


def test_drain_is_not_taken_back(deploy, connect, location_of_valkey):
    deployment = deploy(control_model=False)
    model = deployment.serve(
        saved_later(models.counter(name="drains_again"), location_of_valkey, None, state_api="true")
    )
    client = connect(deployment)
    talk = Diary(client, model, 1)
    talk.start()
    with pytest.raises(Refused, match="unload the model, and load it again"):
        client.ask(model.name, {}, {"drain": False})
    with pytest.raises(Refused, match="STATE_CONFLICT.*leave out START and the sequence id"):
        client.ask(model.name, {}, {"drain": True, "sequence_id": 1})
    with pytest.raises(Refused, match="STATE_CONFLICT.*leave out START and the sequence id"):
        client.ask(model.name, {}, {"drain": True, "sequence_start": True})
    with pytest.raises(Refused, match="STATE_PARAMETER.*'drain'"):
        client.ask(model.name, {}, {"drain": 7})
    talk.step()
    assert client.ask(model.name, {}, {"drain": True}).parameters["stateful_sequences_left"] >= 0
    assert drain(deployment).returncode == 0
    deployment.unload(model)
    deployment.serve(model)
    talk.step()
    assert talk.lost == 0

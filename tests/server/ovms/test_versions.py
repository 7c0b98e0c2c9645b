"""Versions, reloads and unloads: cases O49 to O53 of OpenVINO Model Server."""

import dataclasses
import shutil

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import models
from harness.own import ID_OUTPUT, Talk, fails_with, fed, total
from harness.raw import Refused
from harness.ways import through_gateway

ALL_VERSIONS = "version_policy { all { } }"


def reload(deployment, model):
    """Loads a model that is loaded, with another configuration."""
    model.write(deployment.repository)
    deployment.admin.load_model(model.name)
    deployment.loaded[model.name] = model.config()


@through_gateway
def test_o49_each_version_has_its_own_sequences(serve, connect):
    model, client = serve(versions=(1, 2), more=ALL_VERSIONS + ID_OUTPUT), connect()
    first, second = (Talk(client, model, 5, version=version) for version in "12")
    first.start()
    with fails_with("SEQUENCE_MISSING", 5):
        second.step()
    first.step()
    second.start()
    first.end()
    second.end()


@through_gateway
def test_o50_a_request_that_names_no_version_goes_to_the_latest(deployment, serve, connect):
    """Name the version, if versions may come."""
    model, client = serve(more=ALL_VERSIONS + ID_OUTPUT), connect()
    talk = Talk(client, model, 5)
    talk.start(fed(5))
    folder = deployment.repository / model.name
    shutil.copytree(folder / "1", folder / "2")
    deployment.admin.load_model(model.name)
    with fails_with("SEQUENCE_MISSING", 5):
        talk.step()
    talk.version = "1"
    assert total(talk.step(fed(7))) == 12


@through_gateway
def test_o51_a_reload_ends_all_sequences(deployment, serve, connect):
    model, client = serve(), connect()
    talk = Talk(client, model, 42)
    talk.start()
    reload(deployment, model.with_parameters(model.name, max_sequence_number=7))
    with fails_with("SEQUENCE_MISSING", 42):
        talk.step()
    talk.start()
    talk.end()


def test_o51_requests_that_were_queued_are_answered_before_a_reload(deployment, serve, connect):
    model, stream = serve(), connect("stream")
    stream.send(model.name, fed(1, work=200), {"sequence_id": 42, "sequence_start": True})
    for _ in range(5):
        stream.send(model.name, fed(1, work=100), {"sequence_id": 42})
    stream.reply()
    reload(deployment, model.with_parameters(model.name, max_sequence_number=7))
    replies = stream.all_replies(5)
    for number, came in replies.items():
        # a request that came after the reload finds no sequence; the others have run
        assert came.text.startswith("SEQUENCE_MISSING") if isinstance(came, Refused) else total(came) == number + 1


@through_gateway
def test_o52_after_an_unload_there_is_no_model(deployment, serve, connect):
    model, client = serve(), connect()
    talk = Talk(client, model, 42)
    talk.start()
    deployment.unload(model)
    with pytest.raises(Refused) as caught:
        talk.step()
    assert caught.value.code in ("NOT_FOUND", "UNAVAILABLE")
    text = "Model with requested version is retired" if client.by_ovms else "no available versions"
    assert text in caught.value.text
    reload(deployment, model)
    with fails_with("SEQUENCE_MISSING", 42):
        talk.step()


def test_an_unload_waits_for_requests_that_are_queued(deployment, serve, connect):
    model, stream = serve(), connect("stream")
    count = 10
    stream.send(model.name, fed(1), {"sequence_id": 42, "sequence_start": True})
    for _ in range(count - 1):
        stream.send(model.name, fed(1, work=50), {"sequence_id": 42})
    stream.reply()
    deployment.admin.unload_model(model.name)
    answered = 1
    for came in stream.all_replies(count - 1).values():
        if isinstance(came, Refused):
            assert "no available versions" in came.text, came
        else:
            answered += 1
            assert total(came) == answered
    deployment.wait_until_unloaded(model)
    deployment.loaded.pop(model.name)


@pytest.mark.parametrize("full", [False, True], ids=["queued", "waiting_for_a_place"])
def test_an_unload_answers_every_request_once(deployment, serve, connect, full):
    """Also the STARTs that wait for a place which nobody makes."""
    model = serve(parameters={"max_sequence_number": 1 if full else 100, "max_queue_size": 20, "queue_timeout_ms": 500})
    client = connect()
    Talk(client, model, 1000).start()
    calls = [
        client.send(model.name, fed(1, work=20), {"sequence_id": of, "sequence_start": True}) for of in range(1, 11)
    ]
    deployment.admin.unload_model(model.name)
    for call in calls:
        try:
            assert total(call.answer()) == 1
        except Refused as error:
            assert error.code in ("UNAVAILABLE", "NOT_FOUND"), error
    deployment.wait_until_unloaded(model)
    deployment.loaded.pop(model.name)


def test_o53_a_reload_may_change_who_schedules(deployment, serve, connect):
    """The sequences end with the reload, as with any."""
    model, client = serve(), connect()
    talk = Talk(client, model, 42)
    talk.start()
    tritons = dataclasses.replace(models.work(model.name), scheduling=None)
    reload(deployment, tritons)
    with pytest.raises(Refused, match="must specify the START flag"):
        talk.step()
    client.ask(model.name, fed(5), {"sequence_id": 42, "sequence_start": True})
    reload(deployment, model)
    with fails_with("SEQUENCE_MISSING", 42):
        talk.step()


@through_gateway
def test_o53_a_refused_reload_leaves_the_model_and_its_sequences(deployment, serve, connect):
    model, client = serve(), connect()
    talk = Talk(client, model, 42)
    talk.start(fed(5))
    model.with_parameters(model.name, stateful="false").write(deployment.repository)
    with pytest.raises(InferenceServerException, match="stateful"):
        deployment.admin.load_model(model.name)
    assert total(talk.step(fed(7))) == 12
    model.write(deployment.repository)


@through_gateway
def test_more_instances_are_refused_and_leave_the_model_and_its_sequences(deployment, serve, connect):
    model, client = serve(parameters={"max_sequence_number": 7}), connect()
    talk = Talk(client, model, 42)
    talk.start(fed(5))
    dataclasses.replace(model, instances=2).write(deployment.repository)
    with pytest.raises(InferenceServerException, match="worker_count"):
        deployment.admin.load_model(model.name)
    assert total(talk.step(fed(7))) == 12
    model.write(deployment.repository)


@pytest.mark.parametrize("rounds", [3, *[pytest.param(100, marks=pytest.mark.repetition)]])
def test_loads_and_unloads_under_traffic(deployment, serve, connect, rounds):
    model, client = serve(parameters={"worker_count": 2}), connect()
    rng = np.random.default_rng(1)
    for _ in range(rounds):
        calls = [
            client.send(model.name, fed(of), {"sequence_id": of, "sequence_start": True, "sequence_end": True})
            for of in range(1, 21)
        ]
        calls[int(rng.integers(20))].answer()
        deployment.unload(model)
        for of, call in enumerate(calls, start=1):
            try:
                assert total(call.answer()) == of
            except Refused as error:
                assert error.code in ("NOT_FOUND", "UNAVAILABLE"), error
        reload(deployment, model)

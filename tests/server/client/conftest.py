"""A model with the State API, and clients of each protocol."""

from __future__ import annotations

import dataclasses
import re
import types

import pytest

from client.clients import PROTOCOLS, Clients
from client.proxy import LossyProxy
from harness import models
from harness.model import Model
from harness.own import own


@pytest.fixture(params=PROTOCOLS)
def protocol(request) -> str:
    return request.param


@pytest.fixture(params=["own", "core"])
def scheduling(request) -> str:
    return request.param


@pytest.fixture
def serve(deployment, request):
    """Serves a model under the test's name, with `state_api`: scheduled by the backend or by core's sequence batcher."""

    def made(make=models.counter, scheduling="own", name=None, state_api="true", **changes) -> Model:
        name = name or re.sub(r"\W+", "_", request.node.name).strip("_")
        parameters = {"state_api": state_api} | changes.pop("parameters", {})
        model = make(name=name, **changes)
        model = dataclasses.replace(model, parameters={**model.parameters, **parameters})
        return deployment.serve(own(model) if scheduling == "own" else model)

    return made


@pytest.fixture
def clients():
    made = Clients()
    with made.closing:
        yield made


@pytest.fixture
def begin(clients, deployment, protocol):
    """`Sequence` of the protocol, without its first argument."""
    return clients.connect(protocol, deployment.server)


@pytest.fixture
def proxy(deployment, protocol):
    http = protocol.startswith("http")
    made = LossyProxy(deployment.server.http_url if http else deployment.server.grpc_url, "http" if http else "grpc")
    yield made
    made.close()


@pytest.fixture
def begin_lossy(proxy, clients, protocol):
    """`Sequence` of the protocol through the proxy, without its first argument."""
    return clients.connect(protocol, types.SimpleNamespace(grpc_url=proxy.url, http_url=proxy.url))

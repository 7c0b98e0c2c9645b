"""Decorators and fixtures that run a test of sequences with several clients, directly and through the gateway.

A client of OpenVINO Model Server knows only its two special inputs, so a test that needs strings as ids, streams,
timeouts or other parameters of a request runs with Triton's clients only.
"""

from __future__ import annotations

import contextlib
import re

import pytest

from harness import models, raw, tensorflow_serving
from harness.model import Model
from harness.own import ID_OUTPUT, ByInputs, ByParameters, own

DIRECT, GATEWAY = list(raw.PROTOCOLS), list(tensorflow_serving.CLIENTS)

tritons_protocols = pytest.mark.parametrize("protocol", DIRECT)
every_protocol = pytest.mark.parametrize("protocol", [*DIRECT, *GATEWAY])

#: `connect()` without a protocol, directly and through the gateway.
through_gateway = pytest.mark.parametrize("connect", ["unary", "predict"], indirect=True)
#: The same for both ways to control a sequence.
every_way = pytest.mark.parametrize(
    ("connect", "way"),
    [("unary", ByParameters), ("unary", ByInputs), ("predict", ByInputs)],
    indirect=["connect"],
    ids=["parameters", "inputs", "gateway"],
)
#: Each protocol with each way that it has.
every_client = pytest.mark.parametrize(
    ("protocol", "way"),
    [
        *(
            pytest.param(protocol, way, id=f"{way.name}-{protocol}")
            for way in (ByParameters, ByInputs)
            for protocol in DIRECT
        ),
        *(pytest.param(protocol, ByInputs, id=protocol) for protocol in GATEWAY),
    ],
)


def connected(deployment, protocol: str):
    """A client of a protocol's name."""
    if protocol in tensorflow_serving.CLIENTS:
        return tensorflow_serving.CLIENTS[protocol](deployment.gateway)
    return raw.PROTOCOLS[protocol](deployment)


@pytest.fixture
def serve(deployment, request):
    """Serves `models.work`, or another model, under the test's name: with these parameters, scheduled by the backend, and
    with the output for ids."""

    def made(make=models.work, parameters=None, more=ID_OUTPUT, **changes) -> Model:
        name = re.sub(r"\W+", "_", request.node.name).strip("_")
        return deployment.serve(own(make(name=name, more=more, **changes), **(parameters or {})))

    return made


@pytest.fixture
def connect(deployment, request):
    """Connects clients, which are closed with the test. The parameter is the protocol of those that name none."""
    with contextlib.ExitStack() as opened:

        def made(protocol: str = getattr(request, "param", "unary")):
            client = connected(deployment, protocol)
            opened.callback(client.close)
            return client

        yield made

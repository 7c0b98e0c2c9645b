"""A model and clients for tests of sequences that the backend schedules."""

from __future__ import annotations

import contextlib
import re

import pytest

from harness import models
from harness.model import Model
from harness.own import ID_OUTPUT, own
from harness.ways import connected


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

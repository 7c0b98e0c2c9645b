"""Models with the State API, and clients for them."""

from __future__ import annotations

import contextlib
import re

import pytest

from harness.model import Model
from harness.raw import Stream, Unary
from harness.state_api import OWN, BinaryHttp, with_state_api

PROTOCOLS: dict[str, type[Unary] | type[Stream] | type[BinaryHttp]] = {
    "unary": Unary,
    "stream": Stream,
    "http": BinaryHttp,
}


@pytest.fixture
def serve(deployment, request):
    """Serves what a function of `models` makes, under the test's name: with the State API and these parameters."""

    def made(make, by: str = OWN, parameters=None, on=None, **changes) -> Model:
        name = re.sub(r"\W+", "_", request.node.name).strip("_")
        return (on or deployment).serve(with_state_api(make(name=name, **changes), by, **(parameters or {})))

    return made


@pytest.fixture
def connect(deployment):
    """Connects clients, which are closed with the test."""
    with contextlib.ExitStack() as opened:

        def made(protocol: str = "unary", to=None):
            client = PROTOCOLS[protocol](to or deployment)
            opened.callback(client.close)
            return client

        yield made

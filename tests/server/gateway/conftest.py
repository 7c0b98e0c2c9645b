"""Models and clients for tests of the gateway, and gateways with a tritonserver of their own."""

from __future__ import annotations

import pytest

from harness.gateway import MANAGED, Gateway
from harness.tensorflow_serving import Predict, Rest
from harness.ways import connect, serve

__all__ = ["connect", "gateway", "predict", "rest", "serve", "start"]


@pytest.fixture
def gateway(deployment) -> Gateway:
    """In front of the server that tests share."""
    return deployment.gateway


@pytest.fixture
def predict(connect) -> Predict:
    return connect("predict")


@pytest.fixture
def rest(connect) -> Rest:
    return connect("rest")


@pytest.fixture(scope="session")
def _leaving():
    """Gateways that have been asked to end. Their tritonservers take some seconds each, and the next test begins at once."""
    ending: list[Gateway] = []
    yield ending
    for one in ending:
        one.stop()


@pytest.fixture
def start(_leaving):
    """Starts gateways that start a tritonserver each, with these arguments; they end with the test."""
    started: list[Gateway] = []

    def made(*arguments: object, **how) -> Gateway:
        started.append(Gateway(*MANAGED, *arguments, **how))
        return started[-1]

    yield made
    for one in started:
        one.ask_to_stop()
    _leaving.extend(started)

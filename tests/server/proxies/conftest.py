"""Three servers that share a store, with Envoy and HAProxy in front."""

from __future__ import annotations

import pytest

from harness.deployment import eventually
from harness.models import ledger
from harness.proxied import is_complete, server_of, server_of_http
from harness.stored import stored
from support.cluster.servers import Servers
from support.paths import TESTED_BACKENDS
from support.proxies import KINDS, Proxy
from support.valkey import Valkey


@pytest.fixture(scope="package")
def store(tmp_path_factory):
    running = Valkey(tmp_path_factory.mktemp("v") / "v")
    yield running
    running.kill()


@pytest.fixture(scope="package")
def model(store):
    return stored(ledger("behind_a_proxy"), store.location, state_api="true")


@pytest.fixture(scope="package")
def servers(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    (folder / "models").mkdir()
    model.write(folder / "models")
    with Servers(folder / "models", folder, TESTED_BACKENDS, 3) as running:
        yield running


@pytest.fixture(scope="package", params=KINDS)
def running_proxy(servers, request, tmp_path_factory):
    with Proxy(request.param, tmp_path_factory.mktemp(request.param), servers.ports) as running:
        yield running


@pytest.fixture
def proxy(running_proxy):
    """A proxy that has found all servers to be ready, also those that the last test killed."""
    for ask in (server_of, server_of_http):
        eventually(lambda ask=ask: {ask(running_proxy, number) for number in range(20)}, is_complete)
    return running_proxy

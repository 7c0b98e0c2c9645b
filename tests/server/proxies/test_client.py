"""The Python client behind Envoy and HAProxy."""

from __future__ import annotations

import threading
import types

import numpy as np
import pytest

from client.clients import PROTOCOLS, Clients
from harness.deployment import eventually
from harness.proxied import requests, server_of, server_of_http
from harness.sequence_oracle import SequenceOracle, assert_same
from triton_stateful import Retry

AGAIN = Retry(attempts=60, backoff=0.05, longest=0.25)


@pytest.fixture
def clients():
    made = Clients()
    with made.closing:
        yield made


@pytest.fixture
def urls(proxy):
    return types.SimpleNamespace(grpc_url=proxy.grpc_url, http_url=proxy.http_url)


class Pair:
    """A sequence and the oracle's. Each step is made once and answered: the store keeps answers."""

    def __init__(self, sequence, model):
        self.sequence, self.model = sequence, model
        self.oracle = SequenceOracle(model, sequence.id)
        self.rng = np.random.default_rng(sequence.id % 2**32)
        self.made = 0

    def step(self, end: bool = False) -> None:
        inputs = self.model.draw(self.rng)
        came = self.sequence.step(inputs, end=end)
        expected = self.oracle.step(inputs, start=self.made == 0, end=end)
        self.made += 1
        assert_same(self.model, came, expected)


@pytest.mark.parametrize("protocol", [protocol for protocol in PROTOCOLS if protocol != "stream"])
def test_each_sequence_goes_to_the_server_of_its_id(proxy, servers, model, clients, urls, protocol):
    begin = clients.connect(protocol, urls)
    where = server_of_http if protocol.startswith("http") else server_of

    def wrong() -> list[tuple[str, int, int]]:
        """The servers that got other numbers of requests than the proxy said."""
        counts = lambda: {server.name: requests(server, model) for server in servers.servers}  # noqa: E731
        before = counts()
        wanted = dict(before)
        for _ in range(12):
            sequence = begin(model.name)
            sequence.step(model.draw(np.random.default_rng(1)))
            wanted[where(proxy, sequence.id)] += 1
        assert wanted != before
        now = eventually(counts, lambda now: sum(now.values()) == sum(wanted.values()))
        return [(name, now[name], number) for name, number in wanted.items() if now[name] != number]

    # On a busy machine, the proxy can take a server for dead between the two requests.
    eventually(wrong, lambda found: not found)


def test_sequences_go_on_when_a_server_is_killed_and_comes_back(proxy, servers, model, clients, urls):
    pairs = [
        Pair(clients.connect(protocol, urls)(model.name, retry=AGAIN), model)
        for protocol in PROTOCOLS
        for _ in range(3)
    ]

    def go_on(rounds: int) -> None:
        for _ in range(rounds):
            for pair in pairs:
                pair.step()

    go_on(3)
    name = server_of(proxy, pairs[0].sequence.id)
    [number] = [at for at, server in enumerate(servers.servers) if server.name == name]
    # Most likely in the middle of a request; the streams are open in any case.
    killer = threading.Timer(0.02, servers[number].kill)
    killer.start()
    go_on(5)
    killer.join()
    go_on(3)
    servers.start(number)
    eventually(lambda: server_of(proxy, pairs[0].sequence.id), lambda now: now == servers[number].name)
    go_on(3)
    for pair in pairs:
        assert pair.sequence.info().steps == pair.sequence.steps == pair.made == 14
        pair.step(end=True)

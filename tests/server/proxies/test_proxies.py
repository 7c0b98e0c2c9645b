"""The configurations of deploy/ for Envoy and HAProxy, in front of three servers that share a store."""

from __future__ import annotations

import http.client
import json
import threading
import types

import grpc

from harness.deployment import eventually
from harness.model import Model
from harness.own import Talk
from harness.proxied import requests, server_of, server_of_http
from harness.raw import PROTOCOLS, Refused
from harness.stored import word
from support.proxies import KINDS, Proxy

#: What a client gets whose request or stream a proxy could not carry to its end.
BROKEN = {"UNAVAILABLE", "INTERNAL", "CANCELLED", "502", "503", "504"}


class Client:
    """Sends the requests of one sequence through a proxy, with its id as header, and again after a break.

    This is what a client without a library of ours has to do.
    """

    by_ovms = False

    def __init__(self, proxy: Proxy, protocol: str, number: int):
        self.to = types.SimpleNamespace(server=proxy)
        self.protocol, self.headers = protocol, {"sequence-id": str(number)}
        self.inner = None
        self.broken = 0

    def ask(self, *request, **how):
        """The answer, or None if the step has been made and its answer is lost."""
        made = request[2].get("sequence_step")
        while True:
            try:
                if self.inner is None:
                    self.inner = PROTOCOLS[self.protocol](self.to, self.headers)
                return self.inner.ask(*request, **how)
            except Refused as error:
                if word(error) == "SEQUENCE_STEP_CONFLICT" and f"has made {made + 1}" in error.text:
                    return None
                if error.code not in BROKEN:
                    raise
            except grpc.RpcError as error:
                assert error.code().name in BROKEN, error
            except (OSError, http.client.HTTPException, json.JSONDecodeError):
                pass
            self.broken += 1
            self.close()

    def close(self) -> None:
        if self.inner is not None:
            self.inner.close()
            self.inner = None


class Life(threading.Thread):
    """A sequence that makes steps until it is told to end. Each answer is compared with the oracle's."""

    def __init__(self, proxy: Proxy, protocol: str, number: int, model: Model):
        super().__init__()
        self.client = Client(proxy, protocol, number)
        self.talk = Talk(self.client, model, number)
        self.made = self.lost = 0
        self.ending = threading.Event()
        self.failed: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.ending.is_set():
                self.step()
            self.step(end=True)
        except BaseException as error:
            self.failed = error
        finally:
            self.client.close()

    def step(self, end: bool = False) -> None:
        inputs = self.talk.model.draw(self.talk.rng)
        start = self.made == 0
        _, parameters = self.talk.way.control(self.talk.model, self.talk.sequence_id, start, end)
        checked = parameters if start else {**parameters, "sequence_step": self.made}
        try:
            answer = self.client.ask(self.talk.model.name, inputs, checked)
        except Refused as error:
            # the END has run, and its answer is lost
            assert end and word(error) == "SEQUENCE_MISSING" and self.client.broken, error
            return
        self.made += 1
        if answer is None:
            self.lost += 1
            self.talk.oracle.step(inputs, start=start, end=end)
        else:
            self.talk.check(answer, inputs, start=start, end=end)


def test_all_requests_of_a_sequence_go_to_one_server(proxy):
    """Over gRPC and HTTP."""
    found = {number: server_of(proxy, number) for number in range(30)}
    assert len({*found.values()}) == 3
    for number, name in found.items():
        assert server_of(proxy, number) == server_of_http(proxy, number) == server_of_http(proxy, number) == name


def test_a_stream_goes_to_one_server_with_all_its_sequences(proxy, servers, model):
    before = [requests(server, model) for server in servers.servers]
    client = Client(proxy, "stream", 77)
    for number in range(10):
        Talk(client, model, f"{proxy.kind}-{number}").whole(2)
    client.close()
    more = [requests(server, model) - then for server, then in zip(servers.servers, before, strict=True)]
    assert sorted(more) == [0, 0, 20]


def test_sequences_go_on_when_a_server_is_killed_and_comes_back(proxy, servers, model):
    # a server may still have a sequence that has ended elsewhere, so no id is used twice
    first = 1000 * (1 + KINDS.index(proxy.kind))
    lives = [
        Life(proxy, protocol, first + 10 * at + number, model)
        for at, protocol in enumerate(PROTOCOLS)
        for number in range(4)
    ]

    def go_on() -> None:
        """Until each sequence has made three more steps."""
        wanted = {life: life.made + 3 for life in lives}
        eventually(
            lambda: [(life.talk.sequence_id, life.made) for life in lives if life.made < wanted[life]],
            lambda behind: not behind or any(life.failed for life in lives),
            60,
        )
        assert not [life.failed for life in lives if life.failed]

    def places() -> dict[Life, str | None]:
        return {life: server_of(proxy, life.talk.sequence_id) for life in lives}

    for life in lives:
        life.start()
    try:
        go_on()
        before = places()
        # that of a stream
        [number] = [at for at, server in enumerate(servers.servers) if server.name == before[lives[4]]]
        killed = servers[number]
        of_killed = [life for life, name in before.items() if name == killed.name]
        assert len(of_killed) < len(lives)
        killed.kill()
        go_on()
        for life, name in places().items():
            assert name != killed.name and (life in of_killed or name == before[life])
        servers.start(number)
        # it has a new name
        eventually(places, lambda now: all((now[life] == killed.name) == (life in of_killed) for life in lives))
        go_on()
    finally:
        for life in lives:
            life.ending.set()
        for life in lives:
            life.join(120)
    assert not [life.failed for life in lives if life.failed]
    streams = [life for life in of_killed if life.client.protocol == "stream"]
    assert lives[4] in streams and all(life.client.broken for life in streams)
    assert not [life for life in lives if life.client.broken and life not in of_killed]

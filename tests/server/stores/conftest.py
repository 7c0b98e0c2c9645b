"""Stores that keep sequences, and clients of several servers."""

from __future__ import annotations

import contextlib

import pytest

from harness.networks import Authority, Network, Terminator
from harness.raw import Unary
from support.valkey import Valkey


@pytest.fixture
def valkey(tmp_path):
    """Starts a Valkey with these options, which loses nothing when it is killed."""
    with contextlib.ExitStack() as started:

        def start(*options: str) -> Valkey:
            made = Valkey(tmp_path / "v", "--appendonly", "yes", "--appendfsync", "always", *options)
            started.callback(made.kill)
            return made

        yield start


@pytest.fixture
def network(tmp_path):
    """Starts Valkeys that also listen on ports, and sentinels."""
    with contextlib.ExitStack() as started:
        yield Network(tmp_path, started)


@pytest.fixture
def tls(tmp_path):
    """Puts TLS in front of a Valkey."""
    with contextlib.ExitStack() as started:

        def start(store: Valkey) -> Terminator:
            made = Terminator(store, Authority(tmp_path / "authority"))
            started.callback(made.close)
            return made

        yield start


@pytest.fixture
def location(request):
    """Where a store of the kind that the test names is."""
    kind = request.param
    return request.getfixturevalue("location_of_file" if kind == "file" else "location_of_valkey")


@pytest.fixture
def location_of_valkey(valkey):
    return valkey().location


@pytest.fixture
def location_of_file(tmp_path):
    return f"file:{tmp_path / 'store'}"


@pytest.fixture
def two(deploy):
    """Two servers, for models that share a store."""
    return deploy(control_model=False), deploy(control_model=False)


@pytest.fixture
def connect():
    """Connects clients, which are closed with the test."""
    with contextlib.ExitStack() as opened:

        def made(to) -> Unary:
            client = Unary(to)
            opened.callback(client.close)
            return client

        yield made

"""Fixtures: the server that most tests share, servers of one's own, and the check after each test."""

from __future__ import annotations

import pytest

from harness.deployment import Deployment


def pytest_collection_modifyitems(items):
    """A server that hangs costs one test, not the run."""
    for item in items:
        item.add_marker(pytest.mark.timeout(180))


class _Shared:
    """The shared deployment; a fresh one when a test has killed the last."""

    def __init__(self, folder):
        self.folder = folder
        self.deployment: Deployment | None = None
        self.count = 0

    def running(self) -> Deployment:
        if self.deployment is not None and not self.deployment.server.is_alive():
            self.stop()
        if self.deployment is None:
            self.count += 1
            self.deployment = Deployment(self.folder / f"shared-{self.count}")
        return self.deployment

    def stop(self) -> None:
        if self.deployment is not None:
            self.deployment.stop()
            self.deployment = None


@pytest.fixture(scope="session")
def _shared(tmp_path_factory):
    shared = _Shared(tmp_path_factory.mktemp("server"))
    yield shared
    shared.stop()


@pytest.fixture
def deployment(_shared) -> Deployment:
    """The server that tests share. Give a model a name of its own where its metrics are read."""
    return _shared.running()


@pytest.fixture
def server_version(deployment) -> tuple[int, int]:
    """The server's version, such as (2, 51). docs/servers.md has the release of each."""
    major, minor, *_ = deployment.admin.get_server_metadata().version.split(".")
    return int(major), int(minor)


@pytest.fixture
def _own():
    return []


@pytest.fixture
def deploy(_own, tmp_path):
    """Starts a server of the test's own, with the options given; it ends with the test."""

    def start(**options) -> Deployment:
        made = Deployment(tmp_path / f"own-{len(_own)}", **options)
        _own.append(made)
        return made

    return start


@pytest.fixture(autouse=True)
def healthy_afterwards(_shared, _own):
    """After every test, each server that should run does, and its control model answers rightly."""
    yield
    try:
        if _shared.deployment is not None:
            _shared.deployment.disconnect()
            _shared.deployment.assert_healthy()
        for made in _own:
            made.disconnect()
            if not made.stopped:
                made.assert_healthy()
    finally:
        for made in _own:
            made.stop()

"""Fixtures: the server that most tests share, servers of one's own, and the checks after the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.deployment import Deployment
from support.paths import TEST_DEVICE

#: Whether a test has failed so far.
_FAILED = pytest.StashKey[bool]()


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
def deployment(_shared) -> Iterator[Deployment]:
    """The server that tests share. Give a model a name of its own where its metrics are read."""
    deployment = _shared.running()
    yield deployment
    # Each model takes some hundreds of megabytes of a GPU.
    if TEST_DEVICE == "gpu" and deployment.server.is_alive():
        deployment.unload_all()


@pytest.fixture(scope="session")
def _ending():
    """Servers that have been asked to end. That takes each two seconds, and the next test begins at once."""
    ending: list[Deployment] = []
    yield ending
    for made in ending:
        made.stop()


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def healthy_afterwards(request, _shared, _own, _ending):
    """After each test, the shared server and those of the test still run.

    The control model of a test's own server, and of the shared server after a failure, answers rightly.
    """
    yield
    try:
        if (shared := _shared.deployment) is not None:
            shared.disconnect()
            shared.assert_running()
            if request.node.stash.get(_FAILED, False):
                shared.assert_healthy()
        for made in _own:
            made.disconnect()
            if not made.stopped:
                made.assert_healthy()
    finally:
        for made in _own:
            made.ask_to_stop()
        _ending[:] = [made for made in (*_ending, *_own) if made.server.is_alive()]


@pytest.fixture(autouse=True, scope="module")
def healthy_after_all(_shared):
    """After the tests of a file, the control model of the shared server answers rightly."""
    yield
    if _shared.deployment is not None:
        _shared.deployment.assert_healthy()

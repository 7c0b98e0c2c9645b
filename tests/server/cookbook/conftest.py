"""A server for the models of all pages."""

from __future__ import annotations

import pytest

from harness.deployment import Deployment


@pytest.fixture(scope="session")
def cookbook_deployment(tmp_path_factory):
    made = Deployment(tmp_path_factory.mktemp("cookbook"), control_model=False)
    yield made
    made.stop()

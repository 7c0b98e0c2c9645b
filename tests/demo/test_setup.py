"""What scripts/setup installs: for the demo and the server, and with --tests for the tests."""

import importlib.metadata
import re
import shutil
import subprocess

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.paths import ROOT


def pinned(name: str) -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in (ROOT / "scripts" / name).read_text().splitlines())
    needs = [Requirement(line) for line in lines if line]
    return [need for need in needs if need.marker is None or need.marker.evaluate()]


def needed_by(needs: list[Requirement]) -> set[str]:
    """The packages that these ask for, of this Python."""
    environment = {name: str(value) for name, value in default_environment().items()}
    asked = [
        (Requirement(line), extra)
        for need in needs
        for line in importlib.metadata.requires(need.name) or []
        for extra in {"", *need.extras}
    ]
    return {
        canonicalize_name(need.name)
        for need, extra in asked
        if need.marker is None or need.marker.evaluate(environment | {"extra": extra})
    }


@pytest.mark.parametrize("files", [["requirements.txt"], ["requirements.txt", "requirements-tests.txt"]])
def test_every_package_that_a_pinned_one_asks_for_is_pinned(files):
    needs = [need for file in files for need in pinned(file)]
    names = [canonicalize_name(need.name) for need in needs]
    assert needed_by(needs) <= set(names)
    assert len(names) == len(set(names))


# ---- scripts/setup, with a stand-in for Python


PYTHON = """#!/bin/bash
case "$*" in
    *sys.version_info*) echo 3.11 ;;
    *sys.executable*) echo "$0" ;;
    -V) echo Python 3.11 ;;
    *"-m venv"*) rm -rf .venv && mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *"-m pip"*) echo "${@: -1}" >>"$LOG" ;;
esac
"""


BASE = ["requirements", "requirements-nodeps"]
TESTS = ["requirements-tests", "requirements-tests-nodeps"]
CLUSTER = ["requirements-valkey", "requirements-proxies"]
REDIS = ["requirements-redis"]


@pytest.fixture
def setup(tmp_path):
    """Runs scripts/setup in a folder with nothing else, and answers which lists it installed."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for file in ("setup", *(f"{name}.txt" for name in (*BASE, *TESTS, *CLUSTER, *REDIS))):
        shutil.copy(ROOT / "scripts" / file, scripts)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    log = tmp_path / "log"

    def run(*arguments):
        log.write_text("")
        environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(python), "LOG": str(log)}
        subprocess.run([scripts / "setup", *arguments], env=environment, check=True, capture_output=True)
        return [re.fullmatch("scripts/(.*).txt", line)[1] for line in log.read_text().splitlines()]

    return run


def test_the_tools_of_the_tests_are_installed_only_when_they_are_asked_for(setup):
    assert setup() == BASE
    assert setup() == []
    assert setup("--cluster") == CLUSTER
    assert setup("--tests") == TESTS
    assert setup("--tests") == setup("--cluster") == setup() == []
    assert setup("--redis") == REDIS
    assert setup("--redis") == []


def test_a_new_list_is_installed(setup, tmp_path):
    assert setup("--tests") == [*BASE, *TESTS, *CLUSTER]
    (tmp_path / "scripts" / "requirements-tests.txt").write_text("another==1\n")
    assert setup() == []
    assert setup("--tests") == TESTS
    (tmp_path / "scripts" / "requirements.txt").write_text("another==1\n")
    assert setup() == BASE
    # the environment is new, so what the tests need has gone
    assert setup("--tests") == TESTS

"""Each test that docs/reliability.md names exists."""

import re

import pytest

from support.paths import ROOT

NAMED = re.findall(r"`((?:test_)?\w+_\w+_\w+_\w+\w*)`", (ROOT / "docs/reliability.md").read_text())
SOURCES = "\n".join(
    file.read_text() for folder in ("tests", "src") for kind in ("*.py", "*.rs") for file in (ROOT / folder).rglob(kind)
)


@pytest.mark.parametrize("name", NAMED)
def test_the_tests_that_are_named_exist(name):
    assert re.search(rf"\b(?:def|fn) {name}\(", SOURCES)


def test_many_are_named():
    assert len(NAMED) > 20

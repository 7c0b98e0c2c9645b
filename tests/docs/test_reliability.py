"""Each test that docs/reliability.md, docs/cluster.md and crates/convert/tests/README.md name exists."""

import re

import pytest

from support.paths import ROOT

PAGES = {page: (ROOT / page).read_text() for page in ("docs/reliability.md", "crates/convert/tests/README.md")}
#: Of the rest of the page, parameters look like tests.
PAGES["docs/cluster.md"] = re.findall(
    r"^## What is guaranteed$.*?^## ", (ROOT / "docs/cluster.md").read_text(), re.MULTILINE | re.DOTALL
)[0]
NAMED = sorted({name for text in PAGES.values() for name in re.findall(r"`((?:test_)?\w+_\w+_\w+_\w+\w*)`", text)})
SOURCES = "\n".join(
    file.read_text()
    for folder in ("tests", "src", "crates")
    for kind in ("*.py", "*.rs")
    for file in (ROOT / folder).rglob(kind)
)


@pytest.mark.parametrize("name", NAMED)
def test_the_tests_that_are_named_exist(name):
    assert re.search(rf"\b(?:def|fn) {name}\(", SOURCES)


def test_many_are_named():
    assert len(NAMED) > 50


def test_each_fault_has_a_test():
    faults, _, _ = PAGES["docs/reliability.md"].partition("## Limits of the process")
    rows = re.findall(r"^\| (?!fault \|)(\w.*?) \|.*\| (.*?) \|$", faults, re.MULTILINE)
    without = [fault for fault, tests in rows if not set(re.findall(r"`(\w+)`", tests)) & set(NAMED)]
    assert not without and len(rows) > 20


def test_each_case_of_the_converter_has_a_test():
    rows = re.findall(r"^\| (C.*?) \|.*`\w+` \|$", PAGES["crates/convert/tests/README.md"], re.MULTILINE)
    ends = [re.findall(r"\d+", row) for row in rows]
    cases = [case for first, *last in ends for case in range(int(first), int((last or [first])[0]) + 1)]
    assert cases == list(range(1, 39))

"""The pages' links to files of the project, and to headings."""

import re

import pytest

from support.paths import ROOT

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)")


PAGES = [
    str(file.relative_to(ROOT))
    for pattern in ("*.md", "*/*.md", "clients/*/*.md", "docs/*/*.md")
    for file in sorted(ROOT.glob(pattern))
]


def anchors(page: str) -> set[str]:
    """What a heading is linked by: lower case, spaces become hyphens, other punctuation is left out."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def broken_links(path: str, text: str) -> list[str]:
    broken = []
    for target, anchor in LINK.findall(FENCE.sub("", text)):
        file = (ROOT / path).parent / target if target else ROOT / path
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            broken.append(f"{target}#{anchor}" if anchor else target)
    return broken


@pytest.mark.parametrize("path", PAGES)
def test_links_lead_somewhere(path):
    assert not broken_links(path, (ROOT / path).read_text())


def test_broken_links_are_found():
    text = "[](#codes) [](#code) [](metrics.md#prometheus) [](metrics.md#none) [](none.md) [](../README.md)"
    assert broken_links("docs/errors.md", text) == ["#code", "metrics.md#none", "none.md"]
    assert {"README.md", "docs/errors.md", "clients/python/README.md", "docs/cookbook/README.md"} <= set(PAGES)

"""The maps of the modules in the `lib.rs` of the backend and of `model-config`, held against what the modules use."""

import re
from pathlib import Path

import pytest

from support.paths import ROOT

SOURCES = (ROOT / "src", ROOT / "crates/model-config/src", ROOT / "crates/state-store/src")
ROW = re.compile(r"^//! \| \[`(?:mod@)?(\w+)`\] \| .* \| (.*?) ?\|$", re.MULTILINE)
TESTS = re.compile(
    r"^#\[cfg\((?:test|any\(test, feature = \"fuzzing\"\))\)\]\n(?:pub(?:\(crate\))? )?mod ", re.MULTILINE
)


def map_of(src: Path) -> dict[str, set[str]]:
    """Which modules each module uses, as `lib.rs` says."""
    return {name: set(re.findall(r"\w+", uses)) for name, uses in ROW.findall((src / "lib.rs").read_text())}


def code_of(src: Path, module: str) -> str:
    """The module's code without comments and tests."""
    files = [file for file in (src / f"{module}.rs", *(src / module).rglob("*.rs")) if file.exists()]
    texts = [TESTS.split(file.read_text())[0] for file in files if "tests" not in file.stem]
    return "\n".join(re.sub(r"//.*", "", text) for text in texts)


def used_by(src: Path, module: str) -> set[str]:
    """Other modules that it names, alone or in a list: `crate::a::B`, `crate::{a, b::C}`."""
    named = re.findall(r"\bcrate::(?:(\w+)|\{([^;]*)\};)", code_of(src, module))
    return {word for pair in named for word in re.findall(r"\w+", " ".join(pair))} & set(map_of(src)) - {module}


@pytest.mark.parametrize("src", SOURCES)
def test_the_map_has_every_module(src):
    assert set(map_of(src)) == set(
        re.findall(
            r"^(?<!test\)\]\n)(?<!\"fuzzing\"\)\)\]\n)(?:pub )?mod (\w+);", (src / "lib.rs").read_text(), re.MULTILINE
        )
    )


@pytest.mark.parametrize("src", SOURCES)
def test_the_map_says_what_each_module_uses(src):
    assert {module: used_by(src, module) for module in map_of(src)} == map_of(src)


@pytest.mark.parametrize(("src", "modules_min"), list(zip(SOURCES, (10, 5, 5), strict=True)))
def test_each_module_uses_only_those_below_it(src, modules_min):
    uses = map_of(src)
    order = list(uses)
    upwards = [(module, used) for module in order for used in uses[module] if order.index(used) <= order.index(module)]
    assert not upwards and len(order) >= modules_min

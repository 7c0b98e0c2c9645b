"""The map of the modules in src/lib.rs, held against what the modules use."""

import re

from support.paths import ROOT

SRC = ROOT / "src"
ROW = re.compile(r"^//! \| \[`(?:mod@)?(\w+)`\] \| .* \| (.*?) ?\|$", re.MULTILINE)
TESTS = re.compile(
    r"^#\[cfg\((?:test|any\(test, feature = \"fuzzing\"\))\)\]\n(?:pub(?:\(crate\))? )?mod ", re.MULTILINE
)
MAP = {name: set(re.findall(r"\w+", uses)) for name, uses in ROW.findall((SRC / "lib.rs").read_text())}


def code_of(module: str) -> str:
    """The module's code without comments and tests."""
    files = [file for file in (SRC / f"{module}.rs", *(SRC / module).rglob("*.rs")) if file.exists()]
    texts = [TESTS.split(file.read_text())[0] for file in files if "tests" not in file.stem]
    return "\n".join(re.sub(r"//.*", "", text) for text in texts)


def used_by(module: str) -> set[str]:
    """Other modules that it names, alone or in a list: `crate::a::B`, `crate::{a, b::C}`."""
    named = re.findall(r"\bcrate::(?:(\w+)|\{([^;]*)\};)", code_of(module))
    return {word for pair in named for word in re.findall(r"\w+", " ".join(pair))} & set(MAP) - {module}


def test_the_map_has_every_module():
    assert set(MAP) == set(
        re.findall(
            r"^(?<!test\)\]\n)(?<!\"fuzzing\"\)\)\]\n)(?:pub )?mod (\w+);", (SRC / "lib.rs").read_text(), re.MULTILINE
        )
    )


def test_the_map_says_what_each_module_uses():
    assert {module: used_by(module) for module in MAP} == MAP


def test_each_module_uses_only_those_below_it():
    order = list(MAP)
    upwards = [(module, used) for module in order for used in MAP[module] if order.index(used) <= order.index(module)]
    assert not upwards and len(order) > 10

"""The pages' tables of parameters and settings, held against the lists in the code."""

import re

import pytest

from support.paths import ROOT


def names(file: str, constant: str) -> list[str]:
    """The names in a list of strings of the code."""
    [listed] = re.findall(rf"const {constant}: [^=]* =\s+\[(.*?)\];", (ROOT / file).read_text(), re.DOTALL)
    return re.findall(r'"([^"]+)"', listed)


def documented(page: str) -> set[str]:
    """The names in the first column of the page's tables."""
    cells = re.findall(r"^\| ([^|]*) \|", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


FILE = "crates/model-config/src/config/parameters.rs"
LISTS = ["KNOWN", "OF_OWN_SCHEDULING", "OF_STATE_STORE", "LAZY_SIZES", "CUDA_PARAMETERS"]
PARAMETERS = [name for constant in LISTS for name in names(FILE, constant)]
#: The page has it in a sentence, as it has no effect.
WITHOUT_EFFECT = "error_inject_rate"


@pytest.mark.parametrize("name", sorted(set(PARAMETERS) - {WITHOUT_EFFECT}))
def test_a_parameter_is_documented(name):
    assert name in documented("configuration.md") | documented("gpu.md")


@pytest.mark.parametrize("name", names("src/backend.rs", "KNOWN"))
def test_a_setting_of_the_command_line_is_documented(name):
    assert name in documented("configuration.md")

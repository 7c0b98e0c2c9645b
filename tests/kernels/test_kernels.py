"""The GPU kernel compiles for every architecture, and what lies compiled in the repository is of its source."""

from __future__ import annotations

import re

import pytest

from support.kernels import ARCHITECTURES, COMPILED, OLDEST, SOURCE, VERSION, compiled_hash, source_hash
from support.nvrtc import Nvrtc
from support.paths import BUILD

LIBRARY = BUILD / "nvrtc" / "nvidia" / "cuda_nvrtc" / "lib" / "libnvrtc.so.12"


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    if not LIBRARY.exists():
        pytest.skip("no NVRTC: scripts/test installs it into build/nvrtc")
    return Nvrtc(LIBRARY)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernel_compiles_for(nvrtc, architecture):
    code = nvrtc.cubin(SOURCE, architecture)
    assert code.startswith(b"\x7fELF") and b"move_rows" in code


def test_an_error_in_the_kernel_is_told_with_its_place(nvrtc, tmp_path):
    broken = tmp_path / "broken.cu"
    broken.write_text(SOURCE.read_text().replace("const unsigned total", "const unsinged total"))
    with pytest.raises(RuntimeError, match=r"broken\.cu.*sm_90(.|\n)*unsinged"):
        nvrtc.cubin(broken, "sm_90")


def test_the_compiled_kernel_is_that_of_the_source():
    assert compiled_hash() == source_hash(), "rows.cu has changed: run scripts/kernels"


def test_the_compiled_kernel_is_for_old_devices_and_drivers():
    text = COMPILED.read_text()
    assert re.findall(r"^\.version (.*)$", text, re.MULTILINE) == [VERSION]
    assert f".target {OLDEST.replace('compute', 'sm')}" in text and ".visible .entry move_rows" in text

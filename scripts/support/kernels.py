"""Compiles the GPU kernel ahead, and says whether what lies in the repository is of its source."""

from __future__ import annotations

import ctypes
import hashlib
import re
import sys
from pathlib import Path

from support.nvrtc import Nvrtc
from support.paths import ROOT

SOURCE = ROOT / "crates" / "gpu-rows" / "src" / "rows.cu"
COMPILED = SOURCE.with_suffix(".ptx")

#: The oldest architecture that the PTX is for; drivers finish it for later ones.
OLDEST = "compute_70"
#: What the kernel is compiled for to see that it can be, from Volta to Blackwell.
ARCHITECTURES = ["sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100"]

#: The oldest version of PTX that has the kernel's instructions and knows that architecture. The compiler writes its own, which
#: older drivers refuse. The linker refuses an instruction that is newer than the version.
VERSION = "6.0"

_HEAD = "// Compiled by scripts/kernels from rows.cu with the SHA-256 "


def source_hash() -> str:
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()


def compiled_hash() -> str | None:
    """Which source the PTX in the repository is of."""
    found = re.match(re.escape(_HEAD) + r"([0-9a-f]{64})$", COMPILED.read_text(), re.MULTILINE)
    return found[1] if found else None


def main() -> int:
    libraries = Path(sys.argv[1]) / "nvidia"
    ptx = Nvrtc(libraries / "cuda_nvrtc" / "lib" / "libnvrtc.so.12").ptx(SOURCE, OLDEST).decode()
    ptx, lowered = re.subn(r"^\.version \d+\.\d+$", f".version {VERSION}", ptx, flags=re.MULTILINE)
    if lowered != 1:
        raise RuntimeError(f"the PTX has {lowered} lines with its version; one is expected")
    # The compiler begins with a comment about itself, and leaves the path out.
    ptx = f"{_HEAD}{source_hash()}\n{ptx}"
    for architecture in ARCHITECTURES:
        size = len(linked(libraries / "nvjitlink" / "lib" / "libnvJitLink.so.12", ptx.encode(), architecture))
        print(f"{architecture}: {size} bytes")
    COMPILED.write_text(ptx)
    print(f"written: {COMPILED.relative_to(ROOT)}")
    return 0


def linked(library: Path, ptx: bytes, architecture: str) -> bytes:
    """What NVIDIA's linker makes of PTX, as a driver would."""
    link = ctypes.CDLL(str(library))
    version = "12_9"
    call = {name: getattr(link, f"__nvJitLink{name}_{version}") for name in _LINKER}
    handle, option = ctypes.c_void_p(), f"-arch={architecture}".encode()
    _check(call["Create"](ctypes.byref(handle), 1, (ctypes.c_char_p * 1)(option)), "create", architecture)
    ptx_kind = 2
    _check(
        call["AddData"](handle, ptx_kind, ctypes.c_char_p(ptx), ctypes.c_size_t(len(ptx)), b"rows.ptx"),
        "read",
        architecture,
    )
    _check(call["Complete"](handle), "finish", architecture)
    size = ctypes.c_size_t()
    _check(call["GetLinkedCubinSize"](handle, ctypes.byref(size)), "measure", architecture)
    cubin = ctypes.create_string_buffer(size.value)
    _check(call["GetLinkedCubin"](handle, cubin), "fetch", architecture)
    return cubin.raw


_LINKER = ["Create", "AddData", "Complete", "GetLinkedCubinSize", "GetLinkedCubin"]


def _check(status: int, what: str, architecture: str) -> None:
    if status != 0:
        raise RuntimeError(f"nvJitLink cannot {what} the PTX for {architecture}: error {status}")


if __name__ == "__main__":
    sys.exit(main())

"""Builds libraries that stand in for CUDA's: the functions that ONNX Runtime's CUDA provider takes from each, and of the
driver those that this backend calls.

    python build.py PROVIDER FOLDER

PROVIDER is libonnxruntime_providers_cuda.so; the libraries are put into FOLDER.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, BinaryIO

from elftools.elf.elffile import ELFFile

HERE = Path(__file__).parent

#: The driver: this backend loads it, whether the provider is linked to it or not.
DRIVER = "libcuda.so.1"

#: Of the driver, what this backend calls and the stand-in has nothing to do for.
CALLED = {"cuInit", "cuMemPoolSetAttribute", "cuMemPoolDestroy", "cuDevicePrimaryCtxRelease_v2"}


def main() -> int:
    provider, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    wanted = functions(provider)
    build(DRIVER, wanted, folder)
    for library in needed(provider):
        if library.startswith(("libcu", "libnv")) and library != DRIVER:
            build(library, wanted, folder)
    return 0


def needed(provider: Path) -> list[str]:
    with provider.open("rb") as file:
        tags = _section(file, ".dynamic").iter_tags()
        return [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"]


def _section(file: BinaryIO, name: str) -> Any:
    """Its class, which pyelftools chooses by the name."""
    return ELFFile(file).get_section_by_name(name)


def functions(provider: Path) -> dict[str, set[str]]:
    """The functions that the provider takes, by the library of their version; by "" those without a version."""
    wanted = defaultdict(set)
    with provider.open("rb") as file:
        libraries = {}
        for need, versions in _section(file, ".gnu.version_r").iter_versions():
            for version in versions:
                libraries[version.entry.vna_other] = need.name
        numbers = _section(file, ".gnu.version")
        for index, symbol in enumerate(_section(file, ".dynsym").iter_symbols()):
            number = numbers.get_symbol(index).entry["ndx"]
            if symbol.entry.st_shndx == "SHN_UNDEF" and symbol.name:
                wanted[libraries.get(number, "")].add(symbol.name)
    return wanted


def build(library: str, wanted: dict[str, set[str]], folder: Path) -> None:
    versioned = wanted.get(library, set())
    # a library without versions in it may be the home of any other
    plain = {name for name in wanted[""] if name.startswith("cu") and not versioned}
    own = next((HERE / name for name in ("cudart.c", "cuda.c") if library.startswith(f"lib{name[:-2]}.")), None)
    there = own.read_text() if own else ""
    called = CALLED if library == DRIVER else set()
    is_there = re.compile(r"\b(\w+)\(").findall(there)
    stubs = sorted((versioned | plain | called) - set(is_there))
    source = folder / f"{library}.c"
    included = f'#include "{own}"\n' if own else ""
    source.write_text(included + "\n".join(f"int {name}(void) {{ return 0; }}" for name in stubs) + "\n")
    versions = folder / f"{library}.map"
    versions.write_text(f"{library} {{ global: *; }};\n")
    script = [f"-Wl,--version-script={versions}"] if versioned else []
    # The runtime's streams are the driver's.
    driver = [folder / DRIVER] if library.startswith("libcudart.") else []
    options = ["-shared", "-fPIC", "-O1", "-Wno-unused-function", f"-Wl,-soname,{library}", *script]
    command = ["cc", *options, "-o", str(folder / library), str(source), *map(str, driver)]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())

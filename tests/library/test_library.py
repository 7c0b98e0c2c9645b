"""What the built library offers and what it asks of the system that loads it."""

import ctypes
import re

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

from support import paths

LIBRARY = paths.TESTED_BACKENDS / "stateful" / "libtriton_stateful.so"

ENTRY_POINTS = {
    "TRITONBACKEND_Initialize",
    "TRITONBACKEND_Finalize",
    "TRITONBACKEND_ModelInitialize",
    "TRITONBACKEND_ModelFinalize",
    "TRITONBACKEND_ModelInstanceInitialize",
    "TRITONBACKEND_ModelInstanceFinalize",
    "TRITONBACKEND_ModelInstanceReady",
    "TRITONBACKEND_ModelInstanceExecute",
}

# The dynamic loader is part of glibc and has loaded the process already.
ALLOWED_LIBRARIES = re.compile(r"lib(c|m)\.so\.6|libgcc_s\.so\.1|ld-linux-x86-64\.so\.2|ld-linux-aarch64\.so\.1")

# Ubuntu 22.04's, as in NVIDIA's images.
NEWEST_GLIBC = (2, 35)


@pytest.fixture(scope="module")
def library():
    with LIBRARY.open("rb") as file:
        yield ELFFile(file)


def dynamic_symbols(library):
    return list(library.get_section_by_name(".dynsym").iter_symbols())


def test_it_exports_the_entry_points_of_a_backend_and_nothing_else(library):
    exported = {symbol.name for symbol in dynamic_symbols(library) if symbol["st_shndx"] != "SHN_UNDEF"}
    assert exported == ENTRY_POINTS


def test_it_leaves_no_symbol_of_triton_or_onnx_runtime_to_the_loader(library):
    wanted = {symbol.name for symbol in dynamic_symbols(library) if symbol["st_shndx"] == "SHN_UNDEF"}
    assert not {name for name in wanted if name.startswith(("TRITON", "Ort"))}


def test_it_needs_no_library_but_those_of_every_system(library):
    dynamic = next(section for section in library.iter_sections() if isinstance(section, DynamicSection))
    needed = {tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
    assert needed
    assert not {name for name in needed if not ALLOWED_LIBRARIES.fullmatch(name)}


def test_it_has_its_own_name(library):
    dynamic = next(section for section in library.iter_sections() if isinstance(section, DynamicSection))
    assert [tag.soname for tag in dynamic.iter_tags("DT_SONAME")] == ["libtriton_stateful.so"]


def test_it_asks_for_no_newer_glibc_than_ubuntu_22_04_has(library):
    section = next(section for section in library.iter_sections() if isinstance(section, GNUVerNeedSection))
    versions = {version.name for _, auxiliary in section.iter_versions() for version in auxiliary}
    glibc = {tuple(map(int, name.split("_")[1].split("."))) for name in versions if re.match(r"GLIBC_\d", name)}
    assert glibc
    assert max(glibc) <= NEWEST_GLIBC


def test_it_loads_where_there_is_no_triton_and_survives_a_call():
    library = ctypes.CDLL(str(LIBRARY))
    # Without a server there is nothing to make an error object with: Initialize must come back all the same.
    library.TRITONBACKEND_Initialize.argtypes = [ctypes.c_void_p]
    library.TRITONBACKEND_Initialize.restype = ctypes.c_void_p
    library.TRITONBACKEND_Initialize(None)

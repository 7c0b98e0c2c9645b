"""The libraries of CUDA that ONNX Runtime's providers want, and the folders that have them."""

from __future__ import annotations

import mmap
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_LINKED = re.compile(rb"lib(?:cublasLt|cublas|curand|nvinfer|nvonnxparser)\.so\.\d+")
_CUDA = re.compile(rb"libcublas\.so\.(\d+)")
#: What ONNX Runtime and cuDNN open when they first need it, by the version of CUDA. Their names stand nowhere in one piece.
_LATE = {
    12: ("libcudnn.so.9", "libcufft.so.11", "libnvrtc.so.12"),
    13: ("libcudnn.so.9", "libcufft.so.12", "libnvrtc.so.13"),
}


@dataclass(frozen=True)
class Wanted:
    """linked: a provider does not load without. late: only some operators do not run without."""

    linked: tuple[str, ...]
    late: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return self.linked + self.late


def wanted(provider: Path) -> Wanted:
    """By the names that stand in the provider's file."""
    with provider.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        linked = {name.decode() for name in _LINKED.findall(content)}
        cuda = max((int(major) for major in _CUDA.findall(content)), default=0)
    linked |= {f"libcudart.so.{cuda}"} if cuda else set()
    return Wanted(tuple(sorted(linked)), _LATE.get(cuda, ()))


def roots(site: Path) -> list[Path]:
    """Folders to look in: the virtual environment's, those of CUDA's installers, and of this Python's packages."""
    found = [*sorted(site.glob("nvidia/*/lib")), *site.glob("tensorrt_libs")]
    found += sorted(Path("/usr/local").glob("cuda*/lib64"), reverse=True)
    for packages in {sysconfig.get_path("purelib"), *_dist_packages()}:
        found += sorted(Path(packages).glob("nvidia/*/lib"))
        found += sorted(Path(packages).glob("tensorrt_libs"))
    return found


def _dist_packages() -> list[str]:
    return [str(folder) for folder in Path("/usr").glob("l*/python3*/dist-packages")] + [
        str(folder) for folder in Path("/usr/local/lib").glob("python3*/dist-packages")
    ]


def find(names: Iterable[str], folders: Iterable[Path]) -> dict[str, str | None]:
    """Where each library is: a folder, "the system" where the loader finds it by itself, or None."""
    system, folders = _known_to_loader(), list(folders)
    return {name: _find(name, system, folders) for name in names}


def _find(name: str, system: set[str], folders: list[Path]) -> str | None:
    if folder := next((folder for folder in folders if (folder / name).exists()), None):
        return str(folder)
    return "the system" if name in system else None


def of_providers(runtime: Path, site: Path) -> dict[str, dict[str, dict[str, str | None]]]:
    """Of each provider in a folder, by its file's name, where the libraries are that it wants: linked, and late."""
    folders = roots(site)
    wants = {provider.name: wanted(provider) for provider in sorted(runtime.glob("libonnxruntime_providers_*.so"))}
    return {name: {"linked": find(of.linked, folders), "late": find(of.late, folders)} for name, of in wants.items()}


def search_path(found: dict[str, str | None]) -> str:
    """For LD_LIBRARY_PATH."""
    return ":".join(dict.fromkeys(folder for folder in found.values() if folder and folder != "the system"))


def _known_to_loader() -> set[str]:
    ldconfig = shutil.which("ldconfig", path="/sbin:/usr/sbin:/bin:/usr/bin")
    if ldconfig is None:
        return set()
    listed = subprocess.run([ldconfig, "-p"], capture_output=True, text=True).stdout
    return {line.split()[0] for line in listed.splitlines() if " => " in line}

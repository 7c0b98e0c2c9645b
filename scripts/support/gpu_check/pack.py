"""Collects the parts that a machine with a GPU and without a network needs, and cuts them into pieces.

tree.tar           the repository, as committed
build.tar          what scripts/build --bench has made
wheels.tar         what scripts/setup --tests installs, but for what only builds want, and pip
onnxruntime.tar    onnxruntime-gpu, in onnxruntime's place
cuda.tar           the libraries of CUDA that it names, with cuDNN
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from rich.console import Console

from support.gpu_check.parts import MANIFEST, Manifest, cut
from support.paths import BUILD, ROOT

#: The newest onnxruntime-gpu for each CUDA: that for 13 is the version of scripts/requirements.txt.
RUNTIMES = {12: "1.23.2", 13: "1.31.1"}
#: Only for building and for checking the sources, or replaced.
_LEFT_OUT = ("libclang", "onnxruntime", "ruff", "mypy")
_NEWEST_GLIBC = 35
_BUILT = (
    "backends/stateful/libtriton_stateful.so",
    "tests/backends/stateful/libtriton_stateful.so",
    "bench/stateful-bench",
    "bench/stateful-gpu-bench",
    "bench/backends/trivial/libtriton_trivial.so",
    "bin/stateful-inspect",
    "bin/stateful-convert",
    "tests/bin/stateful-inspect",
    "tests/bin/stateful-convert",
)


class PackError(RuntimeError):
    """Something to be packed is not there, or pip did not get it."""


def pack(folder: Path, python: str, cuda: int, console: Console) -> Manifest:
    """Writes the pieces and the manifest; what an earlier call left in the folder goes."""
    if cuda == 13 and python == "3.10":
        raise PackError(
            f"onnxruntime-gpu {RUNTIMES[13]}, for CUDA 13, needs Python 3.11 or newer: --cuda 12 has an older one"
        )
    folder.mkdir(parents=True, exist_ok=True)
    _clear(folder)
    with tempfile.TemporaryDirectory(prefix="new.", dir=folder) as temporary:
        parts = []
        for part in _parts(Path(temporary), python, cuda):
            console.print(f"{part.stem}: {part.stat().st_size / 1e6:.0f} MB")
            parts.append(part)
        return cut(parts, folder, _about(python, cuda))


def _clear(folder: Path) -> None:
    """Takes pieces of an earlier call away, and nothing else."""
    if not (folder / MANIFEST).exists():
        return
    for piece in Manifest.read(folder).pieces:
        (folder / piece.name).unlink(missing_ok=True)
    (folder / MANIFEST).unlink()


def _parts(folder: Path, python: str, cuda: int) -> Iterator[Path]:
    yield _tree(folder / "tree.tar")
    yield _tar(folder / "build.tar", BUILD, _built())
    needed = list(requirements(python))
    version = RUNTIMES[cuda]
    nodeps = [str(need) for need in _read("requirements-nodeps.txt", python)]
    pip = f"pip=={importlib.metadata.version('pip')}"
    yield _wheels(folder, "wheels", python, [*map(str, needed), *nodeps, pip])
    yield _wheels(folder, "onnxruntime", python, [f"onnxruntime-gpu=={version}"])
    yield _cuda(folder, python, version)


def _about(python: str, cuda: int) -> dict:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return {"commit": commit.stdout.strip(), "python": python, "cuda": cuda}


def _tree(archive: Path) -> Path:
    _run(["git", "archive", "--format=tar", "--output", str(archive), "HEAD"])
    return archive


def _built() -> list[str]:
    # What scripts/build --tests makes is only for dry runs.
    absent = [name for name in _BUILT if not (BUILD / name).exists() and not name.startswith("tests/")]
    if absent:
        raise PackError(f"build/ has no {', '.join(absent)}: scripts/build --bench makes it")
    return [name for name in _BUILT if (BUILD / name).exists()]


def pinned(python: str) -> list[Requirement]:
    return _read("requirements.txt", python) + _read("requirements-tests.txt", python)


def requirements(python: str) -> Iterator[Requirement]:
    """Of what scripts/setup --tests installs, what the machine needs."""
    return (need for need in pinned(python) if need.name not in _LEFT_OUT)


def _read(name: str, python: str) -> list[Requirement]:
    """The lines that are for this Python: pip asks the one that it runs in."""
    lines = (line.split("#")[0].strip() for line in (ROOT / "scripts" / name).read_text().splitlines())
    environment = {name: str(value) for name, value in default_environment().items()} | {
        "python_version": python,
        "python_full_version": f"{python}.0",
    }
    needs = [Requirement(line) for line in lines if line]
    return [_without_marker(need) for need in needs if need.marker is None or need.marker.evaluate(environment)]


def _without_marker(need: Requirement) -> Requirement:
    need.marker = None
    return need


def _wheels(folder: Path, name: str, python: str, wanted: list[str]) -> Path:
    wheels = folder / name
    _download(wheels, python, ["--no-deps", *wanted])
    return _tar(folder / f"{name}.tar", wheels, sorted(wheel.name for wheel in wheels.iterdir()))


def _cuda(folder: Path, python: str, version: str) -> Path:
    """The wheels that onnxruntime-gpu names for its CUDA."""
    wheels, constraints = folder / "cuda", folder / "constraints.txt"
    constraints.write_text("".join(f"{need.name}{need.specifier}\n" for need in pinned(python)))
    wanted = f"onnxruntime-gpu[cuda,cudnn]=={version}"
    more = ["--find-links", str(folder / "onnxruntime"), "--find-links", str(folder / "wheels")]
    _download(wheels, python, ["--constraint", str(constraints), *more, wanted])
    return _tar(folder / "cuda.tar", wheels, sorted(wheel.name for wheel in wheels.glob("nvidia_*.whl")))


def _download(into: Path, python: str, arguments: list[str]) -> None:
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(_NEWEST_GLIBC, 16, -1)]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux2010_x86_64", "--platform=manylinux1_x86_64"]
    target = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python, *platforms]
    common = [sys.executable, "-I", "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    _run([*common, "--dest", str(into), *target, *arguments])


def _run(command: list[str]) -> None:
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ran.returncode != 0:
        raise PackError(f"{' '.join(command[:8])} ... ended with {ran.returncode}\n{ran.stderr[-3000:]}")


def _tar(archive: Path, folder: Path, names: Iterable[str]) -> Path:
    """The same files make the same archive, so that pieces that a machine has need not be sent again."""
    with tarfile.open(archive, "w") as content:
        for name in names:
            content.add((folder / name).resolve(), name, filter=_plain)
    return archive


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    info.mode = 0o755 if info.mode & 0o100 else 0o644
    return info

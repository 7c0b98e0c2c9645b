"""From pieces to something that runs: the tree, the backend, and a virtual environment with the wheels. No network.

    WORK/parts/      the joined parts, unpacked: tree, build, wheels, onnxruntime, cuda
    WORK/tree/       the repository, with .venv/ and build/
    WORK/stamps/     which parts that was made from, so that only what has changed is done again

Needs nothing beside Python itself; called as `python -m support.gpu_check.install PARTS WORK`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support.gpu_check.parts import Manifest, Part, PartsError, faults


@dataclass(frozen=True)
class Place:
    """Where things lie in the folder for work."""

    work: Path

    @property
    def tree(self) -> Path:
        return self.work / "tree"

    @property
    def python(self) -> Path:
        return self.tree / ".venv" / "bin" / "python"

    @property
    def site(self) -> Path:
        """The virtual environment's packages."""
        found = next((self.tree / ".venv" / "lib").glob("python*/site-packages"), None)
        if found is None:
            raise PartsError(f"{self.tree} has no virtual environment: setting up has not ended")
        return found

    @property
    def runtime(self) -> Path:
        """The folder of ONNX Runtime's libraries."""
        return self.site / "onnxruntime" / "capi"

    @property
    def backend(self) -> Path:
        return self.tree / "build" / "backends" / "stateful"


def main() -> int:
    folder, place = Path(sys.argv[1]).resolve(), Place(Path(sys.argv[2]).resolve())
    try:
        install(folder, place)
    except (PartsError, OSError) as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 1
    return 0


def install(folder: Path, place: Place) -> None:
    manifest = Manifest.read(folder)
    check(manifest, folder, place)
    for part in manifest.parts:
        _stamped(place, part.name, part.sha256, lambda part=part: _unpack(part, folder, place))
    # New wheels, or another Python, and the environment is made again.
    wheels = [part for part in manifest.parts if part.name not in ("tree.tar", "build.tar")]
    identity = " ".join([str(place.tree), *(part.sha256 for part in wheels)])
    _stamped(place, "environment", identity, lambda: _environment(manifest.about["python"], place))
    lay_out(place)


def check(manifest: Manifest, folder: Path, place: Place) -> None:
    """All pieces of all parts that are not unpacked yet. PartsError with each one that is missing or damaged."""
    wrong = [
        line for part in manifest.parts if not _is_done(place, part.name, part.sha256) for line in faults(part, folder)
    ]
    if wrong:
        count = sum(1 for _ in manifest.pieces)
        raise PartsError("\n  ".join([f"of {count} pieces, {len(wrong)} cannot be used:", *wrong]))


def _stamped(place: Place, name: str, identity: str, task: Callable[[], None]) -> None:
    if _is_done(place, name, identity):
        return
    began = time.monotonic()
    task()
    stamp = place.work / "stamps" / name
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(identity)
    print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)


def _is_done(place: Place, name: str, identity: str) -> bool:
    stamp = place.work / "stamps" / name
    return stamp.exists() and stamp.read_text() == identity


def _unpack(part: Part, folder: Path, place: Place) -> None:
    archive = place.work / part.name
    archive.parent.mkdir(parents=True, exist_ok=True)
    part.join(folder, archive)
    into = {"tree.tar": place.tree, "build.tar": place.tree / "build"}.get(
        part.name, place.work / "parts" / archive.stem
    )
    into.mkdir(parents=True, exist_ok=True)
    # What an earlier commit had goes; what other parts have made of the tree stays.
    for old in into.iterdir():
        if part.name != "tree.tar" or old.name not in (".venv", "build"):
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    with tarfile.open(archive) as content:
        # our own archive; older versions of Python know no filter
        if hasattr(tarfile, "tar_filter"):
            content.extractall(into, filter="tar")
        else:
            content.extractall(into)
    archive.unlink()


def _environment(version: str, place: Place) -> None:
    python, environment = interpreter(version), place.tree / ".venv"
    # Without ensurepip, which some systems leave out: pip runs from its wheel.
    _run([python, "-I", "-m", "venv", "--clear", "--without-pip", str(environment)])
    wheels = sorted((place.work / "parts").glob("*/*.whl"))
    pip = next(wheel for wheel in wheels if wheel.name.startswith("pip-"))
    install = ["install", "--no-index", "--no-deps", "--no-compile", "--quiet", "--disable-pip-version-check"]
    _run([str(place.python), "-I", f"{pip}/pip", *install, *map(str, wheels)])


def interpreter(version: str) -> str:
    """A Python of that version. PartsError with what there is instead."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    if found := shutil.which(f"python{version}"):
        return found
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    raise PartsError(
        f"the wheels are for Python {version}, which is not in PATH; this is {here}: "
        f"scripts/gpu-check pack --python {here} makes parts for it"
    )


def _run(command: list[str]) -> None:
    # What is in the user's configuration of pip is not meant for this.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment | {"PIP_CONFIG_FILE": os.devnull})
    if ran.returncode != 0:
        raise PartsError(
            f"{' '.join(command[:6])} ... ended with {ran.returncode}\n{ran.stdout[-3000:]}{ran.stderr[-3000:]}"
        )


def lay_out(place: Place) -> None:
    """ONNX Runtime for GPUs beside the backend, with its providers, which it looks for there; and what the benchmark
    wants."""
    # The library of a dry run, which simulates a device.
    tested = place.tree / "build" / "tests" / "backends" / "stateful"
    libraries = sorted(place.runtime.glob("libonnxruntime*.so*"))
    if not any(library.name.startswith("libonnxruntime.so") for library in libraries):
        raise PartsError(f"there is no libonnxruntime in {place.runtime}")
    for library in libraries:
        name = "libonnxruntime.so" if library.name.startswith("libonnxruntime.so") else library.name
        _link(library, place.backend / name)
        if tested.exists():
            _link(library, tested / name)
    backends = place.tree / "build" / "bench" / "backends"
    backends.mkdir(parents=True, exist_ok=True)
    _link(place.backend, backends / "stateful")


def _link(target: Path, link: Path) -> None:
    if link.is_symlink() or link.exists():
        link.unlink()
    link.symlink_to(target)


if __name__ == "__main__":
    sys.exit(main())

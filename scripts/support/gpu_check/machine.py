"""What this machine has, as one JSON object. Fails where something is missing that the GPU needs."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from support import paths
from support.gpu_check import libraries
from support.gpu_check.cuda import STUB, CudaError, Driver
from support.gpu_check.install import Place

_FIELDS = ("name", "driver_version", "memory.total", "memory.used", "clocks.sm", "clocks.max.sm", "mig.mode.current")
SIMULATED = paths.TEST_DEVICE == "simulated"
COMPILER = "libnvidia-ptxjitcompiler.so.1"
CUDA_PROVIDER = "libonnxruntime_providers_cuda.so"


def main() -> int:
    found = describe(Place(paths.ROOT.parent))
    print(json.dumps(found))
    lacks = missing(found)
    for line in lacks:
        print(f"missing: {line}", file=sys.stderr)
    for name in absent_late(found):
        print(f"absent: {name}, without which some operators do not run", file=sys.stderr)
    return 1 if lacks else 0


def describe(place: Place) -> dict:
    import onnxruntime

    return {
        "gpus": gpus(),
        "driver": driver(),
        "compiler": compiler(),
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.release()}, {' '.join(platform.libc_ver())}",
        "python": platform.python_version(),
        "onnxruntime": onnxruntime.__version__,
        "providers": onnxruntime.get_available_providers(),
        "libraries": libraries.of_providers(place.backend, place.site),
    }


def missing(found: dict) -> list[str]:
    lacks = []
    if why := found["driver"].get("error"):
        lacks.append(f"NVIDIA's driver: {why}")
    # The stand-in for CUDA has neither.
    if not SIMULATED and not found["gpus"]:
        lacks.append("a GPU: nvidia-smi names none")
    if not SIMULATED and found["compiler"]:
        lacks.append(f"the driver's compiler: {found['compiler']}")
    of_cuda = found["libraries"].get(CUDA_PROVIDER)
    if of_cuda is None:
        lacks.append(f"{CUDA_PROVIDER} beside the backend")
    else:
        absent = [name for name, where in of_cuda["linked"].items() if where is None]
        lacks += [f"{name}, without which ONNX Runtime's CUDA provider does not load" for name in absent]
    return lacks


def absent_late(found: dict) -> list[str]:
    """Libraries without which only some operators do not run."""
    late = found["libraries"].get(CUDA_PROVIDER, {}).get("late", {})
    return [name for name, where in late.items() if where is None]


def gpus() -> list[dict]:
    """What nvidia-smi says of each."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True)
    if said.returncode != 0:
        print(f"nvidia-smi ended with {said.returncode}: {said.stdout}{said.stderr}", file=sys.stderr)
        return []
    return [
        dict(zip(_FIELDS, map(str.strip, line.split(",")), strict=True))
        for line in said.stdout.splitlines()
        if line.strip()
    ]


def driver() -> dict:
    """The driver's library: its file, the newest CUDA that it knows, and what is wrong with it."""
    try:
        found = Driver()
        found.initialise()
        major, minor = found.version()
    except OSError as error:
        return {"error": str(error)}
    except CudaError as error:
        stub = " (a stub of the CUDA toolkit: take its folder out of LD_LIBRARY_PATH)" if error.code == STUB else ""
        return {"file": found.path(), "error": f"{error}{stub}"}
    described = {"file": found.path(), "cuda": f"{major}.{minor}"}
    return described | ({"error": "it lies in a folder of stubs"} if "/stubs/" in described["file"] else {})


def compiler() -> str | None:
    """Why the driver's compiler, without which our kernel cannot be loaded, does not load."""
    try:
        ctypes.CDLL(COMPILER)
    except OSError as error:
        return str(error)
    return None


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    sys.exit(main())

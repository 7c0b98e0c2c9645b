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
from support.gpu_check.install import Place

_FIELDS = ("name", "driver_version", "memory.total", "memory.used", "clocks.sm", "clocks.max.sm", "mig.mode.current")
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
        "cuda_of_driver": cuda_of_driver(),
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
    if not found["gpus"]:
        lacks.append("a GPU: nvidia-smi names none")
    if not found["cuda_of_driver"]:
        lacks.append("NVIDIA's driver: libcuda.so.1 does not answer")
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


def cuda_of_driver() -> str | None:
    """The newest CUDA that the driver knows."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        print(error, file=sys.stderr)
        return None
    version = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    sys.exit(main())

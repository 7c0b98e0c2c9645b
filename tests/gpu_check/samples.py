"""Results as a machine might have made them, and chunks that need nothing."""

import sys

from support.gpu_check.chunks import Chunk

MACHINE = {
    "gpus": [{"name": "NVIDIA H200", "driver_version": "580.1", "memory.total": "143771 MiB"}],
    "driver": {"file": "/usr/lib/libcuda.so.580.1", "cuda": "13.0"},
    "compiler": None,
    "cpu": "A CPU",
    "cpus": 16,
    "memory_bytes": 128 << 30,
    "system": "6.8, glibc 2.39",
    "python": "3.12.3",
    "onnxruntime": "1.31.1",
    "providers": ["CUDAExecutionProvider"],
    "libraries": {
        "libonnxruntime_providers_cuda.so": {
            "linked": {"libcublas.so.13": "the system"},
            "late": {"libcudnn.so.9": None},
        }
    },
}
STEP = {
    "model": "lstm",
    "batch": 16,
    "composition": "same",
    "ours_us": 150.0,
    "trivial_us": 50.0,
    "whole_us": 100.0,
    "raw_us": 80.0,
    "raw_with_copies_us": 95.0,
    "whole_over_raw": 1.25,
    "whole_over_raw_with_copies": 1.053,
    "infer_us": 85.0,
    "copied_bytes_per_round": 0.0,
}
MOVED = {
    "states": "64 KiB",
    "rows": 64,
    "state_bytes": 65536,
    "gather": 1.5e12,
    "scatter": 1.4e12,
    "copy": 2e12,
    "gather_over_copy": 1.33,
    "scatter_over_copy": 1.43,
    "gather_us": 6.1,
}
RIGHT = {
    "check": "lstm, 16 rows: largest difference",
    "found": "2e-06",
    "allowed": "at most 0.0001",
    "verdict": "right",
}
WRONG = RIGHT | {"found": "0.5", "verdict": "wrong"}
TESTED = {
    "file": "test_pool.py",
    "tests": 12,
    "passed": 10,
    "failures": [{"test": "test_a_full_pool_refuses", "why": "assert 3 == 4"}],
    "skipped": ["test_b: no reason"],
    "models": {"KIND_GPU": 3, "KIND_CPU": 1},
}


def chunk(stage: str, name: str, code: str, needs_s: float = 0, limit_s: float = 10) -> Chunk:
    """Runs a few lines of Python."""
    return Chunk(stage, name, [sys.executable, "-I", "-S", "-c", code], needs_s, limit_s)

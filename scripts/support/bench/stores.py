"""What a store costs: the same sequences over gRPC with each `durability`, and without a store.

Clients, server and Valkey share the machine, so what counts is ratios within one block. Valkey writes no file. A folder is in
the system's folder for temporary files.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from support.bench import service
from support.bench.models import MODELS, BenchModel
from support.server import TritonServer
from support.valkey import Valkey

COMPARED = ("lstm", "cache")
#: The name of a case, its durability, and the store's kind.
CASES = (
    ("none", "none", ""),
    ("drain", "drain", "valkey"),
    ("interval", "interval", "valkey"),
    ("step", "step", "valkey"),
    ("interval, folder", "interval", "folder"),
    ("step, folder", "step", "folder"),
)


def compare(folder: Path, sequences: list[int], seconds: float, blocks: int, backends: Path) -> Iterator[dict]:
    """A row for each model, number of sequences, case and block. The cases take turns."""
    # A socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="bench-") as short:
        valkey = Valkey(Path(short) / "store", "--maxmemory-policy", "noeviction")
        try:
            locations = {"valkey": valkey.location, "folder": f"file:{folder / 'states'}"}
            for of in COMPARED:
                for case, durability, kind in CASES:
                    _write(folder / "repository", MODELS[of], case, durability, locations.get(kind))
            with TritonServer(folder / "repository", backends=backends, log_path=folder / "server.log") as server:
                for of in COMPARED:
                    for count in sequences:
                        for _ in range(blocks):
                            yield from _block(server, valkey, MODELS[of], count, seconds)
        finally:
            valkey.kill()


def _name(model: BenchModel, case: str) -> str:
    return f"{model.name}_{re.sub(r'[^a-z]+', '_', case)}"


def _write(repository: Path, model: BenchModel, case: str, durability: str, location: str | None) -> None:
    store = (
        {"state_store": location, "durability": durability, "worker_count": "2"} if location else {"worker_count": "2"}
    )
    model.write(
        repository, _name(model, case), model.config("stateful", 64, candidates=1024, parameters=store, own=True)
    )


def _block(server: TritonServer, valkey: Valkey, model: BenchModel, sequences: int, seconds: float) -> Iterator[dict]:
    first: dict[str, float] = {}
    for case, _, _ in CASES:
        name = _name(model, case)
        store = psutil.Process(valkey.pid)
        before, cpu, began = _saved(server, name), sum(store.cpu_times()[:2]), time.monotonic()
        found = service.clients(server, name, model, sequences, "grpc", seconds, own=True)
        passed = time.monotonic() - began
        saved = (_saved(server, name) - before) / passed
        first = first or found
        yield {
            "model": model.name,
            "state_bytes": model.state_bytes,
            "sequences": sequences,
            "durability": case,
            "requests_per_s": found["requests_per_s"],
            "requests_per_s_over": found["requests_per_s"] / first["requests_per_s"],
            "p50_us": found["p50_us"],
            "p99_us": found["p99_us"],
            "p99_over": found["p99_us"] / first["p99_us"],
            "server_cpu_us_per_request": found["server_cpu_us_per_request"],
            "saved_per_s": saved,
            "store_cpu": (sum(store.cpu_times()[:2]) - cpu) / passed,
        }


def _saved(server: TritonServer, model: str) -> float:
    found = re.findall(
        rf'^stateful_states_saved_total{{[^}}]*model="{model}"[^}}]*}} (\S+)$', server.metrics(), re.MULTILINE
    )
    return sum(map(float, found))

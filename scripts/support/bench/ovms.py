"""The gateway's throughput and latency next to those of gRPC to Triton itself, and its memory for open sequences.

`crates/ovms/examples/load.rs` makes the load, in the same process for both ways, which take turns.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from support.bench.models import MODELS
from support.paths import ROOT
from support.server import HOST, TritonServer, free_port, resident_bytes

PROGRAMS = ROOT / "target" / "release"
OPEN = 10_000
MODEL = MODELS["accumulate"]


def compare(folder: Path, streams: list[int], seconds: float, blocks: int) -> Iterator[dict]:
    """A row for each way and number of clients, then one for the open sequences."""
    build = ["cargo", "build", "--release", "--locked", "--quiet", "-p", "stateful-ovms", "--bins", "--examples"]
    subprocess.run(build, cwd=ROOT, check=True)
    MODEL.write(folder, MODEL.name, MODEL.config("stateful", 64, candidates=OPEN + 100, own=True))
    with TritonServer(folder) as server, _Gateway(server) as gateway:
        [given] = MODEL.inputs
        of_model = [f"--model={MODEL.name}", f"--input={given.name}", f"--width={abs(given.dims[-1])}"]
        load = [
            str(PROGRAMS / "examples" / "load"),
            f"--gateway={gateway.url}",
            f"--triton={server.grpc_url}",
            *of_model,
        ]
        counts = ",".join(map(str, streams))
        how = [f"--streams={counts}", f"--seconds={seconds}", f"--blocks={blocks}"]
        made = subprocess.run([*load, *how], stdout=subprocess.PIPE, text=True, check=True)
        yield from map(json.loads, made.stdout.splitlines())
        before = gateway.resident_bytes()
        subprocess.run([*load, f"--open={OPEN}"], check=True)
        yield {"way": "open sequences", "streams": OPEN, "resident_bytes": gateway.resident_bytes() - before}


def over_direct(rows: list[dict]) -> list[dict]:
    """The gateway over Triton itself, block by block."""
    of = {(row["way"], row["streams"], row["block"]): row for row in rows if "block" in row}
    return [
        {
            "streams": streams,
            "requests_per_s_over_direct": row["requests_per_s"] / direct["requests_per_s"],
            "p50_more_us": row["p50_us"] - direct["p50_us"],
            "p99_more_us": row["p99_us"] - direct["p99_us"],
        }
        for (way, streams, block), row in of.items()
        if way == "gateway"
        for direct in [of["direct", streams, block]]
    ]


class _Gateway:
    """A gateway in front of a running tritonserver."""

    def __init__(self, server: TritonServer) -> None:
        port = free_port(HOST, ())
        self.url = f"{HOST}:{port}"
        self._log = tempfile.TemporaryFile()
        program = [str(PROGRAMS / "stateful-ovms"), f"--triton={server.grpc_url}", f"--port={port}"]
        self._process = subprocess.Popen([*program, f"--grpc_bind_address={HOST}"], stderr=self._log)

    def __enter__(self) -> _Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def resident_bytes(self) -> int:
        return resident_bytes(self._process.pid)

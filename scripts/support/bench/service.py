"""The service: what clients get over gRPC from a real tritonserver, by perf_analyzer.

Client and server share the machine, so what counts is ratios within one run. CPU is that of all processes; the server's
own is given beside it.
"""

from __future__ import annotations

import csv
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import tritonclient.http as http

from support import sequence_requests
from support.bench.models import BenchModel, Tensor
from support.bench.report import medians
from support.bench.step import BACKENDS, drive
from support.paths import ROOT
from support.server import TritonServer

PERF_ANALYZER = ROOT / "scripts" / "perf-analyzer"
SEQUENCE_LENGTH = 1000
GIVEN_LENGTH = 100
"""Steps of a sequence whose requests are written out: perf_analyzer would take seconds to read ten times as many."""


@dataclass(frozen=True)
class Served:
    """A model as one backend serves it, with what is written into its configuration."""

    backend: str
    model: BenchModel
    max_batch_size: int
    preferred: int | None = None
    delay_us: int = 0
    priority: str = ""
    """MIN or MAX: of the thread in which core forms batches; the one that runs them is not touched."""
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        preferred = f"_of_{self.preferred}" if self.preferred else ""
        waits = f"_{self.delay_us}us" if self.delay_us else ""
        priority = f"_{self.priority.lower()}" if self.priority else ""
        return f"{self.backend}_{self.model.name}_{self.max_batch_size}{preferred}{waits}{priority}"

    def write(self, repository: Path) -> None:
        config = self.model.config(
            self.backend,
            self.max_batch_size,
            candidates=1024,
            preferred=self.preferred,
            delay_us=self.delay_us,
            parameters=dict(self.parameters),
        )
        if self.priority:
            config += f"optimization {{ priority: PRIORITY_{self.priority} }}\n"
        self.model.write(repository, self.name, config)


def measure(server: TritonServer, served: Served, sequences: int, protocol: str, seconds: float) -> dict:
    """What clients of a model get, with what tells its row from others."""
    row = {
        "served": served.name,
        "backend": served.backend,
        "model": served.model.name,
        "protocol": protocol,
        "sequences": sequences,
        "max_batch_size": served.max_batch_size,
        "preferred_batch_size": served.preferred,
        "delay_us": served.delay_us,
        "priority": served.priority or "default",
        "client": "perf_analyzer",
    }
    return row | clients(server, served.name, served.model, sequences, protocol, seconds)


def clients(
    server: TritonServer,
    name: str,
    model: BenchModel,
    sequences: int,
    protocol: str,
    seconds: float,
    rate: float | None = None,
    own: bool = False,
) -> dict:
    """Lets perf_analyzer send requests of these sequences for three windows of this length: so many a second, or else
    one of each sequence as soon as the last is answered.

    name: of the model on the server. protocol: grpc (unary) or stream. own: the backend schedules the model's sequences.
    """
    process, client = psutil.Process(server.pid), http.InferenceServerClient(server.http_url)
    counted: list[tuple[dict[str, int], float, float]] = []

    def count() -> None:
        counted.append((_counts(client, name), _machine_cpu_s(), _cpu_s(process)))

    if rate is None:
        load = ["--concurrency-range", f"{sequences}:{sequences}"]
    else:
        load = ["--request-rate-range", f"{rate:.0f}:{rate:.0f}"]
        load += [] if own else ["--num-of-sequences", str(sequences)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.csv"
        if own:
            given = Path(folder) / "requests.json"
            inputs = sequence_requests.random_inputs(client.get_model_config(name), {})
            given.write_text(json.dumps(sequence_requests.requests(inputs, sequences, GIVEN_LENGTH)))
            load += sequence_requests.arguments(given, sequences)
        else:
            load += ["--sequence-length", str(SEQUENCE_LENGTH), "--sequence-length-variation", "0"]
            load += ["--sequence-id-range", "1:1000000000"]
        command = [
            *(str(PERF_ANALYZER), "-m", name, "-x", "1", "-i", "grpc", "-u", server.grpc_url),
            *(("--streaming",) if protocol == "stream" else ()),
            *load,
            *(argument for tensor in model.inputs for argument in _shape(tensor)),
            *("-p", str(int(seconds * 1000)), "-s", "999", "-r", "3", "-f", str(report)),
        ]
        _run(command, 60 + 10 * seconds, before=count)
        if not report.exists():
            raise RuntimeError(f"{' '.join(command)} wrote no report")
        reported = parse_report(report.read_text())
    count()
    before, after = counted[-2:]
    requests, runs = (after[0][key] - before[0][key] for key in ("inference_count", "execution_count"))
    return {
        **reported,
        "batch": requests / runs,
        "cpu_us_per_request": (after[1] - before[1]) * 1e6 / requests,
        "server_cpu_us_per_request": (after[2] - before[2]) * 1e6 / requests,
        "server_rss_bytes": process.memory_info().rss,
    }


def parse_report(text: str) -> dict[str, float]:
    """What we take of perf_analyzer's CSV: one line for the one number of sequences asked for."""
    rows = list(csv.DictReader(text.splitlines()))
    if len(rows) != 1:
        raise ValueError(f"a report of one line was expected, not of {len(rows)}")
    columns = {"requests_per_s": "Inferences/Second", "p50_us": "p50 latency", "p99_us": "p99 latency"}
    return {key: float(rows[0][column]) for key, column in columns.items()}


def _run(command: list[str], timeout_s: float, before: Callable[[], None], attempts: int = 3) -> None:
    """perf_analyzer sometimes does not come to its end, with whatever backend. `before` is called before each attempt."""
    for attempt in range(attempts):
        before()
        try:
            subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
            return
        except subprocess.TimeoutExpired:
            if attempt + 1 == attempts:
                raise
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"{' '.join(command)}\n{error.stdout}\n{error.stderr}") from error


def _shape(tensor: Tensor) -> tuple[str, ...]:
    """perf_analyzer asks for the dims that the configuration leaves open: where the batch stands inside."""
    return ("--shape", f"{tensor.name}:{','.join(str(abs(dim)) for dim in tensor.dims)}") if -1 in tensor.dims else ()


def _counts(client: http.InferenceServerClient, model: str) -> dict[str, int]:
    (statistics,) = client.get_inference_statistics(model)["model_stats"]
    return {key: int(statistics.get(key, 0)) for key in ("inference_count", "execution_count")}


def _machine_cpu_s() -> float:
    times = psutil.cpu_times()
    return times.user + times.system + times.nice + times.irq + times.softirq


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def serve(folder: Path, models: list[Served]) -> TritonServer:
    """A server of these models."""
    repository = folder / "repository"
    for served in models:
        served.write(repository)
    return TritonServer(repository, backends=BACKENDS, log_path=folder / "server.log")


def compare(
    folder: Path,
    models: list[Served],
    sequences: list[int],
    protocols: list[str],
    seconds: float,
    blocks: int,
) -> Iterator[dict]:
    """Each of the models in turn, again and again: the first, and the others with the first's rate over theirs."""
    with serve(folder, models) as server:
        for _ in range(blocks):
            for count in sequences:
                for protocol in protocols:
                    yield from over_others([measure(server, served, count, protocol, seconds) for served in models])


def over_others(rows: list[dict]) -> list[dict]:
    """Rows measured one right after the other, each with the rate of the first over its own."""
    first = rows[0]["requests_per_s"]
    return [row | {"ours_over_this": first / row["requests_per_s"]} for row in rows]


def bound(folder: Path, model: BenchModel, seconds: float, blocks: int) -> Iterator[dict]:
    """64 sequences against what the CPUs allow: cores / (CPU of a trivial request + CPU of ONNX Runtime for a row).

    ONNX Runtime's is measured alone, at a full batch, and again beside clients that keep the CPUs busy: a row costs
    more there, whoever runs it.
    """
    sequences, cores = 64, psutil.cpu_count()
    variants = [(16, None, 0), (16, 16, 2000), (64, None, 0), (64, 32, 2000)]
    trivial = Served("trivial", model, 64)
    served = [Served("stateful", model, most, preferred, delay) for most, preferred, delay in variants]
    found: dict[str, list[dict]] = {}
    with serve(folder, [trivial, *served]) as server:
        repository = folder / "repository"
        for _ in range(blocks):
            base = measure(server, trivial, sequences, "grpc", seconds)
            # Every CPU is busy then, and a rate counts no start of the client's.
            trivial_cpu_us = cores * 1e6 / base["requests_per_s"]
            with ThreadPoolExecutor(1) as beside:
                busy = beside.submit(drive, repository, "raw", model, batch=16, seconds=4 * seconds)
                measure(server, trivial, sequences, "grpc", seconds)
                busy_us = busy.result()["cpu_us_per_row"]
            for of in served:
                row = measure(server, of, sequences, "grpc", seconds)
                full = drive(repository, "raw", model, batch=of.max_batch_size, seconds=seconds / 2)
                alone_us = full["cpu_us_per_row"]
                share = lambda ort_us: row["requests_per_s"] * (trivial_cpu_us + ort_us) / (cores * 1e6)  # noqa: E731
                row |= {"filled": row["batch"] / of.max_batch_size, "trivial_cpu_us": trivial_cpu_us}
                row |= {"ort_cpu_us_alone": alone_us, "ort_cpu_us_busy": busy_us}
                row |= {"of_bound_alone": share(alone_us), "of_bound_busy": share(busy_us)}
                found.setdefault(of.name, []).append(row)
    yield from medians([row for rows in found.values() for row in rows], ("served",))

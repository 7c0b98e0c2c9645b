"""A real tritonserver with a model on the GPU, sequences that are compared with ONNX Runtime on the CPU, and how much
memory that takes.

With STATEFUL_TEST_DEVICE=simulated, states are on the device that the tests simulate in host memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client

from support import paths
from support.bench.models import BATCH, STEPS, BenchModel
from support.gpu_check.chunks import LEFT_OUT
from support.gpu_check.cuda import Gpu
from support.server import ServerError, TritonServer

SIMULATED = paths.TEST_DEVICE == "simulated"
KIND = "KIND_CPU" if SIMULATED else "KIND_GPU"
BACKENDS = paths.TESTED_BACKENDS if SIMULATED else paths.BACKENDS
RIGHT, WRONG = "right", "wrong"
MIB = 1 << 20

Values = dict[str, np.ndarray]


# ---- findings


class Findings:
    """Prints each finding as a line. `code`: the exit code after them."""

    def __init__(self) -> None:
        self.code = 0

    def __call__(self, check: str, found: str, allowed: str, is_right: bool) -> None:
        self._print(check, found, allowed, RIGHT if is_right else WRONG)

    def left_out(self, check: str, why: str) -> None:
        self._print(check, why, "", LEFT_OUT)

    def _print(self, check: str, found: str, allowed: str, verdict: str) -> None:
        print(json.dumps({"check": check, "found": found, "allowed": allowed, "verdict": verdict}), flush=True)
        if verdict == WRONG:
            self.code = 1

    def most(self, check: str, found: float, allowed: float, unit: str = "") -> None:
        """A number that may not be larger."""
        text = lambda number: f"{number:.3g}{unit}" if abs(number) < 1000 else f"{number:,.0f}{unit}"  # noqa: E731
        self(check, text(found), f"at most {text(allowed)}", found <= allowed)

    @contextmanager
    def guard(self, check: str) -> Iterator[None]:
        """An error in the block is a finding that is wrong."""
        try:
            yield
        except Exception as error:
            print(error, file=sys.stderr)
            self(check, f"{type(error).__name__}: {str(error).splitlines()[0][:300]}", "no error", False)


def run_one(checks: Mapping[str, Callable[[Findings], None]], description: str | None) -> int:
    """Carries out the check that the command line names. Returns the exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("check", choices=checks)
    options = parser.parse_args()
    findings = Findings()
    with findings.guard(options.check):
        checks[options.check](findings)
    return findings.code


# ---- the server


@dataclass(frozen=True)
class Served:
    """A model as it is configured. `rows`: max_batch_size, for which core waits."""

    model: BenchModel
    rows: int = 1
    parameters: Mapping[str, str] = field(default_factory=dict)
    instances: int = 1
    candidates: int = 16

    @property
    def name(self) -> str:
        return self.model.name

    def write(self, repository: Path) -> None:
        waits: dict[str, Any] = {"preferred": self.rows, "delay_us": 40_000} if self.rows > 1 else {}
        config = self.model.config(
            "stateful", self.rows, candidates=self.candidates, parameters=dict(self.parameters), kind=KIND, **waits
        )
        self.model.write(repository, self.name, config.replace("count: 1", f"count: {self.instances}"))


def graphs(sizes: Sequence[int]) -> dict[str, str]:
    """Parameters for CUDA graphs; none on the simulated device, where ONNX Runtime runs on the CPU."""
    return {} if SIMULATED else {"enable_cuda_graph": "1", "warmup_batch_sizes": ",".join(map(str, sizes))}


@contextmanager
def serving(*models: Served, env: Mapping[str, str] = {}, loaded: bool = True) -> Iterator[TritonServer]:
    """The server, ready with its models. Its log has each replay of a graph, which is at level 1 (info)."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        repository = Path(folder) / "repository"
        for model in models:
            model.write(repository)
        server = TritonServer(
            repository,
            backends=BACKENDS,
            ready_timeout_s=100,
            model_control="none" if loaded else "explicit",
            backend_config={"ort-logging-level": "1"},
            env=env,
        )
        try:
            with server:
                yield server
        except ServerError:
            raise
        except Exception:
            print(server.log_text()[-4000:], file=sys.stderr)
            raise


def unload(server: TritonServer, name: str) -> None:
    """Unloads a model, and waits until it is."""
    server.unload(name)
    deadline = time.monotonic() + 30
    while any(model.get("state") not in (None, "UNAVAILABLE") for model in server.models() if model["name"] == name):
        if time.monotonic() > deadline:
            raise ServerError(f"{name} is not unloaded after 30 s")
        time.sleep(0.02)


# ---- sequences


@dataclass(frozen=True)
class Step:
    """A request of a sequence."""

    sequence: int
    fed: Values
    start: bool = False
    end: bool = False


class Client:
    """A gRPC stream. Requests are on their way together, so that the server can make batches of them."""

    def __init__(self, server: TritonServer, model: str) -> None:
        self.model = model
        self._client = grpc_client.InferenceServerClient(server.grpc_url)
        self._answers: queue.Queue = queue.Queue()

    def __enter__(self) -> Client:
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))
        return self

    def __exit__(self, *_: object) -> None:
        self._client.stop_stream()
        self._client.close()

    def send(self, step: Step) -> None:
        self._client.async_stream_infer(
            self.model,
            inputs(step.fed),
            request_id=str(step.sequence),
            sequence_id=step.sequence,
            sequence_start=step.start,
            sequence_end=step.end,
        )

    def receive(self) -> grpc_client.InferResult:
        """The next answer, of any sequence. Raises what the server refused."""
        result, error = self._answers.get(timeout=60)
        if error is not None:
            raise error
        return result

    def run(self, steps: Sequence[Step]) -> dict[int, grpc_client.InferResult]:
        """One request of each sequence, and its answer."""
        for step in steps:
            self.send(step)
        answers = [self.receive() for _ in steps]
        return {int(answer.get_response().id): answer for answer in answers}

    def largest_batch(self) -> int:
        found = self._client.get_inference_statistics(self.model, as_json=True)["model_stats"][0]
        return max((int(batch["batch_size"]) for batch in found.get("batch_stats", [])), default=0)


def inputs(fed: Values) -> list[grpc_client.InferInput]:
    made = []
    for name, value in fed.items():
        made.append(grpc_client.InferInput(name, list(value.shape), "FP32"))
        made[-1].set_data_from_numpy(value)
    return made


def random_values(model: BenchModel, random: np.random.Generator) -> Values:
    return {of.name: random.standard_normal((1, *of.dims), np.float32) for of in model.inputs}


class Alone:
    """ONNX Runtime on the CPU, which steps sequences one by one. `rounds`: keeps the states as fp16 in between."""

    def __init__(self, model: BenchModel, *, rounds: bool = False) -> None:
        import onnxruntime

        self.model, self.rounds = model, rounds
        onnx = model.build().SerializeToString()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(onnx, options, providers=["CPUExecutionProvider"])
        self.names = [of.name for of in self.session.get_outputs()]
        self.states: dict[int, Values] = {}

    def step(self, step: Step) -> Values:
        if step.start:
            self.states[step.sequence] = {
                state.input: np.zeros(_one_row(state.dims), np.float32) for state in self.model.states
            }
        fed = step.fed | self.states[step.sequence]
        gave = dict(zip(self.names, self.session.run(self.names, fed), strict=True))
        self.states[step.sequence] = {state.input: self._kept(gave[state.output]) for state in self.model.states}
        if step.end:
            del self.states[step.sequence]
        return {of.name: gave[of.name] for of in self.model.outputs}

    def _kept(self, state: np.ndarray) -> np.ndarray:
        return state.astype(np.float16).astype(np.float32) if self.rounds else state


def _one_row(dims: tuple[int, ...]) -> list[int]:
    return [{BATCH: 1, STEPS: 0}.get(dim, dim) for dim in dims]


class Sequences:
    """Sequences in `seats`, of which some run in each round; some end, and others take their seats."""

    def __init__(self, served: Served, client: Client, alone: Alone, seed: int = 1) -> None:
        self.served, self.client, self.alone = served, client, alone
        self.random = np.random.default_rng(seed)
        self._ids = itertools.count(1)
        self._seats: list[int | None] = [None] * served.rows
        self.ended = 0
        self.worst = 0.0

    def round(self, count: int, may_end: bool = True) -> None:
        """One step of so many sequences, whose answers are compared. may_end: core puts requests that end a sequence into
        another batch."""
        seats = self.random.choice(len(self._seats), count, replace=False)
        steps = [self._step(int(seat), may_end and bool(self.random.random() < 0.1)) for seat in seats]
        answers = self.client.run(steps)
        for step in steps:
            for name, right in self.alone.step(step).items():
                came = answers[step.sequence].as_numpy(name)
                worst = float(np.abs(came - right).max()) if came.shape == right.shape else np.inf
                # NaN compares as neither larger nor smaller.
                self.worst = max(self.worst, worst if worst == worst else np.inf)

    def finish(self) -> None:
        """Ends the sequences that are left: a server that ends waits for them."""
        for seat, sequence in enumerate(self._seats):
            if sequence is not None:
                self.client.run([self._step(seat, end=True)])

    def _step(self, seat: int, end: bool) -> Step:
        sequence = self._seats[seat]
        start = sequence is None
        number = next(self._ids) if sequence is None else sequence
        self._seats[seat] = None if end else number
        self.ended += end
        return Step(number, random_values(self.served.model, self.random), start, end)


# ---- memory


def host_memory(server: TritonServer) -> dict[str, int]:
    """Bytes of the server's process: resident, and pinned. CUDA's pinned memory is a mapping of the driver's devices,
    which counts as neither locked nor resident."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{server.pid}/status").read_text().splitlines())
    of = lambda name: int(status.get(name, "0 kB").split()[0]) * 1024  # noqa: E731
    mapped = 0
    for line in Path(f"/proc/{server.pid}/maps").read_text().splitlines():
        if "/dev/nvidia" in line or "/dev/zero" in line:
            begin, end = (int(address, 16) for address in line.split()[0].split("-"))
            mapped += end - begin
    return {"resident": of("VmRSS"), "pinned": of("VmLck") + of("VmPin") + mapped}


class DeviceMemory:
    """Bytes that all processes use of the GPU; of the simulated device, which lies in host memory, the server's."""

    def __init__(self, server: TritonServer) -> None:
        self._server = server
        self._gpu = None if SIMULATED else Gpu()

    def used(self) -> int:
        if self._gpu is None:
            return host_memory(self._server)["resident"]
        free, total = self._gpu.memory()
        return total - free

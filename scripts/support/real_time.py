"""How many streams hold the pace of real time on this machine, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import psutil
import tritonclient.grpc as grpc_client

from support import real_time_senders
from support.cpu_use import CORES, CpuMeter, CpuUse, waited_s
from support.real_time_senders import Outcome, Pace
from support.server import TritonServer
from support.speech import CHUNK_S, CHUNK_SAMPLES, CONTEXT_SAMPLES

SECONDS = 5.0
# On a machine that is busy with other things, none may be few enough.
MOST_TRIES = 5
# Ids of the streams begin here, a thousand for each try.
FIRST_ID = 100_000
# The state, the context, and what is left over of packets, at most.
STATE_BYTES = 4 * (2 * 128 + CONTEXT_SAMPLES + CHUNK_SAMPLES - 1)


@dataclass(frozen=True)
class Cost:
    """What the server did meanwhile."""

    cpu_s: float
    runs: int
    steps: int
    infer_s: float  # in ONNX Runtime
    waited_s: float | None  # its threads, for a CPU

    def __sub__(self, earlier: Cost) -> Cost:
        return Cost(
            self.cpu_s - earlier.cpu_s,
            self.runs - earlier.runs,
            self.steps - earlier.steps,
            self.infer_s - earlier.infer_s,
            None if self.waited_s is None or earlier.waited_s is None else self.waited_s - earlier.waited_s,
        )


@dataclass(frozen=True)
class Try:
    """A number of streams, and how it went."""

    pace: Pace
    outcome: Outcome
    cost: Cost
    cpu: CpuUse

    @property
    def latency_ms(self) -> tuple[float, float]:
        """Median and 99th percentile."""
        p50, p99 = np.percentile(self.outcome.latencies_s, [50, 99]) * 1e3
        return float(p50), float(p99)

    @property
    def cpu_us_per_step(self) -> float:
        """Of the server, gRPC and all: a step is 1.6 requests."""
        return self.cost.cpu_s / self.cost.steps * 1e6

    @property
    def needed_cores(self) -> float:
        """How many CPU cores the server and the clients would need if every step cost what those here did."""
        client_s = self.outcome.client_cpu_s / len(self.outcome.latencies_s)
        return (self.cpu_us_per_step / 1e6 + client_s) * self.pace.streams / CHUNK_S

    @property
    def failed_by_others(self) -> bool:
        """Whether the pace was not held, and the machine had enough CPU cores for it but not for others in addition."""
        others = self.cpu.others_s / self.cpu.seconds
        return not self.outcome.held and self.needed_cores <= CORES < self.needed_cores + others

    @property
    def infer_us_per_step(self) -> tuple[float, float]:
        """In ONNX Runtime: at least and at most, if the other processes of the machine had not been there.

        It is the time that passed, so it contains the time that others took a CPU away. That cannot be more than they
        used, nor more than the server waited.
        """
        waited = self.cpu.others_s if self.cost.waited_s is None else min(self.cpu.others_s, self.cost.waited_s)
        least = max(0.0, self.cost.infer_s - waited)
        return least / self.cost.steps * 1e6, self.cost.infer_s / self.cost.steps * 1e6


def tries(server: TritonServer, model: str, streams: int, seed: int, on_try: Callable[[Try], None]) -> list[Try]:
    """Tries with as many streams, and with fewer as long as the pace is not held."""
    done: list[Try] = []
    for number in range(MOST_TRIES):
        before, cpu = _cost(server, model), CpuMeter()
        pace, result = real_time_senders.run(server.grpc_url, model, streams, SECONDS, seed, FIRST_ID + 1000 * number)
        done.append(Try(pace, result, _cost(server, model) - before, cpu.used()))
        on_try(done[-1])
        if result.held:
            break
        streams = _fewer(done[-1])
    return done


def _fewer(last: Try) -> int:
    """In tens, as the tries are few."""
    share = 0.5 if last.outcome.gave_up else 0.7
    return max(1, int(last.pace.streams * share / 10) * 10)


def _cost(server: TritonServer, model: str) -> Cost:
    with grpc_client.InferenceServerClient(server.grpc_url) as client:
        [statistics] = client.get_inference_statistics(model).model_stats
    times = psutil.Process(server.pid).cpu_times()
    batches = statistics.batch_stats
    return Cost(
        times.user + times.system,
        sum(batch.compute_infer.count for batch in batches),
        sum(batch.compute_infer.count * batch.batch_size for batch in batches),
        sum(batch.compute_infer.ns for batch in batches) / 1e9,
        waited_s(server.pid),
    )

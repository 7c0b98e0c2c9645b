"""How many streams hold the pace of real time on this machine, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import psutil
import tritonclient.grpc as grpc_client

from support import real_time_senders
from support.real_time_senders import Outcome, Pace
from support.server import TritonServer
from support.speech import CONTEXT_SAMPLES

SECONDS = 5.0
# On a machine that is busy with other things, none may be few enough.
MOST_TRIES = 5
# Ids of the streams begin here, a thousand for each try.
FIRST_ID = 100_000
STATE_BYTES = 4 * (2 * 128 + CONTEXT_SAMPLES)


@dataclass(frozen=True)
class Cost:
    """What the server did meanwhile."""

    cpu_s: float
    runs: int
    requests: int
    infer_s: float  # in ONNX Runtime

    def __sub__(self, earlier: Cost) -> Cost:
        return Cost(
            self.cpu_s - earlier.cpu_s,
            self.runs - earlier.runs,
            self.requests - earlier.requests,
            self.infer_s - earlier.infer_s,
        )


@dataclass(frozen=True)
class Try:
    """A number of streams, and how it went."""

    pace: Pace
    outcome: Outcome
    cost: Cost

    @property
    def latency_ms(self) -> tuple[float, float]:
        """Median and 99th percentile."""
        p50, p99 = np.percentile(self.outcome.latencies_s, [50, 99]) * 1e3
        return float(p50), float(p99)

    @property
    def cpu_us_per_step(self) -> float:
        """Of the server, gRPC and all."""
        return self.cost.cpu_s / self.cost.requests * 1e6

    @property
    def infer_us_per_step(self) -> float:
        """Of that, in ONNX Runtime."""
        return self.cost.infer_s / self.cost.requests * 1e6


def tries(server: TritonServer, model: str, streams: int, seed: int, on_try: Callable[[Try], None]) -> list[Try]:
    """Tries with as many streams, and with fewer as long as the pace is not held."""
    done: list[Try] = []
    for number in range(MOST_TRIES):
        before = _cost(server, model)
        pace, result = real_time_senders.run(server.grpc_url, model, streams, SECONDS, seed, FIRST_ID + 1000 * number)
        done.append(Try(pace, result, _cost(server, model) - before))
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
    )

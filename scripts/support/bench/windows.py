"""The costs of a second of audio in requests of different lengths: the client or the server (`input_windows`) cuts the
chunks of Silero VAD.

Each stream has the same audio in every case, so all cases make the same steps, and their answers are compared. `paced`: each
request is sent when its last sample is due, and the streams are spread evenly. Otherwise a stream sends its next request when
it has the last answer, so the machine is never idle.
"""

from __future__ import annotations

import functools
import itertools
import queue
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import tritonclient.grpc as grpc_client
from tritonclient.grpc import service_pb2

from support import paths, senders
from support.server import TritonServer
from support.speech import CHUNK_SAMPLES, PACKET_SAMPLES, SAMPLE_RATE, cut_streams, read_recording

STREAMS = 64
SECONDS = 10
"""Of audio of each stream."""
TOLERANCE = 1e-4
"""Between the probabilities of two cases: the sizes of their batches differ, and so do ONNX Runtime's roundings."""
CLIENT, SERVER = "client", "server"
CONFIGS = {CLIENT: ["input_context=input=64+512@1"], SERVER: ["input_context=input=64@1", "input_windows=input=512@1"]}
QUEUE = "max_queued_requests_per_sequence=100000"
"""So that a machine that is too slow for the pace shows it in the latency."""
_SEED = 7


@dataclass(frozen=True)
class Case:
    """Who cuts, and the samples of a request."""

    cuts: str
    samples: int

    @property
    def requests(self) -> int:
        """Of one stream."""
        return SECONDS * SAMPLE_RATE // self.samples


BASE = Case(CLIENT, CHUNK_SAMPLES)
CASES = [BASE, *(Case(SERVER, samples) for samples in (512, 320, 1600, 16_000, 160_000))]


@dataclass(frozen=True)
class Load:
    """What all processes send together. `first_id` is the first of its sequence ids, one a stream."""

    case: Case
    streams: int
    paced: bool
    first_id: int

    def due_s(self, stream: int, request: int) -> float:
        """When a request is sent, after the start."""
        return (request + stream / self.streams) * self.case.samples / SAMPLE_RATE


@dataclass
class Outcome:
    latencies_s: list[float]
    probabilities: dict[int, np.ndarray]
    began: float
    ended: float
    cpu_s: float


def compare(folder: Path, streams: int, blocks: int) -> Iterator[dict]:
    """A row for each case and block, at the pace of real time and as fast as the machine can. The cases take turns."""
    for cuts, parameters in CONFIGS.items():
        _write(folder / "repository" / cuts, ["constant_inputs=sr=16000", QUEUE, *parameters])
    first_id = 1
    expected: dict[int, np.ndarray] = {}
    with TritonServer(folder / "repository") as server:
        for case in CASES:  # warms up
            _run(server, Load(case, streams, False, first_id))
            first_id += streams
        for block in range(blocks):
            for paced in (True, False):
                rows = {}
                for case in CASES[:: 1 if block % 2 == 0 else -1]:
                    rows[case], probabilities = _run(server, Load(case, streams, paced, first_id))
                    first_id += streams
                    expected = expected or probabilities
                    _check(case, probabilities, expected)
                base = rows[BASE]
                for case in CASES:
                    row = rows[case]
                    over = {f"{key}_over": row[key] / base[key] for key in ("server_ms", "all_ms", "audio_s_per_s")}
                    yield {"block": block, **row, **over}


def _write(model: Path, parameters: list[str]) -> None:
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.onnx").symlink_to(paths.MODELS / "silero_vad" / "1" / "model.onnx")
    lines = ['backend: "stateful"', "max_batch_size: 64", "instance_group { kind: KIND_CPU }"]
    for key, value in (text.split("=", 1) for text in parameters):
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
    (model / "config.pbtxt").write_text("\n".join(lines) + "\n")


def _run(server: TritonServer, load: Load) -> tuple[dict, dict[int, np.ndarray]]:
    before = _counts(server, load.case.cuts)
    parts = [part for _, part in senders.run(load.streams, functools.partial(_send_share, server.grpc_url, load))]
    cpu_s, runs, steps = (now - then for now, then in zip(_counts(server, load.case.cuts), before, strict=True))
    audio_s = load.streams * SECONDS
    p50, p99 = np.percentile(np.concatenate([part.latencies_s for part in parts]), [50, 99]) * 1e3
    row = {
        "pace": "real time" if load.paced else "none",
        "cuts": load.case.cuts,
        "request_ms": 1000 * load.case.samples / SAMPLE_RATE,
        "streams": load.streams,
        "server_ms": 1e3 * cpu_s / audio_s,
        "all_ms": 1e3 * (cpu_s + sum(part.cpu_s for part in parts)) / audio_s,
        "batch": steps / runs,
        "p50_ms": float(p50),
        "p99_ms": float(p99),
        "audio_s_per_s": audio_s / (max(part.ended for part in parts) - min(part.began for part in parts)),
    }
    return row, {stream: of for part in parts for stream, of in part.probabilities.items()}


def _counts(server: TritonServer, model: str) -> tuple[float, int, int]:
    """CPU time of the server, runs and steps."""
    with grpc_client.InferenceServerClient(server.grpc_url) as client:
        [statistics] = client.get_inference_statistics(model).model_stats
    times, batches = psutil.Process(server.pid).cpu_times(), statistics.batch_stats
    runs = sum(batch.compute_infer.count for batch in batches)
    return times.user + times.system, runs, sum(batch.compute_infer.count * batch.batch_size for batch in batches)


def _check(case: Case, probabilities: dict[int, np.ndarray], expected: dict[int, np.ndarray]) -> None:
    for stream, of in probabilities.items():
        wanted = expected[stream][: case.requests * case.samples // CHUNK_SAMPLES]
        if len(of) != len(wanted) or np.abs(of - wanted).max(initial=0) > TOLERANCE:
            raise RuntimeError(f"{case}: the answers of stream {stream} are not those of the first case")


def _send_share(url: str, load: Load, share: Sequence[int], start: senders.Start) -> Outcome:
    """One process's streams, over one gRPC stream."""
    return _Sender(load, share).run(url, start)


class _Sender:
    def __init__(self, load: Load, share: Sequence[int]) -> None:
        self.load, self.share = load, share
        packets = SECONDS * SAMPLE_RATE // PACKET_SAMPLES
        cut = cut_streams(read_recording(), load.streams, _SEED, (packets, packets))
        self.audio = {stream: cut[stream].samples for stream in share}
        self.sent_at: dict[int, deque[float]] = {stream: deque() for stream in share}
        self.probabilities: dict[int, list[np.ndarray]] = {stream: [] for stream in share}
        self.heads = {
            (stream, start, end): senders.head(
                load.case.cuts, stream, load.first_id + stream, start, end, load.case.samples
            )
            for stream, start, end in itertools.product(share, (False, True), (False, True))
        }
        self.next: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def run(self, url: str, start: senders.Start) -> Outcome:
        process, latencies = psutil.Process(), []
        with senders.stream_to(url) as infer:
            began = start.wait()
            before = process.cpu_times()
            messages = self._paced(began) if self.load.paced else self._one_by_one(began)
            for answer in infer(messages):
                latencies.append(self._settle(answer))
            ended, after = time.monotonic(), process.cpu_times()
        cpu_s = after.user + after.system - before.user - before.system
        found = {stream: np.concatenate(of) for stream, of in self.probabilities.items()}
        return Outcome(latencies, found, began, ended, cpu_s)

    def _paced(self, began: float) -> Iterator[bytes]:
        for request in range(self.load.case.requests):
            for stream in self.share:
                wait = began + self.load.due_s(stream, request) - time.monotonic()
                if wait > 0.0002:
                    time.sleep(wait)
                yield self._message(stream, request)

    def _one_by_one(self, began: float) -> Iterator[bytes]:
        time.sleep(max(0, began - time.monotonic()))
        for stream in self.share:
            self.next.put((stream, 0))
        for _ in range(len(self.share) * self.load.case.requests):
            yield self._message(*self.next.get())

    def _message(self, stream: int, number: int) -> bytes:
        samples, last = self.load.case.samples, self.load.case.requests - 1
        self.sent_at[stream].append(time.monotonic())
        head = self.heads[stream, number == 0, number == last]
        return head + self.audio[stream][number * samples : (number + 1) * samples].tobytes()

    def _settle(self, message: bytes) -> float:
        """Keeps an answer; the seconds since its request was sent."""
        answer = service_pb2.ModelStreamInferResponse.FromString(message)
        if answer.error_message:
            raise RuntimeError(answer.error_message)
        stream = int(answer.infer_response.id)
        self.probabilities[stream].append(np.frombuffer(answer.infer_response.raw_output_contents[0], np.float32))
        latency = time.monotonic() - self.sent_at[stream].popleft()
        answered = len(self.probabilities[stream])
        if answered < self.load.case.requests:
            self.next.put((stream, answered))
        return latency

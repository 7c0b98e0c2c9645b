"""The costs of a second of audio in requests of different lengths: the client or the server (`input_windows`) cuts the
chunks of Silero VAD.

Each stream has the same audio in every case, so all cases make the same steps, and their answers are compared. `paced`: each
request is sent when its last sample is due, and the streams are spread evenly. Otherwise a stream sends its next request when
it has the last answer, so the machine is never idle.
"""

from __future__ import annotations

import itertools
import multiprocessing
import queue
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from pathlib import Path

import grpc
import numpy as np
import psutil
import tritonclient.grpc as grpc_client
from tritonclient.grpc import service_pb2

from support import paths
from support.server import TritonServer
from support.speech import CHUNK_SAMPLES, PACKET_SAMPLES, SAMPLE_RATE, cut_streams, read_recording

STREAMS = 64
SECONDS = 10
"""Of audio of each stream."""
PROCESSES = 2
TOLERANCE = 1e-4
"""Between the probabilities of two cases: the sizes of their batches differ, and so do ONNX Runtime's roundings."""
START_IN_S = 0.1
READY_TIMEOUT_S = 60
CLIENT, SERVER = "client", "server"
CONFIGS = {CLIENT: ["input_context=input=64+512@1"], SERVER: ["input_context=input=64@1", "input_windows=input=512@1"]}
QUEUE = "max_queued_requests_per_sequence=100000"
"""So that a machine that is too slow for the pace shows it in the latency."""
_STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
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
    shares = [range(load.streams)[at::PROCESSES] for at in range(min(PROCESSES, load.streams))]
    # grpc does not survive a fork
    context = multiprocessing.get_context("spawn")
    start = _Start(context.Barrier(len(shares)), context.Value("d"))
    before = _counts(server, load.case.cuts)
    with context.Pool(len(shares), initializer=_set_start, initargs=(start,)) as pool:
        parts = pool.starmap(_send_share, [(server.grpc_url, load, share) for share in shares], chunksize=1)
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


@dataclass(frozen=True)
class _Start:
    """The start of all senders, when each of them is ready."""

    barrier: Barrier
    at: Synchronized[float]

    def wait(self) -> float:
        """The time of the start, of the system's monotonic clock: the same for all."""
        if self.barrier.wait(READY_TIMEOUT_S) == 0:
            self.at.value = time.monotonic() + START_IN_S
        self.barrier.wait(READY_TIMEOUT_S)
        return self.at.value


def _set_start(start: _Start) -> None:
    """Barriers and values reach a process of a pool only when it starts."""
    global _start
    _start = start


_start: _Start


def _send_share(url: str, load: Load, share: Sequence[int]) -> Outcome:
    """One process's streams, over one gRPC stream."""
    return _Sender(load, share).run(url, _start)


class _Sender:
    def __init__(self, load: Load, share: Sequence[int]) -> None:
        self.load, self.share = load, share
        packets = SECONDS * SAMPLE_RATE // PACKET_SAMPLES
        cut = cut_streams(read_recording(), load.streams, _SEED, (packets, packets))
        self.audio = {stream: cut[stream].samples for stream in share}
        self.sent_at: dict[int, deque[float]] = {stream: deque() for stream in share}
        self.probabilities: dict[int, list[np.ndarray]] = {stream: [] for stream in share}
        kinds = itertools.product(share, (False, True), (False, True))
        self.heads = {kind: _head(load, *kind) for kind in kinds}
        self.next: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def run(self, url: str, start: _Start) -> Outcome:
        process, latencies = psutil.Process(), []
        with grpc.insecure_channel(url) as channel:
            grpc.channel_ready_future(channel).result(READY_TIMEOUT_S)
            began = start.wait()
            before = process.cpu_times()
            messages = self._paced(began) if self.load.paced else self._one_by_one(began)
            for answer in channel.stream_stream(_STREAM_INFER)(messages):
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


def _head(load: Load, stream: int, start: bool, end: bool) -> bytes:
    """A request without its samples; protobuf lets a message be written in parts."""
    request = service_pb2.ModelInferRequest(model_name=load.case.cuts, id=str(stream))
    request.parameters["sequence_id"].int64_param = load.first_id + stream
    request.parameters["sequence_start"].bool_param = start
    request.parameters["sequence_end"].bool_param = end
    request.inputs.add(name="input", datatype="FP32", shape=[1, load.case.samples])
    size = 4 * load.case.samples
    samples = service_pb2.ModelInferRequest(raw_input_contents=[bytes(size)]).SerializeToString()
    return request.SerializeToString() + samples[:-size]

"""Many streams at the pace of real time: each sends 20 ms of sound every 20 ms, whether or not the last one is answered.

The clients share a few gRPC streams of a few processes, so that on a small machine they leave something for the server.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier

import grpc
import numpy as np
import psutil
from tritonclient.grpc import service_pb2

from support.speech import PACKET_S, PACKET_SAMPLES, Stream, cut_streams, read_recording

PROCESSES = 2
# An answer is late when the next packet is due.
LATE_S = PACKET_S
# Held is a pace at which hardly an answer is late.
LATE_SHARE = 0.01
# Who is this far behind does not catch up.
GIVE_UP_S = 0.5
# The first packet is due this long after the last sender is ready.
START_IN_S = 0.1
# A sender takes seconds to start on a busy machine.
READY_TIMEOUT_S = 60
_STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"


@dataclass(frozen=True)
class Pace:
    """What all processes send together. `first_id` is the first of its sequence ids, one a stream."""

    model: str
    streams: int
    packets: int
    seed: int
    first_id: int

    def due_s(self, stream: int, packet: int) -> float:
        """When a packet is there to be sent, after the start: the streams are spread evenly over a packet's time."""
        return (packet + stream / self.streams) * PACKET_S


@dataclass
class Outcome:
    """What came of it."""

    latencies_s: np.ndarray  # from when a packet was due to its answer, one for each that completed a chunk
    probabilities: list[list[float]]  # of each stream
    client_cpu_s: float
    gave_up: bool = False

    @property
    def late_share(self) -> float:
        """The share of late answers."""
        return float((self.latencies_s > LATE_S).mean())

    @property
    def held(self) -> bool:
        """Whether the pace was held."""
        return not self.gave_up and self.late_share <= LATE_SHARE


class RefusedError(Exception):
    """The server refused a request."""


def streams_of(pace: Pace) -> list[Stream]:
    """The streams, the same in every process."""
    return cut_streams(read_recording(), pace.streams, pace.seed, (pace.packets, pace.packets))


def run(url: str, model: str, streams: int, seconds: float, seed: int, first_id: int) -> tuple[Pace, Outcome]:
    """All streams for some seconds of audio."""
    pace = Pace(model, streams, round(seconds / PACKET_S), seed, first_id)
    shares = [range(streams)[at::PROCESSES] for at in range(min(PROCESSES, streams))]
    # grpc does not survive a fork
    context = multiprocessing.get_context("spawn")
    start = _Start(context.Barrier(len(shares)), context.Value("d"))
    with context.Pool(len(shares), initializer=_set_start, initargs=(start,)) as pool:
        parts = pool.starmap(_send_share, [(url, pace, share) for share in shares], chunksize=1)
    probabilities: list[list[float]] = [[] for _ in range(streams)]
    for share, part in zip(shares, parts, strict=True):
        for stream, given in zip(share, part.probabilities, strict=True):
            probabilities[stream] = given
    return pace, Outcome(
        np.concatenate([part.latencies_s for part in parts]),
        probabilities,
        sum(part.client_cpu_s for part in parts),
        any(part.gave_up for part in parts),
    )


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


def _send_share(url: str, pace: Pace, share: Sequence[int]) -> Outcome:
    """One process's streams, over one gRPC stream."""
    return _Sender(pace, share).run(url, _start)


class _Sender:
    def __init__(self, pace: Pace, share: Sequence[int]) -> None:
        self.pace = pace
        self.share = share
        cut = streams_of(pace)
        self.packets = {stream: cut[stream].packets for stream in share}
        self.heads = {(stream, kind): _head(pace, stream, *kind) for stream in share for kind in _KINDS}
        self.waiting: dict[int, deque[float]] = {stream: deque() for stream in share}
        self.probabilities: dict[int, list[float]] = {stream: [] for stream in share}
        self.started_at = 0.0
        self.gave_up = False

    def run(self, url: str, start: _Start) -> Outcome:
        process = psutil.Process()
        latencies = []
        with grpc.insecure_channel(url) as channel:
            grpc.channel_ready_future(channel).result(READY_TIMEOUT_S)
            self.started_at = start.wait()
            before = process.cpu_times()
            for answer in channel.stream_stream(_STREAM_INFER)(self._messages()):
                latency_s, made_a_step = self._settle(answer)
                if made_a_step:
                    latencies.append(latency_s)
        after = process.cpu_times()
        cpu_s = after.user + after.system - before.user - before.system
        return Outcome(np.array(latencies), list(self.probabilities.values()), cpu_s, self.gave_up)

    def _messages(self) -> Iterator[bytes]:
        last = self.pace.packets - 1
        for packet in range(self.pace.packets):
            for stream in self.share:
                due = self.started_at + self.pace.due_s(stream, packet)
                wait = due - time.monotonic()
                if wait > 0.0002:
                    time.sleep(wait)
                self.gave_up = self.gave_up or wait < -GIVE_UP_S
                # a sequence is ended in any case
                if self.gave_up and 0 < packet < last:
                    continue
                self.waiting[stream].append(due)
                kind = (packet == 0, packet == last)
                yield self.heads[stream, kind] + _SAMPLES + self.packets[stream][packet].tobytes()

    def _settle(self, message: bytes) -> tuple[float, bool]:
        """Keeps an answer. The seconds since it was due, and whether it has a step. Those of a stream come in order."""
        answer = service_pb2.ModelStreamInferResponse.FromString(message)
        if answer.error_message:
            raise RefusedError(answer.error_message)
        stream = int(answer.infer_response.id)
        probabilities = np.frombuffer(answer.infer_response.raw_output_contents[0], np.float32)
        self.probabilities[stream].extend(probabilities.tolist())
        return time.monotonic() - self.waiting[stream].popleft(), len(probabilities) > 0


_KINDS = [(False, False), (True, False), (False, True), (True, True)]
# The tag of `raw_input_contents` and the length of a packet: what follows a head is the samples.
_SAMPLES = service_pb2.ModelInferRequest(raw_input_contents=[bytes(PACKET_SAMPLES * 4)]).SerializeToString()[
    : -PACKET_SAMPLES * 4
]


def _head(pace: Pace, stream: int, start: bool, end: bool) -> bytes:
    """A request without its samples; protobuf lets a message be written in parts."""
    request = service_pb2.ModelInferRequest(model_name=pace.model, id=str(stream))
    request.parameters["sequence_id"].int64_param = pace.first_id + stream
    request.parameters["sequence_start"].bool_param = start
    request.parameters["sequence_end"].bool_param = end
    request.inputs.add(name="input", datatype="FP32", shape=[1, PACKET_SAMPLES])
    return request.SerializeToString()

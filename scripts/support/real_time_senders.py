"""Many streams at the pace of real time: each sends 20 ms of sound every 20 ms, whether or not the last one is answered."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import psutil
from tritonclient.grpc import service_pb2

from support import senders
from support.speech import PACKET_S, PACKET_SAMPLES, Stream, cut_streams, read_recording

# An answer is late when the next packet is due.
LATE_S = PACKET_S
# Held is a pace at which hardly an answer is late.
LATE_SHARE = 0.01
# Who is this far behind does not catch up.
GIVE_UP_S = 0.5


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
    sent = senders.run(streams, functools.partial(_send_share, url, pace))
    probabilities: list[list[float]] = [[] for _ in range(streams)]
    for share, part in sent:
        for stream, given in zip(share, part.probabilities, strict=True):
            probabilities[stream] = given
    parts = [part for _, part in sent]
    return pace, Outcome(
        np.concatenate([part.latencies_s for part in parts]),
        probabilities,
        sum(part.client_cpu_s for part in parts),
        any(part.gave_up for part in parts),
    )


def _send_share(url: str, pace: Pace, share: Sequence[int], start: senders.Start) -> Outcome:
    """One process's streams, over one gRPC stream."""
    return _Sender(pace, share).run(url, start)


class _Sender:
    def __init__(self, pace: Pace, share: Sequence[int]) -> None:
        self.pace = pace
        self.share = share
        cut = streams_of(pace)
        self.packets = {stream: cut[stream].packets for stream in share}
        self.heads = {
            (stream, kind): senders.head(pace.model, stream, pace.first_id + stream, *kind, PACKET_SAMPLES)
            for stream in share
            for kind in _KINDS
        }
        self.waiting: dict[int, deque[float]] = {stream: deque() for stream in share}
        self.probabilities: dict[int, list[float]] = {stream: [] for stream in share}
        self.started_at = 0.0
        self.gave_up = False

    def run(self, url: str, start: senders.Start) -> Outcome:
        process = psutil.Process()
        latencies = []
        with senders.stream_to(url) as infer:
            self.started_at = start.wait()
            before = process.cpu_times()
            for answer in infer(self._messages()):
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
                yield self.heads[stream, kind] + self.packets[stream][packet].tobytes()

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

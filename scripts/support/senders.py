"""Processes that share the streams of a client, and begin to send at one time. Each has a gRPC stream for its share.

The clients share a few gRPC streams of a few processes, so that on a small machine they leave something for the server.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from typing import TypeVar

import grpc
from tritonclient.grpc import service_pb2

Outcome = TypeVar("Outcome")

PROCESSES = 2
# The first request is due this long after the last sender is ready.
START_IN_S = 0.1
# A sender takes seconds to start on a busy machine.
READY_TIMEOUT_S = 60
_STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"


@dataclass(frozen=True)
class Start:
    """The start of all senders, when each of them is ready."""

    barrier: Barrier
    at: Synchronized[float]

    def wait(self) -> float:
        """The time of the start, of the system's monotonic clock: the same for all."""
        if self.barrier.wait(READY_TIMEOUT_S) == 0:
            self.at.value = time.monotonic() + START_IN_S
        self.barrier.wait(READY_TIMEOUT_S)
        return self.at.value


def run(streams: int, send: Callable[[Sequence[int], Start], Outcome]) -> list[tuple[Sequence[int], Outcome]]:
    """Has each process call `send` with its share of the streams. Processes get it pickled."""
    shares = [range(streams)[at::PROCESSES] for at in range(min(PROCESSES, streams))]
    # grpc does not survive a fork
    context = multiprocessing.get_context("spawn")
    start = Start(context.Barrier(len(shares)), context.Value("d"))
    with context.Pool(len(shares), initializer=_set_start, initargs=(start,)) as pool:
        return list(
            zip(shares, pool.starmap(_send_share, [(send, share) for share in shares], chunksize=1), strict=True)
        )


def _set_start(start: Start) -> None:
    """Barriers and values reach a process of a pool only when it starts."""
    global _start
    _start = start


_start: Start


def _send_share(send: Callable[[Sequence[int], Start], Outcome], share: Sequence[int]) -> Outcome:
    return send(share, _start)


@contextmanager
def stream_to(url: str) -> Iterator[Callable[[Iterator[bytes]], Iterator[bytes]]]:
    """A gRPC stream, once the server can be reached: takes requests, and gives answers."""
    with grpc.insecure_channel(url) as channel:
        grpc.channel_ready_future(channel).result(READY_TIMEOUT_S)
        yield channel.stream_stream(_STREAM_INFER)


def head(model: str, stream: int, sequence_id: int, start: bool, end: bool, samples: int) -> bytes:
    """A request without its samples, which follow it; protobuf lets a message be written in parts."""
    request = service_pb2.ModelInferRequest(model_name=model, id=str(stream))
    request.parameters["sequence_id"].int64_param = sequence_id
    request.parameters["sequence_start"].bool_param = start
    request.parameters["sequence_end"].bool_param = end
    request.inputs.add(name="input", datatype="FP32", shape=[1, samples])
    # the tag of `raw_input_contents`, and the length
    size = 4 * samples
    contents = service_pb2.ModelInferRequest(raw_input_contents=[bytes(size)]).SerializeToString()
    return request.SerializeToString() + contents[:-size]

"""What a stream costs without a server: the application keeps a session of ONNX Runtime for each stream."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import psutil

from support.speech import Stream, silero_oracle

SESSIONS = 24


@dataclass(frozen=True)
class SessionPerStream:
    """What a stream costs that way."""

    cpu_s_per_step: float
    bytes_per_stream: float


def measure(streams: list[Stream], seconds: float = 1.5) -> SessionPerStream:
    """Steps some streams in turn, each in a session of its own, on one thread."""
    process = psutil.Process()
    before = process.memory_info().rss
    sequences = [silero_oracle().new_sequence() for _ in range(SESSIONS)]
    fed = list(zip(sequences, itertools.cycle(streams), strict=False))
    for sequence, stream in fed:
        sequence.step({"input": stream.inputs[:1]})
    resident = process.memory_info().rss - before
    steps, step = 0, 1
    began = time.process_time()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for sequence, stream in fed:
            sequence.step({"input": stream.inputs[step % stream.steps][None]})
        steps += len(fed)
        step += 1
    return SessionPerStream((time.process_time() - began) / steps, resident / len(sequences))

"""The usual way to serve a small stateful model: every stream has an ONNX Runtime session of its own, in the application.

What it costs without any network, to compare with.
"""

from __future__ import annotations

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
    for sequence, stream in zip(sequences, streams):
        sequence.step({"input": stream.inputs[:1]})
    resident = process.memory_info().rss - before
    steps, step = 0, 1
    began = time.process_time()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for sequence, stream in zip(sequences, streams):
            sequence.step({"input": stream.inputs[step % stream.steps][None]})
        steps += len(sequences)
        step += 1
    return SessionPerStream((time.process_time() - began) / steps, resident / len(sequences))

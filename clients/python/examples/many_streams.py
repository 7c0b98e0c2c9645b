"""Sends many streams of audio at once with asyncio, over one gRPC connection.

    python many_streams.py --url localhost:8001 --streams 100 --file ../../../assets/speech.wav

Each stream is a sequence with a state of its own; the server runs those that are ready as one batch. Works with the
model silero_vad.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import wave
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc.aio as grpcclient

from triton_stateful import AsyncSequence

CHUNK = 512


async def follow(client: Any, model: str, chunks: npt.NDArray[np.floating[Any]]) -> float:
    """One stream. Returns how much of it is speech, from 0 to 1."""
    speech = 0
    async with AsyncSequence(client, model) as sequence:
        for number, chunk in enumerate(chunks):
            answer = await sequence.step(chunk, end=number == len(chunks) - 1)
            speech += answer["output"].item() > 0.5
    return speech / len(chunks)


async def follow_all(url: str, model: str, streams: Sequence[npt.NDArray[np.floating[Any]]]) -> list[float]:
    async with grpcclient.InferenceServerClient(url) as client:
        return await asyncio.gather(*(follow(client, model, chunks) for chunks in streams))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: localhost:8001)")
    parser.add_argument("--model", default="silero_vad")
    parser.add_argument("--file", required=True, help="a WAV file: 16 kHz, mono, 16 bit")
    parser.add_argument("--streams", type=int, default=100, help="how many streams (default: 100)")
    parser.add_argument("--chunks", type=int, default=100, help="the length of each (default: 100 chunks of 32 ms)")
    options = parser.parse_args()

    with wave.open(options.file, "rb") as recording:
        samples = np.frombuffer(recording.readframes(recording.getnframes()), "<i2").astype(np.float32) / np.float32(
            32768
        )
    length = options.chunks * CHUNK
    starts = np.linspace(0, len(samples) - length, options.streams).astype(int)
    streams = [samples[start : start + length].reshape(-1, 1, CHUNK) for start in starts]

    began = time.perf_counter()
    shares = asyncio.run(follow_all(options.url, options.model, streams))
    seconds = time.perf_counter() - began
    for number in range(min(5, len(shares))):
        print(f"stream {number}: {shares[number]:.0%} speech")
    steps = options.streams * options.chunks
    print(f"{options.streams} streams, {steps} steps, {steps / seconds:.0f} steps a second")


if __name__ == "__main__":
    main()

"""Sends many streams of audio at once with asyncio, over one gRPC connection.

    python many_streams.py --url localhost:8001 --streams 100 --file ../../../assets/speech.wav

Each stream is a sequence with a state of its own, and sends 20 ms at a time. The server makes a step of the model for
every 512 samples, and runs the steps that are ready as one batch. Works with the model silero_vad.
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

PACKET = 320  # 20 ms


async def follow(client: Any, model: str, packets: npt.NDArray[np.floating[Any]]) -> tuple[int, int]:
    """One stream. Returns the number of its steps, and how many of them are speech."""
    steps = speech = 0
    async with AsyncSequence(client, model) as sequence:
        for number, packet in enumerate(packets):
            answer = await sequence.step(packet, end=number == len(packets) - 1)
            steps += answer["output"].size  # 1, or 0 if the packet completes no 512 samples
            speech += int((answer["output"] > 0.5).sum())
    return steps, speech


async def follow_all(url: str, model: str, streams: Sequence[npt.NDArray[np.floating[Any]]]) -> list[tuple[int, int]]:
    async with grpcclient.InferenceServerClient(url) as client:
        return await asyncio.gather(*(follow(client, model, packets) for packets in streams))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: localhost:8001)")
    parser.add_argument("--model", default="silero_vad")
    parser.add_argument("--file", required=True, help="a WAV file: 16 kHz, mono, 16 bit")
    parser.add_argument("--streams", type=int, default=100, help="how many streams (default: 100)")
    parser.add_argument("--packets", type=int, default=160, help="the length of each (default: 160 packets of 20 ms)")
    options = parser.parse_args()

    with wave.open(options.file, "rb") as recording:
        samples = np.frombuffer(recording.readframes(recording.getnframes()), "<i2").astype(np.float32) / np.float32(
            32768
        )
    length = options.packets * PACKET
    starts = np.linspace(0, len(samples) - length, options.streams).astype(int)
    streams = [samples[start : start + length].reshape(-1, 1, PACKET) for start in starts]

    began = time.perf_counter()
    counts = asyncio.run(follow_all(options.url, options.model, streams))
    seconds = time.perf_counter() - began
    for number, (steps, speech) in enumerate(counts[:5]):
        print(f"stream {number}: {speech / max(steps, 1):.0%} speech")
    made = sum(steps for steps, _ in counts)
    print(f"{options.streams} streams, {made} steps, {made / seconds:.0f} steps a second")


if __name__ == "__main__":
    main()

"""Recorded speech as a streaming client sends it, and the shape of the speech model."""

from __future__ import annotations

import wave
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from support import paths
from support.oracle import Oracle

SAMPLE_RATE = 16000
CHUNK_SAMPLES = 512
CONTEXT_SAMPLES = 64
CHUNK_S = CHUNK_SAMPLES / SAMPLE_RATE
#: What a client sends at once: 20 ms, as microphones and telephone lines deliver it.
PACKET_SAMPLES = 320
PACKET_S = PACKET_SAMPLES / SAMPLE_RATE


def read_recording(path: Path = paths.RECORDING) -> np.ndarray:
    """The recording's samples, float32 in -1 to 1. ValueError unless it is 16 kHz mono 16 bit."""
    with wave.open(str(path), "rb") as recording:
        found = (recording.getframerate(), recording.getnchannels(), recording.getsampwidth())
        if found != (SAMPLE_RATE, 1, 2):
            raise ValueError(f"{path}: rate, channels and bytes a sample are {found}, not {(SAMPLE_RATE, 1, 2)}")
        samples = np.frombuffer(recording.readframes(recording.getnframes()), "<i2")
    return samples.astype(np.float32) / 32768


def inputs_of(samples: np.ndarray) -> np.ndarray:
    """What the model takes, one row a step: [chunks, 576], each 512 new samples behind the 64 before them.

    Zeros stand before the first; samples that fill no chunk at the end are left out.
    """
    count = len(samples) // CHUNK_SAMPLES
    padded = np.concatenate([np.zeros(CONTEXT_SAMPLES, np.float32), samples])
    starts = np.arange(count)[:, None] * CHUNK_SAMPLES
    return padded[starts + np.arange(CONTEXT_SAMPLES + CHUNK_SAMPLES)]


@dataclass(frozen=True)
class Stream:
    """A stretch of the recording, as if one person's."""

    name: str
    start_s: float
    gain: float
    samples: np.ndarray  # float32, a whole number of packets

    @cached_property
    def inputs(self) -> np.ndarray:
        """What the model takes, [steps, 576], float32."""
        return inputs_of(self.samples)

    @property
    def packets(self) -> np.ndarray:
        """What its client sends, [requests, 320]."""
        return self.samples.reshape(-1, PACKET_SAMPLES)

    @property
    def steps(self) -> int:
        """How many steps the server makes of it. The samples after the last whole chunk make none."""
        return len(self.samples) // CHUNK_SAMPLES

    @property
    def seconds(self) -> float:
        """How long its audio is."""
        return len(self.samples) / SAMPLE_RATE


def cut_streams(recording: np.ndarray, count: int, seed: int, packets: tuple[int, int] = (240, 800)) -> list[Stream]:
    """count stretches of the recording, each with its own start, gain (0.3 to 1.2) and number of packets."""
    random = np.random.default_rng(seed)
    streams = []
    for index in range(count):
        length = int(random.integers(*packets, endpoint=True)) * PACKET_SAMPLES
        start = int(random.integers(0, len(recording) - length, endpoint=True))
        gain = float(random.uniform(0.3, 1.2))
        samples = np.clip(recording[start : start + length] * np.float32(gain), -1, 1)
        streams.append(Stream(f"stream {index + 1}", start / SAMPLE_RATE, gain, samples))
    return streams


def silero_oracle(model_path: Path = paths.MODELS / "silero_vad" / "1" / "model.onnx") -> Oracle:
    """The speech model, to be stepped with {"input": [1, 576]}; "output" [1, 1] is the probability of speech."""
    return Oracle(model_path, {"state": "stateN"}, {"sr": np.array(SAMPLE_RATE, np.int64)})

"""Live streams of speech: each sends 100 ms of sound every 100 ms as one sequence. When one ends, another takes its place."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass, field

import numpy as np
import tritonclient.grpc.aio as grpc_client

from support.speech import CHUNK_SAMPLES, PACKET_SAMPLES, SAMPLE_RATE, Stream, cut_streams, read_recording
from triton_stateful import AnswerLost, AsyncSequence, Retry, StatefulError

MODEL = "silero_vad"
#: A request brings 3.125 chunks of the model, so each makes three or four steps, and leaves samples over.
REQUEST_SAMPLES = 5 * PACKET_SAMPLES
REQUEST_S = REQUEST_SAMPLES / SAMPLE_RATE
#: A sequence lasts between 3 and 12 seconds.
_PACKETS = (150, 600)
#: Longer than any fault that is caused here.
_RETRY = Retry(attempts=200, backoff=0.02, longest=0.25)
#: For the answer to a request. A server that is paused gives none.
_TIMEOUT_S = 2.0


class Clock:
    """Seconds since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self._began


@dataclass
class Asked:
    """A request and what came of it. Times are seconds since the start."""

    due_s: float
    answered_s: float
    values: np.ndarray | None  # None: the server has made the steps, and the answer is lost
    made: int | None  # steps of the sequence, as the server says; None at the end

    @property
    def latency_s(self) -> float:
        """From when the sound was there."""
        return self.answered_s - self.due_s


@dataclass
class Life:
    """A sequence."""

    stream: Stream
    sequence_id: int
    asked: list[Asked] = field(default_factory=list)
    error: str = ""  # why it is lost


def steps_after(requests: int) -> int:
    """How many steps so many requests make."""
    return requests * REQUEST_SAMPLES // CHUNK_SAMPLES


@dataclass
class Speakers:
    """All clients. `live` has the sequences that are there now, and `headers` those by which the proxy chooses."""

    url: str
    count: int
    seed: int
    clock: Clock
    lives: list[Life] = field(default_factory=list)
    live: dict[int, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._recording = read_recording()
        self._rng = random.Random(self.seed)

    async def run(self, seconds: float) -> None:
        """Until all sequences have ended that begin in this time; they end soon after it."""
        async with grpc_client.InferenceServerClient(self.url) as client:
            await asyncio.gather(*(self._speak(client, at, seconds) for at in range(self.count)))

    async def _speak(self, client: grpc_client.InferenceServerClient, at: int, until_s: float) -> None:
        # Spread over the time of a request.
        due_s = self.clock() + REQUEST_S * at / self.count
        for number in itertools.count():
            if due_s >= until_s:
                return
            [stream] = cut_streams(self._recording, 1, self.seed + at + self.count * number, _PACKETS)
            due_s = await self._live(client, stream, due_s, until_s)

    async def _live(
        self, client: grpc_client.InferenceServerClient, stream: Stream, due_s: float, until_s: float
    ) -> float:
        """One sequence. When the next one begins."""
        headers = {"sequence-id": str(self._rng.getrandbits(60))}
        sequence = AsyncSequence(client, MODEL, retry=_RETRY, headers=headers)
        assert isinstance(sequence.id, int)
        life = Life(stream, sequence.id)
        self.lives.append(life)
        self.live[sequence.id] = headers
        requests = len(stream.samples) // REQUEST_SAMPLES
        try:
            for samples in stream.samples[: requests * REQUEST_SAMPLES].reshape(-1, 1, REQUEST_SAMPLES):
                await asyncio.sleep(due_s - self.clock())
                ends = len(life.asked) == requests - 1 or due_s >= until_s
                values = made = None
                try:
                    outputs = await sequence.step(samples, end=ends, timeout=_TIMEOUT_S)
                    values, made = outputs["output"].ravel(), outputs.parameters.get("stateful_steps_made")
                except AnswerLost:
                    pass
                life.asked.append(Asked(due_s, self.clock(), values, None if made is None else int(made)))
                due_s += REQUEST_S
                if ends:
                    break
        except StatefulError as error:
            life.error = f"{type(error).__name__}: {error}"
            due_s = max(due_s, self.clock())
        finally:
            del self.live[sequence.id]
        return due_s

"""Live streams of speech: each sends 100 ms of sound every 100 ms as one sequence. When one ends, another takes its place."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio as grpc_client
import tritonclient.http.aio as http_client

import triton_stateful
from support.proxies import Proxy
from support.speech import CHUNK_SAMPLES, PACKET_SAMPLES, SAMPLE_RATE, Stream, cut_streams, read_recording
from triton_stateful import AnswerLost, AsyncSequence, Outputs, Retry, Sequence, StatefulError

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


#: How a sequence sends its requests: each as a gRPC call, over a gRPC stream, or by HTTP.
PROTOCOLS = ("grpc", "stream", "http")


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


class ByCalls:
    """A sequence that sends each request as a call of a client."""

    def __init__(self, client: Any, headers: dict[str, str], timeout: float | None) -> None:
        self._sequence = AsyncSequence(client, MODEL, retry=_RETRY, headers=headers)
        self._timeout = timeout

    @property
    def id(self) -> triton_stateful.SequenceId:
        """The sequence's id."""
        return self._sequence.id

    async def step(self, samples: np.ndarray, end: bool) -> Outputs:
        """The answer to a request."""
        return await self._sequence.step(samples, end=end, timeout=self._timeout)

    async def close(self) -> None:
        """The client is shared, and stays open."""


class _Headers(tritonclient.grpc.InferenceServerClientPlugin):
    """Gives the headers of now to each request of a client, and to each stream that it opens."""

    def __init__(self, headers: dict[str, str]) -> None:
        self._headers = headers

    def __call__(self, request: Any) -> None:
        request.headers.update(self._headers)


class ByStream:
    """A sequence with a gRPC stream of its own. If `headers` change, it opens a new one, which may lead to another server."""

    def __init__(self, url: str, headers: dict[str, str], threads: ThreadPoolExecutor) -> None:
        self._headers, self._opened, self._threads = headers, dict(headers), threads
        self._client = tritonclient.grpc.InferenceServerClient(url)
        self._client.register_plugin(_Headers(headers))
        self._stream = triton_stateful.Stream(self._client)
        self._sequence = Sequence(self._stream, MODEL, retry=_RETRY)

    @property
    def id(self) -> triton_stateful.SequenceId:
        """The sequence's id."""
        return self._sequence.id

    async def step(self, samples: np.ndarray, end: bool) -> Outputs:
        """The answer to a request."""
        outputs: Outputs = await self._run(lambda: self._step(samples, end))
        return outputs

    async def close(self) -> None:
        """Closes the stream."""
        await self._run(self._close)

    def _step(self, samples: np.ndarray, end: bool) -> Outputs:
        if self._opened != self._headers:
            self._opened = dict(self._headers)
            self._stream.close()
        return self._sequence.step(samples, end=end, timeout=_TIMEOUT_S)

    def _close(self) -> None:
        self._stream.close()
        self._client.close()

    async def _run(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


@dataclass
class Speakers:
    """All clients. `live` has the sequences that are there now, and `headers` those by which the proxy chooses."""

    proxy: Proxy
    protocols: list[str]  # of the sequences, in turn
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
        with ThreadPoolExecutor(self.count) as threads:
            async with (
                grpc_client.InferenceServerClient(self.proxy.grpc_url) as grpc,
                http_client.InferenceServerClient(self.proxy.http_url, conn_timeout=_TIMEOUT_S) as http,
            ):
                by_protocol: dict[str, Callable[[dict[str, str]], ByCalls | ByStream]] = {
                    "grpc": lambda headers: ByCalls(grpc, headers, _TIMEOUT_S),
                    "http": lambda headers: ByCalls(http, headers, None),
                    "stream": lambda headers: ByStream(self.proxy.grpc_url, headers, threads),
                }
                ways = [by_protocol[protocol] for protocol in self.protocols]
                await asyncio.gather(*(self._speak(ways[at % len(ways)], at, seconds) for at in range(self.count)))

    async def _speak(self, begin: Callable[[dict[str, str]], ByCalls | ByStream], at: int, until_s: float) -> None:
        # Spread over the time of a request.
        due_s = self.clock() + REQUEST_S * at / self.count
        for number in itertools.count():
            if due_s >= until_s:
                return
            [stream] = cut_streams(self._recording, 1, self.seed + at + self.count * number, _PACKETS)
            headers = {"sequence-id": str(self._rng.getrandbits(60))}
            sequence = begin(headers)
            try:
                due_s = await self._live(sequence, headers, stream, due_s, until_s)
            finally:
                await sequence.close()

    async def _live(
        self, sequence: ByCalls | ByStream, headers: dict[str, str], stream: Stream, due_s: float, until_s: float
    ) -> float:
        """One sequence. When the next one begins."""
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
                    outputs = await sequence.step(samples, ends)
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

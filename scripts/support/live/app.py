"""The page's server: each WebSocket is a sequence of the model, from its first message until it closes.

A message of the page is binary and has samples: 32-bit floats, little-endian, at 16 kHz, as many as the browser has. Each
message is a request to the model, and gets one answer, in order, as JSON:

    {"probabilities": [0.02]}     of speech, for each 512 samples that are complete: often none
    {"error": "..."}              the message was refused, and the sequence goes on without it

About once a second an answer also has figures of all sequences of the model: {"tabs": 3, "batches": {"2": 17}}, which is
the number of open sockets, and how often the model has run with each batch size since the last figures.

If the model doesn't answer any more, the answer is an error, and the socket is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import tritonclient.grpc.aio as grpc_client
from aiohttp import WSCloseCode, WSMessage, WSMsgType, web
from tritonclient.utils import InferenceServerException

from support import paths
from triton_stateful import AsyncSequence, StatefulError

MODEL = "silero_vad"
PAGE = paths.ROOT / "scripts" / "support" / "live" / "page"
#: 16 s of sound.
MESSAGE_BYTES_MAX = 1 << 20
FIGURES_EVERY_S = 1.0
#: After this time, the server notices a browser that has gone without closing its socket.
HEARTBEAT_S = 10
#: The model has this long to answer.
ANSWER_TIMEOUT_S = 10

Runs = dict[int, int]  # by batch size


def application(grpc_url: str) -> web.Application:
    """The page, the recording and the sockets, for the model on the server at grpc_url."""
    live = _Live(grpc_url)
    app = web.Application()
    app.router.add_get("/", _file(PAGE / "index.html"))
    app.router.add_get("/speech.wav", _file(paths.RECORDING))
    app.router.add_static("/page", PAGE)
    app.router.add_get("/socket", live.talk)
    app.cleanup_ctx.append(live.connect)
    app.on_shutdown.append(live.close_sockets)
    return app


def _file(path):
    async def answer(_: web.Request) -> web.FileResponse:
        return web.FileResponse(path)

    return answer


class _RefusedError(Exception):
    """A message that has no samples."""


class _Live:
    """What the sockets share."""

    def __init__(self, grpc_url: str) -> None:
        self.grpc_url = grpc_url
        self.client: grpc_client.InferenceServerClient
        self.sockets: set[web.WebSocketResponse] = set()
        self.ending: set[asyncio.Task[None]] = set()
        self.figures: dict[str, Any] = {}

    async def connect(self, _: web.Application) -> AsyncIterator[None]:
        """The client and the figures, for as long as the application runs."""
        async with grpc_client.InferenceServerClient(self.grpc_url) as self.client:
            counting = asyncio.create_task(self.count())
            yield
            counting.cancel()
            await asyncio.wait([counting, *self.ending])

    async def close_sockets(self, _: web.Application) -> None:
        """Has each page say that its server has ended."""
        closing = (
            socket.close(code=WSCloseCode.GOING_AWAY, message=b"the server was ended") for socket in self.sockets
        )
        await asyncio.gather(*closing)

    async def talk(self, request: web.Request) -> web.StreamResponse:
        """A socket, until it closes."""
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != request.host:
            raise web.HTTPForbidden(text=f"a page of {origin} may not use the sockets of {request.host}")
        socket = web.WebSocketResponse(max_msg_size=MESSAGE_BYTES_MAX, heartbeat=HEARTBEAT_S)
        await socket.prepare(request)
        self.sockets.add(socket)
        sequence = AsyncSequence(self.client, MODEL)
        told, has_begun = self.figures, False
        try:
            async for message in socket:
                try:
                    answer: dict[str, Any] = {"probabilities": await _rate(sequence, _samples(message))}
                    has_begun = True
                except _RefusedError as error:
                    answer = {"error": str(error)}
                if told is not self.figures:
                    told = self.figures
                    answer.update(told)
                await socket.send_json(answer)
        except StatefulError as error:
            with contextlib.suppress(ConnectionResetError):
                await socket.send_json({"error": f"model '{MODEL}' at {self.grpc_url} does not answer: {error}"})
            await socket.close(code=WSCloseCode.INTERNAL_ERROR)
        except ConnectionResetError:
            pass  # the tab was closed while the model was running
        finally:
            self.sockets.discard(socket)
            if has_begun:
                # A task of its own, because this one may have been cancelled.
                ending = asyncio.create_task(_end(sequence))
                self.ending.add(ending)
                ending.add_done_callback(self.ending.discard)
        return socket

    async def count(self) -> None:
        """Renews the figures. The next answer on each socket has them, so only a socket's own task writes to it."""
        before: Runs | None = None
        while True:
            await asyncio.sleep(FIGURES_EVERY_S)
            now = await self.runs() if self.sockets else None
            if now is not None and before is not None:
                grown = {size: count - before.get(size, 0) for size, count in now.items()}
                batches = {size: count for size, count in sorted(grown.items()) if count > 0}
                self.figures = {"tabs": len(self.sockets), "batches": batches}
            before = now

    async def runs(self) -> Runs | None:
        """How often the model has run, as Triton counts. None if Triton does not answer."""
        try:
            statistics = await self.client.get_inference_statistics(MODEL)
        except InferenceServerException:
            return None
        [model] = statistics.model_stats
        return {batch.batch_size: batch.compute_infer.count for batch in model.batch_stats}


async def _rate(sequence: AsyncSequence, samples: np.ndarray) -> list[float]:
    """The probability of speech of each chunk that these samples complete. StatefulError if there is no answer."""
    outputs = await sequence.step(samples[None], timeout=ANSWER_TIMEOUT_S)
    return outputs["output"].ravel().tolist()


async def _end(sequence: AsyncSequence) -> None:
    """Ends it on the server. If the server is gone, the sequence is gone with it."""
    with contextlib.suppress(StatefulError):
        await sequence.step(np.zeros((1, 0), np.float32), end=True, timeout=ANSWER_TIMEOUT_S)


def _samples(message: WSMessage) -> np.ndarray:
    if message.type is not WSMsgType.BINARY:
        raise _RefusedError("a text came, but a binary message with samples is expected")
    if len(message.data) % 4:
        raise _RefusedError(f"a message has {len(message.data)} bytes, but a multiple of 4 is expected: 32-bit floats")
    samples = np.frombuffer(message.data, "<f4")
    wrong = np.flatnonzero(~np.isfinite(samples))
    if wrong.size:
        raise _RefusedError(f"sample {wrong[0]} of a message is {samples[wrong[0]]}, but a finite number is expected")
    return samples

"""A TCP proxy between a client and a server that loses requests and answers.

It knows as much of HTTP/1.1 and of HTTP/2 as is needed to tell where a request ends and where its answer begins.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
from collections.abc import Callable, Coroutine

import numpy as np

#: What happens to a request. The connection breaks in all cases but the first.
#: "request": the server doesn't get it. "answer": it runs, and its answer is lost.
#: "late": the server gets it when the next request has been answered.
LOSSES = ["none", "request", "answer", "late"]

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_DATA, _HEADERS, _END_STREAM = 0, 1, 1


class LossyProxy:
    """Listens on `url`. `lose` says what happens to each next request; before it is set, all pass.

    protocol: "http", or "grpc" for one call or stream message at a time.
    """

    def __init__(self, target: str, protocol: str):
        self.target = target
        self.lose: Callable[[], str] = lambda: "none"
        self.counts: collections.Counter[str] = collections.Counter()
        self._late: list[Coroutine] = []
        self._open: set[asyncio.StreamWriter] = set()
        self._serve = self._serve_http if protocol == "http" else self._serve_grpc
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.url = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def lose_at_random(self, seed: int) -> None:
        """Two of five requests are lost in one way or another."""
        rng = np.random.default_rng(seed)
        self.lose = lambda: str(rng.choice(LOSSES, p=[0.61, 0.13, 0.13, 0.13]))

    def close(self) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, doing: Coroutine):
        return asyncio.run_coroutine_threadsafe(doing, self._loop).result(60)

    async def _stop(self) -> None:
        self._server.close()
        for late in self._late:
            late.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = await self._connect()
        kept = False
        try:
            kept = await self._serve((reader, writer), upstream)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            _abort(writer)
            if not kept:
                _abort(upstream[1])

    async def _connect(self) -> Connection:
        host, port = self.target.split(":")
        return await asyncio.open_connection(host, int(port))

    def _decide(self) -> str:
        loss = self.lose()
        self.counts[loss] += 1
        return loss

    async def _deliver_late(self) -> None:
        """Before an answer goes to the client: the requests that are late arrive, and run or are refused."""
        late, self._late = self._late, []
        for delivery in late:
            await delivery

    # ---- HTTP/1.1

    async def _serve_http(self, client: Connection, server: Connection) -> bool:
        while True:
            request = await _http_message(client[0])
            loss = self._decide() if b"/infer HTTP/" in request.split(b"\r\n", 1)[0] else "none"
            if loss == "request":
                return False
            if loss == "late":
                self._late.append(self._late_http(request, server))
                return True
            server[1].write(request)
            answer = await _http_message(server[0])
            if loss == "answer":
                return False
            await self._deliver_late()
            client[1].write(answer)

    async def _late_http(self, request: bytes, server: Connection) -> None:
        server[1].write(request)
        await _http_message(server[0])
        _abort(server[1])

    # ---- gRPC

    async def _serve_grpc(self, client: Connection, server: Connection) -> bool:
        server[1].write(await client[0].readexactly(24))  # the preface
        lost_streams: set[int] = set()
        answers = asyncio.create_task(self._pass_answers(client, server, lost_streams))
        kept = False
        try:
            headers = b""
            while True:
                frame, kind, _, stream, size = await _frame(client[0])
                if kind == _HEADERS:
                    headers += frame
                elif kind == _DATA and size:
                    loss = self._decide()
                    if loss == "request":
                        return False
                    if loss == "late":
                        kept = True
                        self._late.append(self._late_grpc(headers + frame, stream, server))
                        return True
                    if loss == "answer":
                        lost_streams.add(stream)
                    server[1].write(headers + frame)
                    headers = b""
                else:
                    server[1].write(headers + frame if kind == _DATA else frame)
                    headers = b"" if kind == _DATA else headers
        finally:
            answers.cancel()
            if kept:
                with contextlib.suppress(asyncio.CancelledError):
                    await answers

    async def _pass_answers(self, client: Connection, server: Connection, lost_streams: set[int]) -> None:
        try:
            while True:
                frame, kind, flags, stream, size = await _frame(server[0])
                if _is_answer(kind, flags, size):
                    if stream in lost_streams:
                        break
                    await self._deliver_late()
                client[1].write(frame)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        _abort(client[1])

    async def _late_grpc(self, frames: bytes, stream: int, server: Connection) -> None:
        server[1].write(frames)
        while True:
            _, kind, flags, of, size = await _frame(server[0])
            if of == stream and _is_answer(kind, flags, size):
                break
        _abort(server[1])


def _is_answer(kind: int, flags: int, size: int) -> bool:
    return (kind == _DATA and size > 0) or (kind == _HEADERS and bool(flags & _END_STREAM))


async def _http_message(reader: asyncio.StreamReader) -> bytes:
    """A request or an answer whose header has its length."""
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return head + await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0)


async def _frame(reader: asyncio.StreamReader) -> tuple[bytes, int, int, int, int]:
    """A frame of HTTP/2, its type, its flags, its stream and its length."""
    head = await reader.readexactly(9)
    size = int.from_bytes(head[:3], "big")
    stream = int.from_bytes(head[5:], "big") & 0x7FFFFFFF
    return head + await reader.readexactly(size), head[3], head[4], stream, size


def _abort(writer: asyncio.StreamWriter) -> None:
    transport = writer.transport
    transport.abort()

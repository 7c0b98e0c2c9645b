"""The package's sequences over each protocol, with one face: `Sequence`, also where the real one is an AsyncSequence."""

from __future__ import annotations

import asyncio
import contextlib
import inspect

import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio

from harness.clients import TIMEOUT_S
from triton_stateful import AsyncSequence, Sequence, Stream

PROTOCOLS = ["grpc", "http", "stream", "grpc.aio", "http.aio"]

#: After a broken connection, gRPC waits for a second before it connects again.
_AT_ONCE = [
    ("grpc.initial_reconnect_backoff_ms", 1),
    ("grpc.min_reconnect_backoff_ms", 1),
    ("grpc.max_reconnect_backoff_ms", 5),
]


class Blocking:
    """An AsyncSequence whose methods wait."""

    def __init__(self, loop: asyncio.AbstractEventLoop, inner: AsyncSequence):
        self.loop, self.inner = loop, inner

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.loop.run_until_complete(self.inner.__aexit__(*error))

    def __getattr__(self, name):
        found = getattr(self.inner, name)
        return self._wait(found) if callable(found) else found

    def _wait(self, method):
        def call(*arguments, **named):
            doing = method(*arguments, **named)
            if inspect.isasyncgen(doing):
                return self._each(doing)
            result = self.loop.run_until_complete(doing)
            return Blocking(self.loop, result) if isinstance(result, AsyncSequence) else result

        return call

    def _each(self, answers):
        """An iterator that waits."""
        try:
            while True:
                try:
                    answer = self.loop.run_until_complete(answers.__anext__())
                except StopAsyncIteration:
                    return
                yield answer
        finally:
            self.loop.run_until_complete(answers.aclose())


class Clients:
    """Makes sequences that share a client for each protocol and server."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.closing = contextlib.ExitStack()
        self.closing.callback(self.loop.close)

    def connect(self, protocol: str, urls):
        """A function like `Sequence`, without its first argument. `urls` has grpc_url and http_url."""
        client = self.client(protocol, urls)
        if not protocol.endswith(".aio"):
            return lambda *arguments, **named: Sequence(client, *arguments, **named)
        return lambda *arguments, **named: Blocking(self.loop, AsyncSequence(client, *arguments, **named))

    def client(self, protocol: str, urls):
        if protocol == "grpc":
            client = tritonclient.grpc.InferenceServerClient(urls.grpc_url, channel_args=_AT_ONCE)
        elif protocol == "http":
            client = tritonclient.http.InferenceServerClient(urls.http_url, network_timeout=TIMEOUT_S)
        elif protocol == "stream":
            inner = tritonclient.grpc.InferenceServerClient(urls.grpc_url, channel_args=_AT_ONCE)
            self.closing.callback(inner.close)
            client = Stream(inner)
        else:
            return self.loop.run_until_complete(self._async_client(protocol, urls))
        self.closing.callback(client.close)
        return client

    async def _async_client(self, protocol: str, urls):
        if protocol == "grpc.aio":
            client = tritonclient.grpc.aio.InferenceServerClient(urls.grpc_url, channel_args=_AT_ONCE)
        else:
            client = tritonclient.http.aio.InferenceServerClient(urls.http_url)
        self.closing.callback(lambda: self.loop.run_until_complete(client.close()))
        return client

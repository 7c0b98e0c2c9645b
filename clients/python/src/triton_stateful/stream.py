"""Several sequences over one gRPC stream, whose requests needn't wait for answers."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from types import TracebackType
from typing import Any

import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from triton_stateful.errors import StatefulError, Unavailable, leaves_server, of_server
from triton_stateful.messages import SEQUENCE_HEADER, Describe, Outputs, Request
from triton_stateful.model import Model
from triton_stateful.transports import Grpc, arguments, grpc_outputs, refuse_decoupled


class _Answer(Future[Outputs]):
    """Calls a function before anybody can see that the request has failed; a callback of a Future may come later."""

    def __init__(self, if_it_fails: Callable[[], None]) -> None:
        super().__init__()
        self._if_it_fails = if_it_fails
        self.set_running_or_notify_cancel()

    def set_exception(self, exception: BaseException | None) -> None:
        self._if_it_fails()
        super().set_exception(exception)


class Stream:
    """A gRPC stream, to be given to `Sequence` in place of a client.

    client: of tritonclient.grpc, with no stream of its own; or an address (`host:port`). A client has one stream.
    headers: of the stream. A proxy sends a stream to one server as a whole, chosen by `sequence-id`. By default, that is a
        random text, so a new stream goes to the server of the last one if that lives.

        with Stream("localhost:8001") as stream, Sequence(stream, "model") as sequence:
            futures = [sequence.send(chunk) for chunk in chunks]
            answers = [future.result() for future in futures]

    The server answers in the order of the requests, whatever their sequences are. May be used by several threads. If
    the stream breaks, every request that waits fails with `Unavailable`, and the next one opens a new stream.
    """

    sends_twice = False

    def __init__(
        self, client: str | tritonclient.grpc.InferenceServerClient, *, headers: Mapping[str, str] | None = None
    ) -> None:
        self._owns_client = isinstance(client, str)
        self.client: Any = tritonclient.grpc.InferenceServerClient(client) if self._owns_client else client
        self._unary = Grpc(self.client)
        self._lock = threading.Condition()
        # Held by who sends. tritonclient's thread never takes it, so its end can be waited for.
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: deque[tuple[str, Future[Outputs]]] = deque()
        self._connection: object | None = None  # None: no stream is open
        self._headers = {SEQUENCE_HEADER: secrets.token_hex(8), **(headers or {})}
        # The server wants to be left: the next request waits for the answers to those before it, and opens a new stream.
        self._leaves = False

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the stream after the answers to all requests have come."""
        self.client.stop_stream()
        with self._lock:
            self._connection = None
            waiting = self._take_all()
        _fail(waiting, Unavailable("the stream was closed before the answer"))
        if self._owns_client:
            self.client.close()

    # ---- what a sequence uses

    def submit(self, request: Request, if_it_fails: Callable[[], None] = lambda: None) -> Future[Outputs]:
        """Sends a request. The answer comes in the future, or StatefulError does, after `if_it_fails` was called."""
        if request.decoupled:
            refuse_decoupled(request, "a shared Stream")
        future = _Answer(if_it_fails)
        more = arguments(tritonclient.grpc, request)
        with self._sending:
            while True:
                with self._lock:
                    self._lock.wait_for(lambda: not self._leaves or not self._waiting)
                    if self._leaves:
                        self._connection = None
                    is_open = self._connection is not None
                if not is_open:
                    self._open()
                with self._lock:
                    if self._connection is None:
                        continue
                    number = str(next(self._numbers))
                    try:
                        self.client.async_stream_infer(**more, request_id=number)
                    except InferenceServerException:
                        # The stream has broken, and its last callback is on its way.
                        broken = self._connection
                        self._lock.wait_for(lambda: self._connection is not broken)
                        continue
                    self._waiting.append((number, future))
                    return future

    def stream(self, request: Request) -> Generator[Outputs, None, None]:
        refuse_decoupled(request, "a shared Stream")
        yield from ()

    def infer(self, request: Request) -> Outputs:
        future = self.submit(request)
        try:
            return future.result(request.timeout)
        except FutureTimeout as error:
            raise Unavailable(f"no answer within {request.timeout:g} s") from error

    def describe(self, asked: Describe) -> Model:
        return self._unary.describe(asked)

    # ---- the stream

    def _open(self) -> None:
        self.client.stop_stream(cancel_requests=True)
        connection = object()
        with self._lock:
            self._connection, self._leaves = connection, False
        try:
            self.client.start_stream(
                lambda result, error: self._arrive(connection, result, error), headers=dict(self._headers)
            )
        except BaseException:
            with self._lock:
                self._connection = None
            raise

    def _arrive(self, connection: object, result: Any, error: Any) -> None:
        """tritonclient's thread calls it for each answer, and with a status if the stream has broken."""
        with self._lock:
            if connection is not self._connection:
                return
            if error is not None and error.status() is not None:
                self._connection = None
                self._lock.notify_all()
                failed = [future for _, future in self._take_all()]
                number = None
            else:
                number, first = self._waiting.popleft()
                failed = [first]
                if error is not None and leaves_server(error):
                    self._leaves = True
                self._lock.notify_all()
        if error is not None:
            for future in failed:
                made = of_server(error, of_stream=True)
                made.__cause__ = error
                future.set_exception(made)
        elif result.get_response().id == number:
            failed[0].set_result(grpc_outputs(result))
        else:
            came = result.get_response().id
            failed[0].set_exception(StatefulError(f"the answer to request {came} came in place of {number}'s"))

    def _take_all(self) -> list[tuple[str, Future[Outputs]]]:
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting


def _fail(waiting: list[tuple[str, Future[Outputs]]], error: StatefulError) -> None:
    for _, future in waiting:
        future.set_exception(error)

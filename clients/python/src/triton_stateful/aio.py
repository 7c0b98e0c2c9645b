"""A sequence for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from types import TracebackType
from typing import Any, Union

import tritonclient.grpc.aio
import tritonclient.http.aio

from triton_stateful.errors import StatefulError
from triton_stateful.flow import Flow
from triton_stateful.messages import (
    Array,
    Describe,
    Doing,
    Inference,
    Info,
    Origin,
    Outputs,
    Pause,
    Request,
    Result,
    SequenceId,
)
from triton_stateful.retry import Retry
from triton_stateful.transports import of_async_client

Client = Union[str, tritonclient.grpc.aio.InferenceServerClient, tritonclient.http.aio.InferenceServerClient]


class AsyncSequence:
    """`Sequence` for asyncio: the same methods, to be awaited, with the same arguments and errors.

        async with AsyncSequence("localhost:8001", "silero_vad") as sequence:
            print((await sequence.step(chunk))["output"])

    client: of tritonclient.grpc.aio or tritonclient.http.aio, or an address: `host:port` (gRPC) or `http://host:port`.

    Many sequences may share a client. A sequence has one call at a time.
    """

    def __init__(
        self,
        client: Client,
        model: str,
        sequence_id: SequenceId | None = None,
        *,
        version: str = "",
        states: Mapping[str, Array] | None = None,
        snapshot: bytes | None = None,
        clone_of: SequenceId | None = None,
        resume: bool = False,
        retry: Retry | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._flow = Flow(model, version, sequence_id, Origin(states or {}, snapshot, clone_of, resume), retry, headers)
        self._owns_client = isinstance(client, str)
        self._transport = of_async_client(client)
        self._flow.sends_twice = self._transport.sends_twice

    async def __aenter__(self) -> AsyncSequence:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._do(self._flow.leave(failed=error is not None))
        finally:
            await self.close()

    async def close(self) -> None:
        """Closes the connection if the sequence was given an address. The sequence goes on."""
        if self._owns_client:
            await self._transport.close()

    @property
    def id(self) -> SequenceId:
        """The sequence's id."""
        return self._flow.id

    @property
    def steps(self) -> int:
        """As `Sequence.steps`."""
        return self._flow.steps

    async def step(
        self,
        inputs: Mapping[str, Array] | Array,
        *,
        commit: bool = True,
        end: bool = False,
        outputs: list[str] | None = None,
        max_steps: int | None = None,
        timeout: float | None = None,
    ) -> Outputs:
        """As `Sequence.step`. If it is cancelled, the step may have run: `info` tells."""
        return await self._do(self._flow.step(Inference(inputs, commit, end, outputs, max_steps, timeout)))

    def stream(
        self,
        inputs: Mapping[str, Array] | Array,
        *,
        commit: bool = True,
        end: bool = False,
        outputs: list[str] | None = None,
        max_steps: int | None = None,
    ) -> AsyncGenerator[Outputs, None]:
        """As `Sequence.stream`, for `async for`. Any number of sequences of a client may stream at a time.

        Errors of the inputs are raised when the first answer is asked for. Leaving the loop doesn't close it at once: call
        `aclose`, or use `contextlib.aclosing`.
        """
        return self._answers(self._flow.stream(Inference(inputs, commit, end, outputs, max_steps)))

    async def _answers(self, doing: Doing[Callable[[], Request]]) -> AsyncGenerator[Outputs, None]:
        build = await self._do(doing)
        await self._do(self._flow.begin())
        request = build()
        with self._flow.streaming(request) as note:
            answers = self._transport.stream(request)
            try:
                async for answer in answers:
                    note(answer)
                    yield answer
            finally:
                await answers.aclose()

    async def end(self) -> None:
        """As `Sequence.end`."""
        await self._do(self._flow.end())

    async def state(self, *names: str) -> Outputs:
        """As `Sequence.state`."""
        return await self._do(self._flow.state(names))

    async def set_state(self, values: Mapping[str, Array] | None = None, **more: Array) -> None:
        """As `Sequence.set_state`."""
        await self._do(self._flow.set_state({**(values or {}), **more}))

    async def reset(self, *names: str) -> None:
        """As `Sequence.reset`."""
        await self._do(self._flow.reset(names))

    async def info(self) -> Info:
        """As `Sequence.info`."""
        return await self._do(self._flow.info())

    async def clone(self, sequence_id: SequenceId | None = None) -> AsyncSequence:
        """As `Sequence.clone`."""
        if not self._flow.started:
            await self.info()
        copy = AsyncSequence.__new__(AsyncSequence)
        copy._owns_client, copy._transport = False, self._transport
        copy._flow = self._flow.cloned(sequence_id)
        await copy.info()
        return copy

    async def snapshot(self) -> bytes:
        """As `Sequence.snapshot`."""
        return await self._do(self._flow.snapshot())

    async def restore(self, snapshot: bytes) -> None:
        """As `Sequence.restore`."""
        await self._do(self._flow.restore(snapshot))

    async def _do(self, doing: Doing[Result]) -> Result:
        """Does what the flow asks for."""
        result: Any = None
        error: StatefulError | None = None
        while True:
            try:
                action = doing.send(result) if error is None else doing.throw(error)
            except StopIteration as done:
                value: Result = done.value
                return value
            result = error = None
            try:
                if isinstance(action, Request):
                    result = await self._transport.infer(action)
                elif isinstance(action, Describe):
                    result = await self._transport.describe(action)
                elif isinstance(action, Pause):
                    await asyncio.sleep(action.seconds)
            except StatefulError as failed:
                error = failed

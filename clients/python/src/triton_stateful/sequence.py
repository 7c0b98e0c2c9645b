"""A sequence for code that waits for its answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import closing
from types import TracebackType
from typing import Any, Union

import tritonclient.grpc
import tritonclient.http

from triton_stateful.errors import StatefulError, StepConflict
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
from triton_stateful.stream import Stream
from triton_stateful.transports import of_client

Client = Union[str, Stream, tritonclient.grpc.InferenceServerClient, tritonclient.http.InferenceServerClient]


class Sequence:
    """A sequence of a stateful model.

        with Sequence("localhost:8001", "silero_vad") as sequence:
            for chunk in chunks:                                  # float32, [1, any]
                print(sequence.step(chunk)["output"])

    client: of tritonclient.grpc or tritonclient.http, or a `Stream`, or an address: `host:port` (gRPC) or
        `http://host:port`. A connection to an address is closed with the sequence.
    model, version: the model's name and version (default: the server chooses one).
    sequence_id: a number from 1 to 2**63 - 1, or a text; by default a random number, as a text if the model's
        control input CORRID is of TYPE_STRING.
    states: values that states begin with, by name; the others have their initial value.
    snapshot: bytes of `snapshot` that the sequence goes on from, of this server or another one.
    clone_of: the id of a live sequence whose state it begins with.
    resume: takes up the parked sequence with this id.
    retry: how often a request is sent again; by default it isn't.
    headers: of each request. By default, `sequence-id` has the id, by which a proxy chooses the server of a sequence. A `Stream`
        has its own.

    The sequence begins on the server with the first request. Leaving the `with` block ends it; if the model has no
    `state_api`, give `end=True` to the last step instead. Without `with`, call `end` and `close`.

    Arrays have Triton's shapes: a batch dimension of 1 in front if the model has `max_batch_size`. All methods raise
    `StatefulError`; the README lists its kinds. A sequence is for one thread at a time.
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
        self._transport = client if isinstance(client, Stream) else of_client(client)
        self._flow.sends_twice = self._transport.sends_twice

    def __enter__(self) -> Sequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._do(self._flow.leave(failed=error is not None))
        finally:
            self.close()

    def close(self) -> None:
        """Closes the connection if the sequence was given an address. The sequence goes on."""
        if self._owns_client:
            self._transport.close()

    @property
    def id(self) -> SequenceId:
        """The sequence's id."""
        return self._flow.id

    @property
    def steps(self) -> int:
        """How many steps (inferences that changed the state) the sequence has made, as this client has counted."""
        return self._flow.steps

    def step(
        self,
        inputs: Mapping[str, Array] | Array,
        *,
        commit: bool = True,
        end: bool = False,
        outputs: list[str] | None = None,
        max_steps: int | None = None,
        timeout: float | None = None,
    ) -> Outputs:
        """Runs the model on inputs by name, or on the only input. Returns its outputs by name.

        commit: if False, the state stays as it was.
        end: the sequence ends with this step.
        outputs: the names of the outputs to return (default: all).
        max_steps: the most steps that the request makes, if the model has `repeat`.
        timeout: seconds to wait for the answer, 1 or more: Triton 24.10 can crash on shorter ones. Only for gRPC;
            with HTTP, the client has one.

        With `input_windows`, an input may have any number of elements, even none. Then `parameters` of the answer has the
        number of steps and the number of elements that are left over.

        TypeError if an input has another dtype than the model takes; ValueError for a name that is no input, or for another
        number of dimensions.
        AnswerLost if the step has run, and its answer was lost.
        """
        return self._do(self._flow.step(Inference(inputs, commit, end, outputs, max_steps, timeout)))

    def send(
        self,
        inputs: Mapping[str, Array] | Array,
        *,
        commit: bool = True,
        end: bool = False,
        outputs: list[str] | None = None,
        max_steps: int | None = None,
    ) -> Future[Outputs]:
        """As `step`, without waiting: the answer comes in the future. Only over a `Stream`.

        If a step fails and the model has `state_api`, the later ones fail with StepConflict: the server refuses those that
        are already sent, and no more are sent until `info`, `step`, `state`, `set_state`, `reset`, `snapshot` or `restore`
        has asked the server for the number of steps. No step is sent again, whatever `retry` is.
        """
        stream = self._transport
        if not isinstance(stream, Stream):
            raise TypeError("send needs a Stream in place of a client")
        try:
            request = self._do(self._flow.send(Inference(inputs, commit, end, outputs, max_steps)))
        except StepConflict as error:
            # The caller may be making a list of futures, and needs those that it has.
            refused: Future[Outputs] = Future()
            refused.set_exception(error)
            return refused
        try:
            return stream.submit(request, lambda: self._flow.note_failure(request))
        except BaseException:
            self._flow.note_failure(request)
            raise

    def stream(
        self,
        inputs: Mapping[str, Array] | Array,
        *,
        commit: bool = True,
        end: bool = False,
        outputs: list[str] | None = None,
        max_steps: int | None = None,
    ) -> Generator[Outputs, None, None]:
        """Yields the outputs of each step of a request as soon as it is made. For models with `decoupled: true`, over gRPC.

            for outputs in sequence.stream(samples):
                print(outputs["output"])

        The request is sent when the loop asks for the first answer, and never again, whatever `retry` is. To cancel it, leave
        the loop or close the iterator: the sequence then has the state from before the request, unless all steps had been
        made. If a step fails, the error follows the answers to the steps before it, and the sequence has the state from
        before the request.

        tritonserver 2.51 (24.10) can crash if a stream is cancelled while answers are on their way.

        A client of tritonclient.grpc has one stream at a time, so give each sequence that streams a client of its own, or the
        address. Clients of one address share a connection.
        """
        return self._answers(self._do(self._flow.stream(Inference(inputs, commit, end, outputs, max_steps))))

    def _answers(self, build: Callable[[], Request]) -> Generator[Outputs, None, None]:
        self._do(self._flow.begin())
        request = build()
        with self._flow.streaming(request) as note, closing(self._transport.stream(request)) as answers:
            for answer in answers:
                note(answer)
                yield answer

    def end(self) -> None:
        """Ends the sequence without an inference. Does nothing if it is over already, or has not begun."""
        self._do(self._flow.end())

    def state(self, *names: str) -> Outputs:
        """The values of these states, or of all. Strings are an object array of bytes."""
        return self._do(self._flow.state(names))

    def set_state(self, values: Mapping[str, Array] | None = None, **more: Array) -> None:
        """Gives states new values, by name. The others keep theirs."""
        self._do(self._flow.set_state({**(values or {}), **more}))

    def reset(self, *names: str) -> None:
        """Gives these states their initial value, or all, which also forgets the contexts of inputs."""
        self._do(self._flow.reset(names))

    def info(self) -> Info:
        """The number of steps, and the states with their types and shapes. Corrects the client's count."""
        return self._do(self._flow.info())

    def clone(self, sequence_id: SequenceId | None = None) -> Sequence:
        """A new sequence that goes on from this one's state. It ends apart from this one.

        It uses the same connection, which stays open until this sequence is closed.
        """
        if not self._flow.started:
            self.info()
        copy = Sequence.__new__(Sequence)
        copy._owns_client, copy._transport = False, self._transport
        copy._flow = self._flow.cloned(sequence_id)
        copy.info()
        return copy

    def snapshot(self) -> bytes:
        """All that the sequence has: states, contexts, held inputs and the number of steps."""
        return self._do(self._flow.snapshot())

    def restore(self, snapshot: bytes) -> None:
        """Sets the sequence back to a snapshot. SnapshotInvalid if it is damaged or of another model."""
        self._do(self._flow.restore(snapshot))

    def _do(self, doing: Doing[Result]) -> Result:
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
                    result = self._transport.infer(action)
                elif isinstance(action, Describe):
                    result = self._transport.describe(action)
                elif isinstance(action, Pause):
                    time.sleep(action.seconds)
            except StatefulError as failed:
                error = failed

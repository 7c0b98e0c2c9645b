"""What a sequence does, without any input or output.

Each method of `Flow` is a generator. It yields what is to be done (a `Request`, a `Describe` or a `Pause`) and gets the
result back, or the error thrown in. `Sequence` does these things and waits, `AsyncSequence` awaits them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Callable
from urllib.parse import quote

from triton_stateful.errors import (
    AnswerLost,
    NoPlace,
    SequenceAlreadyExists,
    SequenceMissing,
    SequenceMoved,
    StateApiOff,
    StatefulError,
    StepConflict,
    StepsLost,
    Unavailable,
)
from triton_stateful.messages import (
    SEQUENCE_HEADER,
    Array,
    Count,
    Describe,
    Doing,
    Inference,
    Info,
    Origin,
    Outputs,
    Parameter,
    Pause,
    Request,
    SequenceId,
    StateInfo,
)
from triton_stateful.model import INFO, SNAPSHOT, STATE_PREFIX, Model
from triton_stateful.replay import Unsaved, count_of, resend
from triton_stateful.retry import Retry


def _random_id() -> int:
    return secrets.randbelow(2**63 - 1) + 1


class Flow:
    """The requests of one sequence."""

    def __init__(
        self,
        model: str,
        version: str,
        sequence_id: SequenceId | None,
        origin: Origin,
        retry: Retry | None,
        headers: Mapping[str, str] | None,
    ) -> None:
        if origin.resume and sequence_id is None:
            raise ValueError("resume takes up a parked sequence, so it needs its id")
        if sequence_id in (0, ""):
            raise ValueError(f"sequence id {sequence_id!r} is not possible: give another one, or none")
        self.model_name = model
        self.version = version
        # The client chooses the id, not the server: a START whose answer is lost can then be sent again.
        self.id: SequenceId = _random_id() if sequence_id is None else sequence_id
        self._chose_id = sequence_id is None
        # After ALREADY_EXISTS, only such an id is certainly that of our own START.
        self._owns_id = sequence_id is None or origin.resume
        self._origin = origin
        self.retry = retry
        self._headers = headers or {}
        self._unsaved = Unsaved(0 if retry is None else retry.keep_bytes)
        #: The transport itself may send a request twice, without telling.
        self.sends_twice = False
        self._model: Model | None = None
        self.started = False
        self.ended = False
        # A server had the sequence, but the START may have been cancelled before it ran.
        self._may_not_have_begun = False
        #: How far the sequence is, as far as answers or errors have come.
        self.count = Count(0, 0)
        # A step, a START or an END was sent, and neither its answer nor an error of the server has come: it may have run,
        # or may run later.
        self._is_open = False
        # `count` may be wrong: a step that was sent ahead has failed, or an answer is lost. Nothing is sent ahead until a
        # call that waits has asked the server.
        self._must_count = False

    @property
    def steps(self) -> int:
        return self.count.steps

    # ---- what a client can do

    def step(self, asked: Inference) -> Doing[Outputs]:
        yield from self.begin()
        build = yield from self.step_builder(asked)
        if self._is_decoupled():
            raise TypeError(f"model '{self.model_name}' answers each step by itself (decoupled): call stream, not step")
        return (yield from self._exchange(build))

    def end(self) -> Doing[None]:
        # A START whose answer is lost may have begun it.
        self.started = self.started or (self._is_open and self._owns_id)
        if self.ended or not self.started:
            self.ended = True
            return
        model = yield from self._described()
        self._need_state_api(model, "ending a sequence without an inference")
        # Core's sequence batcher frees a sequence only with sequence_end.
        try:
            yield from self._exchange(lambda: self._request({"delete": True}, end=True))
        except (SequenceMissing, AnswerLost):
            self.ended = True

    def leave(self, failed: bool) -> Doing[None]:
        """Ends the sequence if that is possible; after an error, without another one."""
        try:
            model = self._model
            if model is not None and model.has_state_api:
                yield from self.end()
        except StatefulError:
            if not failed:
                raise

    def state(self, names: tuple[str, ...]) -> Doing[Outputs]:
        outputs = yield from self._call({"get_state": ",".join(names) if names else True})
        return Outputs({name[len(STATE_PREFIX) :]: outputs[name] for name in outputs if name.startswith(STATE_PREFIX)})

    def set_state(self, values: Mapping[str, Array]) -> Doing[None]:
        model = yield from self._described()
        self._need_state_api(model, "set_state")
        if not values:
            return
        tensors = model.encode_states(values)
        given = {tensor.name for tensor in tensors}

        def build() -> Request:
            made = self._request(self._checks())
            inputs = tuple(t for t in made.inputs if t.name not in given) + tensors
            return replace(made, inputs=inputs, sets=True)

        yield from self.begin()
        yield from self._exchange(build)

    def reset(self, names: tuple[str, ...]) -> Doing[None]:
        if not self.started:
            yield from self.info()
        value: Parameter = ",".join(names) if names else True
        try:
            yield from self._call({"reset_state": value}, checked=True)
        except Unavailable:
            # Nothing may be left over now.
            self._must_count = not names or self._must_count
            raise
        if not names:
            self.count = Count(self.count.steps, 0)

    def info(self) -> Doing[Info]:
        yield from self._look_for_start()
        return (yield from self._info())

    def _info(self) -> Doing[Info]:
        model = yield from self._described()
        self._need_state_api(model, "info")
        failed = 0
        while True:
            outputs = yield from self._exchange(lambda: self._request({"query_state": True}))
            read, count = json.loads(outputs[INFO].item()), count_of(outputs)
            is_lower = count.steps < self.steps and self._unsaved.explains(count)
            if self.retry is None or not is_lower or failed >= self.retry.attempts:
                break
            failed += 1
            if not (yield from self._resend(failed)):
                break
        if count != self.count:
            self.count, self._is_open = count, False
        self._must_count = False
        states = tuple(
            StateInfo(of["name"], of["datatype"], tuple(of["shape"]), int(of["byte_size"])) for of in read["states"]
        )
        return Info(self.id, count.steps, states, count.left)

    def snapshot(self) -> Doing[bytes]:
        outputs = yield from self._call({"snapshot": True})
        return bytes(outputs[SNAPSHOT].item())

    def restore(self, snapshot: bytes) -> Doing[None]:
        model = yield from self._described()
        self._need_state_api(model, "restore")
        tensors = model.encode_snapshot(snapshot)

        def build() -> Request:
            return replace(self._request({"query_state": True}), inputs=tensors)

        yield from self._begin_going_on()
        outputs = yield from self._exchange(build)
        self.count = count_of(outputs)
        self._must_count = False
        self._unsaved.clear()

    def send(self, asked: Inference) -> Doing[Request]:
        """The request of a step that is sent without waiting for the answers to those before. Counts it at once.

        It never counts anew: in the middle of the caller's list, a later step would run in the place of a failed one.
        """
        yield from self._begin_going_on()
        model = yield from self._described()
        build = yield from self.step_builder(asked)
        request = build()
        if self._must_count:
            raise StepConflict(
                f"a step of sequence {self.id} that was sent ahead has failed, so this one was not sent: info() returns the "
                "number of steps that the sequence has made; continue with the next one"
            )
        if request.counts and request.then is None and model.has_state_api:
            raise ValueError(
                f"the client can't tell how many steps a request to model '{model.name}' makes, because it has 'repeat', or "
                "windows with a context ':whole' or more than one open dimension: call step, not send"
            )
        self.started, self.ended = True, asked.end
        if request.counts and request.then is not None:
            self.count = request.then
        return request

    def stream(self, asked: Inference) -> Doing[Callable[[], Request]]:
        """Makes the request of `streaming`, which is sent later."""
        model = yield from self._described()
        if not model.is_decoupled:
            raise TypeError(
                f"model '{model.name}' has one answer for a request: call step, or serve the model with "
                "model_transaction_policy { decoupled: true }"
            )
        return (yield from self.step_builder(asked))

    @contextmanager
    def streaming(self, request: Request) -> Generator[Callable[[Outputs], None], None, None]:
        """Counts the steps of a request with an answer for each step. The caller passes each answer to the function.

        If the caller leaves before the last answer, the request is cancelled, but may have run. So the next call that waits
        asks the server how far the sequence is.
        """
        was_open, self._is_open = self._is_open, True
        parameters: dict[str, Parameter] = {}
        try:
            yield lambda answer: parameters.update(answer.parameters)
        except Unavailable:
            # As after a step: if the caller sends the request again, it runs, or is refused because this one has run.
            raise
        except StatefulError as error:
            lost = self._refused(request, was_open, error)
            if lost is not None:
                raise lost from error
            raise
        except BaseException:
            self._lose_count()
            raise
        self._answered(request, was_open, parameters)

    def _lose_count(self) -> None:
        # Without the State API, the server neither checks nor tells the number of steps.
        self._must_count = self._model is not None and self._model.has_state_api

    def note_failure(self, request: Request) -> None:
        """Notes that a step that was sent ahead has failed. May be called by any thread."""
        if request.end:
            self.ended = False
        self._lose_count()

    def cloned(self, sequence_id: SequenceId | None) -> Flow:
        """A sequence that goes on from this one's state, when it begins."""
        copy = Flow(
            self.model_name, self.version, sequence_id, Origin({}, clone_of=self.id), self.retry, self._all_headers()
        )
        copy.sends_twice = self.sends_twice
        return copy

    # ---- the parts

    def begin(self) -> Doing[None]:
        """What comes before a call that waits: the sequence begins if it goes on from another state, and its steps are
        counted."""
        yield from self._begin_going_on()
        yield from self._look_for_start()
        if self._must_count:
            yield from self._info()

    def _look_for_start(self) -> Doing[None]:
        """After a START whose answers the caller did not wait for: the server says whether it has begun the sequence."""
        if self.started or not self._must_count:
            return
        self.started = True
        try:
            _ = yield from self._info()
        except StatefulError as error:
            self.started = False
            if not isinstance(error, SequenceMissing):
                raise
            self._must_count = self._is_open = False

    def _begin_going_on(self) -> Doing[None]:
        """Begins a sequence that goes on from another state, in a request of its own: the answer has its steps."""
        if not self.started and self._origin.goes_on:
            yield from self.info()

    def step_builder(self, asked: Inference) -> Doing[Callable[[], Request]]:
        """Makes the request of a step, each time anew because START depends on what has come meanwhile."""
        model = yield from self._described()
        tensors = model.encode(asked.inputs)
        if not asked.commit:
            self._need_state_api(model, "commit=False")
        if asked.max_steps is not None and not model.is_repeated:
            raise ValueError(f"model '{model.name}' has no 'repeat', so max_steps has no effect: leave it out")
        wanted = None if asked.outputs is None else tuple(asked.outputs)

        def build() -> Request:
            parameters = self._step_checks(model) if model.has_state_api else {}
            if not asked.commit:
                parameters["commit"] = False
            if asked.max_steps is not None:
                parameters["max_steps"] = asked.max_steps
            made = self._request(parameters, end=asked.end)
            inputs, then = made.inputs + tensors, model.after(self.count, tensors)
            return replace(made, inputs=inputs, outputs=wanted, timeout=asked.timeout, counts=asked.commit, then=then)

        return build

    def _described(self) -> Doing[Model]:
        if self._model is None:
            model = yield from self._describe()
            if self.retry is not None:
                self._need_state_api(model, "a Retry")
            if self._origin.states or self._origin.goes_on:
                self._need_state_api(model, "a sequence that begins with a given state")
            if model.takes_text_ids and self._chose_id:
                self.id = str(self.id)
            self._model = model
        return self._model

    def _describe(self) -> Doing[Model]:
        """A server that stops says that the model is not there."""
        failed = 0
        while True:
            try:
                model: Model = yield Describe(self.model_name, self.version)
                return model
            except Unavailable:
                failed += 1
                if self.retry is None or failed >= self.retry.attempts:
                    raise
                yield Pause(self.retry.pause(failed))

    def _is_decoupled(self) -> bool:
        return self._model is not None and self._model.is_decoupled

    def _is_scheduled_by_core(self) -> bool:
        return self._model is not None and self._model.is_scheduled_by_core

    def _need_state_api(self, model: Model, what: str) -> None:
        if not model.has_state_api:
            raise StateApiOff(f"{what} needs parameter 'state_api' in the configuration of model '{model.name}'")

    def _checks(self) -> dict[str, Parameter]:
        """Has the server refuse the request if the sequence has made another number of steps."""
        return {"sequence_step": self.count.steps} if self.started else {}

    def _step_checks(self, model: Model) -> dict[str, Parameter]:
        """The same for an inference. With windows, it may make no step and change only what is left over."""
        checks = self._checks()
        if not (self.started or self._origin.goes_on or model.is_scheduled_by_core):
            # The server keeps the answer only for a request that says this.
            checks = {"sequence_step": 0}
        return {**checks, "sequence_left": self.count.left} if checks and model.is_cut else checks

    def _call(self, parameters: dict[str, Parameter], checked: bool = False) -> Doing[Outputs]:
        """A request without an inference. checked: it changes the state."""
        model = yield from self._described()
        self._need_state_api(model, next(iter(parameters)))
        yield from self.begin()

        def build() -> Request:
            # A server that has lost steps is noticed here, too.
            checks = self._checks() if checked or self._unsaved else {}
            return replace(self._request({**parameters, **checks}), sets=checked)

        return (yield from self._exchange(build))

    def _request(self, parameters: Mapping[str, Parameter], end: bool = False) -> Request:
        """A request with START and what the sequence begins with, if it has not begun."""
        if self.ended:
            raise SequenceMissing(f"sequence {self.id} has ended")
        made = Request(self.model_name, self.version, self.id, end=end, parameters=dict(parameters))
        made = replace(made, decoupled=self._is_decoupled(), headers=self._all_headers())
        if self.started:
            return made
        assert self._model is not None
        inputs = self._model.encode_states(self._origin.states)
        begins: dict[str, Parameter] = {}
        if self._origin.snapshot is not None:
            inputs += self._model.encode_snapshot(self._origin.snapshot)
        if self._origin.clone_of is not None:
            begins["clone_of"] = self._origin.clone_of
        if self._origin.resume:
            begins["resume"] = True
        return replace(made, start=True, inputs=inputs, parameters={**parameters, **begins})

    def _all_headers(self) -> dict[str, str]:
        # A clone has to be where the other sequence is.
        of = self.id if self._origin.clone_of is None else self._origin.clone_of
        return {SEQUENCE_HEADER: quote(str(of)), **self._headers}

    def _exchange(self, build: Callable[[], Request]) -> Doing[Outputs]:
        """Sends a request until it is answered, refused, or has failed too often."""
        failed = 0
        while True:
            request = build()
            was_open = self._is_open
            self._is_open = was_open or request.counts or request.start or request.end
            try:
                outputs: Outputs = yield request
            except Unavailable as error:
                if isinstance(error, (NoPlace, SequenceMoved)):
                    self._is_open = was_open
                failed += 1
                if self.retry is None or failed >= self.retry.attempts:
                    raise
                if request.start and self._chose_id and self._is_scheduled_by_core():
                    # Two STARTs of one id that core has at the same time may end each other. Core forgets the first.
                    self.id = str(_random_id()) if isinstance(self.id, str) else _random_id()
                yield Pause(self.retry.pause(failed))
            except StatefulError as error:
                lost = self._refused(request, was_open, error)
                if lost is not None:
                    raise lost from error
                if not (request.start and self.started):
                    failed += 1
                    if not (self._begins_again(error, failed) or (yield from self._send_unsaved(error, failed))):
                        raise
                # The sequence has begun, has to begin, or is where it was: the request follows once more.
            else:
                self._answered(request, was_open, outputs.parameters)
                return outputs

    def _refused(self, request: Request, was_open: bool, error: StatefulError) -> AnswerLost | None:
        """Notes that the server has refused a request. AnswerLost if that is because an earlier copy of it has run."""
        self._is_open = was_open
        may_have_run = was_open or (self.sends_twice and (request.counts or request.start))
        if isinstance(error, SequenceAlreadyExists) and request.start and may_have_run and self._owns_id:
            self.started = True
            # A request that says its step follows without START. The server answers it, or refuses it for its step.
            is_lost = request.counts and (request.end or "sequence_step" not in request.parameters)
            self._may_not_have_begun = not is_lost
            return self._answer_lost(request, ended=request.end) if is_lost else None
        if isinstance(error, StepConflict) and may_have_run and _has_run(request, error):
            return self._answer_lost(request, ended=False)
        if isinstance(error, SequenceMissing) and request.end and was_open:
            return self._answer_lost(request, ended=True)
        return None

    def _begins_again(self, error: StatefulError, failed: int) -> bool:
        """Whether START has to be sent again, because it was cancelled before it ran."""
        if not (self._may_not_have_begun and isinstance(error, SequenceMissing)):
            return False
        self._may_not_have_begun = self.started = False
        return self.retry is not None and failed < self.retry.attempts

    def _answered(self, request: Request, was_open: bool, parameters: Mapping[str, Parameter]) -> None:
        self._is_open = was_open and not request.counts
        self.started, self._may_not_have_begun = True, False
        self.ended = request.end
        before = self.count
        self._note(request, parameters)
        if self.retry is not None and (request.counts or request.start or request.sets or request.end):
            self._unsaved.note(request, parameters, before, self.count)
        else:
            self._unsaved.hear(parameters)

    def _note(self, request: Request, parameters: Mapping[str, Parameter]) -> None:
        """Counts a request that has been answered."""
        if not request.counts:
            return
        if "steps" in parameters:
            self.count = Count(self.count.steps + int(parameters["steps"]), int(parameters.get("left", 0)))
        else:
            self._count_unsaid(request)

    def _count_unsaid(self, request: Request) -> None:
        """Counts a request whose answer doesn't say how many steps it has made."""
        if request.then is not None:
            self.count = request.then
        else:
            self._lose_count()

    def _send_unsaved(self, error: StatefulError, failed: int) -> Doing[bool]:
        """After a refusal: if the server has made fewer steps, sends the missing ones. Whether the request can follow."""
        if self.retry is None or failed >= self.retry.attempts:
            return False
        if isinstance(error, StepConflict):
            made = self.steps if error.made is None else error.made
            is_lower = self._unsaved.is_stale(made) or (bool(self._unsaved) and made <= self.steps)
        else:
            is_lower = isinstance(error, SequenceMissing) and bool(self._unsaved)
        if not is_lower:
            return False
        is_there = yield from self._resend(failed)
        # The server that has made fewer steps has let the sequence go, and it is over elsewhere. The request is told so.
        return is_there or isinstance(error, StepConflict)

    def _resend(self, failed: int) -> Doing[bool]:
        assert self.retry is not None
        try:
            return (
                yield from resend(self._unsaved, self._request({"query_state": True}), self.count, self.retry, failed)
            )
        except StepsLost as error:
            self.count = Count(error.made or 0, error.left or 0)
            self._unsaved.clear()
            raise

    def _answer_lost(self, request: Request, ended: bool) -> AnswerLost:
        """The sequence continues after the step whose answer is lost."""
        before, self._is_open, self.ended = self.count, False, ended
        self._count_unsaid(request)
        if self._must_count or ended:
            self._unsaved.clear()
        else:
            self._unsaved.note_unsaid(request, before, self.count)
        if ended:
            return AnswerLost(
                f"sequence {self.id} is over, and the answer to its last step ({before.steps}) was lost: the step has run, unless "
                "the server has forgotten the sequence before"
            )
        several = self._model is not None and (self._model.is_cut or self._model.is_repeated)
        which = "the request after step" if several else "step"
        return AnswerLost(f"{which} {before.steps} of sequence {self.id} has run once, but its answer was lost")


def _has_run(request: Request, error: StepConflict) -> bool:
    """Whether the sequence is where this request must have brought it. The server doesn't always say both numbers."""
    if error.made is None:
        return True
    if request.then is None:
        # A server that died may have lost steps.
        return error.made >= int(request.parameters.get("sequence_step", 0))
    return error.made == request.then.steps and error.left in (None, request.then.left)

"""The requests of a sequence that its server has not saved yet. If the server dies, another one has made fewer steps, and
gets them again."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from triton_stateful.errors import SequenceAlreadyExists, SequenceMissing, StepConflict, StepsLost, Unavailable
from triton_stateful.messages import Count, Doing, Outputs, Parameter, Pause, Request
from triton_stateful.model import INFO
from triton_stateful.retry import Retry

#: A parameter of each answer of a model with a store.
_SAVED = "stateful_steps_saved"


class _Kept(NamedTuple):
    request: Request
    before: Count
    after: Count
    size: int

    def is_in(self, saved: int) -> bool:
        """Whether a state that was saved after so many steps has it. That may be older than a request that made no step."""
        whole_steps = self.after.steps > self.before.steps and self.after.left == 0
        return self.after.steps < saved or (whole_steps and self.after.steps == saved)


class Unsaved:
    """Keeps as many bytes of inputs as `limit` says, and forgets the oldest requests above that."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: deque[_Kept] = deque()
        self._size = 0
        self._saved = 0

    def __bool__(self) -> bool:
        return bool(self._kept)

    def note(self, request: Request, parameters: Mapping[str, Parameter], before: Count, after: Count) -> None:
        """Keeps a request that has changed the sequence, unless the answer says that it is saved. Forgets those that are."""
        if request.end or _SAVED not in parameters:
            self.clear()
        else:
            self._note_saved(parameters)
            self.note_unsaid(request, before, after)

    def note_unsaid(self, request: Request, before: Count, after: Count) -> None:
        """The same for a request whose answer is lost."""
        if "clone_of" in request.parameters or "resume" in request.parameters:
            # Sent again, it would begin with another state.
            self.clear()
        else:
            size = sum(tensor.value.nbytes for tensor in request.inputs)
            self._kept.append(_Kept(request, before, after, size))
            self._size += size
        self._forget()

    def hear(self, parameters: Mapping[str, Parameter]) -> None:
        """Of the answer to a request that has changed nothing."""
        if _SAVED in parameters:
            self._note_saved(parameters)
            self._forget()

    def _note_saved(self, parameters: Mapping[str, Parameter]) -> None:
        # A server that was paused may not know that another one has saved more. By what it says, it would not be stale.
        self._saved = max(self._saved, int(parameters[_SAVED]))

    def _forget(self) -> None:
        while self._kept and (self._kept[0].is_in(self._saved) or self._size > self._limit):
            self._size -= self._kept.popleft().size

    def clear(self) -> None:
        self._kept.clear()
        self._size, self._saved = 0, 0

    def is_stale(self, made: int) -> bool:
        """Whether a server has made fewer steps than are saved. It was paused, and doesn't know yet that another server has
        continued the sequence."""
        return made < self._saved

    def explains(self, count: Count) -> bool:
        """Whether a server that has made only so many steps can be set right."""
        return self.is_stale(count.steps) or self.since(count) is not None

    def since(self, count: Count | None) -> list[Request] | None:
        """The requests after the first so many steps; after None, from START on. None if some are not kept."""
        for at, kept in enumerate(self._kept):
            if kept.request.start if count is None else kept.before == count and not kept.request.start:
                return [later.request for later in list(self._kept)[at:]]
        return None


def resend(unsaved: Unsaved, query: Request, count: Count, retry: Retry, failed: int) -> Doing[bool]:
    """Sends the requests that a server has lost, which died before it had saved them. False if the sequence is not there.

    query: asks how far the sequence is. count: how far it has to be.
    """
    while True:
        try:
            here = yield from _ask(unsaved, query)
            lost = [] if here == count else unsaved.since(here)
            for request in lost or ():
                answer: Outputs = yield request
                unsaved.hear(answer.parameters)
        except (Unavailable, StepConflict, SequenceMissing, SequenceAlreadyExists):
            # A copy that came late may have run, or this server has died, too.
            failed += 1
            if failed >= retry.attempts:
                raise
        else:
            if lost is not None:
                return True
            if here is None:
                # Nothing of it was saved, or it has ended or expired: the caller's request is told so.
                return False
            if here.steps >= count.steps:
                # The request has run, or another client is there. The server tells when it comes again.
                return True
            failed += 1
            if failed >= retry.attempts or not unsaved.is_stale(here.steps):
                break
        yield Pause(retry.pause(failed))
    error = StepsLost(
        f"sequence {query.sequence_id} continues after step {here.steps} of {count.steps}, because a server died before it had "
        f"saved the later ones, and this client no longer has all of their inputs (keep_bytes is {retry.keep_bytes})"
    )
    error.made, error.left = here
    raise error


def _ask(unsaved: Unsaved, query: Request) -> Doing[Count | None]:
    """How far the sequence is on the server. None if it isn't there."""
    try:
        answer: Outputs = yield query
    except SequenceMissing:
        return None
    unsaved.hear(answer.parameters)
    return count_of(answer)


def count_of(outputs: Outputs) -> Count:
    """What `state_info` says."""
    info = json.loads(outputs[INFO].item())
    return Count(int(info["steps"]), int(info.get("left", 0)))

"""What can go wrong. The server's errors are told apart by the code word at the start of their text."""

from __future__ import annotations

import re

from tritonclient.utils import InferenceServerException


class StatefulError(Exception):
    """A request has failed. The exception of tritonclient or of the connection is its `__cause__`."""


class Unavailable(StatefulError):
    """The server could not be reached, or gave no answer, or has no room now. A `Retry` sends the request again.

    Whether the request has run is not known, except for `NoPlace`. After a step, call `step` again with the same inputs
    (it runs once at most), or ask with `info`.
    """


class NoPlace(Unavailable):
    """Every place for a sequence is taken, too many requests of the sequence wait, or the request has waited for too
    long. It has not run."""


class SequenceMoved(Unavailable):
    """Another server has continued the sequence. The request has made no step."""


class StoreFailed(Unavailable):
    """The store that keeps the sequence is down or refuses to write. The step is made or not."""


class StoreDamaged(StatefulError):
    """The store's record of the sequence is not a state of this model. Start the sequence again."""


class SequenceMissing(StatefulError):
    """The sequence is not live: it has ended, or was idle for too long, or its server ended before it had saved it."""


class SequenceAlreadyExists(StatefulError):
    """A new sequence has the id of one that is live. That one goes on."""


class SequenceNotParked(StatefulError):
    """There is no parked sequence to resume."""


class StepConflict(StatefulError):
    """The sequence has made another number of steps than this client has counted. The request has not run.

    Another client has used the sequence, or an earlier request that was sent ahead has failed. `info` counts anew.
    """

    #: How many steps the sequence has made; None if the server doesn't say.
    made: int | None = None
    #: How many elements of a window are left over, if that is what differs.
    left: int | None = None


class StepsLost(StepConflict):
    """A server died before it had saved the last steps, and this client no longer has all of their inputs.

    The sequence continues after `made` steps. If you have the inputs of the later ones, make these steps again.
    """


class AnswerLost(StatefulError):
    """The step has run once, but its answer is lost. The sequence can go on with the next step."""


class StateApiOff(StatefulError):
    """The model's configuration has no `state_api`."""


class StateParameter(StatefulError):
    """A request parameter has a value that it cannot have."""


class StateUnknown(StatefulError):
    """A name that is no state of the model."""


class StateConflict(StatefulError):
    """Things that cannot be asked for together, or not of this model."""


class StateNotListed(StatefulError):
    """A tensor of the State API is not listed in the model's configuration."""


class SnapshotInvalid(StatefulError):
    """A snapshot that is damaged, or of another model. The sequence is as it was."""


_BY_WORD: dict[str, type[StatefulError]] = {
    "MAX_QUEUED_REQUESTS_REACHED": NoPlace,
    "MAX_SEQUENCE_NUMBER_REACHED": NoPlace,
    "SEQUENCE_ALREADY_EXISTS": SequenceAlreadyExists,
    "SEQUENCE_MISSING": SequenceMissing,
    "SEQUENCE_MOVED": SequenceMoved,
    "SEQUENCE_NOT_PARKED": SequenceNotParked,
    "SEQUENCE_NOT_SAVED": SequenceMissing,
    "SEQUENCE_QUEUE_FULL": NoPlace,
    "SEQUENCE_QUEUE_TIMEOUT": NoPlace,
    "SEQUENCE_STEP_CONFLICT": StepConflict,
    "SNAPSHOT_INVALID": SnapshotInvalid,
    "STATE_API_OFF": StateApiOff,
    "STATE_CONFLICT": StateConflict,
    "STATE_NOT_LISTED": StateNotListed,
    "STATE_PARAMETER": StateParameter,
    "STATE_STORE_DAMAGED": StoreDamaged,
    "STATE_STORE_FAILED": StoreFailed,
    "STATE_UNKNOWN": StateUnknown,
}

#: What core's sequence batcher says of a sequence that isn't live, and the backend of one that core still knows.
_MISSING = re.compile(r"must specify the START flag|^sequence .* (is not live|has ended): ")

_NOT_ANSWERED = {"StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED", "502", "503", "504"}

#: How a stream ends whose server has died: behind Envoy, and behind HAProxy.
_BROKEN_STREAM = {"StatusCode.INTERNAL", "StatusCode.CANCELLED"}

#: What Triton says after SIGTERM: first the words of 25.05 and newer, then those of older ones, which still answer when their
#: models are unloaded. On a stream, the answer has no code.
_SHUTTING_DOWN = re.compile("server is shutting down|^Request for unknown model: .* has no available versions")


def leaves_server(error: InferenceServerException) -> bool:
    """Whether a request that is answered so on a stream is better sent over a new one, which may go to another server."""
    text = error.message() or ""
    return text.startswith("SEQUENCE_MOVED:") or _SHUTTING_DOWN.search(text) is not None


def of_server(error: InferenceServerException, of_stream: bool = False) -> StatefulError:
    """The error of this package for one of tritonclient's.

    of_stream: it came from a stream, so if it has a status, the stream is broken.
    """
    text = error.message() or ""
    word = text.split(":", 1)[0]
    if word in _BY_WORD:
        made = _BY_WORD[word](text)
        steps, left = re.search(r"has made (\d+)", text), re.search(r"has (\d+) left over", text)
        if isinstance(made, StepConflict) and steps:
            made.made, made.left = int(steps[1]), int(left[1]) if left else None
        return made
    if _MISSING.search(text):
        return SequenceMissing(text)
    if str(error.status()) in _NOT_ANSWERED or _SHUTTING_DOWN.search(text):
        return Unavailable(str(error))
    if of_stream and str(error.status()) in _BROKEN_STREAM:
        return Unavailable(str(error))
    return StatefulError(str(error))

"""Sequences of stateful models on Triton Inference Server.

with Sequence("localhost:8001", "silero_vad") as sequence:
    for chunk in chunks:
        print(sequence.step(chunk)["output"])
"""

from triton_stateful.aio import AsyncSequence
from triton_stateful.errors import (
    AnswerLost,
    NoPlace,
    SequenceAlreadyExists,
    SequenceMissing,
    SequenceMoved,
    SequenceNotParked,
    SnapshotInvalid,
    StateApiOff,
    StateConflict,
    StatefulError,
    StateNotListed,
    StateParameter,
    StateUnknown,
    StepConflict,
    StepsLost,
    StoreDamaged,
    StoreFailed,
    Unavailable,
)
from triton_stateful.messages import Info, Outputs, SequenceId, StateInfo
from triton_stateful.retry import Retry
from triton_stateful.sequence import Sequence
from triton_stateful.stream import Stream

__all__ = [
    "AnswerLost",
    "AsyncSequence",
    "Info",
    "NoPlace",
    "Outputs",
    "Retry",
    "Sequence",
    "SequenceAlreadyExists",
    "SequenceId",
    "SequenceMissing",
    "SequenceMoved",
    "SequenceNotParked",
    "SnapshotInvalid",
    "StateApiOff",
    "StateConflict",
    "StateInfo",
    "StateNotListed",
    "StateParameter",
    "StateUnknown",
    "StatefulError",
    "StepConflict",
    "StepsLost",
    "StoreDamaged",
    "StoreFailed",
    "Stream",
    "Unavailable",
]

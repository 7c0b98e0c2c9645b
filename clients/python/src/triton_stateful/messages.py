"""What goes to a server and comes back, whatever the protocol."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, Union

import numpy.typing as npt

Array = npt.NDArray[Any]
SequenceId = Union[int, str]
Parameter = Union[bool, int, str]


#: The header by which proxies choose the server of a sequence.
SEQUENCE_HEADER = "sequence-id"


class Outputs(dict[str, Array]):
    """The outputs of an answer, by name. `parameters` has its response parameters.

    With `input_windows` or `repeat`, these are `steps`, the number of steps that the request has made; `left`, the number of
    elements that are left over; `real`, how many elements of the last window came from the client, if zeros fill it up; and
    `stopped`, whether `repeat_until` has ended the steps.
    """

    def __init__(self, outputs: Mapping[str, Array], parameters: Mapping[str, Parameter] | None = None) -> None:
        super().__init__(outputs)
        self.parameters: dict[str, Parameter] = dict(parameters or {})


@dataclass(frozen=True)
class StateInfo:
    """A state as it is now. `shape` is that of the array which `state` returns, `datatype` is Triton's name."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    byte_size: int


@dataclass(frozen=True)
class Info:
    """A sequence as it is now. `steps` counts the inferences that have changed its state, `left` the elements that are left
    over from windows."""

    sequence_id: SequenceId
    steps: int
    states: tuple[StateInfo, ...]
    left: int = 0


class Count(NamedTuple):
    """How far a sequence is: the steps that it has made, and the elements of the first input that is cut into windows
    which are left over. Each request that changes the sequence changes one of the two."""

    steps: int
    left: int


@dataclass(frozen=True)
class Input:
    """A tensor of a request. `datatype` is Triton's name, such as FP32."""

    name: str
    datatype: str
    value: Array


@dataclass(frozen=True)
class Inference:
    """The arguments of `Sequence.step`, `send` or `stream`."""

    inputs: Mapping[str, Array] | Array
    commit: bool
    end: bool
    outputs: list[str] | None
    max_steps: int | None
    timeout: float | None = None


@dataclass(frozen=True)
class Origin:
    """What a sequence begins with, if not with its initial state."""

    states: Mapping[str, Array]
    snapshot: bytes | None = None
    clone_of: SequenceId | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        if sum((self.snapshot is not None, self.clone_of is not None, self.resume)) > 1:
            raise ValueError("of snapshot, clone_of and resume, a sequence begins with one")

    @property
    def goes_on(self) -> bool:
        """Whether the sequence goes on from a state that has made steps."""
        return self.snapshot is not None or self.clone_of is not None or self.resume


@dataclass(frozen=True)
class Request:
    """One inference request."""

    model: str
    version: str
    sequence_id: SequenceId
    inputs: tuple[Input, ...] = ()
    outputs: tuple[str, ...] | None = None  # None: all that the server sends
    start: bool = False
    end: bool = False
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    timeout: float | None = None  # in seconds
    counts: bool = False  # it is an inference that changes the state
    then: Count | None = None  # how far the sequence is after it; None if the client can't tell
    sets: bool = False  # it changes states without an inference
    decoupled: bool = False  # the model sends an answer for each step
    #: Of the request, or of the stream that carries only this request.
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Describe:
    """Asks for a model's configuration."""

    model: str
    version: str


@dataclass(frozen=True)
class Pause:
    """Asks to wait."""

    seconds: float


Action = Union[Request, Describe, Pause]
Result = TypeVar("Result")
Doing = Generator[Action, Any, Result]

"""What goes to a server and comes back, whatever the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Union

import numpy.typing as npt

Array = npt.NDArray[Any]
SequenceId = Union[int, str]
Parameter = Union[bool, int, str]


@dataclass(frozen=True)
class Input:
    """A tensor of a request. `datatype` is Triton's name, such as FP32."""

    name: str
    datatype: str
    value: Array


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
    counts: bool = False  # it is a step: an inference that changes the state


@dataclass(frozen=True)
class Describe:
    """Asks for a model's configuration."""

    model: str
    version: str


@dataclass(frozen=True)
class Pause:
    """Asks to wait."""

    seconds: float


Outputs = dict[str, Array]

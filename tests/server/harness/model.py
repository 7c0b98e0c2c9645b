"""What a test model is: an ONNX graph and the configuration that a user would write for it.

A `Model` writes itself into a model repository, and the oracle reads from it what it has
to feed. Nothing here knows a server; the models themselves are in `models`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto

from support.paths import TEST_DEVICE

# name in this file -> (numpy, ONNX); Triton's names are the upper-case ones
TYPES = {
    "bool": (np.bool_, TensorProto.BOOL),
    "int8": (np.int8, TensorProto.INT8),
    "int16": (np.int16, TensorProto.INT16),
    "int32": (np.int32, TensorProto.INT32),
    "int64": (np.int64, TensorProto.INT64),
    "uint8": (np.uint8, TensorProto.UINT8),
    "uint16": (np.uint16, TensorProto.UINT16),
    "uint32": (np.uint32, TensorProto.UINT32),
    "uint64": (np.uint64, TensorProto.UINT64),
    "fp16": (np.float16, TensorProto.FLOAT16),
    "bf16": (ml_dtypes.bfloat16, TensorProto.BFLOAT16),
    "fp32": (np.float32, TensorProto.FLOAT),
    "fp64": (np.float64, TensorProto.DOUBLE),
    "string": (np.object_, TensorProto.STRING),
}

START = "CONTROL_SEQUENCE_START"
END = "CONTROL_SEQUENCE_END"
READY = "CONTROL_SEQUENCE_READY"
CORRID = "CONTROL_SEQUENCE_CORRID"

MINUTE_US = 60_000_000

#: Where the models run, unless a test says otherwise.
KIND = "KIND_GPU" if TEST_DEVICE == "gpu" else "KIND_CPU"


def parameter(name: str, value: object) -> str:
    """The line of config.pbtxt."""
    return f'parameters {{ key: "{name}" value: {{ string_value: "{value}" }} }}'


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An input or output of the configuration: dims without the batch."""

    name: str
    type: str
    dims: tuple[int, ...]
    # what a random value is drawn from; None: the whole of a type's ordinary range
    between: tuple[int, int] | None = None
    # the dims are the graph's, and -1 marks its batch axis: what stateful_backend's users write.
    # Requests then have Triton's 1 in front, and responses have not
    batch_inside: bool = False
    # the graph's shape of an input that has no batch dimension; requests have Triton's 1 in front
    unbatched: tuple[int, ...] | None = None
    # `optional: true`; what is drawn leaves it out half of the time
    optional: bool = False
    # `allow_ragged_batch: true`
    ragged: bool = False
    # how many elements of what the graph was fed last stand in front of the next chunk, and along
    # which of the graph's axes (the parameter that says so is the model's)
    context: tuple[int, int] | None = None
    # what stands there in a sequence's first inference: "zeros", "repeat" (the first element) or
    # "whole" (nothing: the request has it)
    first: str = "zeros"
    # how long the graph fixes what it is fed along that axis, if "whole" makes the dims open
    window: int | None = None
    # the graph's input that takes the length of what is fed, and along which of the graph's axes
    lengths: tuple[str, int] | None = None

    def config(self) -> str:
        dims = ", ".join(map(str, self.dims))
        more = " reshape { shape: [ ] }" if self.unbatched == () else ""
        more += " optional: true" if self.optional else ""
        more += " allow_ragged_batch: true" if self.ragged else ""
        return f'{{ name: "{self.name}" data_type: TYPE_{self.type.upper()} dims: [ {dims} ]{more} }}'


@dataclasses.dataclass(frozen=True)
class Control:
    """A control input and the two values that mean no and yes (an id has none)."""

    name: str
    kind: str = START
    type: str = "bool"
    false_true: tuple[float, float] = (0, 1)

    def config(self) -> str:
        if self.kind == CORRID:
            value = f"data_type: TYPE_{self.type.upper()}"
        else:
            words = [str(bool(v)).lower() if self.type == "bool" else str(v) for v in self.false_true]
            value = f"{self.type}_false_true: [ {', '.join(words)} ]"
        return f'{{ name: "{self.name}" control [ {{ kind: {self.kind} {value} }} ] }}'


@dataclasses.dataclass(frozen=True)
class State:
    """An entry of `sequence_batching.state`: Triton calls it implicit state."""

    input: str
    output: str
    type: str
    # of the configuration: without the batch, or with -1 in its place
    dims: tuple[int, ...]
    # the dims of `initial_state` (None: there is none), and its file (None: zero_data)
    initial_dims: tuple[int, ...] | None = None
    initial_file: str | None = None
    # more fields
    more: str = ""

    def config(self) -> str:
        data_type = f"data_type: TYPE_{self.type.upper()}"
        return (
            f'{{ input_name: "{self.input}" output_name: "{self.output}" {data_type} '
            f"dims: {_listed(self.dims)} {self._initial_state(data_type)}{self.more} }}"
        )

    def _initial_state(self, data_type: str) -> str:
        if self.initial_dims is None:
            return ""
        data = "zero_data: true" if self.initial_file is None else f'data_file: "{self.initial_file}"'
        return f'initial_state {{ name: "initial" {data_type} dims: {_listed(self.initial_dims)} {data} }} '


def _listed(dims: tuple[int, ...]) -> str:
    return f"[ {', '.join(map(str, dims))} ]"


@dataclasses.dataclass(frozen=True)
class Model:
    """A graph and its configuration. `variant` makes a changed copy."""

    name: str
    build: Callable[[], onnx.ModelProto]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    states: tuple[tuple[str, str], ...]
    controls: tuple[Control, ...] = ()
    constants: Mapping[str, object] = dataclasses.field(default_factory=dict)
    parameters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    max_batch_size: int = 8
    max_candidates: int = 100
    idle_us: int = MINUTE_US
    # more fields of `oldest`
    oldest: str = ""
    # the fields of `direct`, which then replaces `oldest`
    direct: str | None = None
    # replaces the whole `sequence_batching { ... }`
    scheduling: str | None = None
    instances: int = 1
    # more lines of the configuration
    more: str = ""
    file_name: str = "model.onnx"
    versions: tuple[int, ...] = (1,)
    # how exactly a served answer has to equal the oracle's; zero: every bit
    tolerance: float = 0.0
    # entries of `sequence_batching.state`; the states in none of them go into `state_pairs`
    implicit: tuple[State, ...] = ()
    # what the oracle starts a state with instead of zeros: a value in the graph's shape, or what
    # makes one from the inputs of the first request
    initial: Mapping[str, np.ndarray | Callable[[dict], np.ndarray]] = dataclasses.field(default_factory=dict)
    # how long the graph's symbolic dims of states are at START; the others are the batch
    lengths_at_start: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # what the backend feeds the graph's inputs of `generated_inputs`: makes each from what the oracle has counted
    # (`sequence_oracle.Context`), the request's inputs as they are fed, and the states before the run
    generated: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
    # more files, by their path in the model's folder
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    @property
    def takes_text_ids(self) -> bool:
        return any(control.kind == CORRID and control.type == "string" for control in self.controls)

    def variant(self, name: str, **changes) -> Model:
        return dataclasses.replace(self, name=name, **changes)

    def with_parameters(self, name: str, **parameters: object) -> Model:
        texts = {key: str(value) for key, value in parameters.items()}
        return self.variant(name, parameters={**self.parameters, **texts})

    def config(self) -> str:
        parameters = {"state_pairs": self._state_pairs()}
        if self.constants:
            parameters["constant_inputs"] = " ".join(
                f"{key}={value}".replace(" ", "") for key, value in self.constants.items()
            )
        parameters.update(self.parameters)
        lines = [
            f'name: "{self.name}"',
            'backend: "stateful"',
            f"max_batch_size: {self.max_batch_size}",
            *(f"input {tensor.config()}" for tensor in self.inputs),
            *(f"output {tensor.config()}" for tensor in self.outputs),
            self.scheduling if self.scheduling is not None else self._sequence_batching(),
            f"instance_group {{ kind: {KIND} count: {self.instances} }}",
            *(parameter(key, value) for key, value in parameters.items() if value is not None),
            self.more,
        ]
        return "\n".join(line for line in lines if line) + "\n"

    def _sequence_batching(self) -> str:
        if self.direct is None:
            strategy = f"oldest {{ max_candidate_sequences: {self.max_candidates} {self.oldest} }}"
        else:
            strategy = f"direct {{ {self.direct} }}"
        lines = [
            "sequence_batching {",
            f"max_sequence_idle_microseconds: {self.idle_us}",
            strategy,
            *(f"control_input {control.config()}" for control in self.controls),
            *(f"state {state.config()}" for state in self.implicit),
        ]
        return "\n  ".join(lines) + "\n}"

    def _state_pairs(self) -> str | None:
        """The parameter; None where `sequence_batching.state` has all of the states."""
        elsewhere = {state.input for state in self.implicit}
        return " ".join(f"<<<{i}, {o}>>>" for i, o in self.states if i not in elsewhere) or None

    def write(self, repository: Path) -> Path:
        """Lays the model out as Triton wants it; answers its folder."""
        folder = repository / self.name
        graph = self.build().SerializeToString()
        for version in self.versions:
            (folder / str(version)).mkdir(parents=True, exist_ok=True)
            (folder / str(version) / self.file_name).write_bytes(graph)
        for path, content in self.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        (folder / "config.pbtxt").write_text(self.config())
        return folder

    def draw(self, rng: np.random.Generator, first: bool = False) -> dict[str, np.ndarray]:
        """Random values for one request: batch 1, a variable dimension of 1 to 6. `first`: for a sequence's first one."""
        batch = (1,) if self.max_batch_size else ()
        return {
            tensor.name: _draw(tensor, batch, rng, first)
            for tensor in self.inputs
            if not tensor.optional or rng.integers(2)
        }

    def as_fed(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A request's inputs in the shapes that the graph takes."""
        inside = {tensor.name for tensor in self.inputs if tensor.batch_inside}
        fed = {name: value[0] if name in inside else value for name, value in inputs.items()}
        for tensor in self.inputs:
            if tensor.unbatched is not None and tensor.name in fed:
                fed[tensor.name] = fed[tensor.name].reshape(tensor.unbatched)
        return fed

    def as_answered(self, name: str, value: np.ndarray) -> np.ndarray:
        """What the graph gives for one row, in the shape that responses have."""
        return value


def _draw(tensor: Tensor, batch: tuple[int, ...], rng: np.random.Generator, first: bool) -> np.ndarray:
    open_dim = (lambda: 1) if tensor.batch_inside else (lambda: int(rng.integers(1, 7)))
    shape = [*batch, *(open_dim() if dim < 0 else dim for dim in tensor.dims)]
    if tensor.first == "whole" and tensor.context is not None:
        elements, axis = tensor.context
        length = shape[axis] if tensor.window is None else tensor.window - elements
        shape[axis] = length + elements if first else length
    dtype = TYPES[tensor.type][0]
    if tensor.between is not None:
        return rng.integers(*tensor.between, size=shape, endpoint=True).astype(dtype)
    if dtype is np.object_:
        count = int(np.prod(shape))
        words = ["".join(map(chr, rng.integers(97, 123, rng.integers(0, 20)))) for _ in range(count)]
        return np.array(words, np.object_).reshape(shape)
    if dtype is np.bool_:
        return rng.integers(0, 2, size=shape).astype(dtype)
    if np.issubdtype(dtype, np.integer):
        return rng.integers(0, 100, size=shape).astype(dtype)
    return rng.standard_normal(size=shape).astype(dtype)

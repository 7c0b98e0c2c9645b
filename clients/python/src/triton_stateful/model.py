"""What a client knows of a model: the part of its configuration that requests depend on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

from triton_stateful.errors import StateUnknown
from triton_stateful.messages import Array, Count, Input

STATE_PREFIX = "state."
SNAPSHOT = "state_snapshot"
INFO = "state_info"

#: Inputs of Triton and of the backend that are no inputs of the model.
_SPECIAL = {SNAPSHOT, "sequence_id", "sequence_control_input"}


#: The first entry of `input_windows`, such as `audio=512@1:pad`.
_WINDOW = re.compile(r"[\s,]*(?:<<<)?(.+?)(?:>>>)?=(\d+)[@:\s,]")


@dataclass(frozen=True)
class Windows:
    """How requests are cut, if the client can tell: the input, the length of a window, and its axis in arrays."""

    input: str
    length: int
    axis: int

    @classmethod
    def read(cls, text: str, context: str, dims: Mapping[str, tuple[int, ...]], is_batched: bool) -> Windows | None:
        found = _WINDOW.match(text + " ")
        # With ':whole', the first window is longer.
        if found is None or ":whole" in context:
            return None
        open_axes = [axis for axis, dim in enumerate(dims.get(found[1], ())) if dim == -1]
        return cls(found[1], int(found[2]), open_axes[0] + is_batched) if len(open_axes) == 1 else None

    def after(self, count: Count, tensors: Iterable[Input]) -> Count:
        """How far a sequence is after a request with these inputs."""
        brought = sum(tensor.value.shape[self.axis] for tensor in tensors if tensor.name == self.input)
        steps, left = divmod(count.left + brought, self.length)
        return Count(count.steps + steps, left)


@dataclass(frozen=True)
class Model:
    """A model as its server has it."""

    name: str
    datatypes: Mapping[str, str]  # of the inputs, by name
    dims: Mapping[str, tuple[int, ...]]  # of the inputs in the configuration, by name
    is_batched: bool  # tensors have Triton's batch dimension in front
    has_state_api: bool
    is_scheduled_by_core: bool  # has sequence_batching
    takes_text_ids: bool  # Triton 25.01 and newer then refuse ids that are numbers
    is_cut: bool  # it has input_windows: a request may make any number of steps
    is_repeated: bool  # it has repeat: a request may make any number of steps
    windows: Windows | None  # None if the client can't tell how many steps a request makes
    is_decoupled: bool  # it sends an answer for each step

    @classmethod
    def read(cls, name: str, config: Mapping[str, Any]) -> Model:
        """From the JSON of the model's configuration."""
        types = {tensor["name"]: tensor["data_type"][len("TYPE_") :] for tensor in config.get("input", ())}
        inputs = config.get("sequence_batching", {}).get("control_input", ())
        controls = [control for control_input in inputs for control in control_input.get("control", ())]
        dims = {tensor["name"]: tuple(map(int, tensor.get("dims", ()))) for tensor in config.get("input", ())}
        is_batched = int(config.get("max_batch_size", 0)) > 0

        def parameter(name: str) -> str:
            value: str = config.get("parameters", {}).get(name, {}).get("string_value", "")
            return value

        cut = parameter("input_windows")
        return cls(
            name,
            {name: "BYTES" if type == "STRING" else type for name, type in types.items()},
            dims,
            is_batched,
            parameter("state_api").strip().lower() in ("true", "1"),
            "sequence_batching" in config,
            any(
                control.get("kind") == "CONTROL_SEQUENCE_CORRID" and control.get("data_type") == "TYPE_STRING"
                for control in controls
            ),
            bool(cut),
            bool(parameter("repeat")),
            Windows.read(cut, parameter("input_context"), dims, is_batched) if cut else None,
            bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
        )

    def after(self, count: Count, tensors: Iterable[Input]) -> Count | None:
        """How far a sequence is after a request with these inputs; None if the client can't tell."""
        if self.is_repeated:
            return None
        if not self.is_cut:
            return Count(count.steps + 1, 0)
        return self.windows.after(count, tensors) if self.windows is not None else None

    @property
    def inputs(self) -> list[str]:
        """The names of the model's inputs."""
        return [name for name in self.datatypes if not name.startswith(STATE_PREFIX) and name not in _SPECIAL]

    @property
    def states(self) -> list[str]:
        """The names of the states that can be set."""
        return [name[len(STATE_PREFIX) :] for name in self.datatypes if name.startswith(STATE_PREFIX)]

    def encode(self, inputs: Mapping[str, Array] | Array) -> tuple[Input, ...]:
        """The inputs of a step. An array alone is for the only input.

        ValueError for a name that is no input or a wrong number of dimensions, TypeError for a wrong dtype.
        """
        names = self.inputs
        if not isinstance(inputs, Mapping):
            if len(names) != 1:
                raise ValueError(f"model '{self.name}' has {len(names)} inputs, so name them: {', '.join(names)}")
            inputs = {names[0]: inputs}
        if not inputs:
            raise ValueError(f"a step of model '{self.name}' needs an input, and none is given: {', '.join(names)}")
        for name in inputs:
            if name not in self.datatypes:
                raise ValueError(f"model '{self.name}' has no input '{name}': it has {', '.join(names)}")
        return tuple(self._tensor(name, value) for name, value in inputs.items())

    def encode_states(self, states: Mapping[str, Array]) -> tuple[Input, ...]:
        """New values of states. StateUnknown for a name that is no state, TypeError for a wrong dtype."""
        self.check_states(states)
        return tuple(self._tensor(STATE_PREFIX + name, value) for name, value in states.items())

    def check_states(self, names: Iterable[str]) -> None:
        """StateUnknown if a name is no state."""
        known = self.states
        for name in names:
            if name not in known:
                raise StateUnknown(f"model '{self.name}' has no state '{name}': it has {', '.join(known) or 'none'}")

    def encode_snapshot(self, snapshot: bytes) -> tuple[Input, ...]:
        """The tensor of a snapshot."""
        value = np.empty((1, 1) if self.is_batched else (1,), np.object_)
        value.fill(snapshot)
        return (Input(SNAPSHOT, "BYTES", value),)

    def _tensor(self, name: str, value: Array) -> Input:
        array, datatype = np.asarray(value), self.datatypes[name]
        if datatype == "BYTES" and array.dtype.kind in "US":
            array = array.astype(np.object_)
        wanted = np.dtype(triton_to_np_dtype(datatype))
        if array.dtype != wanted and np_to_triton_dtype(array.dtype) != datatype:
            raise TypeError(
                f"input '{name}' of model '{self.name}' has dtype {array.dtype}, but {wanted} ({datatype}) is expected"
            )
        dims = [1] * self.is_batched + list(self.dims[name])
        if array.ndim != len(dims):
            raise ValueError(
                f"input '{name}' of model '{self.name}' has shape {list(array.shape)}, but {len(dims)} dimensions are "
                f"expected: {dims}"
            )
        return Input(name, datatype, array)

"""ONNX Runtime stepped by hand, in place of the Python client's Sequence: what the clients of the pages have to get."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from harness.model import TYPES
from harness.models.exports import Export
from support.oracle import Oracle


@dataclasses.dataclass(frozen=True)
class Steps:
    """How a model is stepped: what the configuration makes the backend add to the requests."""

    export: Export
    constants: Mapping[str, object] = dataclasses.field(default_factory=dict)
    # input -> elements of the last chunk, their axis, and whether the first request has them, too
    context: Mapping[str, tuple[int, int, bool]] = dataclasses.field(default_factory=dict)
    # input -> new elements of a chunk, their axis, and whether zeros fill up the last one
    windows: Mapping[str, tuple[int, int, bool]] = dataclasses.field(default_factory=dict)
    # input -> its value, from the number of steps and what the model is fed otherwise
    generated: Mapping[str, Callable[[int, dict], object]] = dataclasses.field(default_factory=dict)


class ByHand:
    """Makes sequences of these models."""

    def __init__(self, models: Mapping[str, Steps]):
        self.models = {name: (steps, _oracle(steps.export)) for name, steps in models.items()}

    def __call__(self, address: str, model: str, states: Mapping[str, np.ndarray] | None = None) -> _Sequence:
        return _Sequence(*self.models[model], states or {})


def _oracle(export: Export) -> Oracle:
    return Oracle(export.build().SerializeToString(), export.pairs)


class _Sequence:
    def __init__(self, steps: Steps, oracle: Oracle, states: Mapping[str, np.ndarray]):
        self.steps, self.oracle, self.count = steps, oracle, 0
        self.kept: dict[str, np.ndarray] = {}
        self.left: dict[str, np.ndarray] = {}
        self.sequence = oracle.new_sequence()
        export = steps.export
        for name in export.pairs:
            batch_axis = export.batch_axis(name)
            _, dims = export.declared(name)
            shape = [dim if isinstance(dim, int) else int(at == batch_axis) for at, dim in enumerate(dims)]
            self.sequence.state[name] = np.zeros(shape, oracle.dtype(name))
        self.sequence.state |= {**export.initial, **states}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def step(self, inputs, *, commit=True, end=False, outputs=None):
        if not isinstance(inputs, dict):
            taken = {*self.steps.export.pairs, *self.steps.constants, *self.steps.generated}
            [name] = [name for name in self.steps.export.inputs if name not in taken]
            inputs = {name: inputs}
        fed = {name: self._as_fed(name, value) for name, value in inputs.items()}
        if not self.steps.windows:
            return self._step(fed, commit)
        [(name, (_, axis, pads))] = self.steps.windows.items()
        if name in self.left:
            fed[name] = np.concatenate([self.left[name], fed[name]], axis)
        answers = []
        while (have := fed[name].shape[axis]) >= (wanted := self._wanted(name)) or (have and end and pads):
            missing = [(0, max(0, wanted - have) if at == axis else 0) for at in range(fed[name].ndim)]
            chunk, rest = np.split(np.pad(fed[name], missing), [wanted], axis)
            answers.append(self._step({**fed, name: chunk}, commit))
            fed[name] = rest
        self.left = {name: fed[name]}
        outputs = [target for target in self.steps.export.outputs if target not in self.steps.export.pairs.values()]
        return {target: self._together(target, [answer[target] for answer in answers]) for target in outputs}

    def _wanted(self, name: str) -> int:
        """Elements of the next chunk."""
        new, _, _ = self.steps.windows[name]
        elements, _, whole = self.steps.context.get(name, (0, 0, False))
        return new + (elements if whole and self.count == 0 else 0)

    def _together(self, name: str, values: list[np.ndarray]) -> np.ndarray:
        """The steps one after the other along the only open dimension, else in a dimension of their own."""
        export, at = self.steps.export, int(self.steps.export.has_batch)
        kind, dims = export.spec(name)
        axes = [axis for axis, dim in enumerate(dims) if not isinstance(dim, int) and axis != export.batch_axis(name)]
        if not values:
            shape = [
                1 if axis == export.batch_axis(name) else dim if isinstance(dim, int) else 0
                for axis, dim in enumerate(dims)
            ]
            return np.zeros(shape if axes else [*shape[:at], 0, *shape[at:]], TYPES[kind][0])
        return np.concatenate(values, axes[0]) if axes else np.stack(values, at)

    def _step(self, fed, commit):
        for name, (elements, axis, whole) in self.steps.context.items():
            shape = [elements if at == axis else dim for at, dim in enumerate(fed[name].shape)]
            if not (whole and self.count == 0):
                before = self.kept.get(name, np.zeros(shape, fed[name].dtype))
                fed[name] = np.concatenate([before, fed[name]], axis)
            self.kept[name] = np.take(fed[name], range(-elements, 0), axis)
        for name, value in self.steps.constants.items():
            shape = [dim if isinstance(dim, int) else 1 for dim in self.steps.export.dims(name)]
            fed[name] = np.array(value, self.oracle.dtype(name)).reshape(shape)
        for name, made in self.steps.generated.items():
            fed[name] = np.array(made(self.count, fed | self.sequence.state), self.oracle.dtype(name))
        before = dict(self.sequence.state)
        answers = self.sequence.step(fed)
        if commit:
            self.count += 1
        else:
            self.sequence.state = before
        return {name: self._as_answered(name, value) for name, value in answers.items()}

    def _as_fed(self, name: str, value: np.ndarray) -> np.ndarray:
        """Without the 1 that Triton wants in front of dims that do not begin with the batch."""
        export = self.steps.export
        rank = len(export.dims(name))
        if export.has_batch and (value.ndim > rank):
            value = value.reshape(value.shape[value.ndim - rank :])
        return value

    def _as_answered(self, name: str, value: np.ndarray) -> np.ndarray:
        """[batch] is answered as [batch, 1]."""
        return value.reshape(-1, 1) if self.steps.export.has_batch and value.ndim == 1 else value

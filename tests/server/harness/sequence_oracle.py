"""What the right answer is to each request of a sequence: the oracle's, fed as the model's configuration says.

`support.oracle` steps the model. This adds the controls, the context, the constants, the initial values and the storage
as fp16, all from the `Model`. Knows nothing of how the backend works.
"""

from __future__ import annotations

import copy
import functools

import numpy as np

from harness.model import CORRID, END, READY, START, Model
from harness.values import bits
from support.oracle import Oracle
from support.paths import TEST_DEVICE


@functools.cache
def _oracle(graph: bytes, states: tuple[tuple[str, str], ...]) -> Oracle:
    return Oracle(graph, dict(states))


class SequenceOracle:
    """One sequence of a model. START gives it a fresh state."""

    def __init__(self, model: Model, sequence_id: int | str = 1):
        self.model = model
        self.sequence_id = sequence_id
        self.oracle = _oracle(model.build().SerializeToString(), tuple(model.states))
        self.sequence = self.oracle.new_sequence()
        self.is_fresh = True
        self.context = Context(model)

    def step(self, inputs, *, start: bool = False, end: bool = False) -> dict[str, np.ndarray]:
        """The configured outputs of one request; the state goes on."""
        if start:
            self.context = Context(self.model)
        fed = self.context.before(self.model.as_fed(inputs))
        if start or self.is_fresh:
            self.sequence.state = {name: self._initial(name, fed) for name, _ in self.model.states}
            self.is_fresh = False
        feeds = {**fed, **self._lengths(fed), **self._controls(start, end), **self._constants(), **self._generated(fed)}
        results = self.sequence.step(feeds)
        self.sequence.state = {name: self._stored(value) for name, value in self.sequence.state.items()}
        self.context.keep(fed)
        self.context.count(fed)
        names = [output.name for output in self.model.outputs]
        return {name: self.model.as_answered(name, results[name]) for name in names}

    def _initial(self, name: str, fed) -> np.ndarray:
        value = self.model.initial.get(name)
        if value is None:
            return self.oracle.zeros(name, self.model.lengths_at_start)
        return np.asarray(value(fed) if callable(value) else value, self.oracle.dtype(name))

    def _stored(self, state: np.ndarray) -> np.ndarray:
        """What is left of a state that is kept between two requests."""
        if self.model.parameters.get("store_states_as_fp16") != "1" or state.dtype != np.float32:
            return state
        with np.errstate(over="ignore"):
            return state.astype(np.float16).astype(np.float32)

    def _controls(self, start: bool, end: bool) -> dict[str, np.ndarray]:
        said = {START: start, END: end, READY: True}
        feeds = {}
        for control in self.model.controls:
            if not self.oracle.takes(control.name):
                continue
            value = self.sequence_id if control.kind == CORRID else control.false_true[said[control.kind]]
            # the model's type, which need not be the configuration's
            feeds[control.name] = np.array([[value]]).astype(self.oracle.dtype(control.name))
        return feeds

    def _constants(self) -> dict[str, np.ndarray]:
        return {name: np.array(value).astype(self.oracle.dtype(name)) for name, value in self.model.constants.items()}

    def _generated(self, fed) -> dict[str, np.ndarray]:
        made = {name: make(self.context, fed, self.sequence.state) for name, make in self.model.generated.items()}
        return {name: np.asarray(value, self.oracle.dtype(name)) for name, value in made.items()}

    def _lengths(self, fed) -> dict[str, np.ndarray]:
        feeds = {}
        for tensor in self.model.inputs:
            if tensor.lengths is not None:
                name, axis = tensor.lengths
                feeds[name] = np.array([fed[tensor.name].shape[axis]], self.oracle.dtype(name))
        return feeds


class Context:
    """What one sequence's inputs have of the last chunks, as the model's tensors say, and how many steps it has made and
    elements it has had of each input, by axis."""

    def __init__(self, model: Model):
        self.wanted = {tensor.name: tensor.context for tensor in model.inputs if tensor.context}
        self.first = {tensor.name: tensor.first for tensor in model.inputs}
        self.kept: dict[str, np.ndarray] = {}
        self.steps = 0
        self.elements: dict[str, np.ndarray] = {}

    def copy(self) -> Context:
        made = copy.copy(self)
        made.kept, made.elements = dict(self.kept), dict(self.elements)
        return made

    def had(self, name: str, axis: int) -> int:
        """How many elements of an input there were before this request."""
        return int(self.elements[name][axis]) if name in self.elements else 0

    def count(self, fed) -> None:
        """A request has changed the state."""
        self.steps += 1
        for name, value in fed.items():
            self.elements[name] = self.elements.get(name, 0) + np.array(value.shape)

    def before(self, fed) -> dict[str, np.ndarray]:
        """The chunks, with what is kept in front of each."""
        return {name: self._joined(name, value) for name, value in fed.items()}

    def keep(self, fed) -> None:
        """Keeps the last elements of what the model was fed."""
        for name, (elements, axis) in self.wanted.items():
            length = fed[name].shape[axis]
            self.kept[name] = fed[name].take(range(length - elements, length), axis)

    def _joined(self, name: str, chunk: np.ndarray) -> np.ndarray:
        if name not in self.wanted:
            return chunk
        elements, axis = self.wanted[name]
        kept = self.kept.get(name)
        if kept is None and self.first[name] == "whole":
            return chunk
        if kept is None and self.first[name] == "repeat":
            kept = np.repeat(chunk.take([0], axis), elements, axis)
        if kept is None:
            nothing = "" if chunk.dtype == np.object_ else 0
            shape = [elements if at == axis else dim for at, dim in enumerate(chunk.shape)]
            kept = np.full(shape, nothing, chunk.dtype)
        return np.concatenate([kept, chunk], axis)


def assert_same(model: Model, answer, expected, context: object = "") -> None:
    """The same outputs, types and shapes, and every bit (or within the model's tolerance)."""
    assert set(answer) == set(expected), f"{model.name} {context}"
    for name, want in expected.items():
        came = answer[name]
        where = f"{model.name} {context}: {name}"
        assert came.dtype == want.dtype, f"{where}: {came.dtype}, not {want.dtype}"
        assert came.shape == want.shape, f"{where}: {came.shape}, not {want.shape}"
        if want.dtype == np.object_:
            assert bits(came) == bits(want), where
        elif tolerance := max(model.tolerance, _tolerance_of_device(model, want.dtype)):
            np.testing.assert_allclose(came, want, rtol=tolerance, atol=tolerance, err_msg=where)
        else:
            assert bits(came) == bits(want), f"{where}: {came}, not {want}"


def _tolerance_of_device(model: Model, dtype: np.dtype) -> float:
    """The oracle steps on the CPU: a GPU adds in another order."""
    if TEST_DEVICE != "gpu":
        return 0.0
    # A sum that ends beside the middle of two numbers of fp16 may be rounded to the other one.
    if model.parameters.get("store_states_as_fp16") == "1" and dtype == np.float32:
        return 1e-3
    return {"float16": 1e-2, "bfloat16": 5e-2, "float32": 1e-5, "float64": 1e-12}.get(dtype.name, 0.0)

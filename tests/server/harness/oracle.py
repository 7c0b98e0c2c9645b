"""What the right answer is: ONNX Runtime stepped by hand, one sequence at a time, batch 1.

Reads a `Model` only for what to feed. Knows nothing of how the backend works.
"""

from __future__ import annotations

import functools

import numpy as np
import onnxruntime

from harness.model import CORRID, END, READY, START, Model
from support.paths import TEST_DEVICE


@functools.cache
def _session(graph: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


class Oracle:
    """One sequence of a model, stepped by hand. START gives it a fresh state."""

    def __init__(self, model: Model, sequence_id: int | str = 1):
        self.model = model
        self.sequence_id = sequence_id
        self.session = _session(model.build().SerializeToString())
        taken = [*self.session.get_inputs(), *self.session.get_overridable_initializers()]
        self.shapes = {found.name: found.shape for found in taken}
        self.types = {found.name: found.type for found in taken}
        self.state: dict[str, np.ndarray] | None = None
        self.context = Context(model)

    def step(self, inputs, *, start: bool = False, end: bool = False) -> dict[str, np.ndarray]:
        """The configured outputs of one request; the state goes on."""
        if start:
            self.context = Context(self.model)
        fed = self.context.before(self.model.as_fed(inputs))
        if start or self.state is None:
            self.state = self._fresh(fed)
        feeds = {
            **fed,
            **self._lengths(fed),
            **self.state,
            **self._controls(start, end),
            **self._constants(),
        }
        names = [found.name for found in self.session.get_outputs()]
        results = dict(zip(names, self.session.run(names, feeds), strict=True))
        self.state = {source: self._stored(results[target]) for source, target in self.model.states}
        self.context.keep(fed)
        return {output.name: results[output.name] for output in self.model.outputs}

    def _fresh(self, fed) -> dict[str, np.ndarray]:
        return {name: self._initial(name, fed) for name, _ in self.model.states}

    def _initial(self, name: str, fed) -> np.ndarray:
        dtype = self._dtype(name)
        value = self.model.initial.get(name)
        if value is not None:
            return np.asarray(value(fed) if callable(value) else value, dtype)
        lengths = self.model.lengths_at_start
        shape = [dim if isinstance(dim, int) else lengths.get(dim, 1) for dim in self.shapes[name]]
        return np.full(shape, "" if dtype is np.object_ else 0, dtype)

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
            if control.name not in self.shapes:
                continue  # the model does not take it
            value = self.sequence_id if control.kind == CORRID else control.false_true[said[control.kind]]
            # the model's type, which need not be the configuration's
            feeds[control.name] = np.array([[value]]).astype(self._dtype(control.name))
        return feeds

    def _constants(self) -> dict[str, np.ndarray]:
        return {name: np.array(value).astype(self._dtype(name)) for name, value in self.model.constants.items()}

    def _lengths(self, fed) -> dict[str, np.ndarray]:
        feeds = {}
        for tensor in self.model.inputs:
            if tensor.lengths is not None:
                name, axis = tensor.lengths
                feeds[name] = np.array([fed[tensor.name].shape[axis]], self._dtype(name))
        return feeds

    def _dtype(self, name: str):
        names = {
            "float": np.float32,
            "double": np.float64,
            "float16": np.float16,
            "bool": np.bool_,
            "string": np.object_,
        }
        text = self.types[name].removeprefix("tensor(").removesuffix(")")
        return names.get(text) or np.dtype(text)


class Context:
    """What one sequence's inputs have of the last chunks, as the model's tensors say. Zeros at first."""

    def __init__(self, model: Model):
        self.wanted = {tensor.name: tensor.context for tensor in model.inputs if tensor.context}
        self.kept: dict[str, np.ndarray] = {}

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
        nothing = "" if chunk.dtype == np.object_ else 0
        shape = [elements if at == axis else dim for at, dim in enumerate(chunk.shape)]
        return np.concatenate([self.kept.get(name, np.full(shape, nothing, chunk.dtype)), chunk], axis)


def assert_same(model: Model, answer, expected, context: object = "") -> None:
    """The same outputs, types and shapes, and every bit (or within the model's tolerance)."""
    assert set(answer) == set(expected), f"{model.name} {context}"
    for name, want in expected.items():
        came = answer[name]
        where = f"{model.name} {context}: {name}"
        assert came.dtype == want.dtype, f"{where}: {came.dtype}, not {want.dtype}"
        assert came.shape == want.shape, f"{where}: {came.shape}, not {want.shape}"
        if want.dtype == np.object_:
            assert [_bytes(text) for text in came.flat] == [_bytes(text) for text in want.flat], where
        elif tolerance := max(model.tolerance, _tolerance_of_device(want.dtype)):
            np.testing.assert_allclose(came, want, rtol=tolerance, atol=tolerance, err_msg=where)
        else:
            assert _bits(came) == _bits(want), f"{where}: {came}, not {want}"


def _tolerance_of_device(dtype: np.dtype) -> float:
    """The oracle steps on the CPU: a GPU adds in another order."""
    if TEST_DEVICE != "gpu":
        return 0.0
    return {"float16": 1e-2, "bfloat16": 5e-2, "float32": 1e-5, "float64": 1e-12}.get(dtype.name, 0.0)


def _bits(value: np.ndarray) -> bytes | list[bytes]:
    if value.dtype != np.object_:
        return value.tobytes()
    return [text.encode() if isinstance(text, str) else text for text in value.ravel()]


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text

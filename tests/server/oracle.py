"""What the right answer is: ONNX Runtime stepped by hand, one sequence at a time, batch 1.

Reads a `Model` only for what to feed. Knows nothing of how the backend works.
"""

from __future__ import annotations

import functools

import numpy as np
import onnxruntime

from model import CORRID, END, READY, START, Model


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
        self.shapes = {found.name: found.shape for found in self.session.get_inputs()}
        self.types = {found.name: found.type for found in self.session.get_inputs()}
        self.state = self._fresh()

    def step(self, inputs, *, start: bool = False, end: bool = False) -> dict[str, np.ndarray]:
        """The configured outputs of one request; the state goes on."""
        if start:
            self.state = self._fresh()
        feeds = {**self.model.as_fed(inputs), **self.state, **self._controls(start, end), **self._constants()}
        names = [found.name for found in self.session.get_outputs()]
        results = dict(zip(names, self.session.run(names, feeds), strict=True))
        self.state = {source: results[target] for source, target in self.model.states}
        return {output.name: results[output.name] for output in self.model.outputs}

    def _fresh(self) -> dict[str, np.ndarray]:
        return {
            name: np.zeros(
                [1 if isinstance(dim, str) else dim for dim in self.shapes[name]],
                self._dtype(name),
            )
            for name, _ in self.model.states
        }

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
        return {
            name: np.array(value).astype(self._dtype(name)) for name, value in self.model.constants.items()
        }

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


def assert_same(model: Model, answer, expected, context: object = "") -> None:
    """The same outputs, types and shapes, and every bit (or within the model's tolerance)."""
    assert set(answer) == set(expected), f"{model.name} {context}"
    for name, want in expected.items():
        came = answer[name]
        where = f"{model.name} {context}: {name}"
        assert came.dtype == want.dtype, f"{where}: {came.dtype}, not {want.dtype}"
        assert came.shape == want.shape, f"{where}: {came.shape}, not {want.shape}"
        if model.tolerance:
            np.testing.assert_allclose(came, want, rtol=model.tolerance, atol=model.tolerance, err_msg=where)
        else:
            assert came.tobytes() == want.tobytes(), f"{where}: {came}, not {want}"

"""What the right answers are: ONNX Runtime stepped by hand, one sequence at a time, batch of one.

Knows nothing of the backend; simple on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime

#: ONNX Runtime's names for element types, where numpy has others.
_DTYPES = {"float": np.float32, "double": np.float64, "float16": np.float16, "bool": np.bool_, "string": np.object_}


class Oracle:
    """A stateful ONNX model: a file, or the bytes of one.

    states: name of the model's input -> name of the output that is its next value.
    constants: inputs that are the same at every step, as they are fed.

        oracle = Oracle(path, {"state": "stateN"}, {"sr": np.array(16000)})
        outputs = oracle.new_sequence().step({"input": chunk})
    """

    def __init__(
        self,
        model: Path | bytes,
        states: Mapping[str, str],
        constants: Mapping[str, np.ndarray] = {},
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        source = model if isinstance(model, bytes) else str(model)
        self.session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        self.states = dict(states)
        self.constants = dict(constants)
        inputs = [*self.session.get_inputs(), *self.session.get_overridable_initializers()]
        self._signature = {found.name: (found.type, found.shape) for found in inputs}

    def takes(self, name: str) -> bool:
        """Whether the model has an input of this name."""
        return name in self._signature

    def dtype(self, name: str) -> np.dtype:
        """The numpy type of an input."""
        text = self._signature[name][0].removeprefix("tensor(").removesuffix(")")
        return np.dtype(_DTYPES.get(text, text))

    def zeros(self, name: str, lengths: Mapping[str, int] = {}) -> np.ndarray:
        """Zeros, or empty strings, for an input. An open dim has the length given for it, or else 1."""
        shape = [dim if isinstance(dim, int) else lengths.get(dim, 1) for dim in self._signature[name][1]]
        dtype = self.dtype(name)
        return np.full(shape, "" if dtype == np.object_ else 0, dtype)

    def new_sequence(self) -> OracleSequence:
        """A sequence at its start, with zeros for states."""
        return OracleSequence(self, {name: self.zeros(name) for name in self.states})


class OracleSequence:
    """One sequence and its state, which may be replaced between steps."""

    def __init__(self, oracle: Oracle, state: dict[str, np.ndarray]) -> None:
        self._oracle = oracle
        self.state = state

    def step(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """All outputs of the model for inputs with a batch axis of 1; the state goes on."""
        oracle = self._oracle
        names = [output.name for output in oracle.session.get_outputs()]
        results = oracle.session.run(names, {**oracle.constants, **self.state, **inputs})
        outputs = dict(zip(names, results, strict=True))
        self.state = {source: outputs[target] for source, target in oracle.states.items()}
        return outputs

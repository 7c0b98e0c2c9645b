"""What the right answers are: ONNX Runtime stepped by hand, one sequence at a time, batch of one.

Knows nothing of the backend; simple on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import DTypeLike


class Oracle:
    """A stateful ONNX model.

    states: name of the model's input -> (name of its output, shape with the batch axis as 1, numpy type).
    constants: inputs that are the same at every step, as they are fed.

        oracle = Oracle(path, {"state": ("stateN", (2, 1, 128), np.float32)}, {"sr": np.array(16000)})
        outputs = oracle.new_sequence().step({"input": chunk})
    """

    def __init__(
        self,
        model_path: Path,
        states: Mapping[str, tuple[str, tuple[int, ...], DTypeLike]],
        constants: Mapping[str, np.ndarray] = {},
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(str(model_path), options, providers=["CPUExecutionProvider"])
        self.states = dict(states)
        self.constants = dict(constants)

    def new_sequence(self) -> OracleSequence:
        """A sequence at its start, with zeros for states."""
        return OracleSequence(self)


class OracleSequence:
    """One sequence and its state."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._state = {name: np.zeros(shape, dtype) for name, (_, shape, dtype) in oracle.states.items()}

    def step(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """All outputs of the model for inputs with a batch axis of 1; the state goes on."""
        oracle = self._oracle
        names = [output.name for output in oracle.session.get_outputs()]
        results = oracle.session.run(names, {**oracle.constants, **self._state, **inputs})
        outputs = dict(zip(names, results, strict=True))
        self._state = {name: outputs[output] for name, (output, _, _) in oracle.states.items()}
        return outputs

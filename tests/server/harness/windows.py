"""What the right answers are where requests bring any number of elements: the oracle, stepped once for each window."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from harness.clients import new_id
from harness.conversations import together
from harness.model import TYPES, Model
from harness.models.windows import FAILS
from harness.raw import Answer, Asks, Refused
from harness.sequence_oracle import Context, SequenceOracle, assert_same


@dataclasses.dataclass(frozen=True)
class Cut:
    """An input that is cut: new elements of a window, and along which of a request's axes."""

    length: int
    axis: int = 1


class WindowOracle:
    """A sequence of a model whose inputs are cut into windows."""

    def __init__(self, model: Model, cuts: Mapping[str, Cut], *, pads: bool = False, first_longer: int = 0):
        self.model = model
        self.cuts = cuts
        self.pads = pads
        # elements that the first window has more (a context with ':whole')
        self.first_longer = first_longer
        self.batched = bool(model.max_batch_size)
        self.begin()

    def begin(self) -> None:
        self.steps = SequenceOracle(self.model)
        self.left: dict[str, np.ndarray] = {}
        self.made = 0

    def copy(self) -> WindowOracle:
        made = copy.copy(self)
        made.steps = copy.copy(self.steps)
        made.steps.sequence = copy.copy(self.steps.sequence)
        made.steps.sequence.state = dict(self.steps.sequence.state)
        made.steps.context = self.steps.context.copy()
        made.left = dict(self.left)
        return made

    def forget_context(self) -> None:
        self.steps.context, self.left = Context(self.model), {}

    def ask(self, inputs: Mapping[str, np.ndarray], *, start: bool = False, end: bool = False):
        """The outputs and the parameters of the answer."""
        if start:
            self.begin()
        joined = {
            name: np.concatenate([self.left[name], inputs[name]], cut.axis) if name in self.left else inputs[name]
            for name, cut in self.cuts.items()
        }
        answers, extra = [], {}
        while (whole := self._has_window(joined)) or (end and self.pads and self._has_some(joined)):
            windows = {}
            if not whole:
                name, cut = next(iter(self.cuts.items()))
                extra = {"real": joined[name].shape[cut.axis]}
                joined = {name: self._padded(name, value) for name, value in joined.items()}
            for name, cut in self.cuts.items():
                windows[name], joined[name] = np.split(joined[name], [self._wanted(name)], cut.axis)
            answers.append(self.steps.step({**inputs, **windows}, start=self.steps.is_fresh))
            self.made += 1
        self.left = joined
        name, cut = next(iter(self.cuts.items()))
        parameters = {"steps": len(answers), "left": joined[name].shape[cut.axis], **extra}
        return {output.name: self._together(output, answers) for output in self.model.outputs}, parameters

    def _wanted(self, name: str) -> int:
        return self.cuts[name].length + (self.first_longer if self.made == 0 else 0)

    def _has_some(self, joined) -> bool:
        return any(value.shape[self.cuts[name].axis] for name, value in joined.items())

    def _has_window(self, joined) -> bool:
        return all(value.shape[self.cuts[name].axis] >= self._wanted(name) for name, value in joined.items())

    def _padded(self, name: str, value: np.ndarray) -> np.ndarray:
        axis = self.cuts[name].axis
        missing = [(0, self._wanted(name) - value.shape[axis] if at == axis else 0) for at in range(value.ndim)]
        return np.pad(value, missing)

    def _together(self, output, answers: list[dict[str, np.ndarray]]) -> np.ndarray:
        """The steps one after the other along the only open dimension, else in a dimension of their own."""
        at = int(self.batched)
        values = [answer[output.name] for answer in answers]
        if not values:
            return np.zeros([1] * at + [max(dim, 0) for dim in output.dims], TYPES[output.type][0])
        if values[0].ndim == len(output.dims) + at:
            return np.concatenate(values, output.dims.index(-1) + at)
        return np.stack(values, at)


class WindowTalk:
    """A sequence whose requests are served, stepped by the oracle, and compared."""

    def __init__(self, client: Asks, oracle: WindowOracle, rng: np.random.Generator):
        self.client, self.oracle, self.rng = client, oracle, rng
        self.model = oracle.model
        self.sequence_id = new_id()

    def draw(self, elements: int) -> dict[str, np.ndarray]:
        """Random inputs, with so many elements of the first that is cut, and as many windows of the others."""
        lengths = [cut.length for cut in self.oracle.cuts.values()]
        first, unit = lengths[0], lengths[0] // math.gcd(*lengths)
        elements = elements // unit * unit
        drawn = self.model.draw(self.rng)
        for name, cut in self.oracle.cuts.items():
            shape = list(drawn[name].shape)
            shape[cut.axis] = elements * cut.length // first
            drawn[name] = self.rng.integers(1, 100, shape).astype(drawn[name].dtype)
        return drawn

    def left(self) -> int:
        """Elements of the first input that is cut which the sequence has left over."""
        name, cut = next(iter(self.oracle.cuts.items()))
        return self.oracle.left[name].shape[cut.axis] if name in self.oracle.left else 0

    def ask(self, inputs: int | Mapping[str, np.ndarray], *, start=False, end=False, **parameters) -> Answer:
        """A request with so many elements, or these inputs. A refused request leaves the oracle alone."""
        inputs = self.draw(inputs) if isinstance(inputs, int) else inputs
        flags = {"sequence_start": start, "sequence_end": end}
        parameters |= {name: True for name, given in flags.items() if given}
        answer = self.client.ask(self.model.name, inputs, {"sequence_id": self.sequence_id, **parameters})
        before = self.oracle.copy()
        outputs, said = self.oracle.ask(inputs, start=start, end=end)
        if parameters.get("commit") is False:
            self.oracle = before
        context = f"sequence {self.sequence_id}, {said}"
        assert_same(self.model, {name: answer.outputs[name] for name in outputs}, outputs, context)
        self.assert_said(answer, said)
        return answer

    def draw_failing(self, elements: int, step: int) -> dict[str, np.ndarray]:
        """Random inputs with which this step of the request fails."""
        inputs = self.draw(elements)
        name, cut = next(iter(self.oracle.cuts.items()))
        inputs[name][0, cut.length * step - self.left() - 1] = FAILS
        return inputs

    def fail_beside(self, others: Sequence[WindowTalk], step: int) -> Refused:
        """A request of which this step fails, while the others send one. Returns its error."""
        inputs = self.draw_failing(23, step)
        [cut] = self.oracle.cuts.values()
        steps = (23 + self.left()) // cut.length

        def fail() -> Refused:
            with pytest.raises(Refused) as caught:
                self.ask(inputs)
            return caught.value

        error, *_ = together([fail, *(lambda other=other: other.ask(31) for other in others)])
        assert f"step {step} of {steps}" in error.text, error
        return error

    def run_late(self, inputs: Mapping[str, np.ndarray], **parameters) -> Refused:
        """A request whose timeout passes between two of its steps. Returns its error."""
        for timeout_us in (100_000, 200_000, 400_000):
            with pytest.raises(Refused) as caught:
                self.ask(inputs, timeout=timeout_us, **parameters)
            # On a busy host, the time may be over before the first step.
            if "SEQUENCE_QUEUE_TIMEOUT" not in caught.value.text:
                break
        return caught.value

    def call_at_random(self) -> None:
        """A step, or another call of the State API, compared with the oracle."""
        elements = int(self.rng.integers(self.rng.choice([3, 40])))
        match int(self.rng.integers(5)):
            case 0:
                self.ask(elements, commit=False)
            case 1:
                self.oracle.begin()
                self.ask(elements, reset_state=True)
            case 2:
                inputs = self.draw_failing(30, 2)
                with pytest.raises(Refused):
                    self.ask(inputs)
            case _:
                self.ask(elements)

    def assert_said(self, answer: Answer, said) -> None:
        """Compares the parameters of an answer."""
        assert {name: answer.parameters.get(name) for name in said} == said
        assert ("real" in answer.parameters) == ("real" in said)

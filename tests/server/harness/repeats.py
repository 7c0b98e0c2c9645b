"""The right answers of models with `repeat`: the oracle is stepped in a loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from harness.model import Model
from harness.raw import Answer, Asks
from harness.windows import WindowOracle, WindowTalk

Outputs = Mapping[str, np.ndarray]


class RepeatOracle(WindowOracle):
    """A sequence of a model with `repeat`. `stops` says whether a step was the last."""

    def __init__(self, model: Model, feeds: Mapping[str, str], stops: Callable[[Outputs], bool] = lambda _: False):
        super().__init__(model, {})
        self.feeds = feeds
        self.stops = stops
        self.most = 0

    def ask(self, inputs: Outputs, *, start: bool = False, end: bool = False):
        if start:
            self.begin()
        answers: list[dict[str, np.ndarray]] = []
        fed, stopped = dict(inputs), False
        while len(answers) < self.most and not stopped:
            results = self.steps.step(fed, start=self.steps.is_fresh)
            answers.append(results)
            fed |= {to: results[of] for of, to in self.feeds.items()}
            stopped = self.stops(results)
        together = {output.name: self._together(output, answers) for output in self.model.outputs}
        return together, {"steps": len(answers), "stopped": stopped}


class RepeatTalk(WindowTalk):
    """A sequence whose requests are served, stepped by the oracle, and compared."""

    oracle: RepeatOracle
    #: `max_steps_per_request` of the model, if a request says nothing.
    most = 0

    def __init__(self, client: Asks, oracle: RepeatOracle, seed: int):
        super().__init__(client, oracle, np.random.default_rng(seed))

    def draw(self, elements: int) -> dict[str, np.ndarray]:
        """Random inputs, with so many tokens."""
        drawn = self.model.draw(self.rng)
        first = self.model.inputs[0]
        assert first.between is not None
        drawn[first.name] = self.rng.integers(*first.between, (1, elements), endpoint=True).astype(np.int64)
        return drawn

    def ask(self, inputs, *, start=False, end=False, **parameters) -> Answer:
        self.oracle.most = parameters.get("max_steps", self.most)
        return super().ask(inputs, start=start, end=end, **parameters)

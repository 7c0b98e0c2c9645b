"""Models whose sequences outlive their server: each step is in a store before it is answered, or some time later."""

from __future__ import annotations

import pytest

from harness.model import Model
from harness.own import Talk, own
from harness.raw import Answer, Refused
from harness.sequence_oracle import Context, SequenceOracle

#: Runs a test with a folder, and with Valkey: the fixture `location` says where.
both_stores = pytest.mark.parametrize("location", ["file", "valkey"], indirect=True)


def stored(model: Model, location: str, **parameters: object) -> Model:
    """The model, whose steps are saved there before they are answered."""
    return own(model, state_store=location, durability="step", **parameters)


#: An interval that no test lives to see.
NEVER_MS = 3_600_000


def saved_later(model: Model, location: str, interval_ms: int | None = 20, **parameters: object) -> Model:
    """The model, whose steps are saved so long after their answers; None: when a sequence leaves its server."""
    level: dict[str, object] = {"durability": "drain"}
    if interval_ms is not None:
        level = {"durability": "interval", "save_interval_ms": interval_ms}
    return own(model, state_store=location, **level, **parameters)


class Diary(Talk):
    """A sequence that may lose steps which are not saved.

    Each answer says how many steps the sequence has made. The oracle goes back to these, makes the step, and has to give the
    same outputs. `lost` counts the answered steps that were lost.
    """

    def __init__(self, *how, **more):
        super().__init__(*how, **more)
        self.pages = [self._mark()]
        self.answered = self.saved = self.lost = 0

    def check(self, answer: Answer, inputs, *, start: bool = False, end: bool = False) -> None:
        if start:
            self.oracle = SequenceOracle(self.model)
            self.pages = [self._mark()]
            self.answered = self.saved = 0
        made, saved = steps(answer)
        assert isinstance(made, int) and isinstance(saved, int), answer.parameters
        assert self.saved < made <= len(self.pages), f"{made} steps, after {self.saved} of {self.answered} were saved"
        assert self.saved <= saved <= made
        self.lost += self.answered - (made - 1)
        self._turn_to(made - 1)
        super().check(answer, inputs, start=start, end=end)
        self.pages = [*self.pages[:made], self._mark()]
        self.answered, self.saved = made, saved

    def _mark(self) -> tuple[dict, Context, bool]:
        return dict(self.oracle.sequence.state), self.oracle.context.copy(), self.oracle.is_fresh

    def _turn_to(self, step: int) -> None:
        state, context, is_fresh = self.pages[step]
        self.oracle.sequence.state, self.oracle.context, self.oracle.is_fresh = dict(state), context.copy(), is_fresh


def steps(answer: Answer) -> tuple[object, object]:
    """How many steps the sequence has made, and how many of them are saved."""
    return answer.parameters.get("stateful_steps_made"), answer.parameters.get("stateful_steps_saved")


def word(error: Refused) -> str:
    """The code word of an error."""
    return error.text.partition(":")[0]

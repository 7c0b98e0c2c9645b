"""Models whose sequences outlive their server: each step is in a store before it is answered."""

from __future__ import annotations

import pytest

from harness.model import Model
from harness.own import own
from harness.raw import Answer, Refused

#: Runs a test with a folder, and with Valkey: the fixture `location` says where.
both_stores = pytest.mark.parametrize("location", ["file", "valkey"], indirect=True)


def stored(model: Model, location: str, **parameters: object) -> Model:
    """The model, whose steps are saved there before they are answered."""
    return own(model, state_store=location, durability="step", **parameters)


def steps(answer: Answer) -> tuple[object, object]:
    """How many steps the sequence has made, and how many of them are saved."""
    return answer.parameters.get("stateful_steps_made"), answer.parameters.get("stateful_steps_saved")


def word(error: Refused) -> str:
    """The code word of an error."""
    return error.text.partition(":")[0]

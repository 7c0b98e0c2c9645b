"""Sequences on a server are compared with ONNX Runtime on the CPU, and each difference is found."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.gpu_check.models import CHECKED
from support.gpu_check.serving import Alone, Findings, Sequences, Served


class Answers:
    """A client of a server that is ONNX Runtime on the CPU, with an error in some answers."""

    def __init__(self, served: Served, wrong: float = 0.0, drops: bool = False) -> None:
        self.alone, self.wrong, self.drops = Alone(served.model), wrong, drops

    def run(self, steps):
        answers = {}
        for step in steps:
            if self.drops and not step.start:
                for state in self.alone.states[step.sequence].values():
                    state[:] = 0
            gave = {name: value + self.wrong for name, value in self.alone.step(step).items()}
            answers[step.sequence] = SimpleNamespace(as_numpy=gave.get)
        return answers


def answers(served: Served, **faults) -> Any:
    """In place of a `Client`."""
    return Answers(served, **faults)


def sequences(name: str, **faults) -> Sequences:
    served = Served(CHECKED[name], rows=4)
    made = Sequences(served, answers(served, **faults), Alone(served.model))
    for count in (4, 2, 3, 4, 1, 4, 4):
        made.round(count)
    made.finish()
    return made


@pytest.mark.parametrize("name", ["accumulate", "cache", "concat", "uncapturable"])
def test_right_answers_do_not_differ(name):
    found = sequences(name)
    assert found.worst == 0 and found.ended >= 4


@pytest.mark.parametrize("name", ["accumulate", "cache", "concat", "growing"])
@pytest.mark.parametrize("faults", [{"wrong": 0.5}, {"wrong": float("nan")}, {"drops": True}])
def test_a_wrong_answer_and_a_lost_state_are_found(name, faults):
    assert sequences(name, **faults).worst > 0.01


def test_states_that_are_kept_as_fp16_are_rounded():
    served = Served(CHECKED["accumulate"], rows=1)
    whole, rounded = (
        Sequences(served, answers(served), Alone(served.model, rounds=rounds)) for rounds in (False, True)
    )
    for each in (whole, rounded):
        for _ in range(6):
            each.round(1)
    assert whole.worst == 0 and 0 < rounded.worst < 0.01


def test_findings_are_lines_and_one_that_is_wrong_is_a_failure(capsys):
    findings = Findings()
    findings.most("memory", 2.0, 3.0, " MiB")
    findings.left_out("graphs", "no GPU")
    assert findings.code == 0
    findings.most("memory", np.inf, 3.0)
    assert findings.code == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["verdict"] for row in rows] == ["right", "left out", "wrong"]
    assert rows[0] == {"check": "memory", "found": "2 MiB", "allowed": "at most 3 MiB", "verdict": "right"}

"""Outputs that are inputs of the graph, too: ONNX Runtime gives the memory of what was fed as the output, so nothing
may be left there that others write to, or that is freed."""

import dataclasses

import numpy as np
import pytest

from harness.conversations import Conversation, together
from harness.graphs import BATCH, graph, node
from harness.model import Model, Tensor
from harness.strategies import both_strategies

F32 = np.float32


def constant_state(name: str, **changes) -> Model:
    """`<<<S, S>>>` keeps its initial value, and X is an output as it is. Dims are fixed."""

    def build():
        return graph(
            [node("Add", "X S", "Y"), node("Add", "C X", "C_OUT")],
            [("X", "fp32", [BATCH, 4]), ("S", "fp32", [BATCH, 4]), ("C", "fp32", [BATCH, 4])],
            [(output, "fp32", [BATCH, 4]) for output in ("Y", "X", "S", "C_OUT")],
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("X", "fp32", (4,)),),
        outputs=tuple(Tensor(output, "fp32", (4,)) for output in ("Y", "X", "S", "C_OUT")),
        states=(("S", "S"), ("C", "C_OUT")),
        initial={"S": np.full((1, 4), 2, F32)},
    )
    model = dataclasses.replace(model, **changes)
    return model.with_parameters(name, initial_states="S=2")


ROWS = 2_000  # 16 KB of each tensor: large enough to be lent to a run


def open_dims(name: str, **changes) -> Model:
    """As before with open dims, and the state begins as the first request's X."""

    def build():
        return graph(
            [node("Add", "S S", "Y"), node("Concat", "C X", "C_OUT", axis=1)],
            [("X", "fp32", [BATCH, "T", 2]), ("S", "fp32", [BATCH, "K", 2]), ("C", "fp32", [BATCH, "L", 2])],
            [("Y", "fp32", [BATCH, "K", 2]), ("X", "fp32", [BATCH, "T", 2]), ("S", "fp32", [BATCH, "K", 2])]
            + [("C_OUT", "fp32", [BATCH, "M", 2])],
        )

    def initial():
        return graph([node("Identity", "X", "S")], [("X", "fp32", [BATCH, "T", 2])], [("S", "fp32", [BATCH, "T", 2])])

    model = Model(
        name,
        build,
        inputs=(Tensor("X", "fp32", (-1, 2)),),
        outputs=tuple(Tensor(output, "fp32", (-1, 2)) for output in ("Y", "X", "S")),
        states=(("S", "S"), ("C", "C_OUT")),
        initial={"S": lambda fed: fed["X"]},
        lengths_at_start={"L": 0},
        files={"1/start.onnx": initial().SerializeToString()},
    )
    return dataclasses.replace(model, **changes).with_parameters(name, initial_state_model="start.onnx")


@both_strategies
@pytest.mark.parametrize("make", [constant_state, open_dims], ids=lambda make: make.__name__)
def test_a_state_that_the_graph_passes_on_stays_and_an_input_comes_back(deployment, make, direct):
    how = {"oldest": "max_queue_delay_microseconds: 20000"} if direct is None else {"direct": direct}
    model = deployment.serve(make(name=f"echo_{make.__name__}_{direct is None}", **how))

    def draw(talk):
        shape = (1, 4) if make is constant_state else (1, ROWS, 2)
        return {"X": talk.rng.standard_normal(shape).astype(F32)}

    def whole(talk):
        for step in range(8):
            talk.step(draw(talk), start=step == 0, end=step == 7)

    # alone, in one turn after the other, and at once
    talks = [Conversation(deployment.connect(), model, np.random.default_rng(seed)) for seed in range(9)]
    whole(talks[0])
    for step in range(6):
        for talk in talks[1:3]:
            talk.step(draw(talk), start=step == 0, end=step == 5)
    together([lambda talk=talk: whole(talk) for talk in talks[3:]])

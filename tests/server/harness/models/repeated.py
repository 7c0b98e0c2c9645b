"""Models with `repeat`: an output of a step is an input of the next one of the same request."""

from __future__ import annotations

import dataclasses

import numpy as np
from onnx import TensorProto

from harness.graphs import BATCH, graph, node
from harness.model import Model, Tensor
from harness.models.generated import decoder
from support.next_token import with_next_token

#: The token after which a sequence stops.
LAST = 3


def spoken(name: str, *, grows: bool = True, until: str | None = f"NEXT={LAST}", **changes) -> Model:
    """NEXT is the token that follows TOKENS: a whole number below 16 that depends on all tokens of the sequence so far, in
    their order, and on GAIN, which each request carries once. SEEN is the tokens that the step read. IS_LAST says whether
    NEXT is LAST. MADE counts the steps of a sequence; the step that makes it FAILS_AT fails. HISTORY is all NEXT of the
    sequence."""

    def build():
        one, some = [BATCH, 1], [BATCH, "n"]
        # the state matters for the answers
        history = [node("ReduceSum", "PAST AXIS", "OF_PAST", keepdims=1), node("Add", "MIXED OF_PAST", "ALL")]
        nothing = [node("Identity", "MIXED", "ALL")]
        return graph(
            [
                node("Add", "MADE_IN ONE", "MADE_OUT"),
                node("Equal", "MADE_OUT FAILS_AT", "FAILS"),
                node("Cast", "FAILS", "INDEX", to=TensorProto.INT64),
                node("Gather", "ZEROS INDEX", "ZERO"),
                node("CumSum", "TOKENS AXIS_0", "RANKED"),
                node("ReduceSum", "RANKED AXIS", "SUM", keepdims=1),
                node("Mul", "HASH_IN FACTOR", "TURNED"),
                node("Add", "TURNED SUM", "ADDED"),
                node("Add", "ADDED GAIN", "GAINED"),
                node("Add", "GAINED ZERO", "MIXED"),
                *(history if grows else nothing),
                node("Mod", "ALL PRIME", "HASH_OUT"),
                node("Mod", "HASH_OUT WORDS", "NEXT"),
                *([node("Concat", "PAST NEXT", "HISTORY", axis=1)] if grows else []),
                node("Equal", "NEXT LAST", "IS_LAST"),
                node("Identity", "TOKENS", "SEEN"),
                node("Identity", "MADE_OUT", "MADE"),
            ],
            [
                ("TOKENS", "int64", some),
                ("GAIN", "int64", one),
                ("FAILS_AT", "int64", one),
                ("HASH_IN", "int64", one),
                ("MADE_IN", "int64", one),
                *([("PAST", "int64", [BATCH, "past"])] if grows else []),
            ],
            [
                ("NEXT", "int64", one),
                ("SEEN", "int64", some),
                ("IS_LAST", "bool", one),
                ("MADE", "int64", one),
                ("HASH_OUT", "int64", one),
                ("MADE_OUT", "int64", one),
                *([("HISTORY", "int64", [BATCH, "now"])] if grows else []),
            ],
            {
                "AXIS": np.array([1], np.int64),
                "AXIS_0": np.array(1, np.int64),
                "ONE": np.array(1, np.int64),
                "FACTOR": np.array(31, np.int64),
                "PRIME": np.array(1009, np.int64),
                "WORDS": np.array(16, np.int64),
                "LAST": np.array(LAST, np.int64),
                "ZEROS": np.zeros(1, np.int64),
            },
        )

    grown = (("PAST", "HISTORY"),) if grows else ()
    model = Model(
        name,
        build,
        inputs=(
            Tensor("TOKENS", "int64", (-1,), between=(0, 15), ragged=True),
            Tensor("GAIN", "int64", (1,), between=(0, 99)),
            Tensor("FAILS_AT", "int64", (1,), between=(-1, -1)),
        ),
        outputs=(
            Tensor("NEXT", "int64", (-1, 1)),
            Tensor("SEEN", "int64", (-1,)),
            Tensor("IS_LAST", "bool", (-1, 1)),
            Tensor("MADE", "int64", (-1, 1)),
        ),
        states=(("HASH_IN", "HASH_OUT"), ("MADE_IN", "MADE_OUT"), *grown),
        lengths_at_start={"past": 0},
        parameters={"repeat": "<<<NEXT, TOKENS>>>"} | ({"repeat_until": until} if until else {}),
    )
    return dataclasses.replace(model, **changes)


def greedy_decoder(name: str, **changes) -> Model:
    """A decoder as Optimum exports one, that also gives the most probable next token."""
    base = decoder(name)
    model = dataclasses.replace(
        base,
        build=lambda: with_next_token(base.build()),
        inputs=tuple(dataclasses.replace(tensor, ragged=True) for tensor in base.inputs),
        outputs=(*base.outputs, Tensor("next_token", "int64", (-1, 1))),
        parameters={**base.parameters, "growing_padding": "left", "repeat": "<<<next_token, input_ids>>>"},
    )
    return dataclasses.replace(model, **changes)

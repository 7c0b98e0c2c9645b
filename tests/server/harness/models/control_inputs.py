"""Models that are fed START, END, READY and the sequence id, and answer what they were fed."""

from __future__ import annotations

import dataclasses

from harness.graphs import BATCH, graph, node
from harness.model import CORRID, END, READY, START, Control, Model, Tensor

# unusual values for no and yes, so that a default would be wrong
UNUSUAL = {"bool": (0, 1), "int32": (5, -7), "fp32": (0.25, 2.5)}


def controls(
    name: str = "controls",
    start: str = "int32",
    end: str = "fp32",
    ready: str = "bool",
    corrid: str = "uint64",
    counts: bool = True,
    **changes,
) -> Model:
    """Takes START, END, READY and the id, each of the given type, and answers what it was fed.

    `counts` adds what the requests carry up; without it there is no state.
    """
    types = {START: start, END: end, READY: ready, CORRID: corrid}
    fed = tuple(Control(kind.rpartition("_")[2], kind, type, UNUSUAL.get(type, (0, 1))) for kind, type in types.items())

    added = "COUNT_IN" if counts else "INPUT"

    def build():
        one = [BATCH, 1]
        return graph(
            [
                node("Add", f"{added} INPUT", "COUNT_OUT"),
                *(node("Identity", control.name, f"{control.name}_SEEN") for control in fed),
            ],
            [
                *((name, "int64", one) for name in dict.fromkeys(["INPUT", added])),
                *((control.name, control.type, one) for control in fed),
            ],
            [
                ("COUNT_OUT", "int64", one),
                *((f"{control.name}_SEEN", control.type, one) for control in fed),
            ],
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "int64", (1,)),),
        outputs=(
            Tensor("COUNT_OUT", "int64", (1,)),
            *(Tensor(f"{control.name}_SEEN", control.type, (1,)) for control in fed),
        ),
        states=(("COUNT_IN", "COUNT_OUT"),) if counts else (),
        controls=fed,
    )
    return dataclasses.replace(model, **changes)

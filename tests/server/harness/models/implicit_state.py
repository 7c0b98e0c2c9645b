"""States in Triton's own configuration, `sequence_batching.state`."""

from __future__ import annotations

from harness.graphs import BATCH
from harness.model import TYPES, Model, State


def implicit(model: Model, name: str, inside: bool = False, **changes) -> Model:
    """The model with its states in `sequence_batching.state`, dims as its graph has them.

    `inside`: the dims have -1 in the batch's place; otherwise they are written without it.
    `changes` are those of the entries, for all of them.
    """
    types = {onnx_type: type for type, (_, onnx_type) in TYPES.items()}
    tensors = {tensor.name: tensor.type.tensor_type for tensor in model.build().graph.input}

    def dims(name: str) -> tuple[int, ...]:
        written = [(-1 if dim.dim_param else dim.dim_value, dim.dim_param == BATCH) for dim in tensors[name].shape.dim]
        return tuple(dim for dim, batch in written if inside or not batch)

    entries = tuple(
        State(source, target, types[tensors[source].elem_type], dims(source), **changes)
        for source, target in model.states
    )
    return model.variant(name, implicit=entries)

"""A decoder that chooses its next token, so that it can go on by itself (`repeat`).

docs/cookbook/llm-decoder.md shows users the same function, and its test runs that one.
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper


def with_next_token(model: ModelProto) -> ModelProto:
    """The model, with the most probable token after the last one as the output `next_token`."""
    ends = {"last": [-1], "after_last": [2**62], "of_tokens": [1]}
    model.graph.initializer.extend(numpy_helper.from_array(np.array(at), name) for name, at in ends.items())
    model.graph.node.append(helper.make_node("ArgMax", ["logits"], ["best"], axis=-1, keepdims=0))
    model.graph.node.append(helper.make_node("Slice", ["best", *ends], ["next_token"]))
    model.graph.output.append(helper.make_tensor_value_info("next_token", TensorProto.INT64, ["batch_size", 1]))
    return model

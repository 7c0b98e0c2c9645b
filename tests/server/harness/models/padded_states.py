"""Growing states with a mask, so that rows of different lengths can share a run (`growing_padding`)."""

from __future__ import annotations

import dataclasses

import numpy as np
from onnx import TensorProto

from harness.graphs import BATCH, graph, node
from harness.model import Model, Tensor
from harness.models.generated import mask

TOO_LARGE = 50
"""A larger element makes a run fail."""


def ranked(
    name: str,
    side: str | None = "left",
    layout: str = "NTW",
    window: int | None = None,
    masked: bool = True,
    type: str = "fp32",
    far: int | None = None,
    **changes,
) -> Model:
    """CACHE keeps every chunk of INPUT [N, chunk, 2], in the order of the axes in `layout`, and TAIL [2, N, T] their sums. SUM
    has one size. An answer is the sum of all elements, each times its rank among those that MASK marks: whole numbers that
    depend on the order of the elements, and not on where padding is.

    `window`: the states keep so many elements at most. `masked`: without, the ranks count the padding, too.
    `far`: if the longest row of a run has more elements, the first output is twice as large.
    """

    def build():
        axes = {"N": BATCH, "T": "T", "W": 2}
        time = layout.index("T")

        of_length = [
            node("Shape", "MASK", "MASK_DIMS"),
            node("Gather", "MASK_DIMS ONE_I", "LENGTH"),
            node("Greater", "LENGTH FAR", "IS_FAR"),
            node("Where", "IS_FAR TWO ONE", "FACTOR"),
            node("Mul", "WEIGHTED FACTOR", "FURTHER"),
        ]

        def kept(all: str, axis: str, out: str):
            return node("Slice", f"{all} FROM END {axis}", out) if window else node("Identity", all, out)

        return graph(
            [
                # what makes a run fail
                node("ReduceMax", "INPUT", "largest", axes=[1, 2], keepdims=0),
                node("Greater", "largest TOO_LARGE", "is_too_large"),
                node("Cast", "is_too_large", "index", to=TensorProto.INT64),
                node("Gather", "ZEROS index", "zero"),
                node("Unsqueeze", "zero AXES_12", "zeros"),
                node("Add", "INPUT zeros", "X"),
                # the states
                node("Cast", "X", "CHUNK_T", to=TensorProto.FLOAT if type == "fp32" else TensorProto.FLOAT16),
                node("Transpose", "CHUNK_T", "CHUNK", perm=["NTW".index(axis) for axis in layout]),
                node("Concat", "CACHE_IN CHUNK", "ALL", axis=time),
                kept("ALL", "TIME", "CACHE_OUT"),
                node("ReduceSum", "X AXIS_2", "SUMS", keepdims=0),
                node("Cast", "SUMS", "SUMS_64", to=TensorProto.INT64),
                node("Unsqueeze", "SUMS_64 AXIS_0", "PLUS"),
                node("Neg", "PLUS", "MINUS"),
                node("Concat", "PLUS MINUS", "BOTH", axis=0),
                node("Concat", "TAIL_IN BOTH", "TAIL_ALL", axis=2),
                kept("TAIL_ALL", "AXIS_2", "TAIL_OUT"),
                node("ReduceSum", "SUMS AXIS_1", "TOTAL"),
                node("Add", "SUM_IN TOTAL", "SUM_OUT"),
                # the answers
                node("Cast", "MASK", "VALID", to=TensorProto.FLOAT),
                node("Max", f"VALID {'ZERO' if masked else 'ONE'}", "COUNTED"),
                node("CumSum", "COUNTED ONE_I", "RANKS"),
                node("Mul", "RANKS COUNTED", "WEIGHTS"),
                node("Unsqueeze", "WEIGHTS AXIS_2", "WEIGHTS_3"),
                node("Cast", "ALL", "ALL_32", to=TensorProto.FLOAT),
                node("Transpose", "ALL_32", "ALL_NTW", perm=[layout.index(axis) for axis in "NTW"]),
                node("Mul", "ALL_NTW WEIGHTS_3", "WEIGHTED"),
                *([] if far is None else of_length),
                node("ReduceSum", f"{'WEIGHTED' if far is None else 'FURTHER'} AXIS_1", "OUTPUT", keepdims=0),
                node("Unsqueeze", "WEIGHTS AXIS_0", "WEIGHTS_0"),
                node("Cast", "TAIL_ALL", "TAIL_32", to=TensorProto.FLOAT),
                node("Mul", "TAIL_32 WEIGHTS_0", "TAILS"),
                node("ReduceSum", "TAILS AXIS_2", "TAIL_2N", keepdims=0),
                node("Transpose", "TAIL_2N", "TAIL", perm=[1, 0]),
                node("Identity", "SUM_OUT", "SUM"),
            ],
            [
                ("INPUT", "fp32", [BATCH, "chunk", 2]),
                ("MASK", "int64", [BATCH, "all"]),
                ("CACHE_IN", type, [axes[axis] for axis in layout]),
                ("TAIL_IN", "int64", [2, BATCH, "T"]),
                ("SUM_IN", "fp32", [BATCH, 1]),
            ],
            [
                ("OUTPUT", "fp32", [BATCH, 2]),
                ("TAIL", "fp32", [BATCH, 2]),
                ("SUM", "fp32", [BATCH, 1]),
                ("CACHE_OUT", type, [{**axes, "T": "T_new"}[axis] for axis in layout]),
                ("TAIL_OUT", "int64", [2, BATCH, "T_new"]),
                ("SUM_OUT", "fp32", [BATCH, 1]),
            ],
            {
                "AXES_12": np.array([1, 2], np.int64),
                "AXIS_0": np.array([0], np.int64),
                "AXIS_1": np.array([1], np.int64),
                "AXIS_2": np.array([2], np.int64),
                "TIME": np.array([time], np.int64),
                "FROM": np.array([-(window or 1)], np.int64),
                "END": np.array([2**62], np.int64),
                "ONE_I": np.array(1, np.int64),
                "FAR": np.array(far or 0, np.int64),
                "TWO": np.array(2, np.float32),
                "ZERO": np.array(0, np.float32),
                "ONE": np.array(1, np.float32),
                "TOO_LARGE": np.array(TOO_LARGE, np.float32),
                "ZEROS": np.zeros(1, np.float32),
            },
        )

    # where the batch is first, a state can be an answer, too
    listed = (Tensor("CACHE_OUT", type, (-1, 2)),) if layout.startswith("NT") else ()
    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "fp32", (-1, 2), between=(-9, 9)),),
        outputs=(Tensor("OUTPUT", "fp32", (2,)), Tensor("TAIL", "fp32", (2,)), Tensor("SUM", "fp32", (1,)), *listed),
        states=(("CACHE_IN", "CACHE_OUT"), ("TAIL_IN", "TAIL_OUT"), ("SUM_IN", "SUM_OUT")),
        lengths_at_start={"T": 0},
        parameters={"generated_inputs": "MASK=mask(CACHE_IN, INPUT)"} | ({"growing_padding": side} if side else {}),
        generated={"MASK": lambda *of: mask("CACHE_IN", layout.index("T"), "INPUT")(*of)[None]},
    )
    return dataclasses.replace(model, **changes)

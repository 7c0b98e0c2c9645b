"""Models with inputs that no request carries: counters, positions, lengths and masks.

What the backend must feed them is `Model.generated`; an answer shows it (`counted`), or depends on it (`decoder`, `wenet`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from onnx import TensorProto

from harness.graphs import BATCH, checked_gather, graph, node, numbers
from harness.model import TYPES, Model, Tensor

Make = Callable[..., np.ndarray]


# ---- what the backend must feed, from what the oracle has counted, the inputs of the request and the states


def steps(factor: int = 1, addend: int = 0) -> Make:
    return lambda context, fed, state: np.array(context.steps * factor + addend)


def elements(name: str, axis: int = 1, factor: int = 1, addend: int = 0) -> Make:
    return lambda context, fed, state: np.array(context.had(name, axis) * factor + addend)


def positions(name: str, axis: int = 1, factor: int = 1, addend: int = 0) -> Make:
    def make(context, fed, state):
        first = context.had(name, axis)
        return np.arange(first, first + fed[name].shape[axis]) * factor + addend

    return make


def length(name: str, axis: int = 1, factor: int = 1, addend: int = 0) -> Make:
    return lambda context, fed, state: np.array(state[name].shape[axis] * factor + addend)


def mask(state_name: str, state_axis: int = 1, name: str | None = None, axis: int = 1, more: int = 0) -> Make:
    def make(context, fed, state):
        return np.ones(state[state_name].shape[state_axis] + (fed[name].shape[axis] if name else more))

    return make


def last(count: Make, elements: int) -> Make:
    def make(*of):
        made = np.zeros(elements)
        made[max(elements - int(count(*of)), 0) :] = 1
        return made

    return make


@dataclasses.dataclass(frozen=True)
class Made:
    """An input of `generated_inputs`: as it is in the graph, its entry, and what must come."""

    name: str
    type: str
    dims: tuple[int | str, ...]
    entry: str
    make: Make

    def shaped(self, context, fed, state) -> np.ndarray:
        """The values for a batch of one: each dim is 1 or as long as there are values, or repeats them."""
        values = np.atleast_1d(self.make(context, fed, state))
        shape = [dim if isinstance(dim, int) else 1 for dim in self.dims]
        longest = [at for at, dim in enumerate(self.dims) if isinstance(dim, str) and dim != BATCH]
        if longest:
            shape[longest[-1]] = len(values)
            values = values.reshape([-1 if at == longest[-1] else 1 for at in range(len(shape))])
        return np.broadcast_to(values, shape) if shape else values.reshape(())


def counted(name: str, *made: Made, batch: int | str = BATCH, **changes) -> Model:
    """CACHE [N, T] keeps TABLE[INPUT], for INPUT [N, n], in which 4 and more is out of the table, so that the run fails. The
    answers are the cache, and for each generated input what it is, as fp64 [N, elements]."""

    def build():
        nodes = [
            *checked_gather("TABLE", "INPUT", "WORTH", TensorProto.INT32),
            node("Concat", "CACHE WORTH", "CACHE_OUT", axis=1),
            node("Identity", "CACHE_OUT", "OUTPUT"),
            # [N, 1] of zeros, which gives an input without a batch its rows
            node("Shape", "INPUT", "ROWS", start=0, end=1),
            node("Concat", "ROWS ONE", "ROWS_1", axis=0),
            node("ConstantOfShape", "ROWS_1", "ZEROS_32"),
            node("Cast", "ZEROS_32", "ZEROS", to=TensorProto.DOUBLE),
        ]
        for of in made:
            nodes.append(node("Cast", of.name, f"{of.name}/fp64", to=TensorProto.DOUBLE))
            source, flat = f"{of.name}/fp64", "FLAT_ONE"
            if BATCH in of.dims:
                flat = "FLAT"
                at = of.dims.index(BATCH)
                first = [at, *(axis for axis in range(len(of.dims)) if axis != at)]
                nodes.append(node("Transpose", source, f"{of.name}/first", perm=first))
                source = f"{of.name}/first"
            nodes.append(node("Reshape", f"{source} {flat}", f"{of.name}/flat"))
            nodes.append(node("Add", f"{of.name}/flat ZEROS", f"seen.{of.name}"))
        return graph(
            nodes,
            [
                ("INPUT", "int64", [batch, "n"]),
                ("CACHE", "int32", [batch, "T"]),
                *((of.name, of.type, list(of.dims)) for of in made),
            ],
            [
                ("OUTPUT", "int32", [batch, "T_new"]),
                ("CACHE_OUT", "int32", [batch, "T_new"]),
                *((f"seen.{of.name}", "fp64", [batch, None]) for of in made),
            ],
            {
                "TABLE": numbers(1, 10, 100, 1000),
                "ONE": np.array([1], np.int64),
                "FLAT": np.array([0, -1], np.int64),
                "FLAT_ONE": np.array([1, -1], np.int64),
            },
        )

    whole = (1,) if batch == 1 else ()
    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "int64", (*whole, -1), between=(0, 3)),),
        outputs=(
            Tensor("OUTPUT", "int32", (*whole, -1)),
            *(Tensor(f"seen.{of.name}", "fp64", (*whole, -1)) for of in made),
        ),
        states=(("CACHE", "CACHE_OUT"),),
        lengths_at_start={"T": 0},
        parameters={"generated_inputs": " ".join(f"{of.name}={of.entry}" for of in made)},
        generated={of.name: of.shaped for of in made},
        max_batch_size=0 if batch == 1 else 8,
    )
    return dataclasses.replace(model, **changes)


def decoder(name: str, layers: int = 2, heads: int = 2, width: int = 4, mask_type: str = "int64", **changes) -> Model:
    """A decoder as Optimum exports one: input_ids [B, n], attention_mask [B, past + n], position_ids [B, n], and keys and
    values of each layer [B, heads, past, width]."""
    all_heads, words, places = heads * width, 16, 512

    def build():
        rng = np.random.default_rng(5)

        def weights(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32) / 2

        made = {
            "WORDS": weights(words, all_heads),
            "PLACES": weights(places, all_heads),
            "SPLIT": np.array([0, 0, heads, width], np.int64),
            "JOIN": np.array([0, 0, all_heads], np.int64),
            "AXES_12": np.array([1, 2], np.int64),
            "ONE": np.array(1, np.float32),
            "FAR": np.array(-1e9, np.float32),
            "HEAD": weights(all_heads, words),
        }
        nodes = [
            node("Gather", "WORDS input_ids", "of_words"),
            node("Gather", "PLACES position_ids", "of_places"),
            node("Add", "of_words of_places", "hidden.0"),
            node("Cast", "attention_mask", "mask", to=TensorProto.FLOAT),
            node("Sub", "ONE mask", "masked"),
            node("Mul", "masked FAR", "far"),
            node("Unsqueeze", "far AXES_12", "bias"),
        ]
        for layer in range(layers):
            for part in "QKV":
                made[f"{part}.{layer}"] = weights(all_heads, all_heads)
                nodes += [
                    node("MatMul", f"hidden.{layer} {part}.{layer}", f"{part}/flat.{layer}"),
                    node("Reshape", f"{part}/flat.{layer} SPLIT", f"{part}/split.{layer}"),
                    node("Transpose", f"{part}/split.{layer}", f"{part}/heads.{layer}", perm=[0, 2, 1, 3]),
                ]
            past, present = f"past_key_values.{layer}", f"present.{layer}"
            nodes += [
                node("Concat", f"{past}.key K/heads.{layer}", f"{present}.key", axis=2),
                node("Concat", f"{past}.value V/heads.{layer}", f"{present}.value", axis=2),
                node("Transpose", f"{present}.key", f"keys.{layer}", perm=[0, 1, 3, 2]),
                node("MatMul", f"Q/heads.{layer} keys.{layer}", f"scores.{layer}"),
                node("Add", f"scores.{layer} bias", f"biased.{layer}"),
                node("Softmax", f"biased.{layer}", f"shares.{layer}", axis=-1),
                node("MatMul", f"shares.{layer} {present}.value", f"mixed.{layer}"),
                node("Transpose", f"mixed.{layer}", f"by_time.{layer}", perm=[0, 2, 1, 3]),
                node("Reshape", f"by_time.{layer} JOIN", f"attended.{layer}"),
                node("Add", f"hidden.{layer} attended.{layer}", f"hidden.{layer + 1}"),
            ]
        nodes.append(node("MatMul", f"hidden.{layers} HEAD", "logits"))
        both = [(layer, part) for layer in range(layers) for part in ("key", "value")]
        return graph(
            nodes,
            [
                ("input_ids", "int64", ["batch_size", "sequence_length"]),
                ("attention_mask", mask_type, ["batch_size", "past_sequence_length + sequence_length"]),
                ("position_ids", "int64", ["batch_size", "sequence_length"]),
                *(
                    (f"past_key_values.{layer}.{part}", "fp32", ["batch_size", heads, "past_sequence_length", width])
                    for layer, part in both
                ),
            ],
            [
                ("logits", "fp32", ["batch_size", "sequence_length", words]),
                *(
                    (f"present.{layer}.{part}", "fp32", ["batch_size", heads, "present_length", width])
                    for layer, part in both
                ),
            ],
            made,
        )

    key = "past_key_values.0.key"
    model = Model(
        name,
        build,
        inputs=(Tensor("input_ids", "int64", (-1,), between=(0, words - 1)),),
        outputs=(Tensor("logits", "fp32", (-1, words)),),
        states=tuple(
            (f"past_key_values.{layer}.{part}", f"present.{layer}.{part}")
            for layer in range(layers)
            for part in ("key", "value")
        ),
        lengths_at_start={"past_sequence_length": 0},
        parameters={
            "generated_inputs": f"position_ids=positions(input_ids), attention_mask=mask({key}, input_ids)",
        },
        generated={
            "position_ids": lambda *of: positions("input_ids")(*of)[None],
            "attention_mask": lambda *of: mask(key, 2, "input_ids")(*of)[None],
        },
        tolerance=1e-4,
    )
    return dataclasses.replace(model, **changes)


def wenet(
    name: str, left_chunks: int | None = None, has_mask: bool = False, has_open_dims: bool = True, **changes
) -> Model:
    """A streaming encoder with the signature of WeNet's u2++ (wenet-e2e/wenet, wenet/bin/export_onnx_cpu.py): 67 frames of
    `chunk` become 16, the keys and values of which att_cache [layers, heads, T, 2 * width] keeps. Nothing has a batch.

    With `left_chunks`, it keeps those of so many chunks, which are there from START on, and att_mask is 0 for those that do
    not exist yet. Then the exporter leaves the dims open, too, unless its user takes them out of the script.

    Without, the exporter drops att_mask and required_cache_size; `has_mask` is for those that keep the mask."""
    size, frames, layers, heads, width = 16, 67, 12, 4, 64
    out = heads * width
    limited = left_chunks is not None
    past = size * (left_chunks or 0)
    open_dims = has_open_dims or not limited
    cached = [layers, heads, "T_CACHE" if open_dims else past, 2 * width]
    masked = [1, 1, "T_ADD_T_CACHE" if open_dims else past + size]
    convolved = [layers, 1, out, 7]

    def build():
        rng = np.random.default_rng(7)

        def weights(*shape: int) -> np.ndarray:
            return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[:-1]))).astype(np.float32)

        mask = [
            node("Unsqueeze", "att_mask AXIS_1", "mask"),  # [1, 1, 1, T_CACHE + 16]
            node("Where", "mask scores FAR", "masked"),
        ]
        return graph(
            [
                node("Transpose", "chunk", "chunk/channels", perm=[0, 2, 1]),
                node("Conv", "chunk/channels FRONT", "fewer", strides=[4]),
                node("Transpose", "fewer", "frames", perm=[0, 2, 1]),  # [1, 16, out]
                node("Cast", "offset", "offset/float", to=TensorProto.FLOAT),
                node("Mul", "offset/float SMALL", "angle"),
                node("Sin", "angle", "place"),
                node("Add", "frames place", "placed"),
                *(made for part in "QKV" for made in split_into_heads(part)),
                node("Concat", "K/heads V/heads", "both", axis=3),
                node("Mul", "both OF_LAYER", "new"),  # [layers, heads, 16, 2 * width]
                node("Concat", "att_cache new", "all", axis=2),
                node("Split", "all", "keys values", axis=3),
                node("Transpose", "keys", "keys/turned", perm=[0, 1, 3, 2]),
                node("MatMul", "Q/heads keys/turned", "scores"),  # [layers, heads, 16, T_CACHE + 16]
                *(mask if limited or has_mask else [node("Identity", "scores", "masked")]),
                node("Softmax", "masked", "shares", axis=-1),
                node("MatMul", "shares values", "mixed"),
                node("ReduceMean", "mixed", "of_layers", axes=[0], keepdims=1),
                node("Transpose", "of_layers", "by_time", perm=[0, 2, 1, 3]),
                node("Reshape", "by_time JOIN", "attended"),
                node("Expand", "fewer LAYERS", "fewer/layers"),
                node("Concat", "cnn_cache fewer/layers", "convolved", axis=3),
                node("Slice", "convolved MINUS_7 END AXIS_3", "r_cnn_cache"),
                node("ReduceMean", "cnn_cache", "of_cnn", axes=[0, 1, 2, 3], keepdims=0),
                node("Add", "placed attended", "with_past"),
                node("Add", "with_past of_cnn", "output"),
                *(
                    [
                        node("Neg", "required_cache_size", "from"),
                        node("Unsqueeze", "from AXIS_0", "from/1d"),
                        node("Slice", "all from/1d END AXIS_2", "r_att_cache"),
                    ]
                    if limited
                    else [node("Identity", "all", "r_att_cache")]
                ),
            ],
            [
                ("chunk", "fp32", [1, "T", 80]),
                ("offset", "int64", []),
                *([("required_cache_size", "int64", [])] if limited else []),
                ("att_cache", "fp32", cached),
                ("cnn_cache", "fp32", convolved),
                *([("att_mask", "bool", masked)] if limited or has_mask else []),
            ],
            [("output", "fp32", [1, "T", out]), ("r_att_cache", "fp32", cached), ("r_cnn_cache", "fp32", convolved)],
            {
                "FRONT": weights(out, 80, 7),
                "SMALL": np.array(0.01, np.float32),
                **{part: weights(out, out) for part in "QKV"},
                "SPLIT": np.array([0, 0, heads, width], np.int64),
                "JOIN": np.array([0, 0, out], np.int64),
                "OF_LAYER": np.linspace(0.5, 1.5, layers, dtype=np.float32).reshape(layers, 1, 1, 1),
                "LAYERS": np.array([layers, 1, 1, 1], np.int64),
                "FAR": np.array(-np.inf, np.float32),
                "MINUS_7": np.array([-7], np.int64),
                "END": np.array([np.iinfo(np.int64).max], np.int64),
                **{f"AXIS_{axis}": np.array([axis], np.int64) for axis in range(4)},
            },
        )

    def split_into_heads(part: str) -> list:
        return [
            node("MatMul", f"placed {part}", f"{part}/flat"),
            node("Reshape", f"{part}/flat SPLIT", f"{part}/split"),
            node("Transpose", f"{part}/split", f"{part}/heads", perm=[0, 2, 1, 3]),
        ]

    entries, dims, made = f"offset=steps*{size}", {}, {"offset": steps(size, past)}
    if limited:
        length = ""
        if has_open_dims:
            length = f", {past + size}"
            dims = {"state_dims": f"att_cache=[{layers}, {heads}, {past}, {2 * width}]"}
        entries += f"+{past} att_mask=last(steps*{size}+{size}{length})"
        made["att_mask"] = lambda *of: last(steps(size, size), past + size)(*of)[None, None]
    elif has_mask:
        entries += f" att_mask=mask(att_cache, {size})"
        made["att_mask"] = lambda *of: mask("att_cache", 2, more=size)(*of)[None, None]
    model = Model(
        name,
        build,
        inputs=(Tensor("chunk", "fp32", (1, frames, 80)),),
        outputs=(Tensor("output", "fp32", (1, size, out)),),
        states=(("att_cache", "r_att_cache"), ("cnn_cache", "r_cnn_cache")),
        constants={"required_cache_size": past} if limited else {},
        lengths_at_start={"T_CACHE": past},
        max_batch_size=0,
        parameters={"generated_inputs": entries, **dims},
        generated=made,
        tolerance=1e-4,
    )
    return dataclasses.replace(model, **changes)


#: One input of each kind, type and shape that `counted` can show in a model that batches.
OF_EACH_KIND = (
    Made("steps", "int32", (BATCH,), "steps", steps()),
    Made("time", "fp32", (BATCH, 1), "steps*16+64", steps(16, 64)),
    Made("had", "int64", (BATCH, 1), "elements(INPUT)", elements("INPUT")),
    Made("places", "uint8", (BATCH, "n"), "positions(INPUT)", positions("INPUT")),
    Made("rope", "int64", (3, BATCH, "n"), "positions(INPUT@1)*2+1", positions("INPUT", 1, 2, 1)),
    Made("past", "int16", (BATCH,), "length(CACHE)+1", length("CACHE", addend=1)),
    Made("mask", "int64", (BATCH, "T + n"), "mask(CACHE, INPUT)", mask("CACHE", 1, "INPUT")),
    Made("mask_bool", "bool", (BATCH, 1, "T + n"), "mask(CACHE@1,INPUT@1)", mask("CACHE", 1, "INPUT")),
    Made("mask_fp16", "fp16", (BATCH, 1, 2, "T + n"), "mask(CACHE, INPUT)", mask("CACHE", 1, "INPUT")),
    Made("mask_uint8", "uint8", (BATCH, "T"), "mask(CACHE)", mask("CACHE")),
    Made("mask_more", "int64", (BATCH, "T + 2"), "mask(CACHE, 2)", mask("CACHE", more=2)),
    Made("last_bool", "bool", (BATCH, 1, 6), "last(steps*2+1)", last(steps(2, 1), 6)),
    Made("last_fp32", "fp32", (BATCH, "m"), "last(elements(INPUT), 9)", last(elements("INPUT"), 9)),
)

#: The same for inputs that a whole batch shares.
SHARED = (
    Made("offset", "int64", (), "elements(INPUT)", elements("INPUT")),
    Made("steps", "int32", (1,), "steps", steps()),
    Made("places", "int64", ("n",), "positions(INPUT)", positions("INPUT")),
    Made("mask", "fp32", (1, "T + n"), "mask(CACHE, INPUT)", mask("CACHE", 1, "INPUT")),
    Made("last", "bool", (1, 1, 6), "last(steps*2+1)", last(steps(2, 1), 6)),
)

assert all(of.type in TYPES for of in (*OF_EACH_KIND, *SHARED))


def ragged(name: str, **changes) -> Model:
    """Rows of different lengths in one run: SUM [N, 1] adds up what INPUT [N, T] has, each times its place in the sequence,
    and PLACES is what the model is told of these places."""

    def build():
        return graph(
            [
                node("Cast", "places", "places/fp32", to=TensorProto.FLOAT),
                node("Mul", "INPUT places/fp32", "weighed"),
                node("ReduceSum", "weighed AXIS_1", "sum", keepdims=1),
                node("Cast", "lengths", "lengths/fp32", to=TensorProto.FLOAT),
                node("Unsqueeze", "lengths/fp32 AXIS_1", "lengths/2d"),
                node("Add", "sum lengths/2d", "more"),
                node("Add", "SUM_IN more", "SUM"),
                node("Identity", "places", "PLACES"),
                node("ReduceMax", "places", "FURTHEST", axes=[1], keepdims=1),
            ],
            [
                ("INPUT", "fp32", [BATCH, "T"]),
                ("lengths", "int64", [BATCH]),
                ("places", "int64", [BATCH, "T"]),
                ("SUM_IN", "fp32", [BATCH, 1]),
            ],
            [
                ("SUM", "fp32", [BATCH, 1]),
                ("PLACES", "int64", [BATCH, "T"]),
                ("FURTHEST", "int64", [BATCH, 1]),
            ],
            {"AXIS_1": np.array([1], np.int64)},
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "fp32", (-1,), between=(-8, 8), ragged=True, lengths=("lengths", 1)),),
        outputs=(Tensor("SUM", "fp32", (1,)), Tensor("PLACES", "int64", (-1,)), Tensor("FURTHEST", "int64", (1,))),
        states=(("SUM_IN", "SUM"),),
        parameters={"padded_inputs": "INPUT=lengths", "generated_inputs": "places=positions(INPUT)"},
        generated={"places": lambda *of: positions("INPUT")(*of)[None]},
    )
    return dataclasses.replace(model, **changes)

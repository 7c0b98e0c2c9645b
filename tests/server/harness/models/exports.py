"""Models with the signatures that exporters give real ones: their names, types and dims, with little inside.

What a model computes is the same for all: a state of numbers becomes half of itself and the sum
of the first input, a whole number counts, a state that grows gets one more step, and an answer
is the sum of all states. In `Export`, dims are numbers or names, and `BATCH` is the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from harness.graphs import graph, node
from harness.model import TYPES, Model, Tensor


@dataclasses.dataclass(frozen=True)
class Bare(Model):
    """A model with this configuration in place of a whole one; none at all, and no config.pbtxt, if it is None."""

    written: str | None = None
    # inputs that are [batch] in the graph; requests have [1, 1]
    flat: tuple[str, ...] = ()

    def as_fed(self, inputs):
        fed = super().as_fed(inputs)
        return {name: value.reshape(-1) if name in self.flat else value for name, value in fed.items()}

    def config(self) -> str:
        return self.written or ""

    def write(self, repository: Path) -> Path:
        folder = super().write(repository)
        if self.written is None:
            (folder / "config.pbtxt").unlink()
        return folder


Dims = tuple[int | str, ...]
Signature = Dims | tuple[str, Dims]


@dataclasses.dataclass(frozen=True)
class Export:
    """A signature: name -> dims, or (type, dims)."""

    inputs: Mapping[str, Signature]
    outputs: Mapping[str, Signature]
    pairs: Mapping[str, str]
    batch: str | None = "batch"

    def served(self, name: str, folder: str, **changes) -> Bare:
        """The model in the terms of these tests."""
        states = tuple(self.pairs.items())
        requests = [source for source in self.inputs if source not in self.pairs]
        answers = [target for target in self.outputs if target not in self.pairs.values()]
        lengths = {str(dim) for source in self.pairs for dim in self._dims(source) if self._grows(dim)}
        model = Bare(
            folder,
            lambda: self._build(requests[0]),
            inputs=tuple(self._tensor(source) for source in requests),
            outputs=tuple(self._tensor(target) for target in answers),
            states=states,
            lengths_at_start=dict.fromkeys(lengths, 0),
            max_batch_size=0 if self.batch is None else 64,
            file_name=f"{name}.onnx",
            flat=tuple(source for source in requests if self._dims(source) == (self.batch,)),
        )
        return dataclasses.replace(model, **changes)

    def _spec(self, name: str) -> tuple[str, Dims]:
        spec = self.inputs.get(name) or self.outputs.get(name) or ()
        return spec if len(spec) == 2 and isinstance(spec[1], tuple) else ("fp32", spec)

    def _dims(self, name: str) -> Dims:
        return self._spec(name)[1]

    def _grows(self, dim: int | str) -> bool:
        return isinstance(dim, str) and dim != self.batch

    def _tensor(self, name: str) -> Tensor:
        kind, dims = self._spec(name)
        numbers = tuple(-1 if isinstance(dim, str) else dim for dim in dims)
        between = (-8, 8) if kind == "fp32" else (0, 9)
        if self.batch is None:
            return Tensor(name, kind, numbers, between)
        if self.batch not in dims:
            return Tensor(name, kind, numbers or (1,), between, unbatched=numbers)
        at = dims.index(self.batch)
        if at > 0:
            return Tensor(name, kind, numbers, between, batch_inside=True)
        return Tensor(name, kind, numbers[1:] or (1,), between)

    def _build(self, first: str):
        nodes: list[onnx.NodeProto] = []
        weights: dict[str, np.ndarray] = {"HALF": np.array(0.5, np.float32)}

        def constant(values) -> str:
            name = f"const_{len(weights)}"
            weights[name] = np.asarray(values)
            return name

        def axis(dims: Dims) -> int | None:
            return dims.index(self.batch) if self.batch in dims else None

        def summed(name: str, dims: Dims) -> str:
            """[batch], or [1]"""
            others = [at for at in range(len(dims)) if at != axis(dims)]
            total = f"{name}/sum"
            nodes.append(node("Cast", name, f"{name}/float", to=TensorProto.FLOAT))
            if others:
                nodes.append(
                    node("ReduceSum", f"{name}/float {constant(np.array(others))}", f"{total}/raw", keepdims=0)
                )
            else:
                nodes.append(node("Identity", f"{name}/float", f"{total}/raw"))
            nodes.append(node("Reshape", f"{total}/raw {constant(np.array([-1]))}", total))
            return total

        def spread(values: str, dims: Dims, name: str) -> str:
            """The values, one a row, in every place of a tensor of these dims; 1 for what is open."""
            row = [-1 if at == axis(dims) else 1 for at in range(len(dims))]
            ones = np.ones([1 if isinstance(dim, str) else dim for dim in dims], np.float32)
            nodes.append(node("Reshape", f"{values} {constant(np.array(row, np.int64))}", f"{name}/rows"))
            nodes.append(node("Mul", f"{name}/rows {constant(ones)}", f"{name}/spread"))
            return f"{name}/spread"

        brought = summed(first, self._dims(first))
        totals = [brought]
        for source, target in self.pairs.items():
            kind, dims = self._spec(source)
            growing = [at for at, dim in enumerate(dims) if self._grows(dim)]
            if kind != "fp32":
                one = constant(np.ones([1] * len(dims), TYPES[kind][0]))
                nodes.append(node("Add", f"{source} {one}", target))
            elif growing:
                step = spread(brought, dims, target)
                nodes.append(node("Concat", f"{source} {step}", target, axis=growing[0]))
            else:
                nodes.append(node("Mul", f"{source} HALF", f"{target}/half"))
                nodes.append(node("Add", f"{target}/half {spread(brought, dims, target)}", target))
            totals.append(summed(target, dims))
        nodes.append(node("Sum", " ".join(totals), "total"))
        for target in self.outputs:
            if target in self.pairs.values():
                continue
            dims = self._dims(target)
            same = self._dims(first)
            answer = spread("total", dims, target)
            if dims == same:
                nodes.append(node("Cast", first, f"{target}/first", to=TensorProto.FLOAT))
                nodes.append(node("Add", f"{answer} {target}/first", f"{target}/answer"))
                answer = f"{target}/answer"
            nodes.append(node("Cast", answer, target, to=TYPES[self._spec(target)[0]][1]))
        inputs, outputs = ([(name, *self._spec(name)) for name in side] for side in (self.inputs, self.outputs))
        return graph(nodes, inputs, outputs, weights)


def caches(count: int, dims: Dims, source: str, target: str) -> tuple[dict, dict, dict]:
    """Numbered states: inputs, outputs, pairs."""
    names = [(source.format(n), target.format(n)) for n in range(count)]
    return {a: dims for a, _ in names}, {b: dims for _, b in names}, dict(names)


_zipformer = caches(11, (4, "N", 3), "cached_key_{}", "new_cached_key_{}")
_keys = caches(2, ("batch", 2, "past_sequence_length", 4), "past_key_values.{}.key", "present.{}.key")
_values = caches(2, ("batch", 2, "past_sequence_length", 4), "past_key_values.{}.value", "present.{}.value")

EXPORTS = {
    "silero_v4": Export(
        {"input": ("batch", "sequence"), "sr": ("int64", ()), "h": (2, "batch", 64), "c": (2, "batch", 64)},
        {"output": ("batch", 1), "hn": (2, "batch", 64), "cn": (2, "batch", 64)},
        {"h": "hn", "c": "cn"},
    ),
    "nemo_conformer": Export(
        {
            "audio_signal": ("batch", 80, "time"),
            "length": ("int64", ("batch",)),
            "cache_last_channel": (3, "batch", 7, 8),
            "cache_last_time": (3, "batch", 8, 5),
            "cache_last_channel_len": ("int64", ("batch",)),
        },
        {
            "logprobs": ("batch", 4, 9),
            "encoded_lengths": ("int64", ("batch", 1)),
            "cache_last_channel_next": (3, "batch", 7, 8),
            "cache_last_time_next": (3, "batch", 8, 5),
            "cache_last_channel_next_len": ("int64", ("batch",)),
        },
        {
            "cache_last_channel": "cache_last_channel_next",
            "cache_last_time": "cache_last_time_next",
            "cache_last_channel_len": "cache_last_channel_next_len",
        },
    ),
    "icefall_zipformer": Export(
        {
            "x": ("N", 45, 8),
            **_zipformer[0],
            "embed_states": ("N", 2, 3, 4),
            "processed_lens": ("int64", ("N",)),
        },
        {
            "encoder_out": ("N", 16, 8),
            **_zipformer[1],
            "new_embed_states": ("N", 2, 3, 4),
            "new_processed_lens": ("int64", ("N",)),
        },
        {**_zipformer[2], "embed_states": "new_embed_states", "processed_lens": "new_processed_lens"},
        batch="N",
    ),
    "icefall_lstm": Export(
        {"x": ("N", 9, 80), "h0": (2, "N", 6), "c0": (2, "N", 12)},
        {"encoder_out": ("N", 1, 6), "next_h0": (2, "N", 6), "next_c0": (2, "N", 12)},
        {"h0": "next_h0", "c0": "next_c0"},
        batch="N",
    ),
    "wenet": Export(
        {
            "chunk": ("B", "T", 80),
            "att_cache": ("B", 4, "T_CACHE", 8),
            "cnn_cache": ("B", 3, 7),
        },
        {"output": ("B", "T", 80), "r_att_cache": ("B", 4, "T_CACHE", 8), "r_cnn_cache": ("B", 3, 7)},
        {"att_cache": "r_att_cache", "cnn_cache": "r_cnn_cache"},
        batch="B",
    ),
    "robust_video_matting": Export(
        {
            "src": ("batch_size", 3, 4, 4),
            "r1i": ("batch_size", 2, 4, 4),
            "r2i": ("batch_size", 3, 2, 2),
            "r3i": ("batch_size", 4, 1, 1),
        },
        {
            "fgr": ("batch_size", 3, 4, 4),
            "pha": ("batch_size", 1, 4, 4),
            "r1o": ("batch_size", 2, 4, 4),
            "r2o": ("batch_size", 3, 2, 2),
            "r3o": ("batch_size", 4, 1, 1),
        },
        {"r1i": "r1o", "r2i": "r2o", "r3i": "r3o"},
        batch="batch_size",
    ),
    "huggingface_decoder": Export(
        {"input_ids": ("int64", ("batch", "sequence")), **_keys[0], **_values[0]},
        {"logits": ("batch", 1, 11), **_keys[1], **_values[1]},
        {**_keys[2], **_values[2]},
    ),
    "open_model_zoo": Export(
        {"input": (1, 160), "inp_state_000": (1, 4), "inp_state_001": (1, 2, 3)},
        {"output": (1, 160), "out_state_001": (1, 2, 3), "out_state_000": (1, 4)},
        {"inp_state_000": "out_state_000", "inp_state_001": "out_state_001"},
        batch=None,
    ),
    "gtcrn": Export(
        {
            "mix": (1, 9, 1, 2),
            "conv_cache": (2, 1, 4, 3),
            "tra_cache": (2, 3, 1, 1, 4),
            "inter_cache": (2, 1, 3, 4),
        },
        {
            "enh": (1, 9, 1, 2),
            "conv_cache_out": (2, 1, 4, 3),
            "tra_cache_out": (2, 3, 1, 1, 4),
            "inter_cache_out": (2, 1, 3, 4),
        },
        {"conv_cache": "conv_cache_out", "tra_cache": "tra_cache_out", "inter_cache": "inter_cache_out"},
        batch=None,
    ),
    "deep_filter": Export(
        {"input_frame": ("n_batch", 480), "states_in": ("n_batch", 45)},
        {"enhanced_audio_frame": ("n_batch", 480), "states_out": ("n_batch", 45), "lsnr": ("n_batch", 1)},
        {"states_in": "states_out"},
        batch="n_batch",
    ),
    "pytorch_lstm": Export(
        {"x": ("time", "batch", 5), "h_0": (2, "batch", 6), "c_0": (2, "batch", 6)},
        {"y": ("time", "batch", 5), "h_n": (2, "batch", 6), "c_n": (2, "batch", 6)},
        {"h_0": "h_n", "c_0": "c_n"},
    ),
    "dynamo_time_first": Export(
        {"x": ("s77", "s27", 5), "h": (1, "s27", 6)},
        {"y": ("s77", "s27", 5), "hn": (1, "s27", 6)},
        {"h": "hn"},
        batch="s27",
    ),
    "next_state": Export(
        {"observation": ("batch", 4), "hidden": ("batch", 8)},
        {"action": ("batch", 2), "hidden_next": ("batch", 8)},
        {"hidden": "hidden_next"},
    ),
    "previous_state": Export(
        {"frame.features": ("batch", 4), "prev.state": ("batch", 8), "prev.memory": ("batch", 3)},
        {"scores": ("batch", 2), "state": ("batch", 8), "memory": ("batch", 3)},
        {"prev.state": "state", "prev.memory": "memory"},
    ),
    "crossed": Export(
        {"x": ("batch", 4), "b_state": ("batch", 3), "a_state_in": ("batch", 3)},
        {"y": ("batch", 4), "a_state_out": ("batch", 3), "new_b_state": ("batch", 3)},
        {"a_state_in": "a_state_out", "b_state": "new_b_state"},
    ),
    "one_sequence_that_grows": Export(
        {"tokens": ("int32", ("count",)), "past": ("past_length", 3)},
        {"scores": (7,), "present": ("past_length", 3)},
        {"past": "present"},
        batch=None,
    ),
}

#: Of its two states, only the names of `gist` say what it is.
HALF = Export(
    {"x": ("batch", 4), "memory": ("batch", 6), "gist": ("batch", 8)},
    {"y": ("batch", 4), "remembered": ("batch", 6), "gist_new": ("batch", 8)},
    {"memory": "remembered", "gist": "gist_new"},
)

"""Models with the signatures that exporters give real ones: their names, types and dims, with little inside.

The answers are sums of all inputs and states, in which the order of a chunk's elements counts. A state of numbers
becomes half of itself and the sum of the inputs, a whole number counts, a bool becomes false. A state of open length
gets one more step, and drops its first one if its name is in `shifts`.

In `Export`, dims are numbers, names, or None for an open dimension without a name. `families` has the signatures of
real models, with their sources.
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


Dims = tuple[int | str | None, ...]
Signature = Dims | tuple[str, Dims]


@dataclasses.dataclass(frozen=True)
class Export:
    """A signature: name -> dims, or (type, dims)."""

    inputs: Mapping[str, Signature]
    outputs: Mapping[str, Signature]
    pairs: Mapping[str, str]
    batch: str | None = "batch"
    # the graph computes rows apart, and says that there is one
    fixed_batch: bool = False
    # the batch axis of tensors in which it has another name, or none
    batch_axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # what states start with, if not with zeros; open dims have the length 0 in zeros
    initial: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    # states of open length that keep their length
    shifts: frozenset[str] = frozenset()
    # the steps that an open state gets: this many, or None: as many as the first input has
    growth: int | None = 1
    # an input that says which steps of open states count: [batch, past and new steps]
    mask: str | None = None
    # outputs that are constants
    constants: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    # outputs with scores of tokens, and the token that has the best one whenever the sum is odd
    scores: Mapping[str, int] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def served(self, name: str, folder: str, **changes) -> Bare:
        """The model in the terms of these tests."""
        states = tuple(self.pairs.items())
        requests = [source for source in self.inputs if source not in self.pairs]
        answers = [target for target in self.outputs if target not in self.pairs.values()]
        lengths = {str(dim) for source in self.pairs for dim in self.open_dims(source)}
        model = Bare(
            folder,
            self.build,
            inputs=tuple(self._tensor(source) for source in requests),
            outputs=tuple(self._tensor(target) for target in answers),
            states=states,
            lengths_at_start=dict.fromkeys(lengths, 0),
            initial=self.initial,
            max_batch_size=64 if self.has_batch else 0,
            file_name=f"{name}.onnx",
            flat=tuple(source for source in requests if self.dims(source) == (self.batch,)),
        )
        return dataclasses.replace(model, **changes)

    @property
    def has_batch(self) -> bool:
        return not self.fixed_batch and (self.batch is not None or bool(self.batch_axes))

    def spec(self, name: str) -> tuple[str, Dims]:
        spec = self.inputs[name] if name in self.inputs else self.outputs[name]
        return spec if len(spec) == 2 and isinstance(spec[1], tuple) else ("fp32", spec)

    def declared(self, name: str) -> tuple[str, Dims]:
        """The type and dims that the graph says."""
        kind, dims = self.spec(name)
        at = self.batch_axis(name)
        return kind, tuple(1 if self.fixed_batch and axis == at else dim for axis, dim in enumerate(dims))

    def dims(self, name: str) -> Dims:
        return self.spec(name)[1]

    def batch_axis(self, name: str) -> int | None:
        dims = self.dims(name)
        named = dims.index(self.batch) if self.batch in dims and self.batch is not None else None
        return self.batch_axes.get(name, named)

    def open_dims(self, name: str) -> list[int | str | None]:
        """The open dims beside the batch."""
        return [
            dim for at, dim in enumerate(self.dims(name)) if not isinstance(dim, int) and at != self.batch_axis(name)
        ]

    def _tensor(self, name: str) -> Tensor:
        kind, dims = self.declared(name)
        numbers = tuple(dim if isinstance(dim, int) else -1 for dim in dims)
        between = (-8, 8) if kind == "fp32" else (0, 1) if kind == "bool" else (0, 9)
        at = self.batch_axis(name)
        if not self.has_batch:
            return Tensor(name, kind, numbers, between)
        if at is None:
            return Tensor(name, kind, numbers or (1,), between, unbatched=numbers)
        if at > 0:
            return Tensor(name, kind, numbers, between, batch_inside=True)
        return Tensor(name, kind, numbers[1:] or (1,), between)

    def build(self) -> onnx.ModelProto:
        return _Graph(self).model()


class _Graph:
    """The nodes of one export's graph."""

    def __init__(self, export: Export):
        self.export = export
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}

    def model(self) -> onnx.ModelProto:
        export = self.export
        requests = [name for name in export.inputs if name not in export.pairs]
        totals = [self._weighed(self._summed(name), at + 1) for at, name in enumerate(requests)]
        self._add("Cast", self._add("Sum", " ".join(totals), "brought/sum"), "brought", to=TensorProto.FLOAT)
        for at, (source, target) in enumerate(export.pairs.items()):
            totals.append(self._weighed(self._summed(source), at % 7 + 1))
            self._next_state(source, target, requests[0])
        self._add("Sum", " ".join(totals), "total")
        for target in export.outputs:
            if target not in export.pairs.values():
                self._answer(target, requests[0])
        sides = (export.inputs, export.outputs)
        inputs, outputs = ([(name, *export.declared(name)) for name in side] for side in sides)
        model = graph(self.nodes, inputs, outputs, self.weights)
        onnx.helper.set_model_props(model, dict(export.metadata))
        return model

    def _add(self, op: str, inputs: str, output: str, **attributes) -> str:
        self.nodes.append(node(op, inputs, output, **attributes))
        return output

    def _constant(self, values) -> str:
        name = f"const_{len(self.weights)}"
        self.weights[name] = np.asarray(values)
        return name

    def _summed(self, name: str) -> str:
        """[batch], or [1], of doubles, which are exact here, so that the order of the additions changes nothing."""
        kind, dims = self.export.spec(name)
        values = self._add("Cast", name, f"{name}/double", to=TensorProto.DOUBLE)
        if kind == "fp32":
            # a place that is not a number counts, too, for the tests of initial values
            unknown = self._add("IsNaN", values, f"{name}/unknown")
            half = self._constant(np.array(0.5))
            values = self._add("Where", f"{unknown} {half} {values}", f"{name}/known")
        batch_axis = self.export.batch_axis(name)
        others = [at for at in range(len(dims)) if at != batch_axis]
        if self.export.mask and self.export.open_dims(name) and name in self.export.pairs:
            values = self._masked(name, values)
        if others and name != self.export.mask and name not in self.export.pairs:
            along = self._constant(np.array(max(others, key=lambda at: _length(dims[at]))))
            values = self._add("CumSum", f"{values} {along}", f"{name}/ordered")
        if others:
            axes = self._constant(np.array(others))
            values = self._add("ReduceSum", f"{values} {axes}", f"{name}/reduced", keepdims=0)
        return self._add("Reshape", f"{values} {self._constant(np.array([-1]))}", f"{name}/sum")

    def _masked(self, name: str, values: str) -> str:
        """A state [batch, heads, steps, width] without the steps that do not count."""
        constants = [self._constant(np.array(value, np.int64)) for value in ([0], [1], [1, 3])]
        zero, one, others = constants
        steps = self._add(
            "Slice",
            f"{self._add('Shape', name, f'{name}/shape')} {self._constant(np.array([2]))} "
            f"{self._constant(np.array([3]))}",
            f"{name}/steps",
        )
        past = self._add("Slice", f"{self.export.mask} {zero} {steps} {one}", f"{name}/past")
        counts = self._add("Cast", past, f"{name}/counts", to=TensorProto.DOUBLE)
        rows = self._add("Unsqueeze", f"{counts} {others}", f"{name}/mask")
        return self._add("Mul", f"{values} {rows}", f"{name}/masked")

    def _weighed(self, name: str, weight: int) -> str:
        return self._add("Mul", f"{name} {self._constant(np.array(float(weight)))}", f"{name}/weighed")

    def _spread(self, values: str, of: str, name: str, length: int = 1, type=np.float32) -> str:
        """The values, one a row, in every place of a tensor with the dims of `of`; `length` for what is open."""
        dims, batch_axis = self.export.dims(of), self.export.batch_axis(of)
        row = np.array([-1 if at == batch_axis else 1 for at in range(len(dims))], np.int64)
        ones = np.ones(
            [1 if at == batch_axis else dim if isinstance(dim, int) else length for at, dim in enumerate(dims)], type
        )
        rows = self._add("Reshape", f"{values} {self._constant(row)}", f"{name}/rows")
        return self._add("Mul", f"{rows} {self._constant(ones)}", f"{name}/spread")

    def _next_state(self, source: str, target: str, first: str) -> None:
        kind, dims = self.export.spec(source)
        batch_axis = self.export.batch_axis(source)
        growing = [at for at, dim in enumerate(dims) if not isinstance(dim, int) and at != batch_axis]
        if kind == "bool":
            never = self._constant(np.zeros([1] * len(dims), np.bool_))
            self._add("And", f"{source} {never}", target)
        elif kind != "fp32":
            one = self._constant(np.ones([1] * len(dims), TYPES[kind][0]))
            self._add("Add", f"{source} {one}", target)
        elif 0 in dims:
            self._add("Identity", source, target)
        elif growing:
            self._longer_state(source, target, first, growing[0])
        else:
            half = self._add("Mul", f"{source} {self._constant(np.array(0.5, np.float32))}", f"{target}/half")
            self._add("Add", f"{half} {self._spread('brought', source, target)}", target)

    def _longer_state(self, source: str, target: str, first: str, axis: int) -> None:
        growth = self.export.growth
        if growth is None:
            # [batch, n] becomes [batch, 1, n, 1], and each element a step
            values = self._add("Cast", first, f"{target}/values", to=TensorProto.FLOAT)
            batch_axis = self.export.batch_axis(source)
            dims = self.export.dims(source)
            extra = [at for at in range(len(dims)) if at not in (axis, batch_axis)]
            rows = self._add("Unsqueeze", f"{values} {self._constant(np.array(extra))}", f"{target}/rows")
            ones = np.ones(
                [dim if at in extra and isinstance(dim, int) else 1 for at, dim in enumerate(dims)], np.float32
            )
            step = self._add("Mul", f"{rows} {self._constant(ones)}", f"{target}/step")
        else:
            step = self._spread("brought", source, target, growth)
        if source in self.export.shifts:
            bounds = [self._constant(np.array([value])) for value in (growth, 2**31, axis)]
            source = self._add("Slice", f"{source} {' '.join(bounds)}", f"{target}/kept")
        self._add("Concat", f"{source} {step}", target, axis=axis)

    def _answer(self, target: str, first: str) -> None:
        kind, dims = self.export.spec(target)
        if target in self.export.constants:
            self._add("Identity", self._constant(self.export.constants[target]), target)
            return
        answer = self._spread("total", target, target, type=np.float64)
        if self._lengths_of_its_own(target, first):
            answer = self._of_unknown_length(answer, target, first)
        if target in self.export.scores:
            answer = self._scores(answer, target, dims)
        answer = self._as_long_as_the_first(answer, target, first)
        self._add("Cast", answer, target, to=TYPES[kind][1])

    def _lengths_of_its_own(self, target: str, first: str) -> list[int]:
        """The axes of an output that are open and not as long as one of the first input."""
        batch_axis, of_first = self.export.batch_axis(target), self.export.open_dims(first)
        dims = enumerate(self.export.dims(target))
        return [
            at
            for at, dim in dims
            if not isinstance(dim, int) and at != batch_axis and (dim is None or dim not in of_first)
        ]

    def _of_unknown_length(self, answer: str, target: str, first: str) -> str:
        """Cut to a length that ONNX Runtime can't infer, as that of real outputs; it is 1."""
        axes = self._lengths_of_its_own(target, first)
        smallest = self._add("ReduceMin", "total", f"{target}/smallest", keepdims=0)
        never = self._add("IsInf", smallest, f"{target}/never")
        one = self._add(
            "Sub",
            f"{self._constant(np.array(1))} {self._add('Cast', never, f'{target}/zero', to=TensorProto.INT64)}",
            f"{target}/one",
        )
        ends = self._add("Expand", f"{one} {self._constant(np.array([len(axes)]))}", f"{target}/ends")
        starts = self._constant(np.zeros(len(axes), np.int64))
        return self._add("Slice", f"{answer} {starts} {ends} {self._constant(np.array(axes))}", f"{target}/cut")

    def _as_long_as_the_first(self, answer: str, target: str, first: str) -> str:
        """An output that has open dims of the first input has their length, and its elements added."""
        dims, of_first = self.export.dims(target), self.export.dims(first)
        shared = [dim for dim in self.export.open_dims(first) if dim is not None and dim in dims]
        if dims != of_first and not shared:
            return answer
        values = self._add("Cast", first, f"{target}/first", to=TensorProto.DOUBLE)
        if dims != of_first:
            kept = {of_first.index(dim) for dim in shared} | {self.export.batch_axis(first)}
            gone = [at for at in range(len(of_first)) if at not in kept]
            if gone:
                axes = self._constant(np.array(gone))
                values = self._add("ReduceSum", f"{values} {axes}", f"{target}/shared", keepdims=0)
            there = {dims.index(dim) for dim in shared} | {self.export.batch_axis(target)}
            extra = self._constant(np.array([at for at in range(len(dims)) if at not in there], np.int64))
            values = self._add("Unsqueeze", f"{values} {extra}", f"{target}/unsqueezed")
        return self._add("Add", f"{answer} {values}", f"{target}/answer")

    def _scores(self, answer: str, target: str, dims: Dims) -> str:
        """(|sum| + token) mod 37 for each token, and 40 for the special one if the sum is odd."""
        answer = self._add("Abs", answer, f"{target}/positive")
        count, special = int(str(dims[-1])), self.export.scores[target]
        tokens = self._constant(np.arange(count, dtype=np.float64))
        added = self._add("Add", f"{answer} {tokens}", f"{target}/added")
        scores = self._add("Mod", f"{added} {self._constant(np.array(37.0))}", f"{target}/scores", fmod=1)
        only = np.where(np.arange(count) == special, 40.0, 0.0)
        odd = self._add("Mod", f"{answer} {self._constant(np.array(2.0))}", f"{target}/odd", fmod=1)
        odd = self._add("Abs", odd, f"{target}/is_odd")
        bonus = self._add("Mul", f"{odd} {self._constant(only)}", f"{target}/bonus")
        others = self._constant(np.where(np.arange(count) == special, 0.0, 1.0))
        usual = self._add("Mul", f"{scores} {others}", f"{target}/usual")
        return self._add("Add", f"{usual} {bonus}", f"{target}/scored")


def _length(dim: int | str | None) -> int:
    """For a choice of the longest: an open one is."""
    return dim if isinstance(dim, int) else 2**31


def caches(count: int, dims: Dims, source: str, target: str) -> tuple[dict, dict, dict]:
    """Numbered states: inputs, outputs, pairs."""
    names = [(source.format(n), target.format(n)) for n in range(count)]
    return {a: dims for a, _ in names}, {b: dims for _, b in names}, dict(names)


_keys = caches(2, ("batch", 2, "past_sequence_length", 4), "past_key_values.{}.key", "present.{}.key")
_values = caches(2, ("batch", 2, "past_sequence_length", 4), "past_key_values.{}.value", "present.{}.value")

#: Names and dims that say which are the states, and which dimension is the batch. The larger models are in `families`.
EXPORTS = {
    "icefall_lstm": Export(
        {"x": ("N", 9, 80), "h0": (2, "N", 6), "c0": (2, "N", 12)},
        {"encoder_out": ("N", 1, 6), "next_h0": (2, "N", 6), "next_c0": (2, "N", 12)},
        {"h0": "next_h0", "c0": "next_c0"},
        batch="N",
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
    "decoder": Export(
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

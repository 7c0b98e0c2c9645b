"""Converted models beside what they are converted for, in process.

An LSTM of whole sequences that is converted at load, beside the same LSTM exported with its states; and a model whose
batch is fixed to 1, before and after its batch is opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from support.bench.models import BATCH, LAYERS, BenchModel, State, Tensor, sequence_lstm
from support.bench.peers import OURS, Comparison, Serving, Way, in_turn

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto

FEATURES, HIDDEN = 80, 512
STEP, ANSWER = (Tensor("x", (1, FEATURES)),), (Tensor("y", (1, HIDDEN)),)
EXPORTED = BenchModel(
    "lstm_with_states",
    lambda: sequence_lstm(FEATURES, HIDDEN, states=True),
    STEP,
    ANSWER,
    tuple(State(f"{name}_in", f"{name}_out", (LAYERS, BATCH, HIDDEN)) for name in "hc"),
)
CONVERTED = BenchModel(
    "lstm_of_sequences",
    lambda: sequence_lstm(FEATURES, HIDDEN, states=False),
    STEP,
    ANSWER,
    (),
    parameters={"low_latency_transformation": "true"},
)
COMPARED = [(CONVERTED.name, EXPORTED.name), ("opened", "batch 1"), ("opened", "batch 1, 2 workers")]


@dataclass(frozen=True)
class Denoiser:
    """A model whose batch is fixed to 1, by its file and the pairs of its states."""

    file: Path
    pairs: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> Denoiser:
        """FILE,INPUT=OUTPUT,..."""
        import onnx

        file, *pairs = text.split(",")
        if not Path(file).is_file() or not pairs or not all("=" in pair for pair in pairs):
            raise ValueError(
                f"'{text}': FILE,INPUT=OUTPUT,... is wanted, a file that exists and the pairs of its states"
            )
        denoiser = cls(Path(file).resolve(), dict(pair.split("=", 1) for pair in pairs))
        tensors = {tensor.name: tensor.type.tensor_type for tensor in denoiser._ends()}
        for name in (name for pair in denoiser.pairs.items() for name in pair):
            if name not in tensors:
                raise ValueError(f"{file}: there is no '{name}'")
        for tensor in denoiser._read().graph.input:
            dims = [dim.dim_value for dim in tensors[tensor.name].shape.dim]
            if tensors[tensor.name].elem_type != onnx.TensorProto.FLOAT or dims[:1] != [1] or 0 in dims:
                raise ValueError(f"{file}: input '{tensor.name}' is not FLOAT with fixed dims, the first of them 1")
        return denoiser

    @property
    def model(self) -> BenchModel:
        dims = {of.name: tuple(dim.dim_value for dim in of.type.tensor_type.shape.dim)[1:] for of in self._ends()}
        graph = self._read().graph
        inputs = tuple(Tensor(of.name, dims[of.name]) for of in graph.input if of.name not in self.pairs)
        outputs = tuple(Tensor(of.name, dims[of.name]) for of in graph.output if of.name not in self.pairs.values())
        states = tuple(State(read, written, (1, *dims[read])) for read, written in self.pairs.items())
        return BenchModel(self.file.stem, self._read, inputs, outputs, states)

    def _ends(self) -> list[ValueInfoProto]:
        graph = self._read().graph
        return [*graph.input, *graph.output]

    def _read(self) -> ModelProto:
        import onnx

        return onnx.load(self.file)

    def servings(self, sequences: int) -> list[Serving]:
        """With its batch of 1, the same on two threads, and with the batch opened."""
        model = self.model
        alone = lambda tensors: tuple(Tensor(of.name, (1, *of.dims)) for of in tensors)  # noqa: E731
        fixed = replace(model, inputs=alone(model.inputs), outputs=alone(model.outputs))
        found = []
        for name, of, most, parameters in [
            ("batch 1", fixed, 0, {}),
            ("batch 1, 2 workers", fixed, 0, {"worker_count": "2"}),
            ("opened", model, 64, {"open_batch": "true"}),
        ]:
            config = of.config(OURS, most, candidates=256, parameters=parameters, own=True)
            found.append(Serving(OURS, Way(name), model, sequences, config))
        return found


def closed(
    folder: Path, denoiser: Denoiser | None, sequences: list[int], seconds: float, blocks: int
) -> Iterator[dict]:
    """Each sequence sends its next request when it has its answer."""
    with Comparison(folder, [], seconds) as comparison:
        for block in range(blocks):
            for count in sequences:
                yield from _rows(comparison, _lstms(count), "lstm", block)
                if denoiser:
                    yield from _rows(comparison, denoiser.servings(count), "denoiser", block)


def _lstms(sequences: int) -> list[Serving]:
    return [Serving(OURS, Way(of.name), of, sequences) for of in (EXPORTED, CONVERTED)]


def _rows(comparison: Comparison, servings: list[Serving], model: str, block: int) -> Iterator[dict]:
    for serving in in_turn(servings, block):
        yield {"block": block, "load": None} | comparison.measure(serving, "process") | {"model": model}

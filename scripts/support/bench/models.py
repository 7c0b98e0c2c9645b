"""The models of the benchmark, their configurations, and what the driver in process has to know of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from support.paths import ROOT

if TYPE_CHECKING:
    from onnx import ModelProto

BATCH, STEPS = -1, -2
"""In the dims of a state: the number of rows, and the number of steps so far."""


@dataclass(frozen=True)
class Tensor:
    """A TYPE_FP32 tensor of requests or responses: dims without the batch, or with a BATCH of one row."""

    name: str
    dims: tuple[int, ...]


@dataclass(frozen=True)
class State:
    """A TYPE_FP32 state; dims as in the model, with BATCH and STEPS in their places."""

    input: str
    output: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of a row, of one step where it grows."""
        count = 4
        for dim in self.dims:
            count *= max(dim, 1)
        return count


@dataclass(frozen=True)
class BenchModel:
    name: str
    build: Callable[[], ModelProto]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    states: tuple[State, ...]
    says: str = ""
    parameters: dict[str, str] = field(default_factory=dict)

    @property
    def state_bytes(self) -> int:
        return sum(state.bytes for state in self.states)

    @property
    def carried(self) -> BenchModel:
        """The same model with its states in requests and responses, as without a stateful backend. A counter of its
        own lets it be served beside the other."""

        def build() -> ModelProto:
            from onnx import TensorProto, helper

            made = self.build()
            ends = [(made.graph.input, "TICK_IN"), (made.graph.output, "TICK_OUT")]
            for tensors, name in ends:
                tensors.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["tick_batch", 1]))
            made.graph.node.append(helper.make_node("Identity", ["TICK_IN"], ["TICK_OUT"]))
            return made

        def ends(end: str) -> tuple[Tensor, ...]:
            dims = lambda of: of.dims[1:] if of.dims[0] == BATCH else of.dims  # noqa: E731
            return tuple(Tensor(getattr(state, end), dims(state)) for state in self.states)

        tick = State("TICK_IN", "TICK_OUT", (BATCH, 1))
        inputs, outputs = self.inputs + ends("input"), self.outputs + ends("output")
        return BenchModel(
            f"{self.name}_carried", build, inputs, outputs, (tick,), f"{self.says}, carried by the client"
        )

    def config(
        self,
        backend: str,
        max_batch_size: int,
        *,
        candidates: int,
        preferred: int | None = None,
        delay_us: int = 0,
        parameters: dict[str, str] | None = None,
        kind: str = "KIND_CPU",
        declared: str = "",
        own: bool = False,
    ) -> str:
        """A config.pbtxt for sequences, on one thread. `delay_us`: the longest that core waits for a batch of
        `preferred`. `kind`: of the instances. `declared`: states or controls, for `sequence_batching`. `own`: without
        that, so that the backend schedules the sequences."""
        given = {"intra_op_thread_count": "1", "inter_op_thread_count": "1"}
        given |= (
            {
                "max_sequence_number": str(candidates),
                "sequence_cleaner_poll_wait_minutes": "0",
                "on_duplicate_start": "restart",
            }
            if own
            else {"max_candidate_sequence_use_ratio": "1"}
        )
        if self.states and "state [" not in declared:
            given["state_pairs"] = " ".join(f"<<<{state.input}, {state.output}>>>" for state in self.states)
        given |= self.parameters | (parameters or {})
        written = "\n".join(
            f'  {{ key: "{key}" value {{ string_value: "{value}" }} }}{"," if number < len(given) else ""}'
            for number, (key, value) in enumerate(given.items(), 1)
        )
        by_core = f"""sequence_batching {{
  max_sequence_idle_microseconds: 600000000
  {declared}
  oldest {{
    max_candidate_sequences: {candidates}
    {f"preferred_batch_size: [ {preferred} ]" if preferred else ""}
    max_queue_delay_microseconds: {delay_us}
  }}
}}"""
        by_us = ""
        if preferred:
            waits = f"preferred_batch_size: [ {preferred} ] max_queue_delay_microseconds: {delay_us}"
            by_us = f"dynamic_batching {{ {waits} }}"
        return f"""
backend: "{backend}"
max_batch_size: {max_batch_size}
input [ {_tensors(self.inputs)} ]
output [ {_tensors(self.outputs)} ]
{by_us if own else by_core}
instance_group [ {{ count: 1 kind: {kind} }} ]
parameters [
{written}
]
"""

    def write(self, repository: Path, name: str, config: str) -> None:
        """Puts the model into a repository under this name, with its spec beside the repository."""
        version = repository / name / "1"
        version.mkdir(parents=True, exist_ok=True)
        (repository / name / "config.pbtxt").write_text(config)
        onnx = self.onnx_file(repository)
        target = version / "model.onnx"
        if not target.exists():
            target.hardlink_to(onnx)

    def onnx_file(self, repository: Path) -> Path:
        path = repository.parent / "onnx" / f"{self.name}.onnx"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.build().SerializeToString())
        return path

    def spec_file(self, repository: Path) -> Path:
        """What the driver in process reads."""
        row = lambda of: [abs(dim) for dim in of.dims]  # noqa: E731
        tensors = lambda of: [{"name": tensor.name, "dims": row(tensor)} for tensor in of]  # noqa: E731
        path = repository.parent / "onnx" / f"{self.name}.json"
        states = [{"input": of.input, "output": of.output, "dims": list(of.dims)} for of in self.states]
        said = {"onnx": str(self.onnx_file(repository)), "states": states}
        path.write_text(json.dumps(said | {"inputs": tensors(self.inputs), "outputs": tensors(self.outputs)}))
        return path


def _tensors(tensors: tuple[Tensor, ...]) -> str:
    dims = lambda tensor: ", ".join(map(str, tensor.dims))  # noqa: E731
    return ", ".join(f'{{ name: "{of.name}" data_type: TYPE_FP32 dims: [ {dims(of)} ] }}' for of in tensors)


def graph_of(
    nodes: list, inputs: list[tuple[str, list]], outputs: list[tuple[str, list]], constants: dict | None = None
) -> ModelProto:
    from onnx import TensorProto, helper, numpy_helper

    info = lambda of: [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in of]  # noqa: E731
    initializers = [numpy_helper.from_array(value, name) for name, value in (constants or {}).items()]
    graph = helper.make_graph(nodes, "bench", info(inputs), info(outputs), initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _accumulate() -> ModelProto:
    from onnx import helper

    node = helper.make_node
    one = ["batch", 1]
    return graph_of(
        [node("Add", ["X", "SUM_IN"], ["SUM_OUT"]), node("Identity", ["SUM_OUT"], ["Y"])],
        [("X", one), ("SUM_IN", one)],
        [("Y", one), ("SUM_OUT", one)],
    )


def _lstm() -> ModelProto:
    sys.path.insert(0, str(ROOT / "models"))
    try:
        import make_models
    finally:
        sys.path.pop(0)
    return make_models.lstm(features=80, hidden=512, layers=2)


LAYERS = 2


def sequence_lstm(features: int, hidden: int, *, states: bool) -> ModelProto:
    """A stack of LSTM layers over whole sequences, as PyTorch exports it with the batch first: x [B, T, features],
    y [B, T, hidden]. With `states`: it takes and returns h and c of [LAYERS, B, hidden]."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    random, node = np.random.default_rng(1), helper.make_node
    constants = {"layer": np.array([1], np.int64)}
    nodes = [node("Transpose", ["x"], ["x_0"], perm=[1, 0, 2])]
    before, after = ({of: [f"{of}_{when}_{n}" for n in range(LAYERS)] for of in "hc"} for when in ("before", "after"))
    if states:
        nodes += [node("Split", [f"{of}_in"], before[of], axis=0) for of in "hc"]
    for n in range(LAYERS):
        width = features if n == 0 else hidden
        for name, shape in (("W", (4 * hidden, width)), ("R", (4 * hidden, hidden)), ("B", (8 * hidden,))):
            values = random.uniform(-1, 1, (1, *shape)) / np.sqrt(hidden)
            constants[f"{name}_{n}"] = values.astype(np.float32)
        reads = ["", before["h"][n], before["c"][n]] if states else []
        writes = [after["h"][n], after["c"][n]] if states else []
        weights = [f"{name}_{n}" for name in "WRB"]
        nodes.append(node("LSTM", [f"x_{n}", *weights, *reads], [f"y_{n}", *writes], f"lstm_{n}", hidden_size=hidden))
        nodes.append(node("Squeeze", [f"y_{n}", "layer"], [f"x_{n + 1}"]))
    nodes.append(node("Transpose", [f"x_{LAYERS}"], ["y"], perm=[1, 0, 2]))
    nodes += [node("Concat", after[of], [f"{of}_out"], axis=0) for of in "hc"] if states else []
    info = lambda name, *dims: helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)  # noqa: E731
    ends = lambda end: [info(f"{of}_{end}", LAYERS, "batch", hidden) for of in "hc"] if states else []  # noqa: E731
    graph = helper.make_graph(
        nodes,
        "lstm",
        [info("x", "batch", "time", features), *ends("in")],
        [info("y", "batch", "time", hidden), *ends("out")],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _lstm_rows() -> ModelProto:
    """The same with the states batch first, [B, 2, 512], as most exporters write them."""
    from onnx import helper

    made = _lstm()
    graph = made.graph
    batch_first = {"h_in": "h_rows_in", "c_in": "c_rows_in", "h_out": "h_rows_out", "c_out": "c_rows_out"}
    for tensor in (*graph.input, *graph.output):
        if tensor.name in batch_first:
            tensor.name = batch_first[tensor.name]
            dims = tensor.type.tensor_type.shape.dim
            layers, rows = dims[0].dim_value, dims[1].dim_param
            dims[0].dim_param, dims[1].dim_value = rows, layers
    swap = lambda read, written: helper.make_node("Transpose", [read], [written], perm=[1, 0, 2])  # noqa: E731
    before = [swap(batch_first[name], name) for name in ("h_in", "c_in")]
    after = [swap(name, batch_first[name]) for name in ("h_out", "c_out")]
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)
    return made


CACHE_STEPS, WIDTH = 2048, 64


def _cache() -> ModelProto:
    import numpy as np
    from onnx import helper

    node = helper.make_node
    ints = lambda *values: np.array(values, np.int64)  # noqa: E731
    return graph_of(
        [
            node("Slice", ["CACHE_IN", "one", "end", "axis"], ["kept"]),
            node("Concat", ["kept", "X"], ["CACHE_OUT"], axis=1),
            node("Slice", ["CACHE_OUT", "last", "end", "axis"], ["newest"]),
            node("Squeeze", ["newest", "axis"], ["Y"]),
        ],
        [("X", ["batch", 1, WIDTH]), ("CACHE_IN", ["batch", CACHE_STEPS, WIDTH])],
        [("Y", ["batch", WIDTH]), ("CACHE_OUT", ["batch", CACHE_STEPS, WIDTH])],
        {"one": ints(1), "last": ints(-1), "end": ints(2**31), "axis": ints(1)},
    )


def _growing() -> ModelProto:
    import numpy as np
    from onnx import helper

    node = helper.make_node
    return graph_of(
        [
            node("Concat", ["PAST_IN", "X"], ["PAST_OUT"], axis=1),
            node("Squeeze", ["X", "axis"], ["Y"]),
        ],
        [("X", ["batch", 1, WIDTH]), ("PAST_IN", ["batch", "steps", WIDTH])],
        [("Y", ["batch", WIDTH]), ("PAST_OUT", ["batch", "steps_and_one", WIDTH])],
        {"axis": np.array([1], np.int64)},
    )


FORTY = 40


def _forty() -> ModelProto:
    from onnx import helper

    node = helper.make_node
    row = ["batch", 16]
    states = [(f"S{number}_IN", f"S{number}_OUT") for number in range(FORTY)]
    return graph_of(
        [
            *(node("Add", ["X", read], [written]) for read, written in states),
            node("Identity", ["S0_OUT"], ["Y"]),
        ],
        [("X", row), *((read, row) for read, _ in states)],
        [("Y", row), *((written, row) for _, written in states)],
    )


RESET = "ResetSequence"


def resetting(model: BenchModel) -> BenchModel:
    """The same model with an input that clears the states of a row, which NVIDIA's stateful_backend wants, and with
    dims that say where the batch is."""

    def build() -> ModelProto:
        import numpy as np
        from onnx import TensorProto, helper, numpy_helper

        made = model.build()
        graph = made.graph
        graph.input.append(helper.make_tensor_value_info(RESET, TensorProto.BOOL, ["batch", 1]))
        graph.initializer.append(numpy_helper.from_array(np.zeros((), np.float32), "reset_to"))
        first = []
        for state in model.states:
            shape = [-1 if dim == BATCH else 1 for dim in state.dims]
            reset, cleared = f"{state.input}_reset", f"{state.input}_or_reset"
            graph.initializer.append(numpy_helper.from_array(np.array(shape, np.int64), f"{reset}_shape"))
            first.append(helper.make_node("Reshape", [RESET, f"{reset}_shape"], [reset]))
            first.append(helper.make_node("Where", [reset, "reset_to", state.input], [cleared]))
            for node in graph.node:
                for number, name in enumerate(node.input):
                    if name == state.input:
                        node.input[number] = cleared
        rest = list(graph.node)
        del graph.node[:]
        graph.node.extend([*first, *rest])
        return made

    with_batch = lambda of: tuple(Tensor(tensor.name, (BATCH, *tensor.dims)) for tensor in of)  # noqa: E731
    name, inputs, outputs = f"{model.name}_resetting", with_batch(model.inputs), with_batch(model.outputs)
    return replace(model, name=name, build=build, inputs=inputs, outputs=outputs)


MODELS = {
    model.name: model
    for model in (
        BenchModel(
            "accumulate",
            _accumulate,
            (Tensor("X", (1,)),),
            (Tensor("Y", (1,)),),
            (State("SUM_IN", "SUM_OUT", (BATCH, 1)),),
            "one float a sequence",
        ),
        BenchModel(
            "lstm",
            _lstm,
            (Tensor("input", (80,)),),
            (Tensor("output", (512,)),),
            (State("h_in", "h_out", (2, BATCH, 512)), State("c_in", "c_out", (2, BATCH, 512))),
            "2 LSTM layers, hidden 512, input 80: 8 KiB a sequence",
        ),
        BenchModel(
            "lstm_rows",
            _lstm_rows,
            (Tensor("input", (80,)),),
            (Tensor("output", (512,)),),
            (State("h_rows_in", "h_rows_out", (BATCH, 2, 512)), State("c_rows_in", "c_rows_out", (BATCH, 2, 512))),
            "the same with each sequence's state in one piece, [B, 2, 512]",
        ),
        BenchModel(
            "cache",
            _cache,
            (Tensor("X", (1, WIDTH)),),
            (Tensor("Y", (WIDTH,)),),
            (State("CACHE_IN", "CACHE_OUT", (BATCH, CACHE_STEPS, WIDTH)),),
            "shift and append: 512 KiB a sequence",
        ),
        BenchModel(
            "forty",
            _forty,
            (Tensor("X", (16,)),),
            (Tensor("Y", (16,)),),
            tuple(State(f"S{number}_IN", f"S{number}_OUT", (BATCH, 16)) for number in range(FORTY)),
            "forty states of 64 bytes",
        ),
        BenchModel(
            "growing",
            _growing,
            (Tensor("X", (1, WIDTH)),),
            (Tensor("Y", (WIDTH,)),),
            (State("PAST_IN", "PAST_OUT", (BATCH, STEPS, WIDTH)),),
            "grows by 256 bytes a step",
        ),
    )
}

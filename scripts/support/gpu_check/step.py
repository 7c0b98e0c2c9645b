"""The step of one model at one batch size, in process, against ONNX Runtime alone.

    gpu      instances of KIND_GPU; ONNX Runtime with CUDA through IO binding, all tensors made once on the device
    graphs   the same, both with CUDA graphs
    host     instances of KIND_CPU; ONNX Runtime on the CPU, as scripts/bench has it

One JSON object a line, for each way in which the batch's sequences may change from step to step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles

import numpy as np

from support.bench import step as bench
from support.bench.models import BATCH, MODELS, BenchModel

DEVICE = "cuda"
#: As the backend sets them unless told otherwise.
CUDA_OPTIONS = {
    "device_id": "0",
    "cudnn_conv_algo_search": "HEURISTIC",
    "arena_extend_strategy": "kSameAsRequested",
    "use_tf32": "0",
}
WARM_UP = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("batch", type=int)
    parser.add_argument("--kind", choices=("gpu", "graphs", "host"), default="gpu")
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.05)
    options = parser.parse_args()
    model, effort = MODELS[options.model], bench.Effort(options.blocks, options.seconds)
    alone = {} if options.kind == "host" else raw(model, options.batch, effort, graphs=options.kind == "graphs")
    for found in served(model, options.batch, options.kind, effort):
        print(json.dumps(compared({"kind": options.kind} | found | alone)))
    return 0


def compared(row: dict) -> dict:
    """With the time of all but Triton, and its ratios to ONNX Runtime alone where the driver has not made them."""
    row["whole_us"] = row["ours_us"] - row["trivial_us"]
    for key in ("raw_us", "raw_with_copies_us"):
        if row.get(key):
            row.setdefault(f"whole_over_{key.removesuffix('_us')}", row["whole_us"] / row[key])
    return row


def served(model: BenchModel, batch: int, kind: str, effort: bench.Effort) -> list[dict]:
    """What the driver in process measured."""
    with tempfile.TemporaryDirectory(prefix="stateful-step-") as folder:
        parameters = {"enable_cuda_graph": "1", "warmup_batch_sizes": str(batch)} if kind == "graphs" else {}
        ours = "KIND_CPU" if kind == "host" else "KIND_GPU"
        found = list(bench.step(Path(folder) / "repository", model, batch, effort, kind=ours, parameters=parameters))
    # The driver's ONNX Runtime alone is on the CPU.
    names = [] if kind == "host" else ["raw_us", "raw_cpu_us", "trivial_and_raw_us", "own_share_of_cpu"]
    of_cpu = lambda name: name in names or (names and "_over_" in name)  # noqa: E731
    return [{name: value for name, value in row.items() if not of_cpu(name)} for row in found]


def raw(model: BenchModel, batch: int, effort: bench.Effort, *, graphs: bool) -> dict:
    """ONNX Runtime alone: with all tensors on the device, and with inputs brought there and outputs brought back."""
    allowed = os.sched_getaffinity(0)
    # One CPU, as the driver has.
    os.sched_setaffinity(0, {min(allowed)})
    try:
        alone = Raw(model, batch, graphs)
        found = {"raw_us": timed(alone.step, effort), "raw_with_copies_us": timed(alone.step_with_copies, effort)}
    except Exception as error:
        # ONNX Runtime has no classes of its own for what it cannot capture.
        if not graphs:
            raise
        return {"raw_error": str(error)[:500]}
    finally:
        os.sched_setaffinity(0, allowed)
    return {key: value for name, times in found.items() for key, value in _spread(name, times).items()}


class Raw:
    """A session, and bindings that were made once: a state's two tensors change places from step to step."""

    def __init__(self, model: BenchModel, batch: int, graphs: bool) -> None:
        import onnxruntime

        providers = [("CUDAExecutionProvider", CUDA_OPTIONS | ({"enable_cuda_graph": "1"} if graphs else {}))]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        onnx = model.build().SerializeToString()
        self.session = onnxruntime.InferenceSession(onnx, options, providers=providers)
        if "CUDAExecutionProvider" not in self.session.get_providers():
            raise RuntimeError("ONNX Runtime has left CUDA out: its log says why")
        self.batch, self.graphs, self.turn = batch, graphs, 0
        self.inputs = {of.name: self._tensor((batch, *of.dims)) for of in model.inputs}
        self.fed = {name: value.numpy() for name, value in self.inputs.items()}
        self.outputs = {of.name: self._tensor((batch, *of.dims)) for of in model.outputs}
        self.states = [[self._tensor(self._dims(of.dims)) for of in model.states] for _ in range(2)]
        self.runs = [self._run(model, read) for read in range(2)]

    def step(self) -> None:
        self.session.run_with_iobinding(*self.runs[self.turn])
        self.turn = 1 - self.turn

    def step_with_copies(self) -> None:
        for name, value in self.fed.items():
            self.inputs[name].update_inplace(value)
        self.step()
        for output in self.outputs.values():
            output.numpy()

    def _run(self, model: BenchModel, read: int) -> tuple:
        """A binding and options, for reading one set of the states and writing the other."""
        import onnxruntime

        binding = self.session.io_binding()
        for name, value in self.inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in self.outputs.items():
            binding.bind_ortvalue_output(name, value)
        for number, state in enumerate(model.states):
            binding.bind_ortvalue_input(state.input, self.states[read][number])
            binding.bind_ortvalue_output(state.output, self.states[1 - read][number])
        options = onnxruntime.RunOptions()
        if self.graphs:
            options.add_run_config_entry("gpu_graph_id", str(read + 1))
        return binding, options

    def _tensor(self, dims: tuple[int, ...]):
        import onnxruntime

        values = (np.arange(np.prod(dims), dtype=np.float32) % 7 / 16).reshape(dims)
        return onnxruntime.OrtValue.ortvalue_from_numpy(values, DEVICE, 0)

    def _dims(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.batch if dim == BATCH else dim for dim in dims)


def timed(step: Callable[[], None], effort: bench.Effort) -> list[float]:
    """Microseconds of a step, in each block."""
    for _ in range(WARM_UP):
        step()
    rounds = max(4, int(effort.seconds / _seconds(step, WARM_UP)))
    return [1e6 * _seconds(step, rounds) for _ in range(effort.blocks)]


def _seconds(step: Callable[[], None], rounds: int) -> float:
    began = time.perf_counter()
    for _ in range(rounds):
        step()
    return (time.perf_counter() - began) / rounds


def _spread(name: str, values: list[float]) -> dict[str, float]:
    lower, middle, upper = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {name: middle, f"{name}_lower_quartile": lower, f"{name}_upper_quartile": upper}


if __name__ == "__main__":
    sys.exit(main())

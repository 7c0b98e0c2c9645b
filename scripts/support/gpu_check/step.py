"""The step of one model at some batch sizes, in process, against ONNX Runtime alone: with CUDA through IO binding, all
tensors made once on the device. With --graphs: both with CUDA graphs.

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
from typing import TYPE_CHECKING

import numpy as np

from support.bench import step as bench
from support.bench.models import BATCH, MODELS, BenchModel
from support.gpu_check.cuda import Gpu
from support.gpu_check.serving import KIND, SIMULATED

if TYPE_CHECKING:
    from onnxruntime import OrtValue

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
    parser.add_argument("batches", type=int, nargs="+")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.05)
    options = parser.parse_args()
    model, effort = MODELS[options.model], bench.Effort(options.blocks, options.seconds)
    for batch in options.batches:
        alone = raw(model, batch, effort, graphs=options.graphs)
        for found in served(model, batch, effort, graphs=options.graphs):
            print(json.dumps(compared({"graphs": options.graphs} | found | alone)), flush=True)
    return 0


def compared(row: dict) -> dict:
    """With the time of all but Triton, and its ratios to ONNX Runtime alone."""
    row["whole_us"] = row["ours_us"] - row["trivial_us"]
    for key in ("raw_us", "raw_with_copies_us"):
        if row.get(key):
            row[f"whole_over_{key.removesuffix('_us')}"] = row["whole_us"] / row[key]
    return row


def served(model: BenchModel, batch: int, effort: bench.Effort, *, graphs: bool) -> list[dict]:
    """What the driver in process measured; in a dry run, on the CPU and without the stand-in for CUDA, which has less than
    core asks for."""
    if SIMULATED:
        os.environ.pop("LD_LIBRARY_PATH", None)
    captured = {"enable_cuda_graph": "1", "warmup_batch_sizes": str(batch)} if graphs and not SIMULATED else {}
    with tempfile.TemporaryDirectory(prefix="stateful-step-") as folder:
        found = list(bench.step(Path(folder) / "repository", model, batch, effort, kind=KIND, parameters=captured))
    # The driver's ONNX Runtime alone is on the CPU.
    names = ("raw_us", "raw_cpu_us", "trivial_and_raw_us", "own_share_of_cpu")
    return [{name: row[name] for name in row if name not in names and "_over_" not in name} for row in found]


def raw(model: BenchModel, batch: int, effort: bench.Effort, *, graphs: bool) -> dict:
    """ONNX Runtime alone: with all tensors on the device, and with inputs brought there and outputs brought back."""
    allowed = os.sched_getaffinity(0)
    # One CPU, as the driver has.
    os.sched_setaffinity(0, {min(allowed)})
    try:
        alone = Raw(model, batch, graphs)
        found = {"raw_us": timed(alone.step, effort), "raw_with_copies_us": timed(alone.step_with_copies, effort)}
    except Exception as error:
        # ONNX Runtime has no classes of its own for what it cannot capture. The stand-in for CUDA has no cuDNN.
        if not graphs and not SIMULATED:
            raise
        return {"raw_error": str(error)[:500]}
    finally:
        os.sched_setaffinity(0, allowed)
    return {key: value for name, times in found.items() for key, value in _spread(name, times).items()}


class Raw:
    """A session on a stream of ours, and bindings that were made once: a state's two tensors change places from step to
    step. As in the backend, a run waits for the device at its end, unless it is a graph, and a step with copies enqueues
    them from and to pinned memory."""

    def __init__(self, model: BenchModel, batch: int, graphs: bool) -> None:
        import onnxruntime

        self.gpu = Gpu()
        self.stream = self.gpu.stream()
        options = CUDA_OPTIONS | {"user_compute_stream": str(self.stream)}
        providers = [("CUDAExecutionProvider", options | ({"enable_cuda_graph": "1"} if graphs else {}))]
        session_options = onnxruntime.SessionOptions()
        session_options.intra_op_num_threads = session_options.inter_op_num_threads = 1
        onnx = model.build().SerializeToString()
        self.session = onnxruntime.InferenceSession(onnx, session_options, providers=providers)
        if "CUDAExecutionProvider" not in self.session.get_providers():
            raise RuntimeError("ONNX Runtime has left CUDA out: its log says why")
        self.batch, self.graphs, self.turn = batch, graphs, 0
        self.inputs = {of.name: self._tensor((batch, *of.dims)) for of in model.inputs}
        self.outputs = {of.name: self._tensor((batch, *of.dims)) for of in model.outputs}
        self.states = [[self._tensor(self._dims(of.dims)) for of in model.states] for _ in range(2)]
        self.runs = [self._run(model, read) for read in range(2)]
        self.uploads, self.downloads = self._pinned(self.inputs), self._pinned(self.outputs)

    def step(self) -> None:
        self._enqueue()
        self.gpu.wait(self.stream)

    def step_with_copies(self) -> None:
        for pinned, address, size in self.uploads:
            self.gpu.upload(pinned, address, size, self.stream)
        self._enqueue()
        for pinned, address, size in self.downloads:
            self.gpu.download(address, pinned, size, self.stream)
        self.gpu.wait(self.stream)

    def _enqueue(self) -> None:
        self.session.run_with_iobinding(*self.runs[self.turn])
        self.turn = 1 - self.turn

    def _pinned(self, tensors: dict[str, OrtValue]) -> list[tuple[int, int, int]]:
        """Of each tensor: pinned memory of its size, its address, its bytes."""
        sizes = {name: 4 * int(np.prod(value.shape())) for name, value in tensors.items()}
        return [(self.gpu.pin(sizes[name]), value.data_ptr(), sizes[name]) for name, value in tensors.items()]

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
            # The run only enqueues; the step waits. Without graphs, ONNX Runtime would not free what nodes have pinned.
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
            options.add_run_config_entry("gpu_graph_id", str(read + 1))
        return binding, options

    def _tensor(self, dims: tuple[int, ...]) -> OrtValue:
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

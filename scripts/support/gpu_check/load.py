"""One model of the benchmark with instances of KIND_GPU on a real tritonserver: it loads, and its answers are ONNX
Runtime's on the CPU. With --graphs: how many of its runs were CUDA graphs, as ONNX Runtime's log says."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpc_client

from support.bench.models import BATCH, MODELS, BenchModel
from support.server import ServerError, TritonServer

STEPS = 12
SEQUENCES = 3
#: Sums are made in another order there.
TOLERANCE = 1e-4
#: At level 1 (info) of ONNX Runtime's log.
_REPLAY = "Replaying the captured"
_PROBLEM = re.compile(r"^[WE]\d{4}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--kind", default="KIND_GPU", help="of the instances (default: KIND_GPU)")
    options = parser.parse_args()
    try:
        row, log = check(MODELS[options.model], options.kind, options.graphs)
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(row))
    if row["worst"] > TOLERANCE or (options.graphs and not row["replays"]):
        print(log[-5000:], file=sys.stderr)
        return 1
    return 0


def check(model: BenchModel, kind: str, graphs: bool) -> tuple[dict, str]:
    """What was found, and the server's log."""
    parameters = {"enable_cuda_graph": "1", "warmup_batch_sizes": "1"} if graphs else {}
    with tempfile.TemporaryDirectory(prefix="stateful-load-") as folder:
        repository = Path(folder) / "repository"
        config = model.config("stateful", 1, candidates=16, parameters=parameters, kind=kind)
        model.write(repository, model.name, config)
        began = time.monotonic()
        with TritonServer(repository, ready_timeout_s=100, backend_config={"ort-logging-level": "1"}) as server:
            ready_s = time.monotonic() - began
            worst = max(_worst(server, model, sequence) for sequence in range(1, SEQUENCES + 1))
            log = server.log_text()
    problems = [line for line in log.splitlines() if _PROBLEM.match(line)]
    row = {"model": model.name, "kind": kind, "ready_s": round(ready_s, 2), "worst": worst, "warnings": problems[:20]}
    if graphs:
        row |= {"runs": SEQUENCES * STEPS, "replays": sum(_REPLAY in line for line in log.splitlines())}
    return row, log


def _worst(server: TritonServer, model: BenchModel, sequence: int) -> float:
    """The largest difference of a sequence's answers from ONNX Runtime's on the CPU."""
    alone, worst = Alone(model), 0.0
    random = np.random.default_rng(sequence)
    with grpc_client.InferenceServerClient(server.grpc_url) as client:
        for step in range(STEPS):
            fed = {of.name: random.standard_normal((1, *of.dims), np.float32) for of in model.inputs}
            answer = client.infer(
                model.name,
                [_input(name, value) for name, value in fed.items()],
                sequence_id=sequence,
                sequence_start=step == 0,
                sequence_end=step == STEPS - 1,
            )
            for name, right in alone.step(fed).items():
                worst = max(worst, float(np.abs(answer.as_numpy(name) - right).max()))
    return worst


def _input(name: str, value: np.ndarray) -> grpc_client.InferInput:
    made = grpc_client.InferInput(name, list(value.shape), "FP32")
    made.set_data_from_numpy(value)
    return made


class Alone:
    """A sequence, stepped by hand with ONNX Runtime on the CPU."""

    def __init__(self, model: BenchModel) -> None:
        import onnxruntime

        self.model = model
        onnx = model.build().SerializeToString()
        self.session = onnxruntime.InferenceSession(onnx, providers=["CPUExecutionProvider"])
        self.states = {state.input: np.zeros(_one_row(state.dims), np.float32) for state in model.states}

    def step(self, fed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = [of.name for of in self.session.get_outputs()]
        gave = dict(zip(names, self.session.run(names, fed | self.states), strict=True))
        self.states = {state.input: gave[state.output] for state in self.model.states}
        return {of.name: gave[of.name] for of in self.model.outputs}


def _one_row(dims: tuple[int, ...]) -> list[int]:
    return [1 if dim == BATCH else dim for dim in dims]


if __name__ == "__main__":
    sys.exit(main())

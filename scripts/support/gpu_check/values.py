"""Answers of one model on a real tritonserver against ONNX Runtime on the CPU, with sequences that join and leave.

With --graphs: CUDA graphs for these numbers of rows, and how many runs were replays, as ONNX Runtime's log says.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time

from support.gpu_check.models import CHECKED
from support.gpu_check.serving import BACKENDS, SIMULATED, Alone, Client, Findings, Sequences, Served, graphs, serving

ROUNDS = 40
#: Where not all results are equal: sums are made in another order on a GPU, and a sum that ends beside the middle of two
#: numbers of fp16 may be rounded to the other one.
TOLERANCE = {"lstm": 1e-4}
TOLERANCE_FP16 = {"lstm": 4e-3}
TOLERANCE_TRT = 1e-3
_REPLAY = "Replaying the captured"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=CHECKED)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--fp16", action="store_true", help="the states are kept as half precision")
    parser.add_argument("--graphs", type=lambda text: [int(size) for size in text.split(",")], default=[])
    parser.add_argument("--provider", choices=("cuda", "trt"), default="cuda")
    options = parser.parse_args()
    findings = Findings()
    if options.provider == "trt" and (lacks := _lacks_tensorrt()):
        findings.left_out("TensorRT", lacks)
        return findings.code
    with findings.guard(_title(options)):
        check(options, findings)
    return findings.code


def check(options: argparse.Namespace, findings: Findings) -> None:
    title = _title(options)
    parameters = (
        (graphs(options.graphs) if options.graphs else {})
        | ({"store_states_as_fp16": "1"} if options.fp16 else {})
        | ({"ort_ep": "trt"} if options.provider == "trt" else {})
    )
    # Sequences that end need a place beside those that take their seats.
    candidates = 4 * options.rows + 8
    # A graph is captured for each pair of buffers, and what counts are the runs after that.
    rounds = 2 * ROUNDS if options.graphs else ROUNDS
    served = Served(CHECKED[options.model], options.rows, parameters, options.instances, candidates)
    began = time.monotonic()
    with serving(served) as server, Client(server, served.name) as client:
        ready_s = time.monotonic() - began
        sequences = Sequences(served, client, Alone(served.model, rounds=options.fp16))
        for number in range(rounds):
            sequences.round(*_round(options, number, sequences))
        sequences.finish()
        batch, log = client.largest_batch(), server.log_text()
    findings.most(f"{title}: largest difference", sequences.worst, _tolerance(options))
    findings(f"{title}: sequences that ended", str(sequences.ended), "some", sequences.ended > 0)
    # With two instances, each has some of the sequences.
    wanted = options.rows if options.instances == 1 else 1
    findings(f"{title}: rows of the largest batch", str(batch), f"at least {wanted}", batch >= wanted)
    findings.most(f"{title}: seconds until it was ready", ready_s, 90)
    if options.graphs and SIMULATED:
        findings.left_out(f"{title}: replays", "the simulated device has no graphs")
    elif options.graphs:
        replays = log.count(_REPLAY)
        findings(f"{title}: replays", f"{replays} in {rounds} rounds", "at least a third", 3 * replays >= rounds)


def _title(options: argparse.Namespace) -> str:
    more = [f"{options.rows} row{'s' if options.rows > 1 else ''}"]
    more += [f"{options.instances} instances"] if options.instances > 1 else []
    more += ["fp16 states"] if options.fp16 else []
    more += [f"graphs of {', '.join(map(str, options.graphs))}"] if options.graphs else []
    more += ["TensorRT"] if options.provider == "trt" else []
    return f"{options.model}, {', '.join(more)}"


def _round(options: argparse.Namespace, number: int, sequences: Sequences) -> tuple[int, bool]:
    """Sequences of a round, and whether some may end: all, any number, or one of those that have graphs."""
    if options.graphs:
        return options.graphs[number % len(options.graphs)], number % 8 == 7
    if number % 4 == 0:
        return options.rows, options.rows == 1
    return int(sequences.random.integers(1, options.rows + 1)), True


def _tolerance(options: argparse.Namespace) -> float:
    if options.provider == "trt":
        return TOLERANCE_TRT
    return (TOLERANCE_FP16 if options.fp16 else TOLERANCE).get(options.model, 0.0)


def _lacks_tensorrt() -> str:
    """Why TensorRT cannot be asked."""
    if not (BACKENDS / "stateful" / "libonnxruntime_providers_tensorrt.so").exists():
        return "ONNX Runtime's provider libonnxruntime_providers_tensorrt.so is not beside the backend"
    if not any(_loads(f"libnvinfer.so.{major}") for major in (11, 10, 8)):
        return "libnvinfer is not on this machine"
    return ""


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())

"""What clients whose requests fail cost the others: the rate of good clients beside bad ones, and beside as many good ones.

Clients and server share the machine, so the rates beside as many good clients tell what the clients themselves cost.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import tritonclient.grpc as grpc

from support.bench.models import BATCH, BenchModel, State, Tensor, graph_of
from support.server import TritonServer

if TYPE_CHECKING:
    from onnx import ModelProto

GOOD = 8
"""Clients that send good requests."""
FAILS = 1000.0
"""An input whose run fails."""
WIDTH, LAYERS = 512, 32


def rates(folder: Path, seconds: float, blocks: int) -> Iterator[dict]:
    """Requests of the good clients in a second, with each scheduling. The cases take turns."""
    repository = folder / "repository"
    for scheduling, own in (("own", True), ("oldest", False)):
        MODEL.write(repository, scheduling, MODEL.config("stateful", 16, candidates=64, own=own))
    cases = [(bad, good) for bad in (0, 1, 4) for good in (False, True) if bad or not good]
    with TritonServer(repository) as server:
        for scheduling in ("own", "oldest"):
            found: dict[tuple[int, bool], list[float]] = {case: [] for case in cases}
            for _ in range(blocks):
                for more, are_good in cases:
                    found[more, are_good].append(_rate(server.grpc_url, scheduling, more, are_good, seconds))
            over = lambda rates, others: median(rate / of for rate, of in zip(rates, others, strict=True))  # noqa: E731
            for bad in (1, 4):
                beside = found[bad, False]
                yield {
                    "scheduling": scheduling,
                    "bad": bad,
                    "requests_per_s": median(beside),
                    "over_alone": over(beside, found[0, False]),
                    "over_good": over(beside, found[bad, True]),
                }


def _rate(url: str, model: str, more: int, are_good: bool, seconds: float) -> float:
    context = multiprocessing.get_context("spawn")
    counts, stop = context.Array("q", GOOD + more, lock=False), context.Event()
    shares = [(range(GOOD), 1.0)] + ([(range(GOOD, GOOD + more), 1.0 if are_good else FAILS)] if more else [])
    processes = [context.Process(target=_clients, args=(url, model, of, value, counts, stop)) for of, value in shares]
    for process in processes:
        process.start()
    while not all(counts):
        if any(process.exitcode is not None for process in processes):
            raise RuntimeError("a client has failed")
        time.sleep(0.05)
    answered = lambda: sum(counts[:GOOD])  # noqa: E731
    before, began = answered(), time.perf_counter()
    time.sleep(seconds)
    rate = (answered() - before) / (time.perf_counter() - began)
    stop.set()
    for process in processes:
        process.join()
    return rate


def _clients(url: str, model: str, numbers: range, value: float, counts, stop) -> None:
    """Closed loops of this process, one for each number. Counts answers, whatever they say."""

    def loop(number: int) -> None:
        tensor = lambda of: [grpc.InferInput("X", [1, 1], "FP32").set_data_from_numpy(np.full((1, 1), of, np.float32))]  # noqa: E731
        with grpc.InferenceServerClient(url) as client:
            client.infer(model, tensor(1.0), sequence_id=number + 1, sequence_start=True)
            sent = tensor(value)
            while not stop.is_set():
                try:
                    client.infer(model, sent, sequence_id=number + 1)
                    has_failed = False
                except grpc.InferenceServerException:
                    has_failed = True
                if has_failed != (value == FAILS):
                    raise RuntimeError(f"a request with {value} has {'failed' if has_failed else 'succeeded'}")
                counts[number] += 1
            client.infer(model, tensor(1.0), sequence_id=number + 1, sequence_end=True)

    with ThreadPoolExecutor(len(numbers)) as pool:
        loops = [pool.submit(loop, number) for number in numbers]
        done, _ = wait(loops, return_when=FIRST_EXCEPTION)
        stop.set()
        for of in done:
            of.result()


def _build() -> ModelProto:
    """A sum over the sequence, beside products that take about 3 ms for 8 rows. An X of FAILS and more fails Run."""
    from onnx import TensorProto, helper

    node = helper.make_node
    one = ["batch", 1]
    products = [node("MatMul", [f"P{layer}", "SQUARE"], [f"P{layer + 1}"]) for layer in range(LAYERS)]
    return graph_of(
        [
            node("GreaterOrEqual", ["X", "LIMIT"], ["TOO_LARGE"]),
            node("Cast", ["TOO_LARGE"], ["INDEX"], to=TensorProto.INT64),
            node("Gather", ["NOTHING", "INDEX"], ["ADDED"]),
            node("MatMul", ["X", "LINE"], ["P0"]),
            *products,
            node("ReduceMean", [f"P{LAYERS}"], ["MEAN"], axes=[1]),
            node("Mul", ["MEAN", "ADDED"], ["ZERO"]),
            node("Add", ["X", "ZERO"], ["STEP"]),
            node("Add", ["STEP", "SUM_IN"], ["SUM_OUT"]),
            node("Identity", ["SUM_OUT"], ["Y"]),
        ],
        [("X", one), ("SUM_IN", one)],
        [("Y", one), ("SUM_OUT", one)],
        {
            "LIMIT": np.array([FAILS], np.float32),
            "NOTHING": np.zeros(1, np.float32),
            "LINE": np.ones((1, WIDTH), np.float32),
            "SQUARE": np.eye(WIDTH, dtype=np.float32),
        },
    )


MODEL = BenchModel(
    "faults", _build, (Tensor("X", (1,)),), (Tensor("Y", (1,)),), (State("SUM_IN", "SUM_OUT", (BATCH, 1)),)
)

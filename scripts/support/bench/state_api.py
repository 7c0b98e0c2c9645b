"""Measures the calls of the State API beside a plain copy of as many bytes, and the cost of allowing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import numpy as np
import tritonclient.grpc as grpc

from support.bench.models import MODELS, BenchModel
from support.bench.step import Effort, drive
from support.server import TritonServer

MIB = 2**20
ON = {"state_api": "true"}
REPETITIONS = 100


class Caller:
    """Sends requests of one sequence, and asks the server how long the backend worked on them."""

    def __init__(self, client: grpc.InferenceServerClient, model: str, carries: BenchModel) -> None:
        self._client, self._model = client, model
        self._inputs = [_tensor(of.name, np.zeros((1, *map(abs, of.dims)), np.float32)) for of in carries.inputs]

    def send(self, *, runs: bool = False, more: list | None = None, sequence: int = 1, **of: Any) -> grpc.InferResult:
        parameters = of.pop("parameters", None)
        inputs = (self._inputs if runs else []) + (more or [])
        return self._client.infer(self._model, inputs, sequence_id=sequence, parameters=parameters, **of)

    def backend_us(self, call: Callable[[], object]) -> float:
        """The time from Execute to the answer of a call."""
        before = self._spent_ns()
        call()
        return (self._spent_ns() - before) / 1e3

    def _spent_ns(self) -> int:
        statistics = self._client.get_inference_statistics(self._model, as_json=True)["model_stats"][0]
        stages = statistics["inference_stats"]
        return sum(int(stages[stage].get("ns", 0)) for stage in ("compute_input", "compute_infer", "compute_output"))


def calls(folder: Path, effort: Effort) -> Iterator[dict]:
    """The time of each call in the backend, for a small and a large state."""
    repository = folder / "repository"
    for name in ("accumulate", "lstm", "cache"):
        model = MODELS[name]
        model.write(repository, name, model.config("stateful", 16, candidates=64, own=True, parameters=ON))
    with TritonServer(repository) as server, grpc.InferenceServerClient(server.grpc_url) as client:
        for name in ("accumulate", "lstm", "cache"):
            yield from _calls(Caller(client, name, MODELS[name]), MODELS[name], REPETITIONS if effort.live else 1)


def _calls(caller: Caller, model: BenchModel, repetitions: int) -> Iterator[dict]:
    caller.send(runs=True, sequence_start=True)
    got = caller.send(parameters={"get_state": True})
    states = [_tensor(name, got.as_numpy(name)) for name in (f"state.{state.input}" for state in model.states)]
    saved = _tensor("state_snapshot", caller.send(parameters={"snapshot": True}).as_numpy("state_snapshot"), "BYTES")
    parameters = lambda **of: lambda: caller.send(parameters=of)  # noqa: E731
    start: dict[str, Any] = {"sequence": 2, "sequence_start": True}
    made: dict[str, Callable[[], object]] = {
        "query_state": parameters(query_state=True),
        "get_state": parameters(get_state=True),
        "state.NAME": lambda: caller.send(more=states),
        "reset_state": parameters(reset_state=True),
        "snapshot": parameters(snapshot=True),
        "state_snapshot, START": lambda: caller.send(more=[saved], **start),
        "clone_of, START": lambda: caller.send(parameters={"clone_of": 1}, **start),
    }
    size = sum(got.as_numpy(f"state.{state.input}").nbytes for state in model.states)
    copies: list[float] = []
    taken: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(repetitions):
        copies.append(_copy_us(size))
        for name, call in made.items():
            # After a step, so that the state is where a run wrote it.
            caller.send(runs=True)
            taken[name].append(caller.backend_us(call))
            if "START" in name:
                caller.send(parameters={"delete": True}, sequence=2)
    for name, times in taken.items():
        yield {
            "model": model.name,
            "state_bytes": size,
            "call": name,
            "backend_us": median(times),
            "copy_us": median(copies),
            "over_copy": median(times) / median(copies),
        }


def allowing(folder: Path, effort: Effort) -> Iterator[dict]:
    """Requests that use nothing of it, with and without `state_api`, in turn: one sequence in process on one CPU."""
    repository = folder / "repository"
    for name in ("accumulate", "lstm"):
        model = MODELS[name]
        served = {"off": f"{name}_off", "on": f"{name}_on"}
        for which, written in served.items():
            parameters = ON if which == "on" else {}
            model.write(repository, written, model.config("stateful", 16, candidates=24, parameters=parameters))
        model.write(repository, f"{name}_trivial", model.config("trivial", 16, candidates=24))
        rates: dict[str, list[float]] = {which: [] for which in served}
        for block in range(max(5, effort.blocks)):
            # The one that comes second finds the machine warmer.
            for which in list(served)[:: 1 if block % 2 == 0 else -1]:
                of: dict[str, Any] = {"model": served[which], "trivial": f"{name}_trivial", "sequences": 1}
                of |= {"blocks": 1, "seconds": 5 * effort.seconds, "one_cpu": True}
                rates[which].append(drive(repository, "throughput", model, **of)["requests_per_s"])
        yield {
            "model": name,
            "off_per_s": median(rates["off"]),
            "on_per_s": median(rates["on"]),
            "on_over_off": median(on / off for on, off in zip(rates["on"], rates["off"], strict=True)),
        }


def _tensor(name: str, value: np.ndarray, datatype: str = "FP32") -> grpc.InferInput:
    return grpc.InferInput(name, list(value.shape), datatype).set_data_from_numpy(value)


def _copy_us(size: int) -> float:
    """The time to copy so many bytes to memory that has just been allocated, as a response's is."""
    source = np.ones(max(size, 1), np.uint8)
    began = perf_counter_ns()
    source.copy()
    return (perf_counter_ns() - began) / 1e3

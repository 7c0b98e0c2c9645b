"""The step: one batch, in process, on the real libtritonserver, against ONNX Runtime alone.

The driver is tools/bench; here are the models that it runs, and the order of its runs.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.bench.models import MODELS, BenchModel
from support.paths import BUILD, SITE_PACKAGES, TRITON_LIBRARIES

DRIVER = BUILD / "bench" / "stateful-bench"
BACKENDS = BUILD / "bench" / "backends"
DELAY_US = 10_000_000
"""Core waits this long for a batch to be full, so that every batch is."""


@dataclass(frozen=True)
class Effort:
    """How much of everything."""

    blocks: int
    seconds: float
    live: tuple[int, ...] = ()
    growing_steps: int = 2000


QUICK = Effort(blocks=5, seconds=0.03, live=(10, 10_000))
FULL = Effort(blocks=15, seconds=0.1, live=(10, 10_000, 1_000_000))


def libonnxruntime() -> Path:
    return next((SITE_PACKAGES / "onnxruntime" / "capi").glob("libonnxruntime.so.*"))


def drive(
    repository: Path,
    what: str,
    of: BenchModel | None = None,
    /,
    backends: Path = BACKENDS,
    timeout_s: float | None = None,
    **arguments: object,
) -> dict:
    """Runs the driver; its arguments are named as here."""
    command = [
        str(DRIVER),
        f"--server-library={next(TRITON_LIBRARIES.glob('libtritonserver-*.so'))}",
        # The file that the backend loads, so that there is one library in the process.
        f"--onnxruntime={BACKENDS / 'stateful' / 'libonnxruntime.so'}",
        f"--repository={repository}",
        f"--backends={backends}",
        what,
        *([f"--spec={of.spec_file(repository)}"] if of else []),
        *(f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}") for key, value in arguments.items()),
    ]
    # The server's libraries find one another by the path of the program that they came with.
    search = ":".join(filter(None, [str(TRITON_LIBRARIES), os.environ.get("LD_LIBRARY_PATH")]))
    environment = os.environ | {"LD_LIBRARY_PATH": search}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout_s)
    if ran.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\nended with {ran.returncode}:\n{ran.stdout}{ran.stderr}")
    return json.loads(ran.stdout.splitlines()[-1])


def steps(folder: Path, effort: Effort, names: list[str], batches: list[int]) -> Iterator[dict]:
    """Rounds of a batch of each size, whose sequences stay, change at random, or take turns."""
    repository = folder / "repository"
    for name in names:
        model = MODELS[name]
        for batch in batches:
            yield from step(repository, model, batch, effort)


def step(repository: Path, model: BenchModel, batch: int, effort: Effort, **more: Any) -> Iterator[dict]:
    """For each way in which a batch's sequences change. `more`: of our model's configuration."""
    served, trivial = f"{model.name}_{batch}", f"{model.name}_{batch}_trivial"
    common: dict[str, Any] = {"candidates": 4 * batch + 8} | (
        {"preferred": batch, "delay_us": DELAY_US} if batch > 1 else {}
    )
    model.write(repository, served, model.config("stateful", batch, **common, **more))
    model.write(repository, trivial, model.config("trivial", batch, **common))
    arguments: dict[str, Any] = {"blocks": effort.blocks, "seconds": effort.seconds, "batch": batch}
    for composition in ("same", "random", "alternate"):
        arguments["composition"] = composition
        found = drive(repository, "step", model, model=served, trivial=trivial, **arguments)
        yield {"model": model.name, "batch": batch, "composition": composition} | found


def throughput(folder: Path, effort: Effort, cases: list[tuple[str, int]], *, one_cpu: bool = False) -> Iterator[dict]:
    """As many requests as come back from a number of sequences, on all CPUs.

    With one sequence that is mostly the time of waking threads on other CPUs, which differs from run to run by more
    than what is looked for; `one_cpu` leaves that out.
    """
    repository = folder / "repository"
    for name, sequences in cases:
        model, most = MODELS[name], max(sequences, 16)
        served, trivial = f"{name}_rate_{sequences}", f"{name}_rate_{sequences}_trivial"
        for written, backend in ((served, "stateful"), (trivial, "trivial")):
            model.write(repository, written, model.config(backend, most, candidates=sequences + 8))
        arguments: dict[str, Any] = {"blocks": max(3, effort.blocks // 3), "seconds": 10 * effort.seconds}
        arguments |= {"model": served, "trivial": trivial, "sequences": sequences}
        arguments |= {"one_cpu": True} if one_cpu else {}
        yield drive(repository, "throughput", model, **arguments) | {"model": name}


def growing(folder: Path, effort: Effort) -> Iterator[dict]:
    """A cache that grows by 256 bytes with each step."""
    repository, model = folder / "repository", MODELS["growing"]
    for batch in (1, 16):
        served, trivial = f"growing_{batch}", f"growing_{batch}_trivial"
        waits: dict[str, Any] = {"preferred": batch, "delay_us": DELAY_US} if batch > 1 else {}
        for written, backend in ((served, "stateful"), (trivial, "trivial")):
            model.write(repository, written, model.config(backend, batch, candidates=batch + 8, **waits))
        arguments: dict[str, Any] = {"model": served, "trivial": trivial, "batch": batch, "steps": effort.growing_steps}
        found = drive(repository, "growing", model, blocks=5, **arguments)
        yield found | {"model": "growing"}


def live(folder: Path, effort: Effort, backend: str = "stateful") -> Iterator[dict]:
    """What many live sequences cost: time of a batch of 16, and memory. With the backend `trivial`: what they cost in
    Triton."""
    repository = folder / "repository"
    for name, counts, own in (
        ("accumulate", effort.live, False),
        ("accumulate", effort.live, True),
        ("lstm", (10, 10_000), False),
        ("cache", (10, 1_000), False),
    ):
        if own and backend == "trivial":
            continue
        model, served = MODELS[name], f"{name}_live{'_own' if own else ''}"
        waits: dict[str, Any] = {"preferred": 16, "delay_us": 2000, "own": own}
        model.write(repository, served, model.config(backend, 16, candidates=counts[-1] + 64, **waits))
        rounds = 200 if name == "cache" else 2000
        counted = ",".join(map(str, counts))
        found = drive(repository, "live", model, model=served, sequences=counted, rounds=rounds)
        for numbers in found["live"]:
            by = "own" if own else "oldest"
            yield {"model": name, "backend": backend, "scheduling": by, "state_bytes": model.state_bytes} | numbers


def load(folder: Path) -> Iterator[dict]:
    """The time to load a model."""
    repository = folder / "repository"
    for name in ("accumulate", "lstm"):
        model = MODELS[name]
        copies = [f"{name}_load_{number}" for number in range(10)]
        for copy in copies:
            model.write(repository, copy, model.config("stateful", 16, candidates=1024))
        yield drive(repository, "load", models=",".join(copies)) | {"model": name}

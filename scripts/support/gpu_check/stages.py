"""The stages, each a list of chunks, in the order in which they are worth the machine's time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from support.gpu_check import libraries
from support.gpu_check.chunks import PASSED, Chunk, Results, Runner
from support.gpu_check.install import Place

MODELS = ("lstm", "cache", "accumulate")
BATCHES = (1, 64)
#: All stages but `behaviour` have to end within this, even if each takes as long as it may.
MOST_S = 1800
#: Files of tests that say most about states, and go first.
FIRST = ("sequences", "batching", "resident_states", "growing_states", "initial_values", "context", "strings", "direct")


@dataclass(frozen=True)
class Setting:
    """What the stages are made for.

    marker: of the tests, as pytest's -m. stand_in: the folder of libraries that stand in for CUDA's, for a dry run
    without a GPU.
    """

    parts: Path
    place: Place
    marker: str = ""
    stand_in: Path | None = None

    def command(self, module: str, *arguments: object) -> list[str]:
        return [str(self.place.python), "-m", f"support.gpu_check.{module}", *map(str, arguments)]

    def environment(self, *, driver: bool = False) -> Mapping[str, str]:
        """The tree's scripts, where the states are, and the folders where CUDA's libraries were found.

        driver: for commands that call CUDA themselves. In a dry run, these get the stand-in, and a server simulates the
        device instead, because core does not take the stand-in for a GPU.
        """
        of_providers = libraries.of_providers(self.place.runtime, self.place.site)
        found = {
            name: where for provider in of_providers.values() for of in provider.values() for name, where in of.items()
        }
        folders = libraries.search_path(found)
        if self.stand_in:
            folders = str(self.stand_in) if driver else ""
        path = ":".join(filter(None, [folders, os.environ.get("LD_LIBRARY_PATH")]))
        device = "simulated" if self.stand_in else "gpu"
        return {
            "PYTHONPATH": str(self.place.tree / "scripts"),
            "LD_LIBRARY_PATH": path,
            "STATEFUL_TEST_DEVICE": device,
        }

    def program(self, *arguments: object) -> list[str]:
        return [str(self.place.tree / "build" / "bench" / "stateful-gpu-bench"), *map(str, arguments)]

    def chunk(self, stage: str, name: str, command: list[str], needs_s: float, limit_s: float, **more: bool) -> Chunk:
        return Chunk(stage, name, command, needs_s, limit_s, self.environment(**more))


def setup(setting: Setting) -> list[Chunk]:
    """Not by the virtual environment's Python, which it makes."""
    scripts = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-m", "support.gpu_check.install", str(setting.parts), str(setting.place.work)]
    return [Chunk("setup", "install", command, needs_s=10, limit_s=230, environment={"PYTHONPATH": scripts})]


def machine(setting: Setting) -> list[Chunk]:
    return [setting.chunk("machine", "machine", setting.command("machine"), 5, 30, driver=True)]


def kernel(setting: Setting) -> list[Chunk]:
    return [setting.chunk("kernel", "kernel", setting.program("check"), 15, 80, driver=True)]


def load(setting: Setting) -> list[Chunk]:
    return [setting.chunk("load", "accumulate", setting.command("values", "accumulate"), 15, 80)]


def values(setting: Setting) -> list[Chunk]:
    cases: dict[str, list[object]] = {
        "lstm_16": ["lstm", "--rows", 16],
        "lstm_64": ["lstm", "--rows", 64],
        "cache_16": ["cache", "--rows", 16],
        "cache_64": ["cache", "--rows", 64],
        "lstm_fp16": ["lstm", "--rows", 16, "--fp16"],
        "cache_fp16": ["cache", "--rows", 16, "--fp16"],
        "two_instances": ["lstm", "--rows", 16, "--instances", 2],
    }
    return [setting.chunk("values", name, setting.command("values", *case), 15, 35) for name, case in cases.items()]


def leaks(setting: Setting) -> list[Chunk]:
    checks = ("concat", "concat-graphs", "growing")
    return [setting.chunk("leaks", check, setting.command("memory", check), 25, 70) for check in checks]


def captures(setting: Setting) -> list[Chunk]:
    sizes = {"lstm": "1,16,64", "cache": "1,4,16", "accumulate": "1"}
    made = []
    for model, of in sizes.items():
        command = setting.command("values", model, "--rows", of.split(",")[-1], "--graphs", of)
        made.append(setting.chunk("captures", model, command, 15, 40))
    for check in ("refused", "beside"):
        made.append(setting.chunk("captures", check, setting.command("captures", check), 20, 50))
    return made


def shared_memory(setting: Setting) -> list[Chunk]:
    return [setting.chunk("shared_memory", "lstm", setting.command("shared_memory"), 10, 35)]


def loads(setting: Setting) -> list[Chunk]:
    return [setting.chunk("loads", check, setting.command("memory", check), 20, 60) for check in ("loads", "full")]


def peer(setting: Setting) -> list[Chunk]:
    return [setting.chunk("peer", "onnxruntime", setting.command("peer", *BATCHES), 15, 50)]


def tensorrt(setting: Setting) -> list[Chunk]:
    return [setting.chunk("tensorrt", "lstm", setting.command("values", "lstm", "--provider", "trt"), 20, 80)]


def fault(setting: Setting) -> list[Chunk]:
    return [setting.chunk("fault", "fault", setting.program("fault"), 5, 15, driver=True)]


def behaviour(setting: Setting) -> list[Chunk]:
    tests = setting.place.tree / "tests" / "server"
    environment = setting.environment()
    junit = setting.place.work / "junit"
    more = ["--marker", setting.marker] if setting.marker else []
    return [
        Chunk(
            "behaviour",
            f"{file.stem} ({setting.marker})" if setting.marker else file.stem,
            setting.command("behaviour", file, "--junit", junit / f"{file.stem}.xml", *more),
            needs_s=25,
            limit_s=400,
            environment=environment,
        )
        for file in sorted(tests.rglob("test_*.py"), key=_rank)
    ]


def _rank(file: Path) -> tuple[int, str]:
    name = file.stem.removeprefix("test_")
    return (FIRST.index(name) if name in FIRST else len(FIRST), name)


def movement(setting: Setting) -> list[Chunk]:
    # The kernel is slow where the stand-in runs it.
    few = ["--rows", 8, "--batches", 2, "--rounds", 3] if setting.stand_in else []
    return [setting.chunk("movement", "movement", setting.program("movement", *few), 15, 40, driver=True)]


def step(setting: Setting) -> list[Chunk]:
    return _steps("step", setting)


def graphs(setting: Setting) -> list[Chunk]:
    return _steps("graphs", setting, "--graphs")


def _steps(stage: str, setting: Setting, *more: str) -> list[Chunk]:
    command = lambda model: setting.command("step", model, *BATCHES, *more)  # noqa: E731
    return [setting.chunk(stage, model, command(model), 20, 60, driver=True) for model in MODELS]


STAGES: dict[str, Callable[[Setting], list[Chunk]]] = {
    stage.__name__: stage
    for stage in (
        setup,
        machine,
        kernel,
        load,
        values,
        leaks,
        captures,
        step,
        graphs,
        movement,
        shared_memory,
        loads,
        peer,
        tensorrt,
        fault,
        behaviour,
    )
}
#: Without these no later stage can pass.
GATES = ("machine", "load")


def run(runner: Runner, setting: Setting, chosen: list[str], make: Mapping[str, Callable] = STAGES) -> None:
    """The stages chosen, or all. `setup` first, always: it is quick where nothing has changed.

    Of all, those behind a gate that failed are left out, as are all behind `setup`.
    """
    install = make["setup"](setting)
    for chunk in install:
        runner.run(chunk, always=True)
    closed = _closed(runner.results, ["setup"])
    for stage in chosen or [stage for stage in make if stage != "setup"]:
        if closed:
            runner.leave_out(Chunk(stage, "*", [], 0, 0), closed)
            continue
        if stage == "setup":
            continue
        chunks = make[stage](setting)
        runner.results.planned[stage] = len(chunks)
        for chunk in chunks:
            runner.run(chunk)
        if not chosen and stage in GATES:
            closed = _closed(runner.results, [stage])


def _closed(results: Results, gates: list[str]) -> str:
    """Why nothing more can be done."""
    for stage in gates:
        records = results.of_stage(stage)
        if not records or any(record.status != PASSED for record in records.values()):
            return f"{stage} has not passed"
    return ""

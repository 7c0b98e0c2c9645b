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
BATCHES = (1, 16, 64, 256)
#: Files of tests that say most about states, and go first.
FIRST = ("sequences", "batching", "resident_states", "growing_states", "initial_values", "context", "strings", "direct")


@dataclass(frozen=True)
class Setting:
    """What the stages are made for. marker: of the tests, as pytest's -m."""

    parts: Path
    place: Place
    marker: str = ""

    def command(self, module: str, *arguments: object) -> list[str]:
        return [str(self.place.python), "-m", f"support.gpu_check.{module}", *map(str, arguments)]

    def environment(self, **more: str) -> Mapping[str, str]:
        """The tree's scripts, and the folders where CUDA's libraries were found."""
        of_providers = libraries.of_providers(self.place.runtime, self.place.site)
        found = {
            name: where for provider in of_providers.values() for of in provider.values() for name, where in of.items()
        }
        path = ":".join(filter(None, [libraries.search_path(found), os.environ.get("LD_LIBRARY_PATH")]))
        return {"PYTHONPATH": str(self.place.tree / "scripts"), "LD_LIBRARY_PATH": path, **more}


def setup(setting: Setting) -> list[Chunk]:
    """Not by the virtual environment's Python, which it makes."""
    scripts = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-m", "support.gpu_check.install", str(setting.parts), str(setting.place.work)]
    return [Chunk("setup", "install", command, needs_s=10, limit_s=400, environment={"PYTHONPATH": scripts})]


def machine(setting: Setting) -> list[Chunk]:
    return [Chunk("machine", "machine", setting.command("machine"), 10, 60, setting.environment())]


def load(setting: Setting) -> list[Chunk]:
    return [Chunk("load", "accumulate", setting.command("load", "accumulate"), 30, 120, setting.environment())]


def behaviour(setting: Setting) -> list[Chunk]:
    tests = setting.place.tree / "tests" / "server"
    environment = setting.environment(STATEFUL_TEST_DEVICE="gpu")
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
    program = setting.place.tree / "build" / "bench" / "stateful-gpu-bench"
    return [Chunk("movement", "movement", [str(program), "movement"], 30, 180, setting.environment())]


def step(setting: Setting) -> list[Chunk]:
    return _steps("step", "gpu", setting)


def graphs(setting: Setting) -> list[Chunk]:
    """First whether runs are graphs: the driver of the steps does not show the server's warnings."""
    environment = setting.environment()
    captures = [
        Chunk("graphs", f"capture_{model}", setting.command("load", model, "--graphs"), 20, 120, environment)
        for model in MODELS
    ]
    return captures + _steps("graphs", "graphs", setting)


def host(setting: Setting) -> list[Chunk]:
    return _steps("host", "host", setting)


def _steps(stage: str, kind: str, setting: Setting) -> list[Chunk]:
    environment = setting.environment()
    return [
        Chunk(stage, f"{model}_{batch}", setting.command("step", model, batch, "--kind", kind), 25, 180, environment)
        for model in MODELS
        for batch in BATCHES
    ]


STAGES: dict[str, Callable[[Setting], list[Chunk]]] = {
    stage.__name__: stage for stage in (setup, machine, load, behaviour, movement, step, graphs, host)
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

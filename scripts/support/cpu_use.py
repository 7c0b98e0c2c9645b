"""Who used the CPUs of this machine: this process with all that it started, or others."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

CORES = os.cpu_count() or 1


@dataclass(frozen=True)
class CpuUse:
    """CPU time, in seconds, and how long it was counted for. Others are all processes that we did not start; for a
    virtual machine, also those of its host that kept it waiting."""

    seconds: float
    ours_s: float
    others_s: float

    def told(self) -> str:
        """What the others used, as part of a sentence."""
        return f"other processes used {self.others_s / self.seconds:.1f} of {CORES} CPU cores"


class CpuMeter:
    """Counts from the time when it is made."""

    def __init__(self) -> None:
        self._began, self._busy, self._ours = _now()

    def used(self) -> CpuUse:
        now, busy, ours = _now()
        busy, ours = busy - self._busy, ours - self._ours
        # The kernel counts the two in different ways, so their difference may be a little below 0.
        return CpuUse(now - self._began, ours, max(0.0, busy - ours))


def waited_s(pid: int) -> float | None:
    """How long the live threads of a process were ready to run and had no CPU, in seconds. None if the kernel does not
    count it."""
    waited = []
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        # A thread may end meanwhile.
        with contextlib.suppress(FileNotFoundError):
            waited.append(int(file.read_text().split()[1]))
    return sum(waited) / 1e9 if waited else None


def _now() -> tuple[float, float, float]:
    """The time, and the CPU time since the start of all processes and of ours."""
    every = psutil.cpu_times()
    busy = every.user + every.nice + every.system + every.irq + every.softirq + every.steal
    return time.monotonic(), busy, _ours()


def _ours() -> float:
    """Of this process and its descendants. The times of one that has ended are in those of its parent."""
    this = psutil.Process()
    ours = 0.0
    for process in [this, *this.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        ours += times.user + times.system + times.children_user + times.children_system
    return ours

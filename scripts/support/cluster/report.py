"""Whether every answer was right, what was lost, and how long sequences paused that moved."""

from __future__ import annotations

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from support.cluster.faults import WATCHED_S, Event, Faults
from support.cluster.streams import REQUEST_SAMPLES, Life, steps_after
from support.cpu_use import CORES
from support.oracle import Oracle
from support.speech import inputs_of, silero_oracle

TOLERANCE = 1e-5

#: What must not happen.
FAULTS = ("lost_sequences", "lost_steps", "repeated_steps", "wrong_answers")


@dataclass
class Checked:
    """What came of all sequences."""

    sequences: int = 0
    lost_sequences: int = 0
    requests: int = 0
    steps: int = 0
    lost_steps: int = 0
    repeated_steps: int = 0
    wrong_answers: int = 0
    lost_answers: int = 0
    bit_equal: int = 0
    compared: int = 0

    @property
    def passed(self) -> bool:
        """Whether all steps were made once, and all answers are right. Nothing is not enough."""
        return self.compared > 0 and not any(getattr(self, name) for name in FAULTS)


def check(lives: list[Life]) -> Checked:
    """Compares every answer with ONNX Runtime alone."""
    oracle, total = silero_oracle(), Checked()
    with ThreadPoolExecutor(CORES) as pool:
        for checked in pool.map(lambda life: _check(oracle, life), lives):
            for name, count in vars(checked).items():
                setattr(total, name, getattr(total, name) + count)
    return total


def _check(oracle: Oracle, life: Life) -> Checked:
    checked = Checked(sequences=1, lost_sequences=int(bool(life.error)), requests=len(life.asked))
    sequence = oracle.new_sequence()
    inputs = inputs_of(life.stream.samples[: len(life.asked) * REQUEST_SAMPLES])
    right = np.array([sequence.step({"input": chunk[None]})["output"].item() for chunk in inputs], np.float32)
    checked.steps += len(right)
    behind = 0
    for number, asked in enumerate(life.asked):
        first, last = steps_after(number), steps_after(number + 1)
        if asked.made is not None:
            # The server's count, against what it should be: each change is a loss or a repetition.
            change = asked.made - last - behind
            checked.lost_steps += max(0, -change)
            checked.repeated_steps += max(0, change)
            behind += change
        if asked.values is None:
            checked.lost_answers += 1
        elif len(asked.values) != last - first:
            checked.wrong_answers += 1
        else:
            # A NaN is not near anything.
            is_near = np.abs(asked.values - right[first:last]) <= TOLERANCE
            checked.wrong_answers += int(not is_near.all())
            checked.bit_equal += int((asked.values == right[first:last]).sum())
            checked.compared += last - first
    return checked


def pauses(lives: list[Life], events: list[Event], event: Event) -> np.ndarray:
    """How long each sequence that the event moved waited at most for an answer, in seconds, before the next event.

    Those that ended before are left out.
    """
    moved = set(event.moved)
    # The next event would slow down the requests that are sent shortly before it.
    next_s = min((other.at_s for other in events if other.at_s > event.at_s), default=float("inf"))
    until_s = min(event.at_s + WATCHED_S, next_s - 0.5)
    longest = []
    for life in lives:
        near = [asked.latency_s for asked in life.asked if asked.answered_s >= event.at_s and asked.due_s < until_s]
        if life.sequence_id in moved and near:
            longest.append(max(near))
    return np.array(longest)


@dataclass
class _Waited:
    events: int
    longest_s: np.ndarray


def _pauses_by_kind(lives: list[Life], events: list[Event]) -> dict[str, _Waited]:
    """Of all events of a kind, whichever server it was."""
    found: dict[str, _Waited] = {}
    for event in events:
        if event.of_server:
            kind = re.sub(r"server \d+", "a server", event.what)
            waited = found.setdefault(kind, _Waited(0, np.array([])))
            waited.events += 1
            waited.longest_s = np.concatenate([waited.longest_s, pauses(lives, events, event)])
    return found


def table(title: str, lives: list[Life], checked: Checked, faults: Faults) -> Table:
    """The figures of the run."""
    made = Table(title=title, show_header=False, title_justify="left")
    made.add_column(style="bold")
    made.add_column(justify="right")
    latencies = np.array([asked.latency_s for life in lives for asked in life.asked]) * 1e3
    made.add_row("sequences", f"{checked.sequences:,}")
    made.add_row("requests, steps", f"{checked.requests:,}, {checked.steps:,}")
    for name in FAULTS:
        count = getattr(checked, name)
        made.add_row(name.replace("_", " "), f"[{'red' if count else 'green'}]{count}[/]")
    made.add_row("answers lost, their steps made once", f"{checked.lost_answers}")
    made.add_row("answers equal to the last bit", f"{checked.bit_equal:,} of {checked.compared:,}")
    if faults.crashes:
        made.add_row("servers that ended by themselves", f"[red]{faults.crashes}[/]")
    if len(latencies):
        p50, p99 = np.percentile(latencies, [50, 99])
        made.add_row("latency p50, p99, max", f"{p50:.0f}, {p99:.0f}, {latencies.max():.0f} ms")
    elsewhere = Counter(event.what for event in faults.events if not event.of_server)
    for what, count in elsewhere.items():
        made.add_row(f"{what} (times)", f"{count:,}")
    for what, waited in _pauses_by_kind(lives, faults.events).items():
        count = f" ({waited.events} times)" if waited.events > 1 else ""
        made.add_row(f"{what}{count}: sequences that move", f"{len(waited.longest_s)}")
        if len(waited.longest_s):
            p50, p99 = np.percentile(waited.longest_s, [50, 99]) * 1e3
            longest = waited.longest_s.max() * 1e3
            made.add_row("  their longest wait for an answer, p50, p99, max", f"{p50:.0f}, {p99:.0f}, {longest:.0f} ms")
    return made


def draw(title: str, lives: list[Life], faults: Faults, path: Path) -> None:
    """Answers a second, the latency of each answer, and when each server was there, over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (rate, latency, there) = plt.subplots(
        3, 1, figsize=(11, 6.2), height_ratios=[1, 1.6, 0.9], sharex=True, layout="constrained"
    )
    answered = np.array([asked.answered_s for life in lives for asked in life.asked])
    latencies = np.array([asked.latency_s for life in lives for asked in life.asked]) * 1e3
    seconds = float(np.ceil(answered.max(initial=1) * 2) / 2)
    edges = np.arange(0, seconds + 0.25, 0.5)
    counts, _ = np.histogram(answered, edges)
    rate.stairs(counts / 0.5, edges, color="tab:blue", fill=True, alpha=0.4)
    rate.set_ylabel("answers\na second", fontsize=9)
    rate.set_title(title, loc="left", fontsize=10)
    latency.plot(answered, latencies, ".", markersize=2, color="tab:blue", alpha=0.5, rasterized=True)
    latency.set_yscale("log")
    latency.set_ylabel("latency, ms\n(logarithmic)", fontsize=9)
    rows = [*range(len(faults.servers)), "store"]
    labels = [f"server {row + 1}" if isinstance(row, int) else row for row in rows]
    for at, row in enumerate(rows):
        there.barh(at, seconds, height=0.6, color="tab:green", alpha=0.6)
        for which, since, until in faults.away:
            if which == row:
                there.barh(
                    at, min(until, seconds) - since, left=since, height=0.6, color="tab:red" if since else "white"
                )
    there.set_yticks(range(len(rows)), labels, fontsize=9)
    there.invert_yaxis()
    there.set_xlabel("time, s (green: it runs; red: it was killed, paused or stopped)", fontsize=9)
    there.set_xlim(0, seconds)
    # With few events there is room for their names.
    for event in faults.events if len(faults.events) <= 8 else ():
        for axis in (rate, latency):
            axis.axvline(event.at_s, color="0.3", linewidth=0.8, linestyle=":")
        latency.annotate(
            event.what, (event.at_s, 1), xycoords=("data", "axes fraction"), xytext=(3, -4), textcoords="offset points",
            rotation=90, va="top", fontsize=7.5, color="0.2", bbox={"color": "white", "alpha": 0.7, "pad": 1},
        )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, pil_kwargs={"optimize": True} if path.suffix == ".png" else {})
    plt.close(figure)

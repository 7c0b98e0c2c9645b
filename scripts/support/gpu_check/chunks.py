"""Commands that are run one after another, each within the time left, and recorded as soon as they have ended.

A chunk's command prints a JSON object a line: its rows. What it printed else is its output. The file of the results is
written anew, by rename, before and after each chunk, so that it is right whenever this ends.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

PASSED, FAILED, BEGUN, INTERRUPTED = "passed", "failed", "begun", "interrupted"
#: The verdict of a check for which the machine lacks something.
LEFT_OUT = "left out"
OUTPUT_KEPT = 8000


@dataclass(frozen=True)
class Chunk:
    """needs_s: with less time left it is not begun. limit_s: longer than that is a failure."""

    stage: str
    name: str
    command: Sequence[str]
    needs_s: float
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.stage}/{self.name}"


@dataclass
class Record:
    """What became of a chunk. `begun` in a file that nobody writes any more: it was ended from outside."""

    status: str
    commit: str = ""
    when: str = ""
    seconds: float = 0.0
    rows: list[dict] = field(default_factory=list)
    output: str = ""

    @property
    def is_done(self) -> bool:
        return self.status in (PASSED, FAILED)


class Results:
    """The file of the results."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.about: dict = {}
        #: Number of chunks that each stage has.
        self.planned: dict[str, int] = {}
        self.records: dict[str, Record] = {}
        if file.exists():
            written = json.loads(file.read_text())
            self.about, self.planned = written["about"], written["planned"]
            self.records = {key: Record(**record) for key, record in written["chunks"].items()}

    def put(self, chunk: Chunk, record: Record) -> None:
        self.records[chunk.key] = record
        self.write()

    def write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        written = {
            "about": self.about,
            "planned": self.planned,
            "chunks": {key: asdict(record) for key, record in self.records.items()},
        }
        new = self.file.with_name(self.file.name + ".new")
        new.write_text(json.dumps(written, indent=1) + "\n")
        new.replace(self.file)

    def of_stage(self, stage: str) -> dict[str, Record]:
        prefix = f"{stage}/"
        return {key[len(prefix) :]: record for key, record in self.records.items() if key.startswith(prefix)}


class Runner:
    """Runs chunks that are not done. `again`: also those that failed. `say` gets a line for each."""

    def __init__(
        self, results: Results, seconds: float, commit: str, *, again: bool = False, say: Callable[[str], None] = print
    ) -> None:
        self.results = results
        self.deadline = time.monotonic() + seconds
        self.commit = commit
        self.again = again
        self.say = say
        self.not_begun: list[str] = []

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def is_done(self, chunk: Chunk) -> bool:
        """Passed or failed with these parts: what other parts did is no proof of these."""
        record = self.results.records.get(chunk.key)
        if record is None or not record.is_done or record.commit != self.commit:
            return False
        return record.status == PASSED or not self.again

    def run(self, chunk: Chunk, *, always: bool = False) -> None:
        """Runs it, unless it is done or the time does not suffice."""
        if self.is_done(chunk) and not always:
            return
        needs_s, left_s = self.needs_s(chunk), self.left_s
        if needs_s > left_s:
            self.leave_out(chunk, f"takes about {needs_s:.0f} s, and {max(left_s, 0):.0f} are left")
            return
        self.results.put(chunk, Record(BEGUN, self.commit, _now()))
        record = carry_out(chunk, min(chunk.limit_s, left_s), self.commit)
        self.results.put(chunk, record)
        self.say(f"{chunk.key}: {record.status}, {record.seconds:.1f} s")

    def leave_out(self, chunk: Chunk, why: str) -> None:
        """Of each stage's, the first is told; all are kept."""
        is_first = not any(key.startswith(f"{chunk.stage}/") for key in self.not_begun)
        self.not_begun.append(chunk.key)
        if is_first:
            self.say(f"{chunk.key}: not begun: {why}")

    def needs_s(self, chunk: Chunk) -> float:
        """As said; more, where it was interrupted before: the same time would not suffice again."""
        record = self.results.records.get(chunk.key)
        before_s = record.seconds if record and record.status == INTERRUPTED else 0.0
        return max(chunk.needs_s, min(chunk.limit_s, 1.5 * before_s))


def carry_out(chunk: Chunk, timeout_s: float, commit: str) -> Record:
    """Runs a command, with all that it starts, for so long at most."""
    began, when = time.monotonic(), _now()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        status, why = _ended(chunk, timeout_s, out, err)
        seconds = time.monotonic() - began
        printed, said = _text(out), _text(err)
    rows, rest = _split(printed)
    output = "\n".join(text for text in (rest, said, why) if text)
    return Record(status, commit, when, round(seconds, 2), rows, shortened(output, OUTPUT_KEPT))


def shortened(text: str, kept: int) -> str:
    """Its beginning and its end: an error may stand at either."""
    if len(text) <= kept:
        return text
    return f"{text[: kept // 2]}\n[... {len(text) - kept} characters ...]\n{text[len(text) - kept // 2 :]}"


def _ended(chunk: Chunk, timeout_s: float, out, err) -> tuple[str, str]:
    """The status, and what there is to say about it."""
    try:
        process = subprocess.Popen(
            list(chunk.command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, **chunk.environment},
            start_new_session=True,
        )
    except OSError as error:
        return FAILED, f"it cannot be run: {error}"
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        if timeout_s < chunk.limit_s:
            return INTERRUPTED, f"ended after {timeout_s:.0f} s, which were all that was left"
        return FAILED, f"ended after {timeout_s:.0f} s, the limit"
    finally:
        _end(process)
    if code == 0:
        return PASSED, ""
    return FAILED, f"{chunk.command[0]} ended with {code}"


def _end(process: subprocess.Popen) -> None:
    """The command, and what it started and left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(file) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").strip()


def _split(printed: str) -> tuple[list[dict], str]:
    """Lines that are JSON objects, and the others."""
    rows, rest = [], []
    for line in printed.splitlines():
        row = _row(line)
        if row is None:
            rest.append(line)
        else:
            rows.append(row)
    return rows, "\n".join(rest)


def _row(line: str) -> dict | None:
    if not line.startswith("{"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")

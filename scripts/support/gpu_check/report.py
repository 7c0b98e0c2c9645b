"""What was found: a short table for the terminal, and markdown for docs/gpu.md."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from support.gpu_check.chunks import LEFT_OUT, PASSED, Record, Results, shortened

if TYPE_CHECKING:
    from rich.table import Table

Rows = list[dict]

#: In a document, behind it stands what `put` wrote.
MARK = "<!-- what follows is written by scripts/gpu-check report -->"

TITLES = {
    "setup": "Setting up",
    "machine": "The machine",
    "kernel": "The kernel",
    "load": "A model loads",
    "values": "Values",
    "leaks": "Memory from step to step",
    "captures": "CUDA graphs",
    "step": "The step",
    "graphs": "The step with CUDA graphs",
    "movement": "How states move",
    "shared_memory": "CUDA shared memory",
    "loads": "Memory from load to load, and a full GPU",
    "peer": "Triton's onnxruntime backend",
    "tensorrt": "TensorRT",
    "fault": "An illegal access",
    "behaviour": "The tests on the real server",
}

_STEP = {
    "model": "model",
    "batch": "batch",
    "composition": "batches",
    "raw_us": "ORT alone µs",
    "raw_with_copies_us": "and copies µs",
    "whole_us": "all but Triton µs",
    "whole_over_raw": "/ alone",
    "whole_over_raw_with_copies": "/ with copies",
    "infer_us": "run µs",
    "copied_bytes_per_round": "state bytes copied",
}
_COLUMNS = {
    "movement": {
        "states": "states",
        "rows": "rows",
        "state_bytes": "bytes of a state",
        "gather_gb": "gather GB/s",
        "scatter_gb": "scatter GB/s",
        "copy_gb": "plain copy GB/s",
        "gather_over_copy": "gather / copy",
        "scatter_over_copy": "scatter / copy",
        "gather_us": "gather µs",
    },
    "step": _STEP,
    "graphs": _STEP,
    "peer": {key: _STEP[key] for key in ("model", "batch", "whole_us", "infer_us")},
}
_SAID = {
    "movement": "Rows of states between slots and batches, against one copy of as many bytes on the device.",
    "step": "One batch, in process, on one CPU. *ORT alone*: ONNX Runtime with CUDA, all tensors made once on the device; "
    "*and copies*: its inputs brought there from pinned memory and its outputs brought back, with one wait. *All but "
    "Triton*: this backend's step less that of a backend that does nothing.",
    "graphs": "The same with `enable_cuda_graph`, and ONNX Runtime alone with CUDA graphs, too.",
    "peer": "The same batches with implicit states, whose sequences stay.",
}


def counts(records: Iterable[Record]) -> str:
    """As in "24 passed, 1 failed"."""
    statuses = [_status(record) for record in records]
    return ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(sorted(statuses, key=_rank)))


def _status(record: Record) -> str:
    """Its status; `left out` if its checks found nothing to check."""
    left_out = [row.get("verdict") == LEFT_OUT for row in record.rows]
    return LEFT_OUT if record.status == PASSED and left_out and all(left_out) else record.status


def _counted(results: Results, stage: str) -> str:
    """As in "20 passed of 49"."""
    records = results.of_stage(stage)
    planned = results.planned.get(stage, 0)
    return counts(records.values()) + (f" of {planned}" if 0 < len(records) < planned else "")


def _rank(status: str) -> tuple[bool, str]:
    return status != PASSED, status


def table(results: Results) -> Table:
    """A line for each stage."""
    from rich.table import Table

    made = Table(title="gpu-check")
    for heading in ("stage", "chunks", "seconds", "found"):
        made.add_column(heading, justify="right" if heading == "seconds" else "left", overflow="fold")
    for stage in TITLES:
        records = results.of_stage(stage)
        seconds = sum(record.seconds for record in records.values())
        made.add_row(
            stage, _counted(results, stage) or "–", f"{seconds:.0f}" if records else "", _found(stage, records)
        )
    return made


def _found(stage: str, records: dict[str, Record]) -> str:
    rows = _rows(records)
    if stage == "machine" and rows:
        return ", ".join(gpu["name"] for gpu in rows[0]["gpus"]) or "no GPU"
    if stage == "behaviour" and rows:
        return tests(rows)
    if verdicts := [row["verdict"] for row in rows if "check" in row]:
        return ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
    # The largest batch of each model, which stays the same.
    same = [row for row in rows if row.get("whole_over_raw") and row.get("composition") == "same"]
    largest = {row["model"]: row for row in sorted(same, key=lambda row: row["batch"])}
    ratios = [f"{model} {row['whole_over_raw']:.2f} at {row['batch']}" for model, row in largest.items()]
    return f"all but Triton / ORT alone: {', '.join(ratios)}" if ratios else ""


def tests(rows: Rows) -> str:
    """How many tests passed, failed and were skipped."""
    failed, skipped = (sum(len(row[what]) for row in rows) for what in ("failures", "skipped"))
    return f"{sum(row['passed'] for row in rows)} tests passed, {failed} failed, {skipped} skipped"


def markdown(results: Results) -> str:
    parts = [_head(results), _stages(results)]
    parts += [_problems(results)] if any(record.status != PASSED for record in results.records.values()) else []
    checks = [{"stage": TITLES[stage]} | row for stage in TITLES for row in _checks(results.of_stage(stage))]
    if checks:
        columns = {"stage": "stage", "check": "check", "found": "found", "allowed": "allowed", "verdict": "verdict"}
        parts.append("### Checks\n\n" + _markdown_table(columns, checks))
    for stage in _COLUMNS:
        if rows := [row for row in _rows(results.of_stage(stage)) if "check" not in row]:
            parts.append(f"### {TITLES[stage]}\n\n" + _measured(stage, rows))
    if records := results.of_stage("behaviour"):
        parts.append(f"### {TITLES['behaviour']}\n\n" + _behaviour(records))
    return "\n\n".join(parts) + "\n"


def _checks(records: dict[str, Record]) -> Rows:
    return [row for row in _rows(records) if "check" in row]


def put(document: Path, results: Results) -> None:
    """Behind the mark, in place of what stands there; without a mark, as the whole document."""
    written = document.read_text() if document.exists() else ""
    before, mark, _ = written.partition(MARK)
    document.write_text((f"{before}{mark}\n\n" if mark else "") + markdown(results))


def _head(results: Results) -> str:
    lines = ["## Results", ""]
    rows = _rows(results.of_stage("machine"))
    if not rows:
        return "\n".join([*lines, "The machine was not asked."])
    found = rows[0]
    if results.about.get("stand_in"):
        lines += ["**A dry run**: libraries that stand in for CUDA's, no GPU. Times say nothing about a GPU.", ""]
    gpus = [f"{gpu['name']} ({gpu['memory.total']}, driver {gpu['driver_version']})" for gpu in found["gpus"]]
    lines += [
        f"Measured on {', '.join(gpus) or 'a machine without a GPU'}, CUDA {found['driver'].get('cuda', 'unknown')} in the driver, "
        f"{found['cpus']} CPUs ({found['cpu']}), {found['memory_bytes'] / 2**30:.0f} GiB, {found['system']}; "
        f"ONNX Runtime {found['onnxruntime']}, Python {found['python']}; {_commits(results)}."
    ]
    absent = [
        f"`{name}`"
        for of in found["libraries"].values()
        for name, where in (of["linked"] | of["late"]).items()
        if where is None
    ]
    lines += ["", f"Libraries that the machine does not have: {', '.join(dict.fromkeys(absent))}."] if absent else []
    return "\n".join(lines)


def _commits(results: Results) -> str:
    commits = list(dict.fromkeys(record.commit for record in results.records.values()))
    return f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"


def _stages(results: Results) -> str:
    rows = [
        {"stage": TITLES[stage], "chunks": _counted(results, stage), "s": sum(of.seconds for of in records.values())}
        for stage in TITLES
        if (records := results.of_stage(stage))
    ]
    absent = [TITLES[stage] for stage in TITLES if not results.of_stage(stage)]
    text = _markdown_table({"stage": "stage", "chunks": "result", "s": "seconds"}, rows)
    return text + (f"\n\nNot run: {', '.join(absent)}." if absent else "")


def _problems(results: Results) -> str:
    """What did not pass, and the end of what it said."""
    parts = ["### What did not pass"]
    for key, record in results.records.items():
        if record.status != PASSED:
            said = shortened(record.output, 2500).replace("```", "'''")
            parts.append(
                f"**{key}**: {record.status} after {record.seconds:.0f} s, commit {record.commit}\n\n```\n{said}\n```"
            )
    return "\n\n".join(parts)


def _behaviour(records: dict[str, Record]) -> str:
    rows = _rows(records)
    columns = {"file": "file", "passed": "passed", "failed": "failed", "skipped": "skipped"}
    shown = [
        row | {what: len(row[of]) for what, of in (("failed", "failures"), ("skipped", "skipped"))} for row in rows
    ]
    on_cpu = [f"`{row['file']}`" for row in rows if row["models"].get("KIND_CPU") and not row["models"].get("KIND_GPU")]
    failures = [f"- `{row['file']}::{of['test']}`: {_line(of['why'])}" for row in rows for of in row["failures"]]
    models = {kind: sum(row["models"].get(kind, 0) for row in rows) for kind in ("KIND_GPU", "KIND_CPU")}
    kinds = ", ".join(f"{count} of `{kind}`" for kind, count in models.items())
    parts = [f"{tests(rows)}. Models that were configured: {kinds}.", _markdown_table(columns, shown)]
    parts += ["Without a model on a GPU: " + ", ".join(on_cpu) + "."] if on_cpu else []
    return "\n\n".join(parts + (["Failed:\n\n" + "\n".join(failures)] if failures else []))


def _measured(stage: str, rows: Rows) -> str:
    parts = [_SAID[stage], _markdown_table(_COLUMNS[stage], [_with_bandwidths(row) for row in rows])]
    errors = {(row["model"], row["batch"]): row["raw_error"] for row in rows if "raw_error" in row}
    parts += [f"ONNX Runtime alone, {model}, batch {batch}: {_line(why)}" for (model, batch), why in errors.items()]
    return "\n\n".join(parts)


def _with_bandwidths(row: dict) -> dict:
    return row | {f"{key}_gb": row[key] / 1e9 for key in ("gather", "scatter", "copy") if key in row}


def _rows(records: dict[str, Record]) -> Rows:
    return [row for record in records.values() for row in record.rows]


def _markdown_table(columns: dict[str, str], rows: Rows) -> str:
    if not rows:
        return "Nothing was measured."
    # Words to the left, numbers to the right.
    lines = [list(columns.values()), ["---:" if _is_number(rows[0].get(key)) else "---" for key in columns]]
    lines += [[_cell(row.get(key)) for key in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.2g}" if abs(value) < 0.1 else f"{value:.2f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else " ".join(str(value).split()).replace("|", r"\|")


def _line(text: str) -> str:
    return " ".join(text.split())[:200]

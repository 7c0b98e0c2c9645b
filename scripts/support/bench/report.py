"""The benchmark's results as tables, as JSON, and as pictures."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import median, median_low

from rich.console import Console
from rich.table import Table

Rows = list[dict]

COLUMNS = {
    "step": {
        "model": "model",
        "batch": "batch",
        "composition": "batches",
        "raw_us": "ORT alone µs",
        "after_us": "after Triton µs",
        "step_us": "batch and run µs",
        "whole_over_raw": "all but Triton / alone",
        "whole_over_after": "/ after Triton",
        "our_cpu_us_per_request": "our CPU µs/request",
        "copied_bytes_per_round": "state bytes copied",
        "own_share_of_cpu": "share of the CPU",
    },
    "throughput": {
        "model": "model",
        "sequences": "sequences",
        "cpus": "CPUs",
        "requests_per_s": "requests/s",
        "batch": "batch",
        "ratio_to_raw": "/ ORT alone at full batch",
        "ratio_to_raw_and_trivial": "/ (ORT + trivial)",
        "cpu_us_per_request": "CPU µs/request",
    },
    "growing": {
        "batch": "sequences",
        "steps": "steps",
        "raw_us_per_step": "ORT alone µs/step",
        "ours_us_per_step": "µs/step",
        "trivial_us_per_step": "Triton's µs",
        "whole_over_raw": "all but Triton / alone",
        "ours_us_per_step_first_half": "first half",
        "ours_us_per_step_second_half": "second half",
        "written_bytes_per_sequence": "bytes written/sequence",
        "copied_bytes_per_sequence": "copied/sequence",
    },
    "padding": {
        "model": "model",
        "sequences": "sequences",
        "padding": "growing_padding",
        "tokens_per_s": "tokens/s",
        "batch": "rows a run",
        "server_cpu_us_per_token": "server CPU µs/token",
        "over_apart": "/ without",
    },
    "repeat": {
        "model": "model",
        "sequences": "sequences",
        "loop": "who goes on",
        "tokens_per_s": "tokens/s",
        "server_cpu_us_per_token": "server CPU µs/token",
        "over_client": "/ client",
    },
    "live": {
        "model": "model",
        "scheduling": "scheduling",
        "live": "live sequences",
        "us_per_batch": "µs a batch of the same 16",
        "us_per_random_batch": "of any 16",
        "state_bytes": "state bytes",
        "resident_bytes_per_sequence": "resident bytes/sequence",
    },
    "load": {"model": "model", "load_ms": "load ms"},
    "faults": {
        "scheduling": "scheduling",
        "bad": "bad clients",
        "requests_per_s": "requests/s of 8 good clients",
        "over_alone": "/ without others",
        "over_good": "/ beside as many good ones",
    },
    "state": {
        "model": "model",
        "state_bytes": "state bytes",
        "call": "call",
        "backend_us": "µs in the backend",
        "copy_us": "a plain copy µs",
        "over_copy": "/ a plain copy",
    },
    "state_allowed": {
        "model": "model",
        "off_per_s": "requests/s without state_api",
        "on_per_s": "with it, not used",
        "on_over_off": "with / without",
    },
    "service": {
        "model": "model",
        "backend": "backend",
        "protocol": "protocol",
        "sequences": "sequences",
        "max_batch_size": "max batch",
        "delay_us": "delay µs",
        "requests_per_s": "requests/s",
        "ours_over_this": "ours / this",
        "p50_us": "p50 µs",
        "p99_us": "p99 µs",
        "batch": "batch",
        "server_cpu_us_per_request": "server CPU µs/request",
        "cpu_us_per_request": "all CPU µs/request",
        "server_rss_bytes": "server bytes",
    },
    "bound": {
        "max_batch_size": "max batch",
        "preferred_batch_size": "preferred",
        "delay_us": "delay µs",
        "priority": "priority",
        "requests_per_s": "requests/s",
        "filled": "batch filled",
        "trivial_cpu_us": "trivial CPU µs",
        "ort_cpu_us_alone": "ORT CPU µs/row alone",
        "ort_cpu_us_busy": "beside clients",
        "of_bound_alone": "of bound",
        "of_bound_busy": "of bound beside clients",
    },
    "windows": {
        "pace": "pace",
        "cuts": "cuts",
        "request_ms": "audio of a request, ms",
        "server_ms": "server CPU ms / s of audio",
        "server_ms_over": "/ 32 ms",
        "all_ms": "all CPU ms / s of audio",
        "all_ms_over": "/ 32 ms",
        "audio_s_per_s": "s of audio a second",
        "audio_s_per_s_over": "/ 32 ms",
        "batch": "rows a run",
        "p50_ms": "p50 ms",
        "p99_ms": "p99 ms",
    },
    "stores": {
        "model": "model",
        "state_bytes": "state bytes",
        "sequences": "sequences",
        "durability": "durability",
        "requests_per_s": "requests/s",
        "requests_per_s_over": "/ none",
        "p50_us": "p50 µs",
        "p99_us": "p99 µs",
        "p99_over": "/ none",
        "server_cpu_us_per_request": "server CPU µs/request",
        "saved_per_s": "states saved/s",
        "store_cpu": "Valkey's CPUs",
    },
    "stores_claims": {
        "durability": "durability",
        "owner": "the old server",
        "sequences": "sequences",
        "state_bytes": "state bytes",
        "claims_per_s": "claims/s",
        "over_here": "/ requests/s afterwards",
        "p50_us": "p50 µs",
        "p99_us": "p99 µs",
        "server_cpu_us_per_claim": "server CPU µs/claim",
        "store_cpu_us_per_claim": "Valkey's CPU µs/claim",
    },
    "stores_restart": {
        "server": "the server before",
        "sequences": "sequences",
        "state_bytes": "state bytes",
        "ready_s": "s until ready",
        "first_s": "s until the first goes on",
        "all_s": "s until all have gone on",
        "requests_per_s": "requests/s",
        "folder_bytes": "bytes of the folder",
    },
    "stores_primary": {
        "file": "append-only file",
        "durability": "durability",
        "state_bytes": "state bytes",
        "store_cpu_us_per_save": "CPU µs/save",
        "most_per_s": "saves/s of a busy thread",
        "most_bytes_per_s": "bytes/s of a busy thread",
        "store_bytes_per_sequence": "memory bytes/sequence",
    },
    "stores_many": {
        "durability": "durability",
        "sequences": "sequences",
        "state_bytes": "state bytes",
        "server_bytes_per_sequence": "server's bytes/sequence",
        "store_bytes_per_sequence": "Valkey's bytes/sequence",
        "starts_per_s": "STARTs/s",
        "requests_per_s": "requests/s of 64",
        "over_64": "/ with 64 only",
        "p50_us": "p50 µs",
        "p99_us": "p99 µs",
    },
    "join": {
        "way": "way",
        "streams": "streams",
        "chunks_per_s": "chunks/s",
        "p50_us": "p50 µs",
        "p99_us": "p99 µs",
        "server_cpu_us_per_chunk": "server CPU µs/chunk",
        "tokens_per_chunk": "tokens/chunk",
    },
    "ovms": {
        "way": "way",
        "streams": "clients",
        "requests_per_s": "requests/s",
        "p50_us": "p50 µs",
        "p99_us": "p99 µs",
        "resident_bytes": "the gateway's bytes",
    },
    "ovms_ratios": {
        "streams": "clients",
        "requests_per_s_over_direct": "requests/s / direct",
        "p50_more_us": "p50 more µs",
        "p99_more_us": "p99 more µs",
    },
}

_CLIENTS = {
    "transport": "transport",
    "model": "model",
    "sequences": "sequences",
    "load": "of capacity",
    "backend": "backend",
    "configuration": "configuration",
    "requests_per_s": "requests/s",
    "p50_us": "p50 µs",
    "p99_us": "p99 µs",
    "batch": "rows a run",
    "cpu_us_per_request": "CPU µs/request",
    "switches_per_request": "switches/request",
    "failures": "failed",
}
_RATIOS = {
    "transport": "transport",
    "model": "model",
    "sequences": "sequences",
    "load": "of capacity",
    "configuration": "our configuration",
    "peer": "better peer",
    "requests_per_s_over_peer": "requests/s",
    "p50_us_over_peer": "p50",
    "p99_us_over_peer": "p99",
    "batch": "rows a run",
    "peer_batch": "of the peer",
}
_BETWEEN = _RATIOS | {"configuration": "configuration", "peer": "over", "peer_batch": "of the other"}
_CLOSED = {"closed": _CLIENTS, "closed_ratios": _RATIOS}
_CLOSED |= {"conversion": _CLIENTS, "conversion_ratios": _BETWEEN, "scheduling_ratios": _BETWEEN}
for _name, _columns in _CLOSED.items():
    COLUMNS[_name] = {key: heading for key, heading in _columns.items() if key != "load"}
COLUMNS |= {"open": _CLIENTS, "open_ratios": _RATIOS}

PICTURED = ("lstm", "lstm_rows", "cache")
"""Models of the picture of steps."""

TITLES = {
    "step": "The step, pinned to one CPU (in process)",
    "throughput": "As many requests as come back (in process)",
    "growing": "A state that grows by 256 bytes a step (in process)",
    "padding": "A decoder whose sequences have different lengths",
    "repeat": "A decoder with repeat, compared with a client that sends back each token",
    "scheduling_ratios": "The backend's own scheduler over core's oldest",
    "conversion": "Converted models (in process)",
    "conversion_ratios": "Converted models over others (in process)",
    "join": "Several graphs: joined, in a client, in a script of the Python backend",
    "live": "Many live sequences (in process)",
    "load": "Loading",
    "state": "The calls of the State API",
    "state_allowed": "A model that allows the State API, and requests that don't use it (in process)",
    "service": "The service over gRPC",
    "closed": "Each sequence waits for its answers",
    "closed_ratios": "Each sequence waits for its answers: ours over the better peer",
    "open": "At a fixed rate, a part of the capacity",
    "open_ratios": "At a fixed rate: ours over the better peer",
    "bound": "The service, lstm, 64 sequences, against what the CPUs allow",
    "ovms": "Clients of OpenVINO Model Server, through the gateway and with gRPC to Triton itself",
    "ovms_ratios": "The gateway over Triton itself",
    "windows": "A second of audio in requests of different lengths, which the client or the server cuts into chunks of 32 ms",
    "stores": "Sequences that are kept in a store",
    "stores_claims": "A server takes sequences that another one has saved, over gRPC, 16 clients, Valkey",
    "stores_restart": "A server with a folder starts again; seconds from the start of the process",
    "stores_primary": "What saves cost a Valkey",
    "stores_many": "Very many sequences on one server, Valkey",
    "faults": "Good clients beside clients whose requests fail",
}


def medians(rows: Iterable[dict], keys: tuple[str, ...]) -> Rows:
    """Rows that agree in `keys` become one: the median of each number; of whole numbers one that occurs."""
    groups: dict[tuple, Rows] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    merged = []
    for group in groups.values():
        first = dict(group[0])
        for key, value in first.items():
            if isinstance(value, (int, float)) and key not in keys:
                middle = median if isinstance(value, float) else median_low
                first[key] = middle(row[key] for row in group)
        merged.append(first)
    return merged


def show(console: Console, results: dict[str, Rows]) -> None:
    for level, rows in results.items():
        if not rows:
            continue
        columns = COLUMNS[level]
        table = Table(title=TITLES[level])
        for number, heading in enumerate(columns.values()):
            table.add_column(heading, justify="left" if number == 0 else "right")
        for row in rows:
            table.add_row(*(_with_quartiles(row, key) for key in columns))
        console.print(table)


def markdown(rows: Rows, key: str) -> str:
    """Ratios as tables for a page, one for each transport and load: a line for each model, with the rows of a run (ours :
    the peer's)."""
    lines = []
    for transport, load in dict.fromkeys((row["transport"], row["load"]) for row in rows):
        of = [row for row in rows if (row["transport"], row["load"]) == (transport, load)]
        counts = sorted({row["sequences"] for row in of})
        at = "" if load is None else f", {load:.0%} of capacity"
        lines += [
            "",
            f"| {_RATIOS[f'{key}_over_peer']}, {transport}{at} | {' | '.join(map(str, counts))} |",
            f"|---|{'---|' * len(counts)}",
        ]
        for model in dict.fromkeys(row["model"] for row in of):
            cells = {row["sequences"]: _ratio(row, key) for row in of if row["model"] == model}
            lines.append(f"| `{model}` | {' | '.join(cells.get(count, '–') for count in counts)} |")
    return "\n".join(lines)


def _ratio(row: dict, key: str) -> str:
    return f"{row[f'{key}_over_peer']:.2f} ({row['batch']:.2g} : {row['peer_batch']:.2g})"


def _with_quartiles(row: dict, key: str) -> str:
    lower, upper = (row.get(f"{key}_{which}_quartile") for which in ("lower", "upper"))
    quartiles = "" if lower is None or upper is None else f" [{lower:.2f} {upper:.2f}]"
    return _cell(row.get(key)) + quartiles.replace("[", r"\[")


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def write(folder: Path, about: dict, results: dict[str, Rows]) -> list[Path]:
    """results.json and the pictures that its levels allow. Levels that are not in `results` stay as they were."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "results.json"
    merged, abouts = _known(file)
    measured = {level: rows for level, rows in results.items() if rows}
    merged |= measured
    abouts |= {level: about for level in measured}
    file.write_text(json.dumps({"about": abouts, "results": merged}, indent=1) + "\n")
    written = [file]
    if any(row["model"] in PICTURED for row in merged.get("step", [])):
        written.append(_picture_of_steps(folder / "step.svg", merged["step"]))
    if merged.get("service"):
        written.append(_picture_of_service(folder / "service.svg", merged["service"]))
    return written


def _known(file: Path) -> tuple[dict[str, Rows], dict[str, dict]]:
    """The rows of the file's levels, and for each level when and of what it was measured."""
    if not file.exists():
        return {}, {}
    known = json.loads(file.read_text())
    results, about = known["results"], known["about"]
    # A file of before each level had its own says only when the last one was measured.
    return results, {level: about.get(level, {}) for level in results}


def _axes(count: int, width: float):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "bench"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=(width * count, 3.6), layout="constrained")
    return figure, list(axes) if count > 1 else [axes]


def _picture_of_steps(path: Path, rows: Rows) -> Path:
    shown = [row for row in rows if row["model"] in PICTURED]
    models = list(dict.fromkeys(row["model"] for row in shown))
    figure, axes = _axes(len(models), 5.5)
    for axis, model in zip(axes, models, strict=True):
        of = [row for row in shown if row["model"] == model]
        for shift, key, label in ((-0.2, "whole_over_raw", "alone"), (0.2, "whole_over_after", "after Triton")):
            axis.bar([place + shift for place in range(len(of))], [row[key] for row in of], width=0.4, label=label)
        axis.set_xticks(range(len(of)), [f"{row['batch']}\n{row['composition']}" for row in of])
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_title(f"{model}: all but Triton, over ONNX Runtime", fontsize=10)
        axis.legend(fontsize=7)
        axis.tick_params(axis="x", labelsize=7)
    figure.savefig(path, metadata={"Date": None})
    return path


def _picture_of_service(path: Path, rows: Rows) -> Path:
    models = list(dict.fromkeys(row["model"].removesuffix("_carried") for row in rows))
    figure, axes = _axes(len(models), 4.5)
    for axis, model in zip(axes, models, strict=True):
        lines: dict[str, Rows] = {}
        for row in rows:
            if row["model"].removesuffix("_carried") == model:
                carried = ", state carried by the client" if row["model"].endswith("_carried") else ""
                lines.setdefault(f"{row['backend']}, {row['protocol']}{carried}", []).append(row)
        for name, line in lines.items():
            axis.plot([row["sequences"] for row in line], [row["requests_per_s"] for row in line], "o-", label=name)
        axis.set_xscale("log")
        axis.set_xlabel("sequences")
        axis.set_title(f"{model}: requests/s")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})
    return path

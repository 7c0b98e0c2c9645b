"""The benchmark on the command line: see docs/performance.md."""

from __future__ import annotations

import argparse
import datetime
import functools
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import tritonclient.http as http
from rich.console import Console

from support.arguments import names as names_of
from support.bench import (
    conversion,
    faults,
    joining,
    ovms,
    padding,
    peers,
    repeat,
    report,
    service,
    state_api,
    step,
    stored_sequences,
    stores,
    windows,
)
from support.bench.models import MODELS
from support.bench.peers import Comparison, Peer
from support.bench.service import Served
from support.bench.soak import Soak
from support.paths import BUILD, ROOT
from support.server import TritonServer

LEVELS = (
    "step",
    "throughput",
    "growing",
    "padding",
    "repeat",
    "live",
    "load",
    "state",
    "service",
    "bound",
    "faults",
    "conversion",
    "join",
    "ovms",
    "windows",
    "stores",
    "closed",
    "open",
)
TRANSPORTS = ("process", "stream")
STORE_PARTS = ("costs", "claims", "restart", "many", "primary")
RECORDED = ROOT / "docs" / "bench"


def main() -> int:
    options = arguments()
    if options.soak:
        return 0 if Soak(options.soak).run() else 1
    console = Console(width=max(Console().width, 150))
    effort = step.QUICK if options.quick else step.FULL
    results: dict[str, report.Rows] = {}
    ours_failed = False
    with tempfile.TemporaryDirectory(prefix="stateful-bench-") as folder:
        for level in options.level:
            console.print(f"[dim]{level} …[/dim]")
            of_level = Path(folder) / level
            of_level.mkdir()
            found = measure(level, of_level, effort, options)
            results |= found
            report.show(console, found)
            tell(console, found)
            ours_failed |= any("failed" in row and row["backend"] == peers.OURS for row in found[level])
            written = report.write(RECORDED if options.record else BUILD / "bench" / "results", about(), results)
    for path in written:
        console.print(f"written: {path}")
    return 1 if ours_failed else 0


def measure(level: str, folder: Path, effort: step.Effort, options: argparse.Namespace) -> dict[str, report.Rows]:
    if level == "state":
        return {level: list(state_api.calls(folder, effort)), "state_allowed": list(state_api.allowing(folder, effort))}
    if level == "ovms":
        rows = list(ovms.compare(folder, options.sequences or [1, 16], 3 * options.seconds, options.blocks))
        ratios = report.medians(ovms.over_direct(rows), ("streams",))
        measured = report.medians([row for row in rows if "block" in row], ("way", "streams"))
        return {level: [*measured, *(row for row in rows if "block" not in row)], "ovms_ratios": ratios}
    if level == "join":
        streams, seconds = options.sequences or [1, 8, 32], 4 * options.seconds
        rows = [
            *joining.recognisers(folder, streams, seconds, options.blocks),
            *joining.denoisers(folder, streams, seconds, options.blocks),
        ]
        return {level: report.medians(rows, ("way", "streams"))}
    if level == "conversion":
        sequences = options.sequences or [1, 16, 64]
        rows = list(conversion.closed(folder, options.denoiser, sequences, options.seconds, options.blocks))
        ratios = [ratio for pair in conversion.COMPARED for ratio in peers.between(rows, *pair)]
        return {level: peers.table(rows), f"{level}_ratios": ratios}
    if level == "windows":
        streams = (options.sequences or [windows.STREAMS])[0]
        return {level: report.medians(windows.compare(folder, streams, options.blocks), ("pace", "cuts", "request_ms"))}
    if level == "stores":
        return _stores(folder, options)
    if level not in ("closed", "open"):
        return {level: list(LEVEL[level](folder, effort, options))}
    models = [name for name in options.models if name in peers.MODELS_COMPARED]
    sequences = options.sequences or ([16, 64] if level == "open" else [1, 16, 64])
    with Comparison(folder, options.peer, options.seconds) as comparison:
        load = comparison.open if level == "open" else comparison.closed
        rows = list(load(models, sequences, options.transports, options.blocks))
    if level == "closed" and not options.peer:
        return {level: peers.table(rows), "scheduling_ratios": peers.between(rows, peers.OWN.name, peers.PLAIN.name)}
    return {level: peers.table(rows), f"{level}_ratios": peers.ratios(rows)}


def tell(console: Console, found: dict[str, report.Rows]) -> None:
    """What a table has no room for: the ratios in Markdown, and why something failed."""
    for level, rows in found.items():
        for row in rows:
            if "failed" in row:
                console.print(f"failed: {row['failed']}", markup=False, highlight=False)
        if level.endswith("_ratios") and level not in ("conversion_ratios", "ovms_ratios") and rows:
            keys = ("p50_us", "p99_us") if level == "open_ratios" else ("requests_per_s",)
            for key in keys:
                console.print(report.markdown(rows, key), markup=False, highlight=False)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Times the backend side by side with ONNX Runtime alone and with a backend that does nothing. "
        "All of it takes about 40 minutes, with --quick 8.",
    )
    parser.add_argument("level", nargs="*", help=f"what to measure: {', '.join(LEVELS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, fewer live sequences")
    parser.add_argument(
        "--models", type=names_of("model", MODELS), default=["accumulate", "lstm", "lstm_rows", "cache", "forty"]
    )
    parser.add_argument("--batches", type=_numbers, default=[1, 16, 64], help="rows of a batch, for the step")
    parser.add_argument(
        "--sequences",
        type=_numbers,
        help="for service, padding, repeat, conversion, join, ovms, windows, stores, closed and open",
    )
    parser.add_argument(
        "--only",
        type=names_of("part", STORE_PARTS),
        default=list(STORE_PARTS),
        metavar="PART,...",
        help=f"for stores: {', '.join(STORE_PARTS)} (default: all)",
    )
    parser.add_argument("--protocols", type=lambda text: text.split(","), default=["grpc", "stream"])
    parser.add_argument(
        "--transports",
        type=names_of("transport", TRANSPORTS),
        default=list(TRANSPORTS),
        help="for closed and open (default: process,stream)",
    )
    parser.add_argument(
        "--peer",
        type=_peer,
        action="append",
        default=[],
        metavar="NAME=FOLDER[,CONFIGS]",
        help="compare with the backend in FOLDER, in closed and open. NAME: onnxruntime or nvidia (NVIDIA's "
        "stateful_backend), which get models as they want them; another name gets them as ours does. CONFIGS has "
        "MODEL.pbtxt for models that are to be configured in another way",
    )
    parser.add_argument(
        "--blocks",
        type=_number,
        help="repetitions for service, bound, faults, conversion, join, ovms, windows, stores, closed and open (default: 3, with --quick 1)",
    )
    parser.add_argument("--seconds", type=float, help="of a window there (default: 1, with --quick 0.5)")
    parser.add_argument(
        "--decoder",
        type=Path,
        default=padding.SMALL,
        metavar="FILE",
        help="for padding and repeat: an export of scripts/support/bench/export_decoder.py (default: a small one, for tests)",
    )
    parser.add_argument(
        "--denoiser",
        type=_denoiser,
        metavar="FILE,INPUT=OUTPUT,...",
        help="for conversion: a model whose batch is fixed to 1, and the pairs of its states",
    )
    parser.add_argument("--backends", type=Path, default=step.BACKENDS, help=argparse.SUPPRESS)
    parser.add_argument("--record", action="store_true", help="write to docs/bench instead of build/bench/results")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="instead: check every answer for so long")
    options = parser.parse_args()
    unknown = [level for level in options.level if level not in LEVELS]
    if unknown:
        parser.error(f"there is no level '{unknown[0]}'; there are {', '.join(LEVELS)}")
    options.level = options.level or list(LEVELS)
    options.blocks = options.blocks or (1 if options.quick else 3)
    options.seconds = options.seconds or (0.5 if options.quick else 1.0)
    names = [peer.name for peer in options.peer]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        parser.error(f"--peer: '{twice[0]}' is given twice; give each backend its own name")
    if options.peer and not {"closed", "open"} & set(options.level):
        parser.error(f"--peer: only closed and open compare with other backends, not {', '.join(options.level)}")
    return options


def _denoiser(text: str) -> conversion.Denoiser:
    try:
        return conversion.Denoiser.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _numbers(text: str) -> list[int]:
    return [_number(number) for number in text.split(",")]


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}': a whole number from 1 on is expected")
    return int(text)


def _peer(text: str) -> Peer:
    try:
        return Peer.parse(text)
    except ValueError as error:
        # argparse keeps the text of this one only
        raise argparse.ArgumentTypeError(str(error)) from error


def about() -> dict:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ":")
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "cpu": cpu.split(":", 1)[1].strip(),
        "cpus": psutil.cpu_count(),
        "system": platform.release(),
        "onnxruntime": step.libonnxruntime().name.split(".so.")[1],
        "tritonserver": _tritonserver_version(),
    }


@functools.cache
def _tritonserver_version() -> str:
    with tempfile.TemporaryDirectory() as repository, TritonServer(Path(repository)) as server:
        return http.InferenceServerClient(server.http_url).get_server_metadata()["version"]


def _step(folder: Path, effort: step.Effort, options: argparse.Namespace):
    names = [name for name in options.models if name != "growing"]
    for row in step.steps(folder, effort, names, options.batches):
        after_us = row["trivial_and_raw_us"] - row["trivial_us"]
        whole = {"after_us": after_us, "whole_over_after": (row["ours_us"] - row["trivial_us"]) / after_us}
        yield row | whole | {"step_us": row["gather_us"] + row["infer_us"]}


def _throughput(folder: Path, effort: step.Effort, options: argparse.Namespace):
    alone = [("accumulate", 1), ("lstm", 1), ("cache", 1)]
    many = [("accumulate", 64), ("lstm", 16), ("lstm", 64)]
    for cases, one_cpu in ((alone, True), (many, False)):
        cases = [case for case in cases if case[0] in options.models]
        for row in step.throughput(folder, effort, cases, one_cpu=one_cpu):
            yield row | {"cpus": 1 if one_cpu else psutil.cpu_count()}


def _service(folder: Path, effort: step.Effort, options: argparse.Namespace):
    sequences = options.sequences or ([1, 16, 64] if options.quick else [1, 16, 64, 256, 1000])
    for name in [name for name in options.models if name in ("accumulate", "lstm", "cache")]:
        model = MODELS[name]
        served = [Served("stateful", model, 64), Served("stateful", model.carried, 64)]
        rows = service.compare(folder / name, served, sequences, options.protocols, options.seconds, options.blocks)
        yield from report.medians(rows, ("served", "protocol", "sequences"))


def _stores(folder: Path, options: argparse.Namespace) -> dict[str, report.Rows]:
    """A table for each part. --quick: a tenth of the sequences."""
    part, backends = 10 if options.quick else 1, options.backends
    found: dict[str, report.Rows] = {"stores": []}
    for name in options.only:
        of_part = folder / name
        of_part.mkdir()
        if name == "costs":
            rows = stores.compare(of_part, options.sequences or [64], 3 * options.seconds, options.blocks, backends)
            found["stores"] = report.medians(rows, ("model", "sequences", "durability"))
        elif name == "claims":
            found["stores_claims"] = list(stored_sequences.claims(of_part, backends, 2_000 // part))
        elif name == "restart":
            found["stores_restart"] = list(stored_sequences.restart(of_part, backends, 10_000 // part))
        elif name == "many":
            many = stored_sequences.many(of_part, backends, 100_000 // part, 10 * options.seconds)
            found["stores_many"] = list(many)
        else:
            found["stores_primary"] = list(stored_sequences.primary(5 * options.seconds))
    return found


def _bound(folder: Path, effort: step.Effort, options: argparse.Namespace):
    return service.bound(folder, MODELS["lstm"], options.seconds, options.blocks)


LEVEL = {
    "step": _step,
    "throughput": _throughput,
    "growing": lambda folder, effort, _: step.growing(folder, effort),
    "padding": lambda folder, _, options: padding.tokens(
        folder, options.decoder, options.sequences or [1, 4, 16, 64], 4 * options.seconds, options.blocks
    ),
    "repeat": lambda folder, _, options: repeat.tokens(
        folder, options.decoder, options.sequences or [1, 4, 16], 4 * options.seconds, options.blocks
    ),
    "live": lambda folder, effort, _: step.live(folder, effort),
    "load": lambda folder, *_: step.load(folder),
    "service": _service,
    "bound": _bound,
    "faults": lambda folder, _, options: faults.rates(folder, 3 * options.seconds, options.blocks),
}

if __name__ == "__main__":
    sys.exit(main())

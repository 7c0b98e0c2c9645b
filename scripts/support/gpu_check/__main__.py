"""scripts/gpu-check on the command line."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from support.gpu_check import report, stages
from support.gpu_check.chunks import FAILED, Results, Runner, shortened
from support.gpu_check.cuda import CudaError, Driver
from support.gpu_check.install import Place
from support.gpu_check.parts import Manifest, PartsError
from support.gpu_check.stages import STAGES, Setting

ROOT = Path(__file__).resolve().parents[3]
#: Exit codes: all that was asked for has passed; something has not; as argparse's; nothing has failed, but more is to be done.
DONE, WRONG, MISCALLED, MORE = 0, 1, 2, 3

_DESCRIPTION = """Proves the backend on a machine with an NVIDIA GPU that has no network.

    scripts/gpu-check pack                    here: parts in numbered pieces under 55 MB, in build/gpu-check/
    scripts/gpu-check run PARTS               there: what the time allows; a second call goes on
    scripts/gpu-check report PARTS/results.json --out docs/gpu.md

On a machine without the checkout: tar xf PARTS/001-tree.tar, and call scripts/gpu-check from there.
scripts/gpu-check COMMAND --help has each command's options.
"""

_STAGES = """stages, in this order:
    machine         the GPU, the driver, its compiler, the libraries
    kernel          the kernel against the host's copies: random layouts, 100,000 rows, a move above 4 GiB
    load            a model on the real server, against ONNX Runtime on the CPU
    values          the same at 16 and 64 rows, with fp16 states, with two instances
    leaks           memory from step to step: a Concat of many tensors, a growing state
    captures        CUDA graphs of several sizes, one that cannot be captured, others that allocate meanwhile
    step            the step beside ONNX Runtime alone
    graphs          the same with CUDA graphs
    movement        how fast states move
    shared_memory   CUDA shared memory from a client
    loads           memory from load to load, and a GPU whose memory others have taken
    peer            the step of Triton's onnxruntime backend, if it is there
    tensorrt        values with TensorRT, if it is there
    fault           a write to an address that is not allocated
    behaviour       tests/server with instances of KIND_GPU, in the time that is left

exit code: 0 all has passed, 1 something has not, 2 called wrongly, 3 nothing has failed, but more is to be done: call again
"""


def main() -> int:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return options.do(options)
    except (PartsError, OSError, ValueError) as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        print("gpu-check: interrupted; the next run goes on", file=sys.stderr)
        return 128 + signal.SIGINT


def arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description=_DESCRIPTION, formatter_class=raw)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    pack = commands.add_parser("pack", help="collect the parts and cut them into pieces (needs the network)")
    pack.set_defaults(do=_pack)
    pack.add_argument("--into", type=Path, default=ROOT / "build" / "gpu-check", help="default: build/gpu-check")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    pack.add_argument("--python", type=_version, default=here, help=f"the machine's Python (default: {here})")
    pack.add_argument("--cuda", type=int, choices=(12, 13), default=13, help="the machine's CUDA (default: 13)")
    about = "join the pieces, set up, and run the stages (no network)"
    run = commands.add_parser("run", help=about, formatter_class=raw, epilog=_STAGES)
    run.set_defaults(do=_run)
    run.add_argument("parts", type=Path, help="the folder with the pieces and the manifest")
    run.add_argument("--results", type=Path, help="default: PARTS/results.json")
    run.add_argument("--work", type=Path, help="where things are unpacked (default: PARTS/work)")
    run.add_argument("--seconds", type=float, default=450, help="in all (default: 450)")
    run.add_argument("--stage", action="append", choices=list(STAGES), default=[], help="only this; may be repeated")
    run.add_argument("--again", action="store_true", help="run what has failed once more")
    run.add_argument(
        "--stand-in",
        type=Path,
        metavar="FOLDER",
        help="a dry run without a GPU, with the libraries that scripts/test-on-fake-cuda has made in build/fake-cuda",
    )
    run.add_argument("--marker", default="", help="of the tests of the stage behaviour, as pytest's -m")
    shown = commands.add_parser("report", help="write what was found as markdown")
    shown.set_defaults(do=_report)
    shown.add_argument("results", type=Path)
    shown.add_argument(
        "--out", type=Path, help="a file; what stands there behind its mark is replaced (default: standard output)"
    )
    shown.add_argument("--table", action="store_true", help="a short table instead")
    return parser.parse_args()


def _version(text: str) -> str:
    if not re.fullmatch(r"3\.\d+", text):
        raise argparse.ArgumentTypeError(f"'{text}': a version such as 3.12 is expected")
    return text


def _pack(options: argparse.Namespace) -> int:
    from rich.console import Console

    from support.gpu_check.pack import PackError, pack

    console = Console(stderr=True)
    try:
        manifest = pack(options.into, options.python, options.cuda, console)
    except PackError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return WRONG
    pieces = list(manifest.pieces)
    size = sum(piece.bytes for piece in pieces) / 1e6
    console.print(f"{len(pieces)} pieces, {size:.0f} MB, of commit {manifest.about['commit']}: {options.into}")
    if manifest.about["commit"].endswith("-dirty"):
        console.print("[yellow]what is not committed is not in the tree, though it may be in what was built[/yellow]")
    return DONE


def _run(options: argparse.Namespace) -> int:
    parts = options.parts.resolve()
    if not parts.is_dir():
        print(
            f"gpu-check: there is no folder {parts}: 'scripts/gpu-check pack' makes it where there is a network, as "
            "build/gpu-check; copy it here and name it",
            file=sys.stderr,
        )
        return MISCALLED
    place = Place((options.work or parts / "work").resolve())
    results = Results((options.results or parts / "results.json").resolve())
    about = Manifest.read(parts).about
    stand_in = options.stand_in.resolve() if options.stand_in else None
    if stand_in is None:
        _check_driver(about["cuda"])
    elif not (stand_in / "libcuda.so.1").exists():
        raise PartsError(f"there is no {stand_in / 'libcuda.so.1'}: scripts/test-on-fake-cuda makes it")
    results.about = about | {"stand_in": stand_in is not None}
    runner = Runner(results, options.seconds, results.about["commit"], again=options.again, say=_say)
    stages.run(runner, Setting(parts, place, options.marker, stand_in), options.stage)
    return _end(runner, place, options.stage)


def _check_driver(packed: int) -> None:
    """Before anything is unpacked: whether the driver knows the CUDA that the packed ONNX Runtime is for."""
    try:
        major, minor = Driver().version()
    except OSError as error:
        raise PartsError(f"NVIDIA's driver is needed: {error}; --stand-in makes a dry run without a GPU") from error
    except CudaError as error:
        raise PartsError(f"NVIDIA's driver does not tell its version: {error}") from error
    if major < packed:
        raise PartsError(
            f"the driver knows CUDA {major}.{minor}, and the packed ONNX Runtime is for CUDA {packed}: "
            f"scripts/gpu-check pack --cuda {major} makes parts for this machine"
        )


def _end(runner: Runner, place: Place, chosen: list[str]) -> int:
    """The table, what failed, and the exit code."""
    results = runner.results
    failed = [
        (key, record)
        for key, record in results.records.items()
        if record.status == FAILED and (not chosen or key.split("/")[0] in ("setup", *chosen))
    ]
    for key, record in failed:
        wrong = [row for row in record.rows if row.get("verdict") == "wrong"]
        found = [f"{row['check']}: {row['found']}; allowed: {row['allowed']}" for row in wrong]
        _say("\n".join([f"\n{key} has failed:", *found, shortened(record.output, 3000)]))
    _show(results, place)
    unfinished = [key for key, record in results.records.items() if not record.is_done and key not in runner.not_begun]
    for what, keys in (("not begun", runner.not_begun), ("interrupted", unfinished)):
        if keys:
            _say(f"{what}: {_by_stage(keys)}")
    _say(f"results: {results.file}")
    return WRONG if failed else MORE if runner.not_begun or unfinished else DONE


def _by_stage(keys: list[str]) -> str:
    """As in "machine, 37 of behaviour"; "*" is a whole stage."""
    found = [key.split("/") for key in keys]
    names = {stage: [name for of, name in found if of == stage] for stage, _ in found}
    return ", ".join(stage if "*" in of else f"{len(of)} of {stage} ({of[0]} ...)" for stage, of in names.items())


def _show(results: Results, place: Place) -> None:
    """Drawn in the virtual environment, which has what draws."""
    if not place.python.exists():
        return
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    command = [str(place.python), "-m", "support.gpu_check", "report", "--table", str(results.file)]
    subprocess.run(command, env=environment, check=False)


def _report(options: argparse.Namespace) -> int:
    if not options.results.exists():
        raise ValueError(f"there is no {options.results}: 'scripts/gpu-check run PARTS' writes PARTS/results.json")
    results = Results(options.results)
    if options.table:
        from rich.console import Console

        Console().print(report.table(results))
    elif options.out:
        report.put(options.out, results)
        print(f"written: {options.out}")
    else:
        print(report.markdown(results), end="")
    return DONE


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())

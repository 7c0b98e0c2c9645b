"""Sends live streams of speech through several tritonservers behind a proxy, which keep their sequences in one Valkey or Redis.

Each stream sends 100 ms of sound every 100 ms, as one sequence of Silero VAD. On a timeline, a server is killed with -9 and
comes back, another one joins, one is drained and stopped, and the store is stopped for 5 seconds. Every answer is compared
with ONNX Runtime alone, and the number of steps that the server says with what it should be.

At the level `step`, each step is in the store before it is answered: no sequence and no step is lost, and no step is made twice.
While the store is stopped, requests fail, and the clients repeat them.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from support import paths
from support.arguments import names, positive
from support.cluster import report
from support.cluster.faults import Faults
from support.cluster.servers import Servers
from support.cluster.streams import MODEL, PROTOCOLS, Clock, Speakers
from support.proxies import KINDS, Proxy
from support.server import ServerError
from support.valkey import PROGRAMS, Valkey


def write_model(repository: Path, location: str, durability: str) -> None:
    """The speech model, whose sequences are kept in the store."""
    source, target = paths.MODELS / MODEL, repository / MODEL
    (target / "1").mkdir(parents=True)
    (target / "1" / "model.onnx").symlink_to((source / "1" / "model.onnx").resolve())
    parameters = {"state_store": location, "durability": durability, "state_api": "true", "worker_count": "2"}
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()]
    (target / "config.pbtxt").write_text((source / "config.pbtxt").read_text() + "\n" + "\n".join(lines) + "\n")


async def run_all(speakers: Speakers, faults: Faults, seconds: float, chaos_seed: int | None) -> None:
    """The streams, and the faults meanwhile."""
    talking = asyncio.create_task(speakers.run(seconds))
    try:
        if chaos_seed is None:
            await faults.timeline(seconds)
        else:
            await faults.chaos(seconds, chaos_seed)
        await talking
        faults.count_ended()
        await faults.compared()
    finally:
        talking.cancel()


def run(arguments: argparse.Namespace, console: Console) -> bool:
    """Whether no sequence and no step was lost, every answer was right, and no server ended by itself."""
    seconds = arguments.chaos * 60 if arguments.chaos else arguments.seconds
    folder = paths.BUILD / "cluster" / arguments.out.stem
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def tell(text: str) -> None:
        console.print(text, highlight=False)

    # A socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="cluster-") as short:
        # With `everysec`, it loses up to two seconds if it is killed while it syncs.
        sync = "always" if arguments.chaos else "everysec"
        store = Valkey(Path(short) / "store", "--appendonly", "yes", "--appendfsync", sync, kind=arguments.store)
        try:
            write_model(folder / "models", store.location, arguments.durability)
            count = arguments.servers + 1
            with (
                Servers(folder / "models", folder, arguments.backends, count, arguments.servers) as servers,
                Proxy(arguments.proxy, folder, servers.ports) as proxy,
            ):
                tell(
                    f"{arguments.servers} tritonservers, {arguments.proxy} on {proxy.grpc_url}, {arguments.store}: logs in {folder}"
                )
                clock = Clock()
                speakers = Speakers(proxy, arguments.protocols, arguments.streams, arguments.seed, clock)
                faults = Faults(servers, store, speakers, clock, tell)
                # It has not joined yet.
                faults.away.append((count - 1, 0.0, float("inf")))
                asyncio.run(run_all(speakers, faults, seconds, arguments.seed if arguments.chaos else None))
        finally:
            store.kill()
    tell("Comparing each answer with ONNX Runtime ...")
    checked = report.check(speakers.lives)
    title = f"{arguments.streams} live streams, {arguments.servers} servers and one more, {arguments.proxy}, durability {arguments.durability}"
    console.print(report.table(title, speakers.lives, checked, faults))
    for error in sorted({life.error for life in speakers.lives if life.error})[:5]:
        tell(f"lost: {error}")
    report.draw(title, speakers.lives, faults, arguments.out)
    # not through the console: a path must stay on one line
    print(f"picture:    {arguments.out}")
    # With `step`, the store keeps each answer.
    has_all_answers = arguments.durability != "step" or not checked.lost_answers
    return checked.passed and has_all_answers and not faults.crashes


def main() -> int:
    """The process's exit code: 0 if nothing was lost, every answer was right, and no server ended by itself."""
    parser = argparse.ArgumentParser(
        prog="scripts/cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--proxy", choices=KINDS, default="envoy", help="the proxy (default: envoy)")
    option("--store", choices=PROGRAMS, default="valkey", help="the store (default: valkey); redis is Redis 8.2")
    option("--durability", default="step", metavar="LEVEL", help="`durability` of the model (default: step)")
    option(
        "--servers",
        type=positive,
        default=3,
        metavar="N",
        help="servers, in addition to the one that joins (default: 3)",
    )
    option(
        "--protocols",
        type=names("protocol", PROTOCOLS),
        default=list(PROTOCOLS),
        metavar="NAME,...",
        help="of the streams, in turn: grpc (a call for each request), stream (a gRPC stream), http (default: all)",
    )
    option("--streams", type=positive, default=16, metavar="N", help="streams at a time (default: 16)")
    option("--seconds", type=positive, default=40, metavar="S", help="how long the streams live (default: 40)")
    option(
        "--chaos",
        type=float,
        metavar="MINUTES",
        help="in place of the timeline: servers are killed and paused, and sequences move, at random, for so long",
    )
    option("--seed", type=int, default=1, help="chooses the sound and the random faults (default: 1)")
    option(
        "--out",
        type=Path,
        default=paths.BUILD / "cluster.png",
        metavar="FILE",
        help="the picture (default: build/cluster.png)",
    )
    option("--backends", type=Path, default=paths.BACKENDS, metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        return 0 if run(arguments, console) else 1
    except ServerError as error:
        console.print(f"failed: {error}", style="red", markup=False, highlight=False)
        return 1


if __name__ == "__main__":
    sys.exit(main())

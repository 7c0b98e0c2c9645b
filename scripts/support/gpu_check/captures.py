"""CUDA graphs where they cannot be had: a model that reads on the host, and others that allocate meanwhile."""

from __future__ import annotations

import base64
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from support.gpu_check.cuda import CudaError, Gpu
from support.gpu_check.models import CHECKED
from support.gpu_check.serving import (
    MIB,
    SIMULATED,
    Alone,
    Client,
    Findings,
    Sequences,
    Served,
    graphs,
    run_one,
    serving,
    unload,
)
from support.server import ServerError, TritonServer

FAILED = "no CUDA graph could be made for"
REPLAY = "Replaying the captured"
SIZES = (1, 2, 4)
LOADS = 4


def main() -> int:
    return run_one({"refused": refused, "beside": beside}, __doc__)


def refused(findings: Findings) -> None:
    """A model whose replays would write where nothing is any more. ONNX Runtime takes it."""
    title = "a model that graphs cannot stand for"
    if SIMULATED:
        findings.left_out(title, "the simulated device has no graphs")
        return
    served = Served(CHECKED["uncapturable"], parameters=graphs([1]))
    with serving(served, loaded=False) as server:
        try:
            server.load(served.name)
            found = "loaded"
        except ServerError as error:
            found = str(error)
    findings(title, found[:400], "an error that names the node", "NonZero" in found)


def beside(findings: Findings) -> None:
    """Captures while another model is loaded and unloaded, another process allocates, and core opens shared memory."""
    captured, other = Served(CHECKED["lstm"], 4, graphs(SIZES), candidates=24), Served(CHECKED["accumulate"])
    worst, problems = 0.0, 0
    with serving(captured, other, loaded=False) as server, ExitStack() as stack:
        counts = [stack.enter_context(_in_turn(task)) for task in _others(server, other.name)]
        for load in range(LOADS):
            server.load(captured.name)
            with Client(server, captured.name) as client:
                sequences = Sequences(captured, client, Alone(captured.model), seed=load)
                try:
                    for number in range(40):
                        sequences.round(SIZES[number % len(SIZES)], may_end=False)
                    sequences.finish()
                except InferenceServerException as error:
                    print(error, file=sys.stderr)
                    problems += 1
            worst = max(worst, sequences.worst)
            unload(server, captured.name)
        done = [count() for count in counts]
        log = server.log_text()
    title = "captures beside other allocations"
    findings.most(f"{title}: largest difference", worst, 1e-4)
    findings.most(f"{title}: loads with a refused request, of {LOADS}", problems, 0)
    names = ("loads of another model", "allocations of another process", "openings of shared memory")
    text = ", ".join(f"{count} {name}" for count, name in zip(done, names, strict=False))
    # Not every machine lets one process open another's memory.
    findings(f"{title}: meanwhile", text, "loads, and allocations on a GPU", all(done[:2]))
    if SIMULATED:
        findings.left_out(f"{title}: graphs", "the simulated device has no graphs")
        return
    replays, warnings = log.count(REPLAY), log.count(FAILED)
    findings(f"{title}: replays", f"{replays}, and {warnings} captures failed", "some", replays > 0)


def _others(server: TritonServer, other: str) -> list[Callable[[], None]]:
    def load() -> None:
        server.load(other)
        unload(server, other)

    if SIMULATED:
        return [load]
    gpu = Gpu()
    region = gpu.allocate(MIB)
    client = grpc_client.InferenceServerClient(server.grpc_url)

    def allocate() -> None:
        gpu.make_current()
        gpu.free(gpu.allocate(64 * MIB))

    def share() -> None:
        gpu.make_current()
        handle = base64.b64encode(gpu.share(region))
        client.register_cuda_shared_memory("region", handle, 0, MIB)
        client.unregister_cuda_shared_memory("region")

    return [load, allocate, share]


@contextmanager
def _in_turn(task: Callable[[], None]) -> Iterator[Callable[[], int]]:
    """Does it again and again in a thread; gives how often it succeeded. What fails meanwhile is told, and tried again."""
    stop, succeeded = threading.Event(), [0]

    def run() -> None:
        while not stop.is_set():
            try:
                task()
                succeeded[0] += 1
            except (ServerError, InferenceServerException, CudaError, OSError) as error:
                print(f"meanwhile: {error}", file=sys.stderr)
            stop.wait(0.05)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: succeeded[0]
    finally:
        stop.set()
        thread.join()


if __name__ == "__main__":
    sys.exit(main())

"""How much memory a real tritonserver takes in the long run, and what it does when others have all of the GPU's."""

from __future__ import annotations

import contextlib
import sys

import numpy as np
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from support.gpu_check.cuda import CudaError, Gpu
from support.gpu_check.models import CHECKED, TOKEN
from support.gpu_check.serving import (
    MIB,
    SIMULATED,
    Alone,
    Client,
    DeviceMemory,
    Findings,
    Sequences,
    Served,
    Step,
    graphs,
    host_memory,
    inputs,
    random_values,
    run_one,
    serving,
    unload,
)
from support.server import TritonServer

#: Nodes that copy parameters from pinned memory to the GPU would keep 20 KB a step if a run did not free it.
CONCAT_STEPS, WARM_UP = 20_000, 2000
TOKENS = 2000
LOADS = 20
#: Requests of a sequence that are on their way at once.
AHEAD = 50
#: For the check of full memory: slots of 512 KiB that are added at once, which are more than what is left free.
SLOTS_ADDED = 1024
LEFT_FREE = 128 * MIB


def main() -> int:
    return run_one(
        {"concat": concat, "concat-graphs": concat_with_graphs, "growing": growing, "loads": loads, "full": full},
        __doc__,
    )


# ---- from step to step


def concat(findings: Findings) -> None:
    _concat(findings, Served(CHECKED["concat"]), "a Concat of many tensors")


def concat_with_graphs(findings: Findings) -> None:
    if SIMULATED:
        findings.left_out("a Concat of many tensors, with graphs", "the simulated device has no graphs")
        return
    _concat(findings, Served(CHECKED["concat"], parameters=graphs([1])), "a Concat of many tensors, with graphs")


def _concat(findings: Findings, served: Served, title: str) -> None:
    with serving(served) as server, Client(server, served.name) as client:
        wrong = _sums(client, WARM_UP)
        before = host_memory(server)
        wrong += _sums(client, CONCAT_STEPS)
        after = host_memory(server)
    findings.most(f"{title}: wrong answers of {WARM_UP + CONCAT_STEPS:,}", wrong, 0)
    for what, allowed in (("resident", 16), ("pinned", 4)):
        grown = (after[what] - before[what]) / MIB
        findings.most(f"{title}: growth of {what} memory in {CONCAT_STEPS:,} steps", grown, allowed, " MiB")
    if SIMULATED:
        findings.left_out(f"{title}: pinned memory of the CUDA provider", "ONNX Runtime runs on the CPU")


def _sums(client: Client, count: int) -> int:
    """Steps of one sequence, each adding small whole numbers; how many answers were wrong."""
    width = CHECKED["concat"].inputs[0].dims[0]
    fed = np.ones((1, width), np.float32)
    wrong = sent = 0
    for number in range(count):
        while sent < min(count, number + AHEAD):
            client.send(Step(1, {"X": fed}, sent == 0, sent == count - 1))
            sent += 1
        wrong += not np.all(client.receive().as_numpy("Y") == number + 1)
    return wrong


def growing(findings: Findings) -> None:
    served = Served(CHECKED["growing"])
    with serving(served) as server, Client(server, served.name) as client:
        device = DeviceMemory(server)
        _tokens(client, 1, 20, None, end=True)
        before, most, first = device.used(), 0, None
        for begin in range(0, TOKENS, 100):
            first = _tokens(client, 2, 100, first, end=begin + 100 == TOKENS)
            most = max(most, device.used() - before)
    state = TOKENS * TOKEN * 4
    # ONNX Runtime's arena has the state of a step and of the next. It grows by blocks of twice the size, the last of which
    # has less than four times the bytes of one: eight times with all smaller ones.
    findings.most(f"a state of {TOKENS:,} tokens, {state / MIB:.0f} MiB: memory over its bytes", most / state, 8)


def _tokens(client: Client, sequence: int, count: int, first: np.ndarray | None, end: bool) -> np.ndarray:
    """Steps of a sequence, whose answers are its first token; without one, it starts."""
    random = np.random.default_rng(count)
    for number in range(count):
        fed = random_values(CHECKED["growing"], random)
        starts = first is None
        right = fed["X"][:, 0] if first is None else first
        answer = client.run([Step(sequence, fed, starts, end and number == count - 1)])[sequence]
        if not np.array_equal(answer.as_numpy("Y"), right):
            raise RuntimeError(f"step {number} of {count} does not have the first token any more")
        first = right
    assert first is not None
    return first


# ---- from load to load


def loads(findings: Findings) -> None:
    served = Served(CHECKED["lstm"], rows=4)
    # With an arena for each thread, malloc keeps more memory as loads come to use other threads.
    with serving(served, env={"MALLOC_ARENA_MAX": "1"}, loaded=False) as server:
        device = DeviceMemory(server)
        used, resident = [], []
        worst = 0.0
        for number in range(LOADS):
            server.load(served.name)
            with Client(server, served.name) as client:
                sequences = Sequences(served, client, Alone(served.model), seed=number)
                for count in (4, 1, 3):
                    sequences.round(count)
                sequences.finish()
            worst = max(worst, sequences.worst)
            unload(server, served.name)
            used.append(device.used() / MIB)
            resident.append(host_memory(server)["resident"] / MIB)
    # The first loads leave what is made once: the context, libraries, kernels, and what the allocator keeps.
    kept = LOADS // 2
    findings.most(f"{LOADS} loads: largest difference", worst, 1e-4)
    if not SIMULATED:
        grown = used[-1] - used[kept - 1]
        findings.most(f"{LOADS} loads: growth of the GPU's memory after {kept}", grown, 16, " MiB")
    grown = resident[-1] - resident[kept - 1]
    findings.most(f"{LOADS} loads: growth of resident memory after {kept}", grown, 16, " MiB")


# ---- when there is none left


def full(findings: Findings) -> None:
    """A pool that has to grow when others have taken the memory of the GPU."""
    lazy = {
        "initial_buffer_size": "4",
        "subsequent_buffer_size": str(SLOTS_ADDED),
        "buffer_alloc_threshold": "4",
        "buffer_dealloc_threshold": "8",
        "warmup_batch_sizes": "4",
    }
    served = Served(CHECKED["cache"], rows=4, parameters=lazy, candidates=4096)
    # Enough for the first buffer and the batches.
    simulated = {"TRITON_STATEFUL_SIMULATED_BYTES": str(LEFT_FREE)} if SIMULATED else {}
    with serving(served, env=simulated) as server, Client(server, served.name) as client:
        alone, random = Alone(served.model), np.random.default_rng(3)
        step = lambda number, **flags: Step(number, random_values(served.model, random), **flags)  # noqa: E731
        # Before the first START, which would add slots.
        other = None if SIMULATED else OtherUser()
        right = all(_is_right(client, alone, step(number, start=True)) for number in range(1, 5))
        refused = _refusal(server, served.name, step(9, start=True))
        findings(
            "full memory: a START that needs more",
            refused or "was not refused",
            "UNAVAILABLE, with the GPU's numbers",
            "UNAVAILABLE" in refused and "memory of GPU" in refused,
        )
        right &= all(_is_right(client, alone, step(number)) for number in range(1, 5))
        findings("full memory: the other sequences", "as on the CPU" if right else "differ", "as on the CPU", right)
        if other is None:
            # The simulated device has no other user, so a place has to become free.
            right = _is_right(client, alone, step(1, end=True))
        else:
            other.release()
        again = right and _is_right(client, alone, step(10, start=True))
        findings("full memory: a START afterwards", "as on the CPU" if again else "differs", "as on the CPU", again)
        # The refused one, too: core counts it as live.
        for number in (2, 3, 4, 9, 10):
            with contextlib.suppress(InferenceServerException):
                client.run([step(number, end=True)])


def _is_right(client: Client, alone: Alone, step: Step) -> bool:
    came = client.run([step])[step.sequence]
    return all(np.array_equal(came.as_numpy(name), right) for name, right in alone.step(step).items())


def _refusal(server: TritonServer, model: str, step: Step) -> str:
    """The code and the text: without a stream, because the errors of a stream have no code."""
    with grpc_client.InferenceServerClient(server.grpc_url) as client:
        try:
            client.infer(model, inputs(step.fed), sequence_id=step.sequence, sequence_start=True)
        except InferenceServerException as error:
            return f"{error.status()}: {error.message()}"[:400]
    return ""


class OtherUser:
    """Takes the memory of the GPU, as another process would, until little is free."""

    def __init__(self) -> None:
        self._gpu, self._taken = Gpu(), []
        size = 1 << 30
        while size >= MIB and (free := self._gpu.memory()[0]) > LEFT_FREE:
            try:
                self._taken.append(self._gpu.allocate(min(size, free - LEFT_FREE)))
            except CudaError:
                size //= 2

    def release(self) -> None:
        for address in self._taken:
            self._gpu.free(address)


if __name__ == "__main__":
    sys.exit(main())

"""The soak: hours of sequences that start, step, end or vanish at random, every answer checked.

Four models, so that each load has its own: `steady` gets most of the requests; clients of `vanishing` break off their
streams, or are killed, with requests on their way; `reloaded` is unloaded and loaded; the states of `stated` are read,
written, copied and saved. It ends at the first answer that is wrong or missing. In the end, the memory and the file
descriptors of the server must not have grown, and no sequence of a vanished client may be left.

No request of ours is on its way when its model is unloaded: tritonserver 2.51 itself has died of that.
"""

from __future__ import annotations

import contextlib
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import tritonclient.grpc as grpc

from support.bench.models import MODELS
from support.bench.step import BACKENDS
from support.server import TritonServer

THREADS = 8
SEQUENCES = 64
REPORT_S = 10
ANSWER_S = 60
"""No answer takes longer on a machine that lives."""
VANISHED_IDLE_US = 5_000_000
"""What nobody comes back to is over after this."""
LIFE_S = 3.0
"""Seconds until a client is killed. It needs about one of them to start."""
MEMORY_GROWN = 1.1
"""At the end, memory may be 1.1 times that of the second quarter. It goes up and down by less."""
SOCKET_BYTES = 2**20
"""And so much more for each socket that the server has kept since then: tritonserver 2.51 keeps 0.3 to 0.6 MiB with each
socket of a killed client."""
FILES_GROWN = 16
"""At most this many more open files: gRPC opens a few for its threads. There are more reloads than that between the two
quarters of a soak of three minutes. Sockets don't count: tritonserver 2.51 keeps the sockets of some killed clients,
with any backend, and this backend opens none."""

# Sends on a stream until it is killed.
_SENDER = """
import sys
import numpy as np
import tritonclient.grpc as grpc
client = grpc.InferenceServerClient(sys.argv[1])
client.start_stream(lambda result, error: None)
tensor = grpc.InferInput("X", [1, 1], "FP32")
tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
number = 0
while True:
    sequence = int(sys.argv[2]) + number % 4
    client.async_stream_infer("vanishing", [tensor], sequence_id=sequence, sequence_start=number < 4)
    number += 1
"""


class Sums:
    """What the model `accumulate` must answer: sums of whole numbers, which floats hold exactly."""

    def __init__(self) -> None:
        self._of: dict[int, float] = {}

    def start(self, sequence: int) -> bool:
        """Whether the next request of this sequence is its first."""
        return sequence not in self._of

    def expect(self, sequence: int, value: float, end: bool) -> float:
        """The answer to the next request of this sequence."""
        expected = self._of.get(sequence, 0.0) + value
        if end:
            self._of.pop(sequence, None)
        else:
            self._of[sequence] = expected
        return expected


class Soak:
    def __init__(self, minutes: float) -> None:
        self.until = time.monotonic() + 60 * minutes
        self.wrong: list[str] = []
        self.counts = {"answers": 0, "vanished": 0, "killed": 0, "reloads": 0, "state calls": 0}
        self.seen: list[tuple[int, int, int]] = []
        """The server's memory in bytes, its open files that are no sockets, and its sockets, at each report."""
        self._lock = threading.Lock()

    def run(self) -> bool:
        """Prints a line every ten seconds. Whether every answer was right."""
        with tempfile.TemporaryDirectory(prefix="stateful-soak-") as folder:
            repository = Path(folder) / "repository"
            names = ["steady", "vanishing", "reloaded", "stated"]
            for name in names:
                _write(repository, name)
            with TritonServer(repository, backends=BACKENDS, model_control="explicit", load_models=names) as server:
                loads: list[Callable[[], None]] = [partial(self.steady, server, number) for number in range(THREADS)]
                others = (self.vanish, self.kill_clients, self.reload, self.call_states)
                loads += [partial(load, server) for load in others]
                threads = [threading.Thread(target=self._guarded, args=(load,)) for load in loads]
                for thread in threads:
                    thread.start()
                self._watch(server, threads)
                self._guarded(lambda: self._settles(server))
        self.wrong += grown(self.seen)
        for what in self.wrong:
            print(what)
        return not self.wrong and all(self.counts.values())

    def _watch(self, server: TritonServer, threads: list[threading.Thread]) -> None:
        next_report = time.monotonic()
        while any(thread.is_alive() for thread in threads):
            if time.monotonic() >= next_report:
                self._print(server)
                next_report += REPORT_S
            time.sleep(0.2)
        self._print(server)

    def _print(self, server: TritonServer) -> None:
        if not server.is_alive():
            self.wrong.append(f"the server ended with {server.exit_code}:\n{server.log_text()[-4000:]}")
            return
        process = psutil.Process(server.pid)
        files, sockets = open_files(server.pid)
        rss = process.memory_info().rss
        self.seen.append((rss, files, sockets))
        left = max(0, self.until - time.monotonic())
        counts = ", ".join(f"{count} {what}" for what, count in self.counts.items())
        server_has = f"server {rss / 2**20:.0f} MiB, {files} files, {sockets} sockets"
        print(f"{left:7.0f} s left: {counts}, {len(self.wrong)} wrong, {server_has}", flush=True)

    def _settles(self, server: TritonServer) -> None:
        """The sequences of clients that are gone are removed."""
        live = r'^stateful_live_sequences{.*model="vanishing".*} 0$'
        self._until(lambda: bool(re.search(live, server.metrics(), re.MULTILINE)))

    def goes_on(self) -> bool:
        return time.monotonic() < self.until and not self.wrong

    def _guarded(self, load: Callable[[], None]) -> None:
        """A load that breaks off for any reason is a failure of the soak."""
        try:
            load()
        except Exception:
            self.wrong.append(traceback.format_exc())

    def _count(self, what: str, by: int = 1) -> None:
        with self._lock:
            self.counts[what] += by

    def _check(self, sequence: int, answer: float, expected: float) -> None:
        if answer != expected:
            self.wrong.append(f"sequence {sequence}: {answer} instead of {expected}")
        self._count("answers")

    def _step(self, client: grpc.InferenceServerClient, model: str, sums: Sums, sequence: int, value: float, end: bool):
        flags = {"sequence_id": sequence, "sequence_start": sums.start(sequence), "sequence_end": end}
        answer = client.infer(model, [_input(value)], client_timeout=ANSWER_S, **flags)
        self._check(sequence, answer.as_numpy("Y").item(), sums.expect(sequence, value, end))

    def steady(self, server: TritonServer, number: int) -> None:
        """Steps its own sequences, sometimes with a new connection that knows nothing of those that live."""
        random = np.random.default_rng(number)
        client, sums = grpc.InferenceServerClient(server.grpc_url), Sums()
        while self.goes_on():
            if random.random() < 0.0005:
                client.close()
                client, sums = grpc.InferenceServerClient(server.grpc_url), Sums()
            sequence = 1 + number * SEQUENCES + int(random.integers(SEQUENCES))
            self._step(client, "steady", sums, sequence, float(random.integers(100)), bool(random.random() < 0.05))
        client.close()

    def vanish(self, server: TritonServer) -> None:
        """Streams of a few sequences each: every other one is cut off with its requests on their way."""
        random = np.random.default_rng(THREADS)
        first_id, kinds = 1, 0
        while self.goes_on():
            client, sums = grpc.InferenceServerClient(server.grpc_url), Sums()
            answers: queue.Queue[tuple] = queue.Queue()
            client.start_stream(lambda result, error, answers=answers: answers.put((result, error)))
            awaited = {}
            for number in range(32):
                sequence, value = first_id + number % 4, float(random.integers(100))
                flags = {"sequence_id": sequence, "sequence_start": sums.start(sequence)}
                expected = sums.expect(sequence, value, end=False)
                awaited[str(number)] = sequence, expected
                client.async_stream_infer("vanishing", [_input(value)], request_id=str(number), **flags)
            breaks_off = kinds % 2 == 1
            # tritonserver 2.51 can crash if a stream is broken off while its first request is in flight
            for _ in range(1 if breaks_off else len(awaited)):
                result, error = answers.get(timeout=ANSWER_S)
                if error is not None:
                    raise error
                sequence, expected = awaited.pop(result.get_response().id)
                self._check(sequence, result.as_numpy("Y").item(), expected)
            client.stop_stream(cancel_requests=breaks_off)
            if breaks_off:
                self._count("vanished")
            client.close()
            # Requests that were cut off may still arrive: nobody uses their ids again.
            first_id, kinds = first_id + 4, kinds + 1
            time.sleep(0.02)

    def kill_clients(self, server: TritonServer) -> None:
        """Kills processes that send on a stream as fast as they can."""
        first_id = 1 << 32
        while self.goes_on():
            command = [sys.executable, "-c", _SENDER, server.grpc_url, str(first_id)]
            with subprocess.Popen(command) as client:
                time.sleep(LIFE_S)
                if client.poll() is not None:
                    self.wrong.append(f"a client that was to be killed ended with {client.returncode}")
                client.kill()
            self._count("killed")
            first_id += 4

    def call_states(self, server: TritonServer) -> None:
        """Reads, sets, resets, copies and saves the state of a sequence, in rounds. Every answer has the sum."""
        random = np.random.default_rng(THREADS + 2)
        client, total, first = grpc.InferenceServerClient(server.grpc_url), 0.0, 1

        def ask(sequence: int, inputs: list[grpc.InferInput], start=False, end=False, **parameters) -> grpc.InferResult:
            flags = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end}
            self._count("state calls")
            return client.infer("stated", inputs, parameters=parameters, client_timeout=ANSWER_S, **flags)

        while self.goes_on():
            value = float(random.integers(100))
            total = value
            answer = ask(first, [_input(value)], start=True)
            self._check(first, answer.as_numpy("Y").item(), total)
            answer = ask(first, [_input(value)], commit=False)
            self._check(first, answer.as_numpy("Y").item(), total + value)
            self._check(first, ask(first, [], get_state=True).as_numpy("state.SUM_IN").item(), total)
            saved = grpc.InferInput("state_snapshot", [1, 1], "BYTES")
            saved.set_data_from_numpy(ask(first, [], snapshot=True).as_numpy("state_snapshot"))
            ask(first + 1, [], start=True, clone_of=first)
            ask(first, [_input(value, "state.SUM_IN")])
            ask(first + 2, [saved], start=True)
            ask(first, [], reset_state=True)
            for sequence, expected in ((first, value), (first + 1, total + value), (first + 2, total + value)):
                answer = ask(sequence, [_input(value)], end=True)
                self._check(sequence, answer.as_numpy("Y").item(), expected)
            first += 3
        client.close()

    def reload(self, server: TritonServer) -> None:
        """Unloads and loads a model with live sequences, which are over then."""
        random = np.random.default_rng(THREADS + 1)
        client = grpc.InferenceServerClient(server.grpc_url)
        while self.goes_on():
            sums = Sums()
            for _ in range(100):
                sequence = 1 + int(random.integers(20))
                self._step(client, "reloaded", sums, sequence, float(random.integers(100)), end=False)
            # Its last answer is here, but its last run may not have returned yet: see "Unloading a model that has just
            # answered" in docs/sequences.md.
            time.sleep(0.3)
            client.unload_model("reloaded")
            self._until(lambda: not server.is_model_ready("reloaded"))
            client.load_model("reloaded")
            self._until(lambda: server.is_model_ready("reloaded"))
            self._count("reloads")
            time.sleep(0.3)
        client.close()

    def _until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + ANSWER_S
        while not happened():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the model did not change its state in {ANSWER_S} s")
            time.sleep(0.02)


def open_files(pid: int) -> tuple[int, int]:
    """How many files a process has open that are no sockets, and how many sockets."""
    opened = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            opened.append(descriptor.readlink().name)
    sockets = sum(name.startswith("socket:") for name in opened)
    return len(opened) - sockets, sockets


def grown(seen: list[tuple[int, int, int]]) -> list[str]:
    """What has grown between the second and the last quarter of these memory sizes, numbers of files and of sockets."""
    quarter = len(seen) // 4
    if not quarter:
        return []
    second, last = seen[quarter : 2 * quarter], seen[-quarter:]
    memory, files, sockets = (max(values) for values in zip(*second, strict=True))
    memory_now, files_now, sockets_now = (min(values) for values in zip(*last, strict=True))
    kept = max(0, sockets_now - sockets)
    found = []
    if memory_now > MEMORY_GROWN * memory + SOCKET_BYTES * kept:
        found.append(f"the server's memory grew from {memory} to {memory_now} bytes, with {kept} more sockets")
    if files_now > files + FILES_GROWN:
        found.append(f"the server's open files grew from {files} to {files_now}")
    return found


def _write(repository: Path, name: str) -> None:
    model = MODELS["accumulate"]
    parameters = {"state_api": "true"} if name == "stated" else {"resident_batches": "2"}
    config = model.config("stateful", 16, candidates=4096, parameters=parameters, own=name == "stated")
    if name == "vanishing":
        # the benchmark's models keep what is idle for longer than a soak
        idle = "max_sequence_idle_microseconds: "
        before, _, after = config.partition(idle)
        config = f"{before}{idle}{VANISHED_IDLE_US}\n{after.partition(chr(10))[2]}"
    model.write(repository, name, config)


def _input(value: float, name: str = "X") -> grpc.InferInput:
    tensor = grpc.InferInput(name, [1, 1], "FP32")
    tensor.set_data_from_numpy(np.array([[value]], np.float32))
    return tensor

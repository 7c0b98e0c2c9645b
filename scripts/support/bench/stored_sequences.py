"""What a store does for many sequences: servers take them over, a server that starts finds them, and one server has very many.
And what a Valkey can do at most.

The clients are threads of this process, each with one request at a time. They share the machine with the servers and the store,
and take about as much of it as the servers do. So the rates are lower bounds, and what counts is their ratios.
"""

from __future__ import annotations

import itertools
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

import grpc
import psutil
from tritonclient.grpc import service_pb2

from support.bench.models import MODELS, BenchModel
from support.server import TritonServer, resident_bytes
from support.valkey import Valkey

CLIENTS = 16
SAVED_BYTES = (1536, 8 << 10, 50 << 10, 2 << 20)
_INFER = "/inference.GRPCInferenceService/ModelInfer"
_PATIENCE_S = 120
#: Of all states in a Valkey together.
_RECORD_BYTES = 64 << 20
#: The measured range of a rate has so many seconds before it.
_WARM_S = 0.5


@dataclass(frozen=True)
class Kept:
    """A model whose sequences are kept in a store."""

    of: BenchModel
    durability: str
    location: str
    most_sequences: int

    @property
    def name(self) -> str:
        return f"{self.of.name}_{self.durability}"

    def write(self, repository: Path) -> None:
        parameters = {"worker_count": "2"}
        if self.durability != "none":
            parameters |= {"state_store": self.location, "durability": self.durability}
        config = self.of.config("stateful", 64, candidates=self.most_sequences, parameters=parameters, own=True)
        self.of.write(repository, self.name, config)

    def request(self, sequence: int, start: bool = False) -> bytes:
        """A step of a sequence, all of whose inputs are zero."""
        request = service_pb2.ModelInferRequest(model_name=self.name)
        request.parameters["sequence_id"].int64_param = sequence
        request.parameters["sequence_start"].bool_param = start
        for tensor in self.of.inputs:
            shape = [1, *tensor.dims]
            request.inputs.add(name=tensor.name, datatype="FP32", shape=shape)
            size = 4
            for dim in shape:
                size *= dim
            request.raw_input_contents.append(bytes(size))
        return request.SerializeToString()


@dataclass
class Answers:
    """When requests were sent and answered, in the order of the answers of each client."""

    times: list[tuple[float, float]]

    @property
    def seconds(self) -> float:
        """From the first request to the last answer."""
        return max(answered for _, answered in self.times) - min(sent for sent, _ in self.times)

    def row(self) -> dict[str, float]:
        waits = sorted(1e6 * (answered - sent) for sent, answered in self.times)
        centiles = quantiles(waits, n=100, method="inclusive")
        return {"requests_per_s": len(waits) / self.seconds, "p50_us": centiles[49], "p99_us": centiles[98]}


class Clients:
    """Threads that ask a server. As a context manager, it closes their connections."""

    def __init__(self, url: str, model: Kept, count: int = CLIENTS) -> None:
        self.model, self.count = model, count
        self.channel = grpc.insecure_channel(url, [("grpc.use_local_subchannel_pool", 1)])
        self._infer = self.channel.unary_unary(_INFER)

    def __enter__(self) -> Clients:
        grpc.channel_ready_future(self.channel).result(_PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def ask(self, sequence: int, start: bool = False) -> tuple[float, float]:
        """Makes a step of a sequence. RpcError if it is refused."""
        request = self.model.request(sequence, start)
        sent = time.monotonic()
        self._infer(request, timeout=_PATIENCE_S)
        return sent, time.monotonic()

    def ask_each(self, sequences: Sequence[int], start: bool = False) -> Answers:
        """Makes a step of each sequence. The clients share them."""

        def steps(client: int) -> Iterator[tuple[float, float]]:
            for sequence in sequences[client :: self.count]:
                yield self.ask(sequence, start)

        return self._all(steps)

    def ask_for(self, sequences: Sequence[int], seconds: float) -> Answers:
        """Makes steps of these sequences, one for each client, for so long."""
        begin = time.monotonic() + _WARM_S

        def steps(client: int) -> Iterator[tuple[float, float]]:
            while time.monotonic() < begin + seconds:
                sent, answered = self.ask(sequences[client])
                if sent >= begin:
                    yield sent, answered

        return self._all(steps)

    def _all(self, steps) -> Answers:
        times: list[list[tuple[float, float]]] = [[] for _ in range(self.count)]
        errors: list[BaseException] = []

        def run(client: int) -> None:
            try:
                times[client].extend(steps(client))
            except grpc.RpcError as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=[client]) for client in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return Answers([of for client in times for of in client])


def claims(folder: Path, backends: Path, sequences: int) -> Iterator[dict]:
    """A server takes sequences that another one has saved, each with its first request there.

    The other server was killed, or it lives. With `interval`, one that lives is asked to release each sequence. `over_here`: the
    rate over that of the sequences' next requests, when they are on this server.
    """
    with ExitStack() as stack:
        valkey = _valkey(stack)
        for durability in ("step", "interval"):
            model = Kept(MODELS["lstm"], durability, valkey.location, 2 * sequences)
            model.write(folder / durability)
            owner, other = (_server(folder, durability, backends, number) for number in (1, 2))
            with owner, other, Clients(owner.grpc_url, model) as at_owner, Clients(other.grpc_url, model) as at_other:
                at_owner.ask_each(range(1, 2 * sequences + 1), start=True)
                _wait_until_saved(owner)
                for case, first in (("lives", 1), ("was killed", sequences + 1)):
                    of = range(first, first + sequences)
                    if case == "was killed":
                        owner.kill()
                    before, process = _metric(other, "stateful_sequences_claimed_total"), psutil.Process(other.pid)
                    cpu, store_cpu = _cpu_s(process), _cpu_s(psutil.Process(valkey.pid))
                    row = at_other.ask_each(of).row()
                    cpu, store_cpu = _cpu_s(process) - cpu, _cpu_s(psutil.Process(valkey.pid)) - store_cpu
                    here = at_other.ask_each(of).row()
                    _settles(other, "stateful_sequences_claimed_total", before + sequences)
                    yield {
                        "durability": durability,
                        "owner": case,
                        "sequences": sequences,
                        "state_bytes": model.of.state_bytes,
                        "claims_per_s": row["requests_per_s"],
                        "over_here": row["requests_per_s"] / here["requests_per_s"],
                        "p50_us": row["p50_us"],
                        "p99_us": row["p99_us"],
                        "server_cpu_us_per_claim": 1e6 * cpu / sequences,
                        "store_cpu_us_per_claim": 1e6 * store_cpu / sequences,
                    }


def restart(folder: Path, backends: Path, sequences: int) -> Iterator[dict]:
    """A server with a folder starts again, after it was killed or stopped.

    All times begin with the start of the process. `ready_s`: Triton says that it and the model are ready. `first_s`: a sequence
    has got its next answer. `all_s`: all of them have, sent by 16 clients as soon as the first has it. The first row is of a
    server whose folder is empty: its first request is a START.
    """
    model = Kept(MODELS["lstm"], "interval", f"file:{folder / 'states'}", sequences)
    model.write(folder / "interval")
    server = _server(folder, "interval", backends, 1)
    try:
        for how in ("never ran", "was killed", "was stopped"):
            ids = range(1, sequences + 1)
            is_new = how == "never ran"
            began = time.monotonic()
            server.start()
            server.wait_ready()
            ready = time.monotonic()
            with Clients(server.grpc_url, model) as clients:
                _, first = clients.ask(ids[0], start=is_new)
                rest = clients.ask_each(ids[1:], start=is_new)
                last = max(answered for _, answered in rest.times)
                _settles(server, "stateful_sequences_claimed_total", 0 if is_new else sequences)
                _wait_until_saved(server)
            yield {
                "server": how,
                "sequences": sequences,
                "state_bytes": model.of.state_bytes,
                "ready_s": ready - began,
                "first_s": first - began,
                "all_s": last - began,
                "requests_per_s": rest.row()["requests_per_s"],
                "folder_bytes": sum(file.stat().st_size for file in (folder / "states").rglob("*") if file.is_file()),
            }
            if is_new:
                server.kill()
            else:
                server.stop()
    finally:
        server.stop()


def many(folder: Path, backends: Path, sequences: int, seconds: float) -> Iterator[dict]:
    """One server has very many sequences, of which 64 get requests; before that, it has only these 64. Without a store, and with.

    The memory of a sequence is what the server's resident memory, and Valkey's `used_memory`, have grown by for each sequence
    beyond the 64, when all are saved.
    """
    stepping = 64
    with ExitStack() as stack:
        valkey = _valkey(stack)
        for durability in ("none", "interval"):
            model = Kept(MODELS["accumulate"], durability, valkey.location, sequences)
            model.write(folder / durability)
            with (
                _server(folder, durability, backends, 1) as server,
                Clients(server.grpc_url, model, stepping) as clients,
            ):
                first: dict[str, float] = {}
                resident = used = 0
                for begins, ends in ((1, stepping), (stepping + 1, sequences)):
                    starts = clients.ask_each(range(begins, ends + 1), start=True)
                    _settles(server, "stateful_live_sequences", ends)
                    _settles(server, "stateful_owned_sequences", 0 if durability == "none" else ends)
                    _wait_until_saved(server)
                    before, resident, used = (resident, used), resident_bytes(server.pid), _used_memory(valkey)
                    is_first, more = not before[0], ends - stepping
                    row = clients.ask_for(range(1, stepping + 1), seconds).row()
                    first = first or row
                    yield {
                        "durability": durability,
                        "sequences": ends,
                        "state_bytes": model.of.state_bytes,
                        "server_bytes_per_sequence": None if is_first else (resident - before[0]) / more,
                        "store_bytes_per_sequence": None if is_first else (used - before[1]) / more,
                        "starts_per_s": starts.row()["requests_per_s"],
                        **row,
                        "over_64": row["requests_per_s"] / first["requests_per_s"],
                    }


def primary(seconds: float) -> Iterator[dict]:
    """What saves cost a Valkey: with `interval`, sent 64 or 1 MiB together; with `step`, 16 together, after as many questions
    whose sequences they are. With no file, and with an append-only file that is synced each second.

    The cost is CPU time of the one thread that runs commands. `most_per_s`: how many saves fill that thread.
    """
    for appends in ("no", "yes"):
        for size in SAVED_BYTES:
            with ExitStack() as stack:
                valkey = _valkey(stack, "--appendonly", appends, "--appendfsync", "everysec")
                send = stack.enter_context(valkey.connect())
                records = [f"{{stateful:model:1:{'0' * 16}:n{number:08}}}" for number in range(_RECORD_BYTES // size)]
                used, blob = _used_memory(valkey), os.urandom(size)
                for record in records:
                    send(_start(record) + _save(record, blob))
                memory = (_used_memory(valkey) - used) / len(records)
                for durability, together in (("interval", max(1, min(64, (1 << 20) // size))), ("step", 16)):
                    batches = [records[at : at + together] for at in range(0, len(records), together)]
                    saves, cpu, until = 0, _main_thread_cpu_s(valkey.pid), time.monotonic() + seconds
                    for batch in itertools.cycle(batches):
                        if durability == "step":
                            send([("HGET", f"o{record}", "t") for record in batch])
                        send([command for record in batch for command in _save(record, blob)])
                        saves += len(batch)
                        if time.monotonic() > until:
                            break
                    cost = (_main_thread_cpu_s(valkey.pid) - cpu) / saves
                    yield {
                        "file": "none" if appends == "no" else "everysec",
                        "durability": durability,
                        "state_bytes": size,
                        "store_cpu_us_per_save": 1e6 * cost,
                        "most_per_s": 1 / cost,
                        "most_bytes_per_s": size / cost,
                        "store_bytes_per_sequence": memory,
                    }


# As the crate state-store does it.
_TOKEN, _TTL_MS = "0" * 32, "3600000"


def _start(record: str) -> list[tuple[str | bytes, ...]]:
    return [("HSET", f"o{record}", "t", _TOKEN, "o", _TOKEN), ("SET", f"b{record}{_TOKEN}", "")]


def _save(record: str, blob: bytes) -> list[tuple[str | bytes, ...]]:
    return [("SET", f"b{record}{_TOKEN}", blob, "XX", "PX", _TTL_MS), ("PEXPIRE", f"o{record}", _TTL_MS)]


def _main_thread_cpu_s(pid: int) -> float:
    [main] = [thread for thread in psutil.Process(pid).threads() if thread.id == pid]
    return main.user_time + main.system_time


def _valkey(stack: ExitStack, *options: str) -> Valkey:
    # A socket's path has at most 107 bytes.
    short = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
    valkey = Valkey(Path(short) / "store", "--maxmemory-policy", "noeviction", *options)
    stack.callback(valkey.kill)
    return valkey


def _server(folder: Path, repository: str, backends: Path, number: int) -> TritonServer:
    log = folder / f"{repository}-{number}.log"
    return TritonServer(folder / repository, backends=backends, log_path=log, env={"CUDA_VISIBLE_DEVICES": ""})


def _metric(server: TritonServer, name: str) -> float:
    return sum(map(float, re.findall(rf"^{name}{{.*}} (\S+)$", server.metrics(), re.MULTILINE)))


def _settles(server: TritonServer, name: str, value: float) -> None:
    """Waits until a metric has this value. It shows a moment after the answers."""
    deadline = time.monotonic() + _PATIENCE_S
    while (found := _metric(server, name)) != value:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} is {found}, and should be {value}")
        time.sleep(0.05)


def _wait_until_saved(server: TritonServer) -> None:
    # The gauge may not show the last steps yet.
    time.sleep(0.3)
    _settles(server, "stateful_oldest_unsaved_step_seconds", 0)


def _used_memory(valkey: Valkey) -> int:
    [used] = re.findall(rb"^used_memory:(\d+)", valkey.ask("INFO", "memory"), re.MULTILINE)
    return int(used)


def _cpu_s(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])

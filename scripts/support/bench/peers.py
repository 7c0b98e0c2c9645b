"""Other backends beside ours: the same models, the same clients and the same loads, in turn within one run.

Ours serves each model with the peer's own configuration, and with the peer's ONNX file: two lines of a table differ in
nothing but the backend. In process, each measurement has a process of its own; over gRPC, each backend has a server of
its own. So a peer that crashes takes nothing with it, and two libraries of one name never meet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from subprocess import TimeoutExpired

from support.bench import service
from support.bench.models import MODELS, RESET, BenchModel, resetting
from support.bench.report import medians
from support.bench.step import BACKENDS, drive
from support.server import ServerError, TritonServer

OURS = "stateful"
MAX_BATCH_SIZE, CANDIDATES = 64, 256
MODELS_COMPARED = ("accumulate", "lstm", "cache")
LOADS = (0.5, 0.7, 0.9)
"""Parts of the capacity, for a fixed rate."""


@dataclass(frozen=True)
class Way:
    """How a backend wants a model: the variant of it that the backend can serve, and what its configuration says."""

    name: str
    variant: Callable[[BenchModel], BenchModel] = lambda model: model
    declared: Callable[[BenchModel], str] = lambda model: ""
    """In `sequence_batching`."""
    pads: bool = False
    """Whether the peer runs the largest batch for any number of requests, unless it is told to fill each batch up to the
    next preferred size. It is told so, and the preferred size is the number of sequences. Ours never needs that."""
    own: bool = False
    """Whether the backend schedules the sequences, not core. No peer can."""

    def config(self, model: BenchModel, backend: str, sequences: int) -> str:
        parameters = {"onnx_file_name": "model.onnx"}
        if self.pads and backend != OURS:
            parameters["always_pad_to_max_batch"] = "1"
        variant = self.variant(model)
        return variant.config(
            backend,
            MAX_BATCH_SIZE,
            candidates=max(CANDIDATES, sequences),
            preferred=sequences if self.pads else None,
            parameters=parameters,
            declared=self.declared(variant),
            own=self.own,
        )


def _batch_first(model: BenchModel) -> BenchModel:
    """Core's implicit state has the batch in front."""
    return MODELS["lstm_rows"] if model.name == "lstm" else model


def _implicit_states(model: BenchModel) -> str:
    """Without an initial state, the onnxruntime backend starts from what the memory held before."""
    states = []
    for state in model.states:
        dims = ", ".join(map(str, state.dims[1:]))
        zero = f'initial_state {{ name: "zero" data_type: TYPE_FP32 dims: [ {dims} ] zero_data: true }}'
        names = f'input_name: "{state.input}" output_name: "{state.output}"'
        states.append(f"{{ {names} data_type: TYPE_FP32 dims: [ {dims} ] {zero} }}")
    return f"state [ {', '.join(states)} ]"


def _controls(model: BenchModel) -> str:
    flag = lambda name, kind: f'{{ name: "{name}" control [ {{ kind: {kind} int32_false_true: [ 0, 1 ] }} ] }}'  # noqa: E731
    start, end = flag(RESET, "CONTROL_SEQUENCE_START"), flag("EndSequence", "CONTROL_SEQUENCE_END")
    corrid = '{ name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }'
    return f"control_input [ {start}, {end}, {corrid} ]"


PLAIN, OWN = Way("ours"), Way("own", own=True)
WAYS = {
    "onnxruntime": Way("implicit", _batch_first, _implicit_states),
    "nvidia": Way("reset", resetting, _controls, pads=True),
}
"""Of the peers whose name says how they want models. Others get them as ours does."""


@dataclass(frozen=True)
class Peer:
    """Another backend: the name that it gets here, its library, and how it wants models."""

    name: str
    library: Path
    way: Way
    configs: Path | None = None
    """A folder with MODEL.pbtxt for the models that it gets configured in another way."""

    @classmethod
    def parse(cls, text: str) -> Peer:
        """NAME=FOLDER or NAME=FOLDER,CONFIGS"""
        name, _, folders = text.partition("=")
        folder, _, configs = folders.partition(",")
        if not re.fullmatch(r"[a-z0-9_]+", name) or not folder:
            raise ValueError(f"'{text}': NAME=FOLDER is wanted, with a NAME of small letters, digits and _")
        if name in (OURS, "trivial"):
            raise ValueError(
                f"'{text}': the name '{name}' is taken by a backend of this benchmark; "
                "call NVIDIA's stateful_backend 'nvidia', and another build of this one as you like"
            )
        if configs and not Path(configs).is_dir():
            raise ValueError(f"'{text}': there is no folder {configs}")
        library = _library(text, name, Path(folder).resolve())
        return cls(name, library, WAYS.get(name, PLAIN), Path(configs).resolve() if configs else None)

    def config(self, model: BenchModel) -> str | None:
        """The configuration that is given for a model, with this backend in it."""
        file = self.configs / f"{model.name}.pbtxt" if self.configs else None
        if file is None or not file.exists():
            return None
        without = re.sub(r"(?m)^(name|backend|platform|runtime)\s*:.*$", "", file.read_text())
        return f'backend: "{self.name}"\n{without}'


def _library(text: str, name: str, folder: Path) -> Path:
    found = sorted(folder.glob("libtriton_*.so"))
    named = [path for path in found if path.name == f"libtriton_{name}.so"] or found
    if len(named) != 1:
        there = ", ".join(path.name for path in found) or "none"
        raise ValueError(f"'{text}': one library libtriton_*.so is wanted in {folder}; there is {there}")
    return named[0]


def backends_of(folder: Path, peers: Iterable[Peer]) -> Path:
    """A folder of all backends, each under the name that it has here, whatever its library is called."""
    backends = folder / "backends"
    backends.mkdir()
    for source in BACKENDS.iterdir():
        (backends / source.name).symlink_to(source.resolve())
    for peer in peers:
        here = backends / peer.name
        here.mkdir()
        for file in peer.library.parent.iterdir():
            (here / (f"libtriton_{peer.name}.so" if file == peer.library else file.name)).symlink_to(file)
    return backends


@dataclass(frozen=True)
class Serving:
    """A model as one backend serves it to a number of sequences."""

    backend: str
    way: Way
    model: BenchModel
    sequences: int
    given: str | None = None
    """The configuration to use instead of the way's."""

    @property
    def name(self) -> str:
        return f"{self.backend}_{self.way.name}_{self.model.name}_{self.sequences}"

    @property
    def variant(self) -> BenchModel:
        return self.way.variant(self.model)

    @property
    def config(self) -> str:
        return self.given or self.way.config(self.model, self.backend, self.sequences)

    def write(self, repository: Path) -> None:
        self.variant.write(repository, self.name, self.config)


class Comparison:
    """Ours and the peers, in process or over gRPC streams. A context manager: it ends the servers."""

    def __init__(self, folder: Path, peers: list[Peer], seconds: float) -> None:
        self.folder, self.peers, self.seconds = folder, peers, seconds
        self._backends = backends_of(folder, peers)
        self._servers: dict[str, TritonServer] = {}
        self._loaded: dict[str, set[str]] = {}
        self._ends = ExitStack()

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def servings(self, model: BenchModel, sequences: int) -> list[Serving]:
        """Ours in the way of each peer and under its own scheduler, and each peer in its way."""
        ways = [*(dict.fromkeys(peer.way for peer in self.peers) or [PLAIN]), OWN]
        ours = [Serving(OURS, way, model, sequences) for way in ways]
        return ours + [Serving(of.name, of.way, model, sequences, of.config(model)) for of in self.peers]

    def measure(self, serving: Serving, transport: str, rate: float | None = None) -> dict:
        """A row. If something fails, the row says why, and the others go on."""
        row = {"model": serving.model.name, "transport": transport, "sequences": serving.sequences}
        row |= {"backend": serving.backend, "configuration": serving.way.name, "rate": rate}
        measure = self._in_process if transport == "process" else self._over_grpc
        try:
            return row | measure(serving, rate)
        except (RuntimeError, TimeoutExpired) as error:
            return row | {"failed": f"{serving.name}: {error}"}

    def _in_process(self, serving: Serving, rate: float | None) -> dict:
        repository = self.folder / "process" / "repository"
        serving.write(repository)
        given: dict[str, object] = {"model": serving.name, "sequences": serving.sequences, "seconds": self.seconds}
        given |= {"rate": rate} if rate else {}
        timeout_s = 60 + 10 * self.seconds
        return drive(repository, "clients", serving.variant, backends=self._backends, timeout_s=timeout_s, **given)

    def _over_grpc(self, serving: Serving, rate: float | None) -> dict:
        server = self._server(serving.backend)
        try:
            if serving.name not in self._loaded[serving.backend]:
                serving.write(server.repository)
                server.load(serving.name)
                self._loaded[serving.backend].add(serving.name)
            return service.clients(
                server, serving.name, serving.variant, serving.sequences, "stream", self.seconds, rate, serving.way.own
            )
        except (RuntimeError, OSError) as error:
            if server.is_alive():
                raise
            end = f"The server of {serving.backend} ended with {server.exit_code}; its log:\n{server.log_text()}"
            raise ServerError(f"{error}\n{end}") from error

    def _server(self, backend: str) -> TritonServer:
        """The server of a backend, started anew if it died."""
        server = self._servers.get(backend)
        if server is None:
            repository = self.folder / backend / "repository"
            repository.mkdir(parents=True)
            server = TritonServer(repository, backends=self._backends, model_control="explicit")
            self._servers[backend] = server
            self._ends.callback(server.stop)
        if not server.is_alive():
            self._loaded[backend] = set()
            server.start()
            server.wait_ready()
        return server

    def closed(self, models: Iterable[str], sequences: list[int], transports: list[str], blocks: int) -> Iterator[dict]:
        """As many requests as come back: each sequence sends its next one when it has its answer."""
        for block in range(blocks):
            for model, count, transport in _points(models, sequences, transports):
                for serving in in_turn(self.servings(MODELS[model], count), block):
                    yield {"block": block, "load": None} | self.measure(serving, transport)

    def open(self, models: Iterable[str], sequences: list[int], transports: list[str], blocks: int) -> Iterator[dict]:
        """Fixed rates, as streams of sensors have: parts of the capacity, which is what the best peer (without peers:
        ours) answers in the closed loop, measured first. A backend that doesn't reach a rate isn't measured at it."""
        points = list(_points(models, sequences, transports))
        reached = capacities(list(self.closed(models, sequences, transports, blocks)))
        for block in range(blocks):
            for model, count, transport in points:
                servings = self.servings(MODELS[model], count)
                rates = [reached.get((transport, model, count, of.backend, of.way.name), 0.0) for of in servings]
                peers = [rate for of, rate in zip(servings, rates, strict=True) if of.backend != OURS]
                capacity = max(peers or rates)
                for load in LOADS:
                    for serving, rate in zip(servings, rates, strict=True):
                        if rate >= load * capacity > 0:
                            row = self.measure(serving, transport, load * capacity)
                            yield {"block": block, "load": load} | row


def in_turn(servings: list[Serving], block: int) -> list[Serving]:
    """What comes second finds the machine warmer, so each second block has the other order."""
    return servings[:: -1 if block % 2 else 1]


def _points(models: Iterable[str], sequences: list[int], transports: list[str]) -> Iterator[tuple[str, int, str]]:
    return ((model, count, transport) for transport in transports for model in models for count in sequences)


POINT = ("transport", "model", "sequences", "load")
KEYS = (*POINT, "backend", "configuration")


def table(rows: list[dict]) -> list[dict]:
    """The medians of what was measured. What failed each time has its reason instead."""
    groups = _grouped(rows, KEYS)
    found = []
    for group in groups.values():
        measured = [row for row in group if "failed" not in row]
        merged = medians(measured, KEYS) if measured else group[:1]
        found += [row | {"failures": len(group) - len(measured)} for row in merged]
    order = {key: number for number, key in enumerate(_grouped(rows, POINT))}
    return sorted(found, key=lambda row: order[_key(row, POINT)])


def capacities(rows: list[dict]) -> dict[tuple, float]:
    """What each backend in each configuration answered in the closed loop, requests a second."""
    keys = tuple(key for key in KEYS if key != "load")
    groups = _grouped([row for row in rows if "failed" not in row], keys)
    return {key: median(row["requests_per_s"] for row in group) for key, group in groups.items()}


def ratios(rows: list[dict]) -> list[dict]:
    """At each point, the best of ours over the best of the peers: medians of the blocks' ratios. The best answers most,
    or at a fixed rate has the lowest p99."""
    found = []
    for point, of in _grouped([row for row in rows if "failed" not in row], POINT).items():
        ours = _best([row for row in of if row["backend"] == OURS])
        peer = _best([row for row in of if row["backend"] != OURS])
        found += _over(point, ours, peer, "backend")
    return found


def between(rows: list[dict], ours: str, other: str) -> list[dict]:
    """At each point, one configuration over another of ours: medians of the blocks' ratios."""
    found = []
    for point, of in _grouped([row for row in rows if "failed" not in row], POINT).items():
        first, second = ({row["block"]: row for row in of if row["configuration"] == name} for name in (ours, other))
        found += _over(point, first, second, "configuration")
    return found


def _over(point: tuple, ours: dict[int, dict], other: dict[int, dict], of_other: str) -> list[dict]:
    """A row of the ratios at a point, from rows by block; no row if there is no block with both."""
    pairs = [(ours[block], other[block]) for block in sorted(ours.keys() & other.keys())]
    if not pairs:
        return []
    row = dict(zip(POINT, point, strict=True)) | {"blocks": len(pairs)}
    row |= {"configuration": pairs[0][0]["configuration"], "peer": pairs[0][1][of_other]}
    for key in ("requests_per_s", "p50_us", "p99_us"):
        row[f"{key}_over_peer"] = median(first[key] / second[key] for first, second in pairs)
    row |= {"batch": median(pair[0]["batch"] for pair in pairs)}
    row |= {"peer_batch": median(pair[1]["batch"] for pair in pairs)}
    return [row]


def _best(rows: list[dict]) -> dict[int, dict]:
    """The rows of the best backend and configuration, by block."""
    kinds = list(_grouped(rows, KEYS).values())
    if not kinds:
        return {}
    if rows[0].get("load") is None:
        best = max(kinds, key=lambda kind: median(row["requests_per_s"] for row in kind))
    else:
        best = min(kinds, key=lambda kind: median(row["p99_us"] for row in kind))
    return {row["block"]: row for row in best}


def _grouped(rows: list[dict], keys: tuple[str, ...]) -> dict[tuple, list[dict]]:
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault(_key(row, keys), []).append(row)
    return groups


def _key(row: dict, keys: tuple[str, ...]) -> tuple:
    return tuple(row.get(key) for key in keys)

"""Clients that do anything to their sequences, every answer held against a model of `ledger` in plain Python.

Requests of a stream are sent without waiting for answers: what each must be is known when it is sent, because the requests
of a stream run in their order, also if they clone a sequence of the same client.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import deque

import numpy as np
import pytest

from harness.conversations import together
from harness.model import Model
from harness.models import ledger
from harness.raw import Answer, Refused, Stream, Unary
from harness.repetitions import repeated
from harness.state_api import OLDEST, OWN, BinaryHttp, element, with_state_api

NAMES = ("SUM", "BOTH", "LOG")
FAILED = "ONNX Runtime"
MISSING = "SEQUENCE_MISSING"
#: The answer for a sequence that isn't live, if core schedules. Core gives the first text. After a START that failed, core
#: takes the sequence for live and passes the request on, and the backend gives one of the others.
CORE_MISSING = "must specify the START flag|is not live|STATE_UNKNOWN|STATE_CONFLICT"
#: Requests of a client that may be in flight.
WINDOW = 25


@dataclasses.dataclass(frozen=True)
class State:
    """What a sequence has. `sides` is BOTH, `scale` the held input."""

    sum: int = 0
    sides: tuple[int, int] = (0, 0)
    log: tuple[int, ...] = ()
    scale: int | None = None
    steps: int = 0

    def value(self, name: str) -> np.ndarray:
        rows = {"SUM": [self.sum], "BOTH": [[side] for side in self.sides], "LOG": list(self.log)}
        return np.array([rows[name]], np.int64)

    def with_value(self, name: str, value: np.ndarray) -> State:
        numbers = [int(number) for number in value.ravel()]
        if name == "SUM":
            return dataclasses.replace(self, sum=numbers[0])
        if name == "BOTH":
            return dataclasses.replace(self, sides=(numbers[0], numbers[1]))
        return dataclasses.replace(self, log=tuple(numbers))

    def after(self, value: int, scale: int) -> State:
        booked = value * scale
        sides = (self.sides[0] + booked, self.sides[1] - booked)
        return State(self.sum + booked, sides, (*self.log, booked), scale, self.steps + 1)


@dataclasses.dataclass
class Asked:
    """A request, and what must come: outputs, or the words of an error. `said` tells what it was."""

    inputs: dict[str, np.ndarray]
    parameters: dict[str, bool | int | str]
    outputs: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    info: dict | None = None
    error: str = ""
    # the snapshot that comes is of this state
    saves: State | None = None
    # the sequence may not be live before the answer is there
    waits: bool = False


class Client:
    """Does random things to ids that no other client uses."""

    def __init__(self, connection, model: Model, by: str, seed: int):
        self.connection, self.model, self.by, self.seed = connection, model, by, seed
        self.rng = np.random.default_rng([20, seed])
        self.ids: list[int | str] = [*range(1000 * (seed + 1), 1000 * (seed + 1) + 6), f"client {seed}"]
        self.live: dict[int | str, State] = {}
        self.saved: list[tuple[bytes, State]] = []
        self.due: deque[tuple[int, Asked]] = deque()
        self.history: deque[str] = deque(maxlen=40)
        self.kinds: dict[str, int] = {}

    def run(self, operations: int) -> None:
        for _ in range(operations):
            self.send(self.any_request())
        self.settle()
        for sequence_id in list(self.live):
            end = {"sequence_id": sequence_id, "sequence_end": True}
            self.send(self.request(sequence_id, {**end, "get_state": True}, None, end=True))
        self.settle()

    # ---- sending and hearing

    def send(self, asked: Asked) -> None:
        self.history.append(f"{ {name: value.shape for name, value in asked.inputs.items()} } {asked.parameters}")
        self.kinds[asked.error or "answered"] = self.kinds.get(asked.error or "answered", 0) + 1
        if not isinstance(self.connection, Stream):
            try:
                self.hears(asked, self.connection.ask(self.model.name, asked.inputs, asked.parameters))
            except Refused as error:
                self.hears(asked, error)
            return
        if "clone_of" in asked.parameters and self.by == OLDEST:
            # core's batcher must not have a request of the source in flight
            self.settle()
        number = self.connection.send(self.model.name, asked.inputs, asked.parameters)
        self.due.append((number, asked))
        while self.due and (asked.waits or len(self.due) >= WINDOW):
            self.hear()

    def hear(self) -> None:
        number, came = self.connection.reply()
        sent, asked = self.due.popleft()
        assert number == sent, "Triton answers the requests of a stream in their order"
        self.hears(asked, came)

    def settle(self) -> None:
        while self.due:
            self.hear()

    def hears(self, asked: Asked, came: Answer | Refused) -> None:
        where = f"seed {self.seed}, {asked.parameters}, after:\n" + "\n".join(self.history)
        if isinstance(came, Refused):
            allowed = asked.error.split("|") if asked.error else []
            assert any(words in came.text for words in allowed), (
                f"{came} instead of {asked.error or asked.outputs}, {where}"
            )
            return
        assert not asked.error, f"{came.outputs} instead of {asked.error}, {where}"
        outputs = dict(came.outputs)
        if asked.saves is not None:
            self.saved.append((outputs.pop("state_snapshot").item(), asked.saves))
            self.saved = self.saved[-5:]
        if asked.info is not None:
            assert json.loads(outputs.pop("state_info").item()) == asked.info, where
        assert outputs.keys() == asked.outputs.keys(), where
        for name, value in asked.outputs.items():
            assert outputs[name].tolist() == value.tolist(), f"{name} is {outputs[name]} instead of {value}, {where}"

    # ---- what it asks, and what must come

    def chance(self, of: float) -> bool:
        return bool(self.rng.random() < of)

    def any_of(self, values):
        return values[int(self.rng.integers(len(values)))]

    def any_request(self) -> Asked:
        sequence_id = self.any_of(self.ids)
        # `oldest` may end both sequences where one is started over soon
        start = self.chance(0.9 if sequence_id not in self.live else 0.03 * (self.by == OWN))
        parameters: dict[str, bool | int | str] = {"sequence_id": sequence_id}
        inputs: dict[str, np.ndarray] | None = None
        if start:
            parameters["sequence_start"] = True
            others = [other for other in self.live if other != sequence_id]
            if others and self.chance(0.5):
                parameters["clone_of"] = self.any_of(others) if self.chance(0.95) else 999
        end = self.chance(0.05)
        if end:
            parameters["sequence_end"] = True
        elif self.chance(0.03) and sequence_id in self.live and not start:
            parameters["delete"] = True
            end = True
            if self.by == OLDEST:
                parameters["sequence_end"] = True
        deletes = "delete" in parameters
        if not deletes:
            if self.chance(0.15):
                parameters["commit"] = self.chance(0.3)
            if self.chance(0.15):
                parameters["reset_state"] = self.any_of([True, *NAMES, "SUM,LOG", "NOTHING"])
            if self.chance(0.6):
                inputs = {"INPUT": np.array([[int(self.rng.integers(-99, 99))]], np.int64)}
                if self.chance(0.05):
                    inputs["INPUT"][:] = 1000
                if start or self.chance(0.2):
                    inputs["SCALE"] = np.array([[int(self.rng.integers(1, 6))]], np.int64)
        if self.chance(0.3):
            parameters["get_state"] = self.any_of([True, *NAMES, "BOTH,SUM", "NOTHING", "LOG"])
        if self.chance(0.2):
            parameters["query_state"] = True
        if self.chance(0.1):
            parameters["snapshot"] = True
        if self.chance(0.1):
            made = self.live.get(sequence_id, State()).steps if not start else 0
            parameters["sequence_step"] = made + int(self.chance(0.2))
        set = {}
        if not deletes and self.chance(0.2):
            values = {
                "SUM": np.array([[int(self.rng.integers(-(2**40), 2**40))]], np.int64),
                "BOTH": self.rng.integers(-9, 9, (1, 2, 1)),
                "LOG": self.rng.integers(-9, 9, (1, int(self.rng.integers(0, 5)))),
            }
            set = {name: values[name] for name in NAMES if self.chance(0.5)}
        restore = None
        if not deletes and self.saved and self.chance(0.1):
            restore = self.any_of(self.saved)
        # without one of these, a request without inputs would run
        asks = parameters.keys() & {"clone_of", "delete", "get_state", "query_state", "reset_state", "snapshot"}
        if inputs is None and not (asks or set or restore):
            parameters["query_state"] = True
        return self.request(sequence_id, parameters, inputs, start, end, set, restore)

    def request(self, sequence_id, parameters, inputs, start=False, end=False, set=(), restore=None) -> Asked:
        """Decides in the order of the documentation what comes of it, and keeps what it leaves."""
        set = dict(set)
        sent = dict(inputs or {}) | {f"state.{name}": value for name, value in set.items()}
        if restore is not None:
            sent["state_snapshot"] = element(restore[0], self.model)
        asked = Asked(sent, parameters)
        # Two STARTs of one id in flight may end both sequences.
        asked.waits = self.by == OLDEST and start
        before = self.live.get(sequence_id)
        error, after = self.outcome(sequence_id, asked, inputs, start, end, set, restore)
        if error:
            asked.error = error
            if error == "SEQUENCE_ALREADY_EXISTS" or (error in (MISSING, CORE_MISSING) and not start):
                return asked
            refused_early = self.by == OWN and not error.startswith((FAILED, "SEQUENCE_STEP", "input 'SCALE'"))
            if not refused_early:
                asked.waits = asked.waits or start
                if start or end:
                    self.live.pop(sequence_id, None)
            elif before is None:
                self.live.pop(sequence_id, None)
            return asked
        assert after is not None
        if end:
            self.live.pop(sequence_id, None)
        else:
            self.live[sequence_id] = after
        return asked

    def outcome(self, sequence_id, asked, inputs, start, end, set, restore) -> tuple[str, State | None]:
        """The words of its error, or the state that the sequence then has."""
        parameters = asked.parameters
        is_live, by_own = sequence_id in self.live, self.by == OWN
        # core looks for the sequence first
        if not by_own and not is_live and not start:
            return CORE_MISSING, None
        for parameter in ("get_state", "reset_state"):
            if parameters.get(parameter) == "NOTHING":
                return "STATE_UNKNOWN", None
        reset = parameters.get("reset_state", "")
        resets = list(NAMES) if reset is True else [name for name in NAMES if name in str(reset).split(",")]
        if any(name in set for name in resets):
            return "STATE_CONFLICT", None
        if restore is not None and "clone_of" in parameters:
            return "STATE_CONFLICT", None
        if by_own and not is_live and not start:
            return MISSING, None
        if by_own and is_live and start:
            return "SEQUENCE_ALREADY_EXISTS", None
        state = State() if start else self.live[sequence_id]
        source = parameters.get("clone_of")
        if by_own and source is not None and source not in self.live:
            return MISSING, None
        if parameters.get("sequence_step", state.steps) != state.steps:
            return "SEQUENCE_STEP_CONFLICT", None
        if source is not None and (source not in self.live or source == sequence_id):
            return MISSING, None
        if source is not None:
            state = self.live[source]
        if restore is not None:
            state = restore[1]
        for name in resets:
            state = state.with_value(name, State().value(name))
        for name, value in set.items():
            state = state.with_value(name, value)
        expected: dict[str, np.ndarray] = {}
        if inputs is not None:
            scale = int(inputs["SCALE"].item()) if "SCALE" in inputs else state.scale
            if scale is None:
                return "input 'SCALE' is missing", None
            value = int(inputs["INPUT"].item())
            if value >= 1000:
                return FAILED, None
            made = state.after(value, scale)
            expected["OUTPUT"] = np.array([[made.sum, *made.log]], np.int64)
            if parameters.get("commit", True):
                state = made
            elif start:
                state = dataclasses.replace(state, scale=scale)
            else:
                state = self.live[sequence_id]
        get = parameters.get("get_state", "")
        for name in NAMES if get is True else [name for name in NAMES if name in str(get).split(",")]:
            expected[f"state.{name}"] = state.value(name)
        if end and inputs is None and not parameters.keys() & {"delete", "get_state", "query_state", "snapshot"}:
            # like any END that is not inferred
            expected["OUTPUT"] = np.zeros((0, 1), np.int64)
        if parameters.get("snapshot"):
            asked.saves = state
        if parameters.get("query_state"):
            asked.info = self.info(sequence_id, state)
        asked.outputs = expected
        return "", state

    @staticmethod
    def info(sequence_id, state: State) -> dict:
        values = [(name, state.value(name)) for name in NAMES]
        states = [
            {"name": name, "datatype": "INT64", "shape": list(value.shape), "byte_size": value.nbytes}
            for name, value in values
        ]
        return {"sequence_id": sequence_id, "steps": state.steps, "states": states}


SIZES = [pytest.param((4, 500, 0), id="small", marks=pytest.mark.simulated_device), *repeated((8, 2500, 100))]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("by", "workers"), [(OWN, 1), (OWN, 3), (OLDEST, 1)])
@pytest.mark.host_and_device
def test_clients_that_do_anything(deployment, by, workers, size):
    clients, operations, first = size
    own = {"worker_count": workers, "idle_sequence_cleanup": "false"} if by == OWN else {}
    name = f"random_{by}_{workers}_{clients}"
    model = with_state_api(ledger(name, max_batch_size=4), by, held_inputs="SCALE", **own)
    deployment.serve(model)
    with contextlib.ExitStack() as opened:

        def client(seed: int) -> Client:
            connection = (Stream, Unary, Stream, BinaryHttp)[seed % 4](deployment)
            opened.callback(connection.close)
            return Client(connection, model, by, first + seed)

        made = [client(seed) for seed in range(clients)]
        together(lambda client=client: client.run(operations) for client in made)
    deployment.settles("stateful_live_sequences", model, 0)
    kinds = {kind for client in made for kind in client.kinds}
    assert {"answered", "STATE_UNKNOWN", "STATE_CONFLICT", "SEQUENCE_STEP_CONFLICT", FAILED} <= kinds

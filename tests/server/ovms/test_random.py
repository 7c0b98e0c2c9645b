"""Many clients that do anything at any time, every answer held against `harness.sequence_rules`; and in the end no
sequence is left."""

import itertools
import os
import subprocess
import sys
import textwrap
import time
from collections import deque

import numpy as np
import pytest

from harness import raw
from harness.conversations import together
from harness.deployment import eventually
from harness.own import ANSWERED_ID, ERRORS, FAILS, ByInputs, ByParameters, fed, total
from harness.raw import Answer, Refused
from harness.repetitions import repeated
from harness.sequence_rules import (
    END,
    FAILED,
    MISSING,
    ONE_SHOT,
    START,
    STEP,
    TOO_MANY,
    UNKNOWN,
    Operation,
    Outcome,
    SequenceRules,
)
from harness.tensorflow_serving import Pipelined, Predict, Rest
from support import paths

#: Requests of one client that may be in flight.
WINDOW = 30


def outcome_of(came: Answer | Refused) -> Outcome:
    """A sum, or the code word of an error."""
    if isinstance(came, Answer):
        return total(came)
    if came.text.startswith("ONNX Runtime"):
        return FAILED
    if came.by_ovms:
        words = [word for word, (_, _, text) in ERRORS.items() if text and came.text.startswith(text)]
        return words[0] if words else came.text
    return came.text.partition(":")[0]


def request_of(model, sequence_id, operation: Operation, rng):
    """Its inputs and parameters, in one of the two ways. A gateway's clients make either the same."""
    start, end = operation.kind in (START, ONE_SHOT), operation.kind in (END, ONE_SHOT)
    in_either = isinstance(sequence_id, int) and operation.kind != ONE_SHOT and rng.integers(2)
    inputs, parameters = (ByInputs if in_either else ByParameters).control(model, sequence_id, start, end)
    return {**fed(FAILS if operation.fails else operation.value, work=int(rng.integers(3))), **inputs}, parameters


class Client:
    """Does random things to some ids that no other client uses, and to sequences whose ids the server makes."""

    kinds = [STEP] * 12 + [END] * 3
    starts = [START] * 4 + [ONE_SHOT]

    def __init__(self, deployment, model, seed: int, limited: bool):
        self.deployment = deployment
        self.model = model
        self.rng = np.random.default_rng(seed)
        self.limited = limited
        self.protocol = ("stream", "stream", "unary", "http")[seed % 4]
        self.unary, self.http, self.stream = self.connected()
        # the server's own ids are far below
        self.new_ids = itertools.count(10**6 * (seed + 1))
        self.ids: list[int | str] = [*itertools.islice(self.new_ids, 5), self.name_of(seed)]
        self.abandoned: list[int | str] = []
        self.rules = {sequence_id: SequenceRules(limited) for sequence_id in self.ids}
        # what is in flight on the stream, and how many of each id
        self.due: deque[tuple[int, int | str, Operation]] = deque()
        self.in_flight = dict.fromkeys(self.ids, 0)
        # a START that will fail: what another START of the id meets depends on which is faster
        self.doubtful: set[int | str] = set()

    def connected(self):
        """A client that asks and waits over gRPC, one over HTTP, and one that sends without waiting."""
        return raw.Unary(self.deployment), raw.Http(self.deployment), raw.Stream(self.deployment)

    def name_of(self, seed: int) -> int | str:
        """A last id."""
        return f"client {seed}"

    def run(self, operations: int) -> None:
        actions = [self.use_a_made_id, self.take_one_back, self.break_the_stream, self.ask]
        for at in self.rng.choice(len(actions), operations, p=[0.02, 0.02, 0.005, 0.955]):
            actions[at]()
        self.settle()
        for sequence_id in self.ids:
            self.end(sequence_id)
        for client in (self.unary, self.http, self.stream):
            client.close()

    # ---- what it does

    def ask(self) -> None:
        sequence_id = self.any_id()
        operation = self.any_operation(sequence_id)
        if self.protocol != "stream":
            self.ask_and_wait(self.http if self.protocol == "http" else self.unary, sequence_id, operation)
            return
        while len(self.due) >= WINDOW:
            self.hear()
        inputs, parameters = request_of(self.model, sequence_id, operation, self.rng)
        number = self.stream.send(self.model.name, inputs, parameters)
        self.due.append((number, sequence_id, operation))
        self.in_flight[sequence_id] += 1
        if operation.fails and operation.kind == START:
            self.doubtful.add(sequence_id)

    def ask_and_wait(self, client, sequence_id, operation: Operation) -> Outcome:
        inputs, parameters = request_of(self.model, sequence_id, operation, self.rng)
        try:
            came = outcome_of(client.ask(self.model.name, inputs, parameters))
        except Refused as error:
            came = outcome_of(error)
        self.rules[sequence_id].hears(operation, came)
        return came

    def use_a_made_id(self) -> None:
        """A sequence with an id of the server's, from START to END."""
        rules, count = SequenceRules(self.limited), int(self.rng.integers(1, 6))
        sequence_id = None
        for i in range(count + 1):
            operation = Operation(START if i == 0 else END if i == count else STEP, int(self.rng.integers(-99, 99)))
            inputs, parameters = request_of(self.model, sequence_id or 0, operation, self.rng)
            try:
                came = self.unary.ask(self.model.name, inputs, parameters)
            except Refused as error:
                rules.hears(operation, outcome_of(error))
                return
            rules.hears(operation, total(came))
            assert sequence_id in (None, came.parameters[ANSWERED_ID])
            sequence_id = came.parameters[ANSWERED_ID]

    def take_one_back(self) -> None:
        sequence_id = self.any_id()
        self.settle(sequence_id)
        operation = self.any_operation(sequence_id)
        inputs, parameters = request_of(self.model, sequence_id, operation, self.rng)
        self.send_and_take_back(inputs, parameters, after_s=float(self.rng.choice([0.001, 0.005, 0.02])))
        rules = self.rules[sequence_id]
        rules.hears(operation, UNKNOWN)
        # each doubles what may be so
        if sum(came == UNKNOWN for _, came in rules.heard) == 4:
            self.abandon(sequence_id)

    def send_and_take_back(self, inputs, parameters, after_s: float) -> None:
        raw.take_back(self.deployment, self.model.name, inputs, parameters, after_s)

    def break_the_stream(self) -> None:
        """Leaves with requests in flight, and comes back with other ids."""
        self.stream.leave()
        for sequence_id in {sequence_id for _, sequence_id, _ in self.due}:
            self.abandon(sequence_id)
        self.due.clear()
        *_, self.stream = self.connected()

    def abandon(self, sequence_id) -> None:
        """Uses another id instead."""
        new = next(self.new_ids)
        self.abandoned.append(sequence_id)
        self.ids[self.ids.index(sequence_id)] = new
        self.rules[new], self.in_flight[new] = SequenceRules(self.limited), 0

    def end(self, sequence_id) -> None:
        """Ends its sequence, whatever the requests that were taken back have made of it."""
        end = Operation(END, 0)
        eventually(lambda: self.ask_and_wait(self.unary, sequence_id, end), lambda came: came == MISSING)

    # ---- choices, and what came

    def any_id(self):
        return self.ids[int(self.rng.integers(len(self.ids)))]

    def any_operation(self, sequence_id) -> Operation:
        kinds = self.kinds if sequence_id in self.doubtful else [*self.kinds, *self.starts]
        kind = str(self.rng.choice(kinds))
        return Operation(kind, int(self.rng.integers(-99, 100)), fails=self.rng.random() < 0.05)

    def hear(self) -> None:
        number, came = self.stream.reply()
        sent, sequence_id, operation = self.due.popleft()
        assert number == sent, "Triton answers the requests of a stream in their order"
        self.in_flight[sequence_id] -= 1
        if operation.fails and operation.kind == START:
            self.doubtful.discard(sequence_id)
        self.rules[sequence_id].hears(operation, outcome_of(came))

    def settle(self, sequence_id=None) -> None:
        """Until nothing is in flight, of an id or at all."""
        while self.due and (sequence_id is None or self.in_flight[sequence_id]):
            self.hear()


class GatewayClient(Client):
    """The same through the gateway, whose clients know numbers as ids, and no sequence of one request. Requests that are
    sent without waiting go over one connection; their order is the gateway's promise."""

    starts = [START] * 4

    def connected(self):
        gateway = self.deployment.gateway
        return Predict(gateway), Rest(gateway), Pipelined(gateway)

    def name_of(self, seed: int) -> int:
        return next(self.new_ids)

    def send_and_take_back(self, inputs, parameters, after_s: float) -> None:
        call = self.unary.send(self.model.name, inputs, parameters)
        time.sleep(after_s)
        call.future.cancel()


#: Floods a model on two ids without end, and says so.
FLOOD = textwrap.dedent("""
    import sys
    from harness import raw, tensorflow_serving
    from harness.own import fed

    kind, url, model, first = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])

    class Server:
        grpc_url = url

    class Deployment:
        server = Server

    stream = raw.Stream(Deployment) if kind == "direct" else tensorflow_serving.Pipelined(Server)
    for count in range(10**9):
        for sequence_id in (first, first + 1):
            flags = {"sequence_start": True} if count == 0 else {}
            stream.send(model, fed(1, 2), {"sequence_id": sequence_id, **flags})
        if count == 20:
            print("flooding", flush=True)
        if count > 20:
            stream.reply(), stream.reply()
""")


def let_some_die(deployment, model, count: int, kind: str) -> list[int]:
    """Starts processes that flood the model, and kills them; the ids that they leave behind."""
    left = []
    for i in range(count):
        first = 10**8 + 2 * i
        url = (deployment.server if kind == "direct" else deployment.gateway).grpc_url
        arguments = [sys.executable, "-c", FLOOD, kind, url, model.name, str(first)]
        where = {**os.environ, "PYTHONPATH": str(paths.ROOT / "scripts")}
        victim = subprocess.Popen(
            arguments, cwd=paths.ROOT / "tests" / "server", env=where, stdout=subprocess.PIPE, text=True
        )
        assert victim.stdout and victim.stdout.readline() == "flooding\n"
        victim.kill()
        victim.wait()
        victim.stdout.close()
        left += [first, first + 1]
    return left


def end_what_is_left(deployment, model, ids) -> None:
    """Ends the sequences of clients that are gone, until none of any client is live."""
    client = raw.Unary(deployment)

    def end_all() -> float:
        for sequence_id in ids:
            try:
                client.ask(model.name, fed(0), {"sequence_id": sequence_id, "sequence_end": True})
            except Refused as error:
                assert outcome_of(error) == MISSING, error
        return deployment.metric("stateful_live_sequences", model)

    eventually(end_all, lambda live: live == 0)
    client.close()


#: Workers, and max_sequence_number.
MORE = [(2, None), (4, None), (1, 8), (4, 8)]


@pytest.mark.parametrize("kind", [Client, GatewayClient], ids=["direct", "gateway"])
@pytest.mark.parametrize("size", [(6, 400, 1), *repeated((16, 2500, 8))], ids=["small", "large"])
@pytest.mark.parametrize(
    ("workers", "limit"),
    [(1, None), (3, None), (2, 8), *(pytest.param(*case, marks=pytest.mark.repetition) for case in MORE)],
)
def test_many_clients_that_do_anything(deployment, serve, limit, workers, size, kind):
    clients, operations, deaths = size
    parameters = {"worker_count": workers, "idle_sequence_cleanup": "false"}
    model = serve(parameters={**parameters, "max_sequence_number": limit or 10000}, max_batch_size=4)
    made = [kind(deployment, model, seed, limit is not None) for seed in range(clients)]
    # with a limit, what the dead leave would take the places of all others
    of = "direct" if kind is Client else "gateway"
    dying = lambda: let_some_die(deployment, model, 0 if limit else deaths, of)  # noqa: E731
    left, *_ = together([dying, *(lambda client=client: client.run(operations) for client in made)])
    for client in made:
        left += client.abandoned
    end_what_is_left(deployment, model, left)
    started = deployment.metric("stateful_sequences_started_total", model)
    deployment.settles("stateful_sequences_ended_total", model, started)
    heard = {came for client in made for rules in client.rules.values() for _, came in rules.heard}
    assert (TOO_MANY in heard) == (limit is not None)

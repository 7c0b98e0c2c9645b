"""Sequences talked through to their end, every answer held against the oracle."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterable

import numpy as np
from tritonclient.utils import InferenceServerException

from harness.clients import Stream, new_id
from harness.deployment import Deployment
from harness.model import Model
from harness.sequence_oracle import SequenceOracle, assert_same


class Conversation:
    """One sequence of a model: each step is served, stepped by the oracle, and compared."""

    def __init__(self, client, model: Model, rng: np.random.Generator, sequence_id=None, version=""):
        self.client = client
        self.model = model
        self.rng = rng
        if sequence_id is None:
            # 25.01 and newer refuse an id of another type than the control input CORRID
            sequence_id = f"caller-{new_id()}" if model.takes_text_ids else new_id()
        self.sequence_id = sequence_id
        self.version = version
        self.oracle = SequenceOracle(model, self.sequence_id)
        self.count = 0

    def step(self, inputs=None, *, start=False, end=False):
        """Asks with these inputs, or random ones. A refused step leaves the oracle alone."""
        inputs = self.model.draw(self.rng, first=start) if inputs is None else inputs
        answer = self.client.step(self.model.name, self.sequence_id, inputs, start=start, end=end, version=self.version)
        self.count += 1
        context = f"sequence {self.sequence_id!r}, step {self.count}, start {start}, end {end}"
        assert_same(self.model, answer, self.oracle.step(inputs, start=start, end=end), context)
        return answer

    def start(self, inputs=None):
        return self.step(inputs, start=True)

    def end(self, inputs=None):
        return self.step(inputs, end=True)

    def whole(self, length: int) -> None:
        """All of a sequence: START on the first step, END on the last, which may be one."""
        for i in range(length):
            self.step(start=i == 0, end=i == length - 1)


def interleave(client, model: Model, rng: np.random.Generator, sequences: int, longest: int = 9) -> None:
    """Sequences of random lengths, one request at a time, in random order."""
    left = []
    for _ in range(sequences):
        length = int(rng.integers(1, longest + 1))
        left.append((Conversation(client, model, rng), length, length))
    while left:
        at = int(rng.integers(len(left)))
        talk, length, to_go = left.pop(at)
        talk.step(start=to_go == length, end=to_go == 1)
        if to_go > 1:
            left.append((talk, length, to_go - 1))


def talk(deployment: Deployment, model: Model, sequences: int = 5) -> None:
    """Serves the model and interleaves some sequences of it."""
    rng = np.random.default_rng(1)
    interleave(deployment.connect(), deployment.serve(model), rng, sequences=sequences, longest=7)


def some_at_once(talks: list[Conversation], rng: np.random.Generator, rounds: int) -> None:
    """Again and again some of the sequences take a step at the same time, and the others pause.

    Each talk needs a generator of its own.
    """
    for _ in range(rounds):
        chosen = rng.choice(len(talks), int(rng.integers(1, len(talks) + 1)), replace=False)
        together(talks[at].step for at in chosen)


def together(tasks: Iterable[Callable[[], object]]) -> list:
    """Runs all tasks at once, a thread each; the results, or the first error."""
    tasks = list(tasks)
    with concurrent.futures.ThreadPoolExecutor(len(tasks)) as pool:
        return [future.result() for future in [pool.submit(task) for task in tasks]]


def outcome(task: Callable[[], object]):
    """The task's result, or the server's error as a value."""
    try:
        return task()
    except InferenceServerException as error:
        return error


@dataclasses.dataclass(frozen=True)
class Said:
    """One request of a script."""

    sequence_id: int
    inputs: dict[str, np.ndarray]
    start: bool
    end: bool


def script(model: Model, rng: np.random.Generator, sequence_id, lives: int, ends: bool = True) -> list[Said]:
    """An id used again and again: each life START, some more, END.

    Without `ends` a life may also be cut short by the next START.
    """
    said = []
    for _ in range(lives):
        length = int(rng.integers(1, 6))
        closed = ends or bool(rng.integers(2))
        for i in range(length):
            end = closed and i == length - 1
            said.append(Said(sequence_id, model.draw(rng, first=i == 0), start=i == 0, end=end))
    last = said[-1]
    said[-1] = dataclasses.replace(last, end=True)
    return said


def windowed(stream: Stream, model: Model, rng: np.random.Generator, scripts: list[list[Said]], window: int) -> None:
    """As `pipeline`, with at most `window` answers awaited of each script, and the START of a life sent when that of the
    one before it has been answered."""
    oracles = [SequenceOracle(model, said[0].sequence_id) for said in scripts]
    left = [list(reversed(said)) for said in scripts]
    awaited: dict[str, tuple[int, Said, dict]] = {}
    unanswered_starts: set[int] = set()

    def may_send(of: int) -> bool:
        due = sum(1 for script, *_ in awaited.values() if script == of)
        return bool(left[of]) and due < window and not (left[of][-1].start and of in unanswered_starts)

    number = 0
    while awaited or any(left):
        ready = [of for of in range(len(scripts)) if may_send(of)]
        if ready:
            of = int(rng.choice(ready))
            now, number = left[of].pop(), number + 1
            want = oracles[of].step(now.inputs, start=now.start, end=now.end)
            awaited[str(number)] = (of, now, want)
            unanswered_starts |= {of} if now.start else set()
            how = {"start": now.start, "end": now.end, "request_id": str(number)}
            stream.send(model.name, now.sequence_id, now.inputs, **how)
        must_wait = not ready
        while awaited and (must_wait or not stream.arrived.empty()):
            (reply,) = stream.replies(1)
            assert reply.error is None, reply.error
            of, now, want = awaited.pop(reply.request_id)
            unanswered_starts -= {of} if now.start else set()
            assert_same(model, reply.outputs, want, f"sequence {now.sequence_id}, request {reply.request_id}")
            must_wait = False


def pipeline(stream: Stream, model: Model, rng: np.random.Generator, scripts: list[list[Said]]) -> None:
    """Sends all requests on one stream without waiting, the scripts shuffled into each other but each in its own order;
    then compares every answer. With `oldest`, several STARTs of one id in flight may end the sequences of the id, but no
    request may get the state of another sequence."""
    expected: dict[str, tuple[Said, dict]] = {}
    waiting = [(SequenceOracle(model, said[0].sequence_id), list(reversed(said))) for said in scripts]
    while waiting:
        at = int(rng.integers(len(waiting)))
        oracle, said = waiting[at]
        now = said.pop()
        if not said:
            waiting.pop(at)
        request_id = str(len(expected))
        expected[request_id] = (now, oracle.step(now.inputs, start=now.start, end=now.end))
        stream.send(model.name, now.sequence_id, now.inputs, start=now.start, end=now.end, request_id=request_id)
    refused = 0
    # Triton answers the requests of a stream in their order, and an error has no id.
    for reply, (request_id, (now, want)) in zip(stream.replies(len(expected)), expected.items(), strict=True):
        if reply.error is not None and model.direct is None:
            refused += 1
            assert "cannot be told apart" in str(reply.error) or "is not live" in str(reply.error)
            continue
        assert reply.error is None, reply.error
        assert reply.request_id == request_id
        context = f"sequence {now.sequence_id}, request {reply.request_id}"
        assert_same(model, reply.outputs, want, context)
    assert refused < len(expected)

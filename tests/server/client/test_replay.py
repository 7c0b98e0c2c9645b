"""Steps that a server has answered and not saved before it dies: the client sends them again."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest

from harness import models
from harness.model import Model
from harness.models.repeated import LAST
from harness.repeats import RepeatOracle
from harness.sequence_oracle import SequenceOracle, assert_same
from harness.windows import Cut, WindowOracle
from triton_stateful import AnswerLost, Outputs, Retry, Sequence, SequenceMissing, StepConflict, StepsLost, Unavailable
from triton_stateful.messages import Request
from triton_stateful.model import INFO, SNAPSHOT
from triton_stateful.replay import count_of
from triton_stateful.transports import of_client

AGAIN = Retry(attempts=50, backoff=0.0001, longest=0.001)

#: What happens to a request. "dies": the server dies before it. "request" and "answer": it dies, too, and the connection
#: breaks before or after the step. "lost": only the answer is lost. "stale": two requests come to a server that was paused
#: and still has an older state; "stale once": this one does, whatever it is.
EVENTS = ["none", "dies", "request", "answer", "stale", "lost"]


class Forgetful:
    """A real server that now and then saves a sequence, and now and then has only what was saved.

    It says what is saved as a server does whose `durability` is below `step`.
    """

    sends_twice = False

    def __init__(self, url: str, seed: int = 0, share: float = 0.5):
        self.inner = of_client(url)
        self.rng, self.share = np.random.default_rng(seed), share
        self.snapshot: bytes | None = None
        self.saved = self.told = 0
        self.next: list[str] = []
        self.old = 0  # how many requests come to a server with an older state
        self.counts: dict[str, int] = dict.fromkeys([*EVENTS, "stale once"], 0)

    def describe(self, asked):
        return self.inner.describe(asked)

    def close(self):
        self.inner.close()

    def stream(self, request: Request):
        raise NotImplementedError

    def infer(self, request: Request) -> Outputs:
        event = self.next.pop(0) if self.next else "none"
        self.counts[event] += 1
        if event == "stale":
            self.old = 2
        if self.old and self.told and not request.start and not request.end:
            self.old -= 1
            return self.answer_from_old_state(request)
        if event == "stale once":
            return self.answer_from_old_state(request)
        if event in ("dies", "request"):
            self.die(request)
        if event == "request":
            raise Unavailable("the request is lost")
        answer = self.inner.infer(request)
        if event == "answer":
            self.die(request)
        if event in ("answer", "lost"):
            raise Unavailable("the answer is lost")
        if not request.end:
            if self.rng.random() < self.share:
                self.save(request)
            made = count_of(self._ask(request, {"query_state": True})).steps
            answer.parameters.update(stateful_steps_made=made, stateful_steps_saved=self.saved)
            self.told = self.saved
        return answer

    def answer_from_old_state(self, request: Request) -> Outputs:
        if "sequence_step" not in request.parameters:
            assert request.parameters == {"query_state": True}
            told = {"stateful_steps_made": self.told - 1, "stateful_steps_saved": max(0, self.told - 2)}
            return Outputs({INFO: np.array([json.dumps({"steps": self.told - 1})])}, told)
        error = StepConflict(f"has made {self.told - 1}")
        error.made = self.told - 1
        raise error

    def save(self, request: Request) -> None:
        self.snapshot = bytes(self._ask(request, {"snapshot": True})[SNAPSHOT].item())
        self.saved = count_of(self._ask(request, {"query_state": True})).steps

    def die(self, request: Request) -> None:
        if self.snapshot is None:
            with contextlib.suppress(SequenceMissing):
                self._ask(request, {"delete": True}, end=True)
        else:
            tensors = self.describe(request).encode_snapshot(self.snapshot)
            self.inner.infer(replace(self._like(request, {"query_state": True}), inputs=tensors))

    def _ask(self, request: Request, parameters, end: bool = False) -> Outputs:
        return self.inner.infer(self._like(request, parameters, end))

    @staticmethod
    def _like(request: Request, parameters, end: bool = False) -> Request:
        return Request(request.model, request.version, request.sequence_id, parameters=parameters, end=end)


def forgetful(deployment, model: Model, retry: Retry | None = AGAIN, **how) -> tuple[Sequence, Forgetful]:
    sequence = Sequence(deployment.server.grpc_url, model.name, retry=retry)
    sequence.close()
    sequence._transport = made = Forgetful(deployment.server.grpc_url, **how)
    return sequence, made


class Counted:
    """The oracle of a model that makes a step for each request."""

    def __init__(self, model: Model):
        self.model, self.oracle = model, SequenceOracle(model)

    def draw(self, rng):
        return self.model.draw(rng)

    def ask(self, inputs, start):
        return self.oracle.step(inputs, start=start)


class Windowed:
    """Of one whose requests make any number of steps, also none."""

    def __init__(self, model: Model):
        self.model, self.oracle = model, WindowOracle(model, {"AUDIO": Cut(5)})

    def draw(self, rng):
        audio = rng.integers(1, 100, (1, int(rng.integers(0, 12)))).astype(np.float32)
        return {"AUDIO": audio, "GAIN": np.ones((1, 1), np.float32)}

    def ask(self, inputs, start):
        return self.oracle.ask(inputs, start=start)[0]


class Repeated:
    """Of one that goes on until a stop, so the client can't tell how many steps a request makes."""

    def __init__(self, model: Model):
        self.model = model
        self.oracle = RepeatOracle(model, {"NEXT": "TOKENS"}, lambda outputs: outputs["NEXT"].item() == LAST)
        self.oracle.most = 10

    def draw(self, rng):
        return self.model.draw(rng) | {"TOKENS": rng.integers(0, 15, (1, 3))}

    def ask(self, inputs, start):
        return self.oracle.ask(inputs, start=start)[0]


@pytest.mark.parametrize(
    ("make", "oracle_of", "events"),
    [(models.lstm, Counted, EVENTS), (models.cut, Windowed, EVENTS), (models.spoken, Repeated, EVENTS[:-1])],
    ids=["a step a request", "windows", "until a stop"],
)
def test_all_answers_are_those_of_a_server_that_lives(serve, deployment, make, oracle_of, events):
    model = serve(make)
    rng = np.random.default_rng(5)
    total: dict[str, int] = dict.fromkeys(EVENTS, 0)
    for seed in range(6):
        sequence, server = forgetful(deployment, model, seed=seed, share=0.3)
        oracle = oracle_of(model)
        more = {"max_steps": 10} if oracle_of is Repeated else {}
        for step in range(20):
            if rng.random() < 0.6:
                server.next = rng.choice(events, 2).tolist()
            inputs = oracle.draw(rng)
            try:
                came = sequence.step(inputs, **more)
            except AnswerLost:
                came = None
            expected = oracle.ask(inputs, start=step == 0)
            if came is not None:
                assert_same(model, came, expected, f"seed {seed}, step {step}")
        assert sequence.info().steps == sequence.steps
        total = {event: total[event] + server.counts[event] for event in EVENTS}
        sequence.end()
        server.close()
    assert min(total[event] for event in events) > 10


def value(number: float) -> np.ndarray:
    return np.full((1, 4), number, np.float64)


def test_what_sets_states_is_sent_again_in_its_place(serve, deployment):
    model = serve(type="fp64")
    sequence, server = forgetful(deployment, model, share=0)
    for number in (1, 2):
        sequence.step(value(number))
    server.save(Request(model.name, "", sequence.id))
    sequence.step(value(4))
    sequence.set_state(STATE_IN=value(100))
    sequence.step(value(8))
    for dies in (["dies"], ["request"], ["answer"]):
        server.next = dies
        assert sequence.step(value(16))["OUTPUT"].tolist() == value(100 + 8 + 16).tolist()
        sequence.reset()
        sequence.set_state(STATE_IN=value(108))
    server.next = ["dies"]
    assert sequence.state()["STATE_IN"].tolist() == value(108).tolist()
    server.next = ["dies"]
    assert sequence.info().steps == sequence.steps == 7
    server.close()


def test_steps_whose_inputs_are_no_longer_kept_are_named(serve, deployment):
    model = serve(type="fp64")
    # two inputs of four numbers
    sequence, server = forgetful(deployment, model, Retry(attempts=9, backoff=0, keep_bytes=64), share=0)
    sequence.step(value(1))
    server.save(Request(model.name, "", sequence.id))
    for number in (2, 4, 8):
        sequence.step(value(number))
    server.next = ["dies"]
    with pytest.raises(StepsLost, match=rf"{sequence.id} continues after step 1 of 4.*keep_bytes is 64") as lost:
        sequence.step(value(16))
    assert (lost.value.made, sequence.steps) == (1, 1)
    assert [sequence.step(value(number))["OUTPUT"][0, 0] for number in (2, 4)] == [3, 7]
    server.next = ["dies"]
    assert sequence.step(value(8))["OUTPUT"][0, 0] == 15
    server.close()


def test_a_sequence_that_was_never_saved_begins_again(serve, deployment):
    model = serve(type="fp64")
    sequence, server = forgetful(deployment, model, share=0)
    for number in (1, 2, 4):
        sequence.step(value(number))
    server.next = ["dies"]
    assert sequence.step(value(8))["OUTPUT"][0, 0] == 15
    server.close()


def test_an_end_that_has_run_is_told_even_if_a_server_with_an_older_state_refuses_it(serve, deployment):
    model = serve(type="fp64")
    sequence, server = forgetful(deployment, model, share=1)
    for number in (1, 2):
        sequence.step(value(number))
    server.next = ["lost", "stale once"]
    with pytest.raises(AnswerLost, match=f"sequence {sequence.id} is over"):
        sequence.step(value(4), end=True)
    server.close()


def test_without_a_retry_nothing_is_sent_again_and_the_loss_is_told(serve, deployment):
    model = serve(type="fp64")
    sequence, server = forgetful(deployment, model, None, share=0)
    sequence.step(value(1))
    server.save(Request(model.name, "", sequence.id))
    sequence.step(value(2))
    server.next = ["dies"]
    with pytest.raises(StepConflict) as conflict:
        sequence.step(value(4))
    assert conflict.value.made == 1
    server.close()

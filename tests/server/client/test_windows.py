"""Steps that take any number of elements (`input_windows`), and models that answer each of them (`decoupled: true`)."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from client.proxy import LOSSES
from harness import models
from harness.deployment import eventually
from harness.each_step import decoupled
from harness.models.repeated import LAST
from harness.models.windows import FAILS
from harness.repeats import RepeatOracle
from harness.sequence_oracle import assert_same
from harness.windows import Cut, WindowOracle
from triton_stateful import AnswerLost, Retry, Sequence, StatefulError, StepConflict, Stream, Unavailable

CUTS = {"AUDIO": Cut(5)}
AGAIN = Retry(attempts=30, backoff=0.001, longest=0.05)

#: The protocols that carry several answers.
over_grpc = pytest.mark.parametrize("protocol", ["grpc", "grpc.aio"])


def audio(*values: float) -> dict[str, np.ndarray]:
    return {"AUDIO": np.array([values], np.float32), "GAIN": np.ones((1, 1), np.float32)}


def drawn(rng: np.random.Generator, length: int) -> dict[str, np.ndarray]:
    return audio(*rng.integers(1, 100, length))


class Pair:
    """A sequence and the oracle's."""

    def __init__(self, model, sequence, seed=1):
        self.model, self.sequence = model, sequence
        self.oracle = WindowOracle(model, CUTS)
        self.rng = np.random.default_rng(seed)
        self.begun = False
        self.made = 0

    def expected(self, inputs, commit=True):
        before = self.oracle.copy()
        outputs, said = self.oracle.ask(inputs, start=not self.begun)
        self.begun = True
        if commit:
            self.made += said["steps"]
        else:
            self.oracle = before
        return outputs, said

    def step(self, length, commit=True):
        inputs = drawn(self.rng, length)
        came = self.sequence.step(inputs, commit=commit)
        outputs, said = self.expected(inputs, commit)
        assert_same(self.model, came, outputs)
        assert {name: came.parameters[name] for name in said} == said
        assert self.sequence.steps == self.made

    def stream(self, length, commit=True):
        inputs = drawn(self.rng, length)
        came = list(self.sequence.stream(inputs, commit=commit))
        outputs, said = self.expected(inputs, commit)
        assert len(came) == said["steps"]
        for step, answer in enumerate(came):
            assert answer.parameters["step"] == step + 1
            assert_same(self.model, answer, {name: value[:, step] for name, value in outputs.items()})
        if came:
            assert {name: came[-1].parameters[name] for name in said} == said
        assert self.sequence.steps == self.made

    def goes_on(self, sequence):
        """Another sequence with the same state."""
        other = Pair(self.model, sequence)
        other.oracle, other.begun, other.made = self.oracle.copy(), True, self.made
        return other


@pytest.fixture
def stream(clients, deployment) -> Stream:
    return clients.client("stream", deployment.server)


@pytest.fixture
def serve_decoupled(serve):
    def made(**changes):
        """The model as if it answered once, for the oracle."""
        as_once = models.cut("once", 5, 3)
        served = serve(lambda name, **more: decoupled(models.cut(name, 5, 3, **more)), **changes)
        return as_once.variant(served.name)

    return made


# ---- one answer


def test_a_step_takes_any_number_of_elements(serve, begin, scheduling):
    model = serve(models.cut, scheduling, context=3)
    with begin(model.name) as sequence:
        pair = Pair(model, sequence)
        for length in (0, 3, 1, 5, 17, 0, 42):
            pair.step(length)
        pair.step(8, commit=False)
        saved = sequence.snapshot()
        pair.step(4)
        with sequence.clone() as copied:
            pair.goes_on(copied).step(9)
        later = pair.goes_on(sequence)
        pair.step(9)
        sequence.restore(sequence.snapshot())
        pair.step(6)
        info = sequence.info()
        assert (info.steps, info.left) == (pair.made, pair.oracle.left["AUDIO"].shape[1])
        sequence.restore(saved)
        assert sequence.info().steps < later.made


def test_what_is_left_over_goes_with_a_reset_of_all_states(serve, begin):
    model = serve(models.cut, context=3)
    with begin(model.name) as sequence:
        pair = Pair(model, sequence)
        pair.step(7)
        sequence.reset()
        pair.oracle.begin()
        pair.step(4)
        pair.step(4)


def test_elements_are_taken_exactly_once(serve, begin, begin_lossy, proxy, scheduling):
    """Each element has its number, so one that is missing or comes twice shows."""
    model = serve(models.cut, scheduling)
    begin(model.name).step(audio(), end=True)
    sequences = [begin_lossy(model.name, retry=AGAIN) for _ in range(3)]
    for sequence in sequences:
        sequence.info()
    rng = np.random.default_rng(9)
    proxy.lose_at_random(seed=8)
    lost, sent = 0, [0] * len(sequences)
    for _ in range(60):
        for index, sequence in enumerate(sequences):
            before, sent[index] = sent[index], sent[index] + int(rng.choice([1, 2, 3, 7, 12]))
            try:
                came = sequence.step(audio(*range(before, sent[index])))
            except AnswerLost:
                lost += 1
            else:
                windows = np.arange(before // 5 * 5, sent[index] // 5 * 5).reshape(-1, 5)
                assert came["WINDOW"][0].tolist() == windows.tolist()
            assert sequence.steps == sent[index] // 5
    for sequence, count in zip(sequences, sent, strict=True):
        assert sequence.state()["SUM_IN"].item() == sum(range(count // 5 * 5))
        assert sequence.info().steps == sequence.steps == count // 5
        sequence.end()
    assert min(proxy.counts[loss] for loss in LOSSES) > 10 and lost > 10


def test_steps_that_are_sent_ahead_are_counted(serve, stream, scheduling):
    model = serve(models.cut, scheduling)
    with Sequence(stream, model.name) as sequence:
        futures = [sequence.send(audio(*[1] * length)) for length in (3, 0, 4, 12, 1)]
        assert [future.result().parameters["steps"] for future in futures] == [0, 0, 1, 2, 1]
        assert sequence.steps == sequence.info().steps == 4
        # None of the later ones runs in the place of the third.
        futures = [sequence.send(audio(*values)) for values in ([1] * 5, [1] * 2, [FAILS] * 3, [1] * 4, [1] * 7)]
        assert [future.result().parameters["left"] for future in futures[:2]] == [0, 2]
        assert type(futures[2].exception()) is StatefulError
        assert [type(future.exception()) for future in futures[3:]] == [StepConflict] * 2
        assert sequence.info().steps == 5
        assert sequence.step(audio(1, 1, 1)).parameters["left"] == 0


def test_steps_that_cannot_be_foreseen_are_counted_when_they_are_answered(serve, begin, protocol, stream):
    """The first window is longer, with `:whole`."""
    model = serve(models.cut, context=3, parameters={"input_context": "AUDIO=3:whole"})
    with begin(model.name) as sequence:
        assert [sequence.step(audio(*[1] * length)).parameters["steps"] for length in (7, 1, 5, 11)] == [0, 1, 1, 2]
        assert sequence.steps == sequence.info().steps == 4
    with pytest.raises(ValueError, match=f"how many steps a request to model '{model.name}' makes.*call step"):
        Sequence(stream, model.name).send(audio(1))


def test_a_request_goes_on_until_a_stop(serve, begin, stream, scheduling):
    model = serve(models.spoken, scheduling)
    oracle = RepeatOracle(model, {"NEXT": "TOKENS"}, lambda outputs: outputs["NEXT"].item() == LAST)
    rng = np.random.default_rng(5)
    made = 0
    with begin(model.name) as sequence:
        for number in range(6):
            inputs = model.draw(rng) | {"TOKENS": rng.integers(0, 15, (1, 3))}
            came = sequence.step(inputs, max_steps=10)
            oracle.most = 10
            outputs, said = oracle.ask(inputs, start=number == 0)
            assert_same(model, came, outputs)
            assert {name: came.parameters[name] for name in said} == said
            made += said["steps"]
            assert sequence.steps == made
        assert sequence.info().steps == made
    with pytest.raises(ValueError, match=f"how many steps a request to model '{model.name}' makes.*'repeat'"):
        Sequence(stream, model.name).send(inputs)


def test_an_array_with_other_dimensions_is_refused_by_name(serve, begin):
    model = serve(models.cut)
    sequence = begin(model.name)
    inputs = {**audio(), "AUDIO": np.zeros(5, np.float32)}
    with pytest.raises(ValueError, match=rf"input 'AUDIO' of model '{model.name}' has shape \[5\], .* 2 .*: \[1, -1\]"):
        sequence.step(inputs)
    with pytest.raises(TypeError, match="input 'AUDIO'.*int64"):
        sequence.step({**audio(), "AUDIO": np.zeros((1, 5), np.int64)})


# ---- an answer for each step


def slow_repeat(serve, scheduling):
    each = {"parameters": {"repeat": "<<<OUTPUT, INPUT>>>"}, "more": "model_transaction_policy { decoupled: true }"}

    def make(name, **more):
        return models.slow(name, 4000, slow_from=2, max_batch_size=1, **more)

    return serve(make, scheduling, **each)


@over_grpc
def test_each_step_is_answered(serve_decoupled, begin, scheduling):
    model = serve_decoupled(scheduling=scheduling)
    with begin(model.name) as sequence:
        pair = Pair(model, sequence)
        for length in (0, 3, 17, 1, 0, 42):
            pair.stream(length)
        pair.stream(11, commit=False)
        pair.stream(4)
        with sequence.clone() as copied:
            pair.goes_on(copied).stream(8)
        assert sequence.info().steps == pair.made
        pair.stream(6)
        assert sequence.state()["SUM_IN"].item() == pair.oracle.steps.sequence.state["SUM_IN"].item()


@over_grpc
def test_a_sequence_without_the_state_api_is_streamed_and_ended(serve_decoupled, begin):
    model = serve_decoupled(state_api="false")
    sequence = begin(model.name)
    totals = [answer["TOTAL"].item() for answer in sequence.stream(audio(*range(12)))]
    totals += [answer["TOTAL"].item() for answer in sequence.stream(audio(*range(12, 20)), end=True)]
    assert totals == np.cumsum(np.arange(20).reshape(4, 5).sum(1)).tolist()


@over_grpc
def test_a_step_that_fails_follows_the_answers_before_it_and_changes_nothing(serve_decoupled, begin, scheduling):
    model = serve_decoupled(scheduling=scheduling)
    with begin(model.name) as sequence:
        pair = Pair(model, sequence)
        pair.stream(7)
        came = []
        with pytest.raises(StatefulError, match=r"step 3 of 4 of the request"):
            came.extend(sequence.stream(audio(*[1] * 8, *[1] * 4, FAILS, *[1] * 5)))
            pytest.fail("all steps were made")
        pair.stream(9)
        assert sequence.info().steps == pair.made


@over_grpc
def test_leaving_the_answers_cancels_the_request(serve, begin, deployment, scheduling):
    """The next step is slow, so no answer is on its way when the caller leaves: tritonserver 2.51 can crash then."""
    model = slow_repeat(serve, scheduling)
    one = np.ones((1, 1), np.float32)
    with begin(model.name) as sequence:
        assert [answer["OUTPUT"].item() for answer in sequence.stream(one, max_steps=3)] == [1, 2, 4]
        answers = sequence.stream(one, max_steps=1000)
        assert next(answers)["OUTPUT"].item() == 5
        answers.close()
        eventually(lambda: deployment.failures(model).get("cancelled"), lambda count: count == 1)
        assert [answer["OUTPUT"].item() for answer in sequence.stream(one, max_steps=2)] == [5, 10]
        assert sequence.steps == sequence.info().steps == 5


@over_grpc
def test_a_sequence_begins_anew_if_its_first_answers_are_left(serve, begin, deployment, scheduling):
    model = slow_repeat(serve, scheduling)
    one = np.ones((1, 1), np.float32)
    before = deployment.failures(model).get("cancelled", 0)
    with begin(model.name) as sequence:
        answers = sequence.stream(one, max_steps=1000)
        # The third step is slow, so no answer is on its way: tritonserver 2.51 can crash then.
        assert [next(answers)["OUTPUT"].item() for _ in range(2)] == [1, 2]
        answers.close()
        eventually(lambda: deployment.failures(model).get("cancelled", 0) - before, lambda count: count == 1)
        assert [answer["OUTPUT"].item() for answer in sequence.stream(one, max_steps=2)] == [1, 2]
        assert sequence.steps == sequence.info().steps == 2


@over_grpc
def test_a_first_request_that_was_made_is_found_although_its_last_answer_was_not_awaited(serve_decoupled, begin):
    model = serve_decoupled()
    with begin(model.name) as sequence:
        answers = sequence.stream(audio(*range(10)))
        assert [next(answers)["TOTAL"].item() for _ in range(2)] == [10, 45]
        # Both steps were made, so the START is.
        answers.close()
        assert [answer["TOTAL"].item() for answer in sequence.stream(audio(*[1] * 5))] == [50]
        assert sequence.steps == sequence.info().steps == 3


@over_grpc
def test_a_request_whose_answers_are_lost_is_not_made_twice(serve_decoupled, begin, begin_lossy, proxy):
    model = serve_decoupled()
    with begin_lossy(model.name) as sequence:
        assert [answer["TOTAL"].item() for answer in sequence.stream(audio(1, 2, 3, 4, 5))] == [15]
        losses = iter(["answer"])
        proxy.lose = lambda: next(losses, "none")
        inputs = audio(*[1] * 8)
        with pytest.raises(Unavailable):
            list(sequence.stream(inputs))
        with contextlib.suppress(AnswerLost):
            try:
                list(sequence.stream(inputs))
            except Unavailable:
                # Only now has the client noticed that its connection is broken. Nothing was sent.
                list(sequence.stream(inputs))
        assert sequence.steps == 2
        assert [answer["TOTAL"].item() for answer in sequence.stream(audio(1, 1))] == [25]


def test_what_cannot_carry_several_answers_is_refused(serve, serve_decoupled, begin, protocol):
    model = serve_decoupled()
    sequence = begin(model.name)
    if protocol.startswith("grpc"):
        with pytest.raises(TypeError, match="call stream, not step"):
            sequence.step(audio(1))
        one_answer = serve(models.cut, name=f"{model.name}_at_once")
        with pytest.raises(TypeError, match=f"model '{one_answer.name}' has one answer.*decoupled: true"):
            list(begin(one_answer.name).stream(audio(1)))
    else:
        carries = "HTTP" if protocol.startswith("http") else "a shared Stream"
        with pytest.raises(TypeError, match=f"decoupled.*{carries} can't carry.*tritonclient.grpc"):
            list(sequence.stream(audio(1)))
        with pytest.raises(TypeError, match="call stream|can't carry"):
            sequence.step(audio(1))


def test_a_client_has_one_stream_at_a_time(serve_decoupled, clients, deployment):
    model = serve_decoupled()
    begin = clients.connect("grpc", deployment.server)
    first, second = begin(model.name), begin(model.name)
    answers = first.stream(audio(*[1] * 10))
    next(answers)
    with pytest.raises(StatefulError, match="stream"):
        list(second.stream(audio(1)))
    assert len(list(answers)) == 1
    assert len(list(second.stream(audio(*[1] * 5)))) == 1

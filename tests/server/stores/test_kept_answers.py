"""With `durability: step`, a request that is sent again with its `sequence_step` gets the answer that was kept."""

import contextlib
import random

import numpy as np
import pytest

from harness import models
from harness.conversations import together
from harness.models import ledger
from harness.models.windows import cut_pair
from harness.own import Talk, fails_with
from harness.raw import Answer, Http, Refused, Stream
from harness.shared_memory import SharedMemory
from harness.state_api import with_state_api
from harness.stored import both_stores, stored, word
from harness.windows import Cut, WindowOracle, WindowTalk


def kept(model, location, **parameters):
    return stored(with_state_api(model), location, **parameters)


def serving(deploy, model):
    """A server with this model."""
    deployment = deploy(control_model=False)
    deployment.serve(model)
    return deployment


def assert_equal(again: Answer, first: Answer) -> None:
    """The same outputs to the last bit, and the same parameters."""
    assert again.parameters == first.parameters
    assert list(again.outputs) == list(first.outputs)
    for name, value in first.outputs.items():
        assert again.outputs[name].dtype == value.dtype and again.outputs[name].shape == value.shape
        assert np.array_equal(again.outputs[name], value), name


class Repeater:
    """A client that says its steps, and can send its last request again."""

    def __init__(self, client, model, sequence_id, **how):
        self.talk, self.made = Talk(client, model, sequence_id), 0
        self.last, self.how = ({}, {}), how

    def step(self, *, start=False, end=False, **parameters) -> Answer:
        inputs = self.talk.model.draw(self.talk.rng)
        parameters |= {"sequence_id": self.talk.sequence_id, "sequence_step": self.made}
        parameters |= {name: True for name, given in {"sequence_start": start, "sequence_end": end}.items() if given}
        self.last = inputs, parameters
        answer = self.ask()
        self.talk.check(answer, inputs, start=start, end=end)
        self.made += 1
        return answer

    def ask(self, **parameters) -> Answer:
        """The last request, once more, perhaps with other parameters."""
        inputs, before = self.last
        return self.talk.client.ask(self.talk.model.name, inputs, before | parameters, **self.how)


@both_stores
def test_a_repeated_request_gets_its_answer_and_makes_no_second_step(deploy, connect, location):
    """From the server that has the sequence, and from the next one after a kill."""
    served = [kept(ledger("kept_answers"), location, worker_count=2), kept(models.lstm("kept_answers_lstm"), location)]
    talks = [Repeater(None, model, number) for model in served for number in (1, 2)]
    answers = {}
    for kill in range(3):
        deployment = deploy(control_model=False)
        for model in served:
            deployment.serve(model)
        client = connect(deployment)
        for talk in talks:
            talk.talk.client = client
            if kill:
                assert_equal(talk.ask(), answers[talk])
            talk.step(start=not kill)
            answers[talk] = talk.step()
            assert_equal(talk.ask(), answers[talk])
            assert_equal(talk.ask(), answers[talk])
        deployment.kill()


def test_a_repeated_request_may_come_to_any_server(two, connect, location_of_valkey):
    model = kept(ledger("kept_anywhere"), location_of_valkey)
    clients = []
    for deployment in two:
        deployment.serve(model)
        clients.append(connect(deployment))

    def wander(number: int) -> None:
        rng = random.Random(number)
        talk = Repeater(clients[0], model, 1 + number)
        talk.step(start=True)
        for step in range(12):
            talk.talk.client = rng.choice(clients)
            answer = talk.step(end=step == 11)
            for _ in range(rng.randint(0, 3)):
                talk.talk.client = rng.choice(clients)
                assert_equal(talk.ask(), answer)

    together(lambda number=number: wander(number) for number in range(6))


@both_stores
def test_the_answer_to_an_end_is_kept(deploy, connect, location):
    model = kept(ledger("kept_end"), location)
    talk, deleted = Repeater(None, model, 1), Repeater(None, model, 2)
    first = serving(deploy, model)
    talk.talk.client = deleted.talk.client = connect(first)
    for of in (talk, deleted):
        of.step(start=True)
    answer = talk.step(end=True)
    assert_equal(talk.ask(), answer)
    deleted.last = {}, {"sequence_id": 2, "sequence_step": 1, "delete": True}
    gone = deleted.ask()
    assert_equal(deleted.ask(), gone)
    first.kill()
    second = serving(deploy, model)
    talk.talk.client = deleted.talk.client = connect(second)
    assert_equal(talk.ask(), answer)
    assert_equal(deleted.ask(), gone)
    # no other request of the sequence gets it, and none after the next START
    for other in ({"sequence_step": 2}, {"sequence_end": False}):
        with pytest.raises(Refused) as refused:
            talk.ask(**other)
        assert word(refused.value) == "SEQUENCE_MISSING"
    talk.made = 0
    talk.step(start=True)
    talk.step()
    talk.step()
    with pytest.raises(Refused) as refused:
        talk.ask(sequence_step=1, sequence_end=True)
    assert word(refused.value) == "SEQUENCE_STEP_CONFLICT"
    talk.step()


@both_stores
def test_only_the_same_request_gets_the_answer(deploy, connect, location):
    model = kept(ledger("kept_for_one"), location)
    deployment = serving(deploy, model)
    talk = Repeater(connect(deployment), model, 1)
    talk.step(start=True)
    talk.step()
    talk.step()
    others = (
        {"sequence_step": 0},
        {"sequence_step": 1},
        {"sequence_step": 4},
        {"sequence_end": True},
        {"snapshot": True},
    )
    for how in others:
        with pytest.raises(Refused) as refused:
            talk.ask(**how)
        assert word(refused.value) == "SEQUENCE_STEP_CONFLICT", how
    talk.ask()


@both_stores
def test_a_request_that_has_changed_nothing_runs_again_and_answers_no_other(deploy, connect, location):
    """A look ahead (`commit: false`) is at the same step as the request that follows it."""
    model = kept(ledger("kept_peek"), location)
    first = serving(deploy, model)
    talk = Repeater(connect(first), model, 1)
    talk.step(start=True)
    peek = {"INPUT": np.array([[5]], np.int64), "SCALE": np.array([[1]], np.int64)}
    at = {"sequence_id": 1, "sequence_step": 1}
    seen = talk.talk.client.ask(model.name, peek, {**at, "commit": False})
    first.kill()
    second = serving(deploy, model)
    talk.talk.client = connect(second)
    assert_equal(talk.talk.client.ask(model.name, peek, {**at, "commit": False}), seen)
    # other inputs, and a step
    talk.step()
    talk.step()


@both_stores
def test_a_start_gets_its_answer_without_start(deploy, connect, location):
    """With START it begins anew, or is refused while the sequence is live."""
    model = kept(ledger("kept_start"), location)
    deployment = serving(deploy, model)
    talk = Repeater(connect(deployment), model, 1)
    answer = talk.step(start=True)
    with fails_with("SEQUENCE_ALREADY_EXISTS", 1):
        talk.ask()
    assert_equal(talk.ask(sequence_start=False), answer)
    talk.step()


@pytest.mark.parametrize("most", [0, 400, None])
def test_answers_above_the_limit_are_not_kept(deploy, connect, location_of_file, most):
    limit = {} if most is None else {"max_kept_answer_bytes": most}
    model = kept(ledger("kept_large"), location_of_file, **limit)
    deployment = serving(deploy, model)
    talk = Repeater(connect(deployment), model, 1)
    talk.step(start=True)
    were_kept = []
    for _ in range(40):
        answer = talk.step()
        try:
            assert_equal(talk.ask(), answer)
            were_kept.append(True)
        except Refused as refused:
            assert word(refused) == "SEQUENCE_STEP_CONFLICT"
            were_kept.append(False)
    # OUTPUT grows with each step
    assert were_kept == sorted(were_kept, reverse=True)
    assert any(were_kept) == (most != 0) and all(were_kept) == (most is None)


@both_stores
def test_requests_of_several_steps_or_none_get_their_answers(deploy, connect, location):
    """Strings, open dims, and the parameters of windows; a request that makes no step needs `sequence_left`, too."""
    model = kept(cut_pair("kept_windows"), location)
    talk = WindowTalk(None, WindowOracle(model, {"NEAR": Cut(4), "FAR": Cut(2, 2)}), np.random.default_rng(7))
    asked: dict = {}

    def ask(elements: int, *, end: bool = False) -> Answer:
        asked.update(inputs=talk.draw(elements), sequence_step=talk.oracle.made, sequence_left=talk.left(), end=end)
        return talk.ask(asked["inputs"], **{name: asked[name] for name in asked if name != "inputs"})

    def again(**how) -> Answer:
        flags = {"sequence_end": True} if asked["end"] else {}
        at = {name: asked[name] for name in ("sequence_step", "sequence_left")}
        return talk.client.ask(model.name, asked["inputs"], {"sequence_id": talk.sequence_id, **at, **flags}, **how)

    answer = None
    for chunks in ((9, 2, 1), (14, 2), (30, 1)):
        deployment = serving(deploy, model)
        talk.client = connect(deployment)
        if answer is None:
            talk.ask(5, start=True)
        else:
            assert_equal(again(), answer)
        for chunk in chunks:
            answer = ask(chunk)
            if answer.parameters["steps"]:
                # one that names other outputs is another request
                with pytest.raises(Refused) as refused:
                    again(outputs=["SAID"])
                assert word(refused.value) == "SEQUENCE_STEP_CONFLICT"
            assert_equal(again(), answer)
        deployment.kill()
    deployment = serving(deploy, model)
    talk.client = connect(deployment)
    answer = ask(7, end=True)
    assert_equal(again(), answer)


@pytest.mark.parametrize("way", ["http", "stream", "shared memory"])
def test_each_protocol_gets_its_answer(deploy, location_of_file, way):
    model = kept(ledger("kept_protocols"), location_of_file)
    deployment = serving(deploy, model)
    makes = {"http": Http, "stream": Stream, "shared memory": lambda to: SharedMemory(to, model)}
    with contextlib.closing(makes[way](deployment)) as client:
        talk = Repeater(client, model, 1)
        talk.step(start=True)
        for step in range(3):
            answer = talk.step(end=step == 2)
            assert_equal(talk.ask(), answer)

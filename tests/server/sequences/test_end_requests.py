"""`infer_end_requests: 0`: an END alone is answered, not run, and frees its slot."""

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import models
from harness.clients import PROTOCOLS, new_id
from harness.conversations import Conversation, together
from harness.deployment import eventually
from harness.model import Tensor
from harness.sequence_oracle import SequenceOracle, assert_same


def not_inferred(make, name: str, **changes):
    return make(name=name, **changes).with_parameters(name, infer_end_requests=0)


def ends_without_elements(talk: Conversation, inputs=None, outputs=None) -> None:
    """Ends the sequence; every output comes, in its type, with nothing in it."""
    model = talk.model
    fed = model.draw(talk.rng) if inputs is None else inputs
    answer = talk.client.step(model.name, talk.sequence_id, fed, end=True, outputs=outputs)
    assert set(answer) == (set(outputs) if outputs else {tensor.name for tensor in model.outputs})
    for name, value in answer.items():
        assert value is not None, f"the client library cannot read {name}"
        assert value.size == 0, f"{name}: {value}"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("make", [models.two_inputs, models.mixed_io_int32_fp16, models.accumulate])
def test_an_end_alone_is_answered_with_outputs_without_elements(deployment, make, protocol):
    model = deployment.serve(not_inferred(make, f"{make.__name__}_not_inferred"))
    rng = np.random.default_rng(1)
    talk = Conversation(deployment.connect(protocol), model, rng)
    for _ in range(3):  # the id is free each time
        talk.start()
        talk.step()
        ends_without_elements(talk)
    deployment.settles("stateful_live_sequences", model, 0)


def test_only_the_requested_outputs_come_of_such_an_end(deployment):
    model = deployment.serve(not_inferred(models.two_inputs, "two_inputs_end_asks_one"))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(2))
    talk.start()
    ends_without_elements(talk, outputs=["TOTAL_OUT"])


def test_the_end_is_not_run(deployment):
    model = deployment.serve(not_inferred(models.fails, "fails_not_inferred"))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(3))
    talk.start()
    talk.step()
    eventually(lambda: deployment.statistics(model).execution_count, lambda runs: runs == 2)
    ends_without_elements(talk, {"INPUT": np.array([[99]], np.int64)})  # would fail
    deployment.settles("stateful_sequences_ended_total", model, 1)
    assert deployment.statistics(model).execution_count == 2


def test_an_end_is_run_where_nothing_else_is_said(deployment):
    for name, said in (("fails_inferred_by_default", None), ("fails_inferred", "1")):
        model = models.fails(name, parameters={"infer_end_requests": said})
        talk = Conversation(deployment.connect(), deployment.serve(model), np.random.default_rng(4))
        talk.start()
        with pytest.raises(InferenceServerException, match="out of data bounds"):
            talk.end({"INPUT": np.array([[99]], np.int64)})


def test_start_and_end_in_one_request_is_run(deployment):
    model = deployment.serve(not_inferred(models.counter, "counter_one_shot_not_inferred"))
    client = deployment.connect()
    for seed in range(5):
        Conversation(client, model, np.random.default_rng(seed)).whole(1)
    deployment.settles("stateful_live_sequences", model, 0)


def test_two_hundred_sequences_pass_while_others_are_open(deployment):
    """The original freed a slot of somebody else with each of these and mixed the states up."""
    model = deployment.serve(not_inferred(models.counter, "counter_many_ends", max_candidates=40))
    client = deployment.connect()
    rng = np.random.default_rng(5)
    open_ones = [Conversation(client, model, rng) for _ in range(4)]
    for talk in open_ones:
        talk.start()

    def pass_by(seed):
        rng = np.random.default_rng(seed)
        for i in range(25):
            talk = Conversation(client, model, rng)
            if i % 2:
                talk.whole(1)
            else:
                talk.start()
                talk.step()
                ends_without_elements(talk)

    together(lambda seed=seed: pass_by(seed) for seed in range(8))
    for talk in (*open_ones, *open_ones):
        talk.step()
    for talk in open_ones:
        ends_without_elements(talk)
    deployment.settles("stateful_live_sequences", model, 0)


def test_an_end_that_the_model_cannot_take_ends_the_sequence_all_the_same(deployment):
    """One that Triton's core refuses itself is another matter: nobody hears of it."""
    any_width = (Tensor("INPUT", "fp32", (-1,)),)
    model = deployment.serve(not_inferred(models.counter, "counter_end_refused", inputs=any_width))
    client = deployment.connect()
    talk = Conversation(client, model, np.random.default_rng(6))
    four, nine = ({"INPUT": np.ones((1, width), np.float32)} for width in (4, 9))
    talk.start(four)
    with pytest.raises(InferenceServerException) as refused:
        client.step(model.name, talk.sequence_id, nine, end=True)
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
    deployment.settles("stateful_live_sequences", model, 0)
    talk.start(four)
    ends_without_elements(talk, four)


def test_an_end_of_nobody_frees_nothing(deployment):
    model = deployment.serve(not_inferred(models.counter, "counter_end_of_nobody"))
    client = deployment.connect()
    talk = Conversation(client, model, np.random.default_rng(7))
    talk.start()
    for _ in range(5):
        with pytest.raises(InferenceServerException, match="START"):
            client.step(model.name, new_id(), model.draw(talk.rng), end=True)
    talk.step()
    assert deployment.metric("stateful_live_sequences", model) == 1
    ends_without_elements(talk)


def test_ends_that_are_not_inferred_share_payloads_with_steps_that_are(deployment):
    model = not_inferred(
        models.counter,
        "counter_ends_among_steps",
        max_batch_size=4,
        oldest="preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 300000",
    )
    model = deployment.serve(model)
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng(seed)) for seed in range(4)]
    together(talk.start for talk in talks)
    together([talks[0].step, lambda: ends_without_elements(talks[1]), talks[2].step, talks[3].step])
    together([talks[0].step, talks[1].start, lambda: ends_without_elements(talks[2]), talks[3].step])
    for at in (0, 1, 3):
        talks[at].step()
        ends_without_elements(talks[at])


def test_direct_takes_such_ends_too(deployment):
    model = deployment.serve(not_inferred(models.counter, "counter_end_direct", direct="", max_batch_size=4))
    client = deployment.connect()

    def talk(seed):
        rng = np.random.default_rng(seed)
        oracle = SequenceOracle(model)
        for _ in range(4):
            sequence_id = new_id()
            for i in range(3):
                fed = model.draw(rng)
                answer = client.step(model.name, sequence_id, fed, start=i == 0)
                assert_same(model, answer, oracle.step(fed, start=i == 0))
            answer = client.step(model.name, sequence_id, model.draw(rng), end=True)
            assert answer["OUTPUT"].size == 0

    together(lambda seed=seed: talk(seed) for seed in range(6))

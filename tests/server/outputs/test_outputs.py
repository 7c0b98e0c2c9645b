"""A response carries exactly what was asked for."""

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import models
from harness.clients import PROTOCOLS, new_id
from harness.conversations import Conversation, together
from harness.sequence_oracle import SequenceOracle


@pytest.fixture
def model(deployment):
    return deployment.serve(models.two_inputs())


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("wanted", [["DIFFERENCE"], ["TOTAL_OUT"], ["TOTAL_OUT", "DIFFERENCE"], None], ids=str)
def test_only_the_requested_outputs_come_and_all_where_none_is_named(deployment, model, protocol, wanted):
    rng = np.random.default_rng(1)
    client, sequence_id, oracle = deployment.connect(protocol), new_id(), SequenceOracle(model)
    for step in range(3):
        fed = model.draw(rng)
        how = {"start": step == 0, "end": step == 2}
        answer = client.step(model.name, sequence_id, fed, outputs=wanted, **how)
        expected = oracle.step(fed, **how)
        assert set(answer) == set(wanted or expected)
        for name, value in answer.items():
            np.testing.assert_array_equal(value, expected[name])


def test_a_state_that_is_also_an_output_is_returned(deployment, model):
    talk = Conversation(deployment.connect(), model, np.random.default_rng(2))
    assert "TOTAL_OUT" in talk.start()
    talk.end()


@pytest.mark.parametrize("name", ["UNLISTED", "nothing_of_this_name"])
def test_an_output_that_the_configuration_does_not_list_is_refused(deployment, model, name):
    talk = Conversation(deployment.connect(), model, np.random.default_rng(3))
    talk.start()
    with pytest.raises(InferenceServerException, match=name):
        talk.client.step(model.name, talk.sequence_id, model.draw(talk.rng), outputs=[name])
    talk.end()


@pytest.mark.parametrize("wanted", [["OUTPUT"], ["OUTPUT", "LOSS"]], ids=str)
def test_what_the_model_says_of_a_whole_batch_is_for_batches_of_one(deployment, wanted):
    """Who does not ask for it shares batches; for who does, the run is made again alone."""
    wait = "max_queue_delay_microseconds: 200000 preferred_batch_size: [ 4 ]"
    model = deployment.serve(models.with_a_loss(f"with_a_loss_{len(wanted)}", oldest=wait))

    def talk(seed: int) -> None:
        rng, client, sequence_id = np.random.default_rng(seed), deployment.connect(), new_id()
        total = np.zeros((1, 2), np.float32)
        for step in range(4):
            fed = model.draw(rng)
            total += fed["INPUT"]
            how = {"start": step == 0, "end": step == 3}
            answer = client.step(model.name, sequence_id, fed, outputs=wanted, **how)
            np.testing.assert_array_equal(answer["OUTPUT"], total)
            if "LOSS" in wanted:
                np.testing.assert_array_equal(answer["LOSS"], [total.mean()])

    together([lambda seed=seed: talk(seed) for seed in range(4)])
    statistics = deployment.statistics(model)
    assert statistics.execution_count < statistics.inference_count or "LOSS" in wanted


def test_open_output_dims_of_the_model_are_filled_from_what_it_computes(deployment):
    model = deployment.serve(models.speech_like())
    talk = Conversation(deployment.connect(), model, np.random.default_rng(4))
    assert talk.start()["output"].shape == (1, 16)
    talk.end()


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("spaces", "sr=8000 gain=[1.5,-2]"),
        ("comma", "sr=8000,gain=[1.5,-2]"),
        ("comma_and_space", "gain=[1.5,-2], sr=8000"),
        ("spaces_in_the_list", "sr=8000 gain=[1.5, -2.0]"),
    ],
)
def test_constant_inputs_may_be_written_in_these_ways(deployment, name, written):
    model = models.speech_like(f"speech_like_{name}", rate=8000)
    model = deployment.serve(model.with_parameters(model.name, constant_inputs=written))
    Conversation(deployment.connect(), model, np.random.default_rng(5)).whole(4)

"""Sequence ids: numbers of the whole range, and strings."""

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import models
from harness.clients import PROTOCOLS, new_id
from harness.conversations import Conversation


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_sequence_may_be_named_by_a_string(deployment, protocol):
    rng = np.random.default_rng(1)
    client = deployment.connect(protocol)
    model = deployment.serve(models.accumulate())
    talks = [
        Conversation(client, model, rng, f"{name}-{protocol}")
        for name in ("caller", "caller-2", "Ünïcödé ☎", "x" * 100)
    ]
    for talk in talks:
        talk.start()
    for _ in range(3):
        for talk in talks:
            talk.step()
    for talk in talks:
        talk.end()


def test_a_number_and_a_string_of_its_digits_are_two_sequences(deployment):
    rng = np.random.default_rng(2)
    client = deployment.connect()
    model = deployment.serve(models.counter())
    number = new_id()
    talks = [Conversation(client, model, rng, number), Conversation(client, model, rng, str(number))]
    for talk in talks:
        talk.start()
    for talk in (*talks, *talks):
        talk.step()
    for talk in talks:
        talk.end()


@pytest.mark.parametrize(
    ("protocol", "largest"),
    # gRPC carries an id in 63 bits and a sign
    [("unary", 2**63 - 1), ("stream", 2**63 - 1), ("http", 2**64 - 1)],
)
def test_the_largest_id_is_an_id_like_any_other(deployment, protocol, largest):
    rng = np.random.default_rng(3)
    client = deployment.connect(protocol)
    model = deployment.serve(models.controls())
    talks = [Conversation(client, model, rng, sequence_id) for sequence_id in (largest, largest - 1)]
    for talk in talks:
        talk.start()
    for talk in (*talks, *talks):
        talk.step()
    for talk in talks:
        talk.end()


@pytest.mark.parametrize("protocol", ["unary", "http"])
def test_a_request_without_an_id_is_refused(deployment, protocol):
    model = deployment.serve(models.counter())
    fed = model.draw(np.random.default_rng(4))
    with pytest.raises(InferenceServerException, match="correlation ID"):
        deployment.connect(protocol).step(model.name, 0, fed, start=True)


@pytest.mark.parametrize("protocol", ["unary", "http"])
def test_a_sequence_that_never_started_is_refused(deployment, protocol):
    model = deployment.serve(models.counter())
    fed = model.draw(np.random.default_rng(5))
    with pytest.raises(InferenceServerException, match="must specify the START flag"):
        deployment.connect(protocol).step(model.name, new_id(), fed)

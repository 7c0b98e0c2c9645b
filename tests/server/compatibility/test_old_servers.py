"""What a server that is older than this library cannot do: it is said in the log, or refused when a model loads.

`scripts/test --servers` runs these on every server; docs/servers.md has the table.
"""

from __future__ import annotations

import numpy as np
import pytest

from harness import models
from harness.conversations import Conversation
from harness.raw import Unary
from harness.refusals import refused
from harness.state_api import StateSequence, with_state_api


@pytest.fixture
def said(deployment) -> str:
    """What the log says of the server's age."""
    return "".join(line for line in deployment.server.log_text().splitlines() if "is old: " in line)


@pytest.mark.parametrize(
    ("since", "without"),
    [
        ((2, 32), "'state_api' are refused"),
        ((2, 35), "memory on GPUs is not reported"),
        ((2, 39), "cancelled requests are run"),
        ((2, 41), "the timeouts of requests are ignored"),
    ],
)
def test_the_log_names_what_the_server_lacks(server_version, said, since, without):
    assert (without in said) == (server_version < since), said


def test_the_state_api_works_or_its_model_does_not_load(deployment, server_version):
    model = with_state_api(models.ledger(name="state_api_on_any_server"))
    if server_version < (2, 32):
        refused(deployment, model, "state_api", "TRITONBACKEND_RequestParameter", "23.03")
        return
    deployment.serve(model)
    client = Unary(deployment)
    try:
        talk = StateSequence(client, model, np.random.default_rng(1))
        talk.start()
        talk.step(commit=False, get_state=True)
        talk.end()
    finally:
        client.close()


def test_oldest_has_places_without_max_candidate_sequences_or_the_model_does_not_load(deployment, server_version):
    model = models.counter(name="no_candidates_written", scheduling="sequence_batching { oldest { } }")
    if server_version < (2, 38):
        refused(deployment, model, "max_candidate_sequences", "0", "23.09")
        return
    deployment.serve(model)
    Conversation(deployment.connect(), model, np.random.default_rng(1)).whole(4)

"""Inputs that the backend makes (`generated_inputs`): each answer is held against ONNX Runtime stepped by hand, which is fed
what a plain count in Python says."""

from __future__ import annotations

import numpy as np
import pytest

from harness.conversations import Conversation, interleave, some_at_once
from harness.models import generated
from harness.state_api import OWN, both_schedulers, every_scheduler, with_state_api


@pytest.mark.simulated_device
@every_scheduler
@pytest.mark.parametrize("shared", [False, True], ids=["per row", "shared"])
def test_each_kind_in_sequences_that_take_turns_and_that_come_together(deployment, by, shared):
    made = generated.SHARED if shared else generated.OF_EACH_KIND
    model = deployment.serve(
        with_state_api(generated.counted(f"each_kind_{by}_{shared}", *made), by, state_api=None)
    )
    rng = np.random.default_rng(3)
    interleave(deployment.connect(), model, rng, sequences=6)
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng(seed)) for seed in range(6)]
    for talk in talks:
        talk.start()
    some_at_once(talks, rng, rounds=12)
    for talk in talks:
        talk.end()


def test_a_decoder_needs_nothing_but_its_tokens(deployment):
    model = deployment.serve(generated.decoder("generated_decoder"))
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng(seed)) for seed in range(4)]
    for talk in talks:
        talk.start()
    some_at_once(talks, np.random.default_rng(5), rounds=10)
    for talk in talks:
        talk.end()


def test_wenets_signature_needs_nothing_but_its_chunks(deployment):
    model = deployment.serve(generated.wenet("generated_wenet"))
    interleave(deployment.connect(), model, np.random.default_rng(6), sequences=5)

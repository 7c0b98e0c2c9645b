"""Control inputs: what the model is fed for START, END, READY and the id."""

import numpy as np
import pytest

from harness import models
from harness.clients import new_id
from harness.conversations import Conversation, interleave, together
from harness.model import CORRID, READY, START, Control


@pytest.mark.parametrize(
    ("start", "end", "ready"),
    [("bool", "int32", "fp32"), ("int32", "fp32", "bool"), ("fp32", "bool", "int32")],
)
def test_flags_come_in_the_configured_type_and_values(deployment, start, end, ready):
    model = models.controls(f"controls_{start}_{end}_{ready}", start, end, ready)
    # the oracle feeds the configured values, and the model answers what it was fed
    interleave(deployment.connect(), deployment.serve(model), np.random.default_rng(1), sequences=6)


@pytest.mark.parametrize("type", ["uint64", "int64", "uint32", "int32"])
def test_the_id_comes_in_every_integer_type(deployment, type):
    model = models.controls(f"controls_id_{type}", corrid=type)
    interleave(deployment.connect(), deployment.serve(model), np.random.default_rng(2), sequences=6)


@pytest.mark.parametrize("type", ["string", "uint64"])
def test_controls_that_the_model_does_not_take_change_nothing(deployment, type):
    model = models.counter(
        name=f"counter_with_idle_controls_{type}",
        controls=(
            Control("START", START, "int32"),
            Control("READY", READY, "fp32"),
            Control("CORRID", CORRID, type),
        ),
    )
    model = deployment.serve(model)
    client = deployment.connect()
    names = ["alice", "bob", "carol"] if type == "string" else [new_id() for _ in range(3)]
    talks = [Conversation(client, model, np.random.default_rng(3), name) for name in names]
    for talk in talks:
        talk.start()
    for talk in (*talks, *talks):
        talk.step()
    for talk in talks:
        talk.end()


def test_rows_of_one_batch_get_their_own_flags_and_ids(deployment):
    model = models.controls(
        "controls_together",
        max_batch_size=4,
        oldest="preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 1000000",
    )
    model = deployment.serve(model)
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng(i)) for i in range(4)]
    together(talk.start for talk in talks)
    # in one batch: a restart, an end, and two that go on
    together([talks[0].start, talks[1].end, talks[2].step, talks[3].step])
    # and: a new one in the place of the one that ended
    talks[1] = Conversation(client, model, np.random.default_rng(9), new_id())
    together([talks[0].step, talks[1].start, talks[2].end, talks[3].step])
    sizes = {batch.batch_size for batch in deployment.statistics(model).batch_stats}
    assert 4 in sizes, f"the requests never came together: batches of {sizes}"


@pytest.mark.parametrize("type", ["bool", "int32", "fp32"])
def test_the_reset_input_has_its_configured_values(deployment, type):
    model = models.accumulate(f"accumulate_reset_{type}_unusual", reset=type)
    if type != "bool":
        # any value but zero casts to true: no is zero, yes is not one
        model = model.variant(model.name, controls=(Control("RESET", START, type, (0, -3)),))
    interleave(deployment.connect(), deployment.serve(model), np.random.default_rng(5), sequences=8)

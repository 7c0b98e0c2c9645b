"""`always_pad_to_max_batch`: runs have more rows than requests, and nothing else changes."""

import numpy as np
import pytest
from onnx import TensorProto
from tritonclient.utils import InferenceServerException

from harness import models
from harness.conversations import Conversation, interleave, outcome, together
from harness.deployment import eventually
from harness.graphs import BATCH, checked_gather, graph, node, numbers
from harness.model import Model, Tensor

pytestmark = pytest.mark.simulated_device


def rows_of_the_run(name: str, *, padded: bool = True, **changes) -> Model:
    """Answers how many rows the run had, and how many requests of its sequence there were."""

    def build():
        one = [BATCH, 1]
        return graph(
            [
                node("Add", "COUNT_IN INPUT", "COUNT_OUT"),
                node("Shape", "INPUT", "SHAPE"),
                node("Gather", "SHAPE FIRST", "SIZE"),
                node("Mul", "INPUT NOTHING", "BLANK"),
                node("Add", "BLANK SIZE", "ROWS"),
            ],
            [("INPUT", "int64", one), ("COUNT_IN", "int64", one)],
            [("ROWS", "int64", one), ("COUNT_OUT", "int64", one)],
            {"FIRST": np.array(0, np.int64), "NOTHING": np.array(0, np.int64)},
        )

    return Model(
        name,
        build,
        inputs=(Tensor("INPUT", "int64", (1,)),),
        outputs=(Tensor("ROWS", "int64", (1,)), Tensor("COUNT_OUT", "int64", (1,))),
        states=(("COUNT_IN", "COUNT_OUT"),),
        parameters={"trust_batch": "true"} | ({"always_pad_to_max_batch": "1"} if padded else {}),
        **changes,
    )


def rows(client, model, sequence_id: int, start: bool = False) -> tuple[int, int]:
    answer = client.step(model.name, sequence_id, {"INPUT": np.array([[1]], np.int64)}, start=start)
    return answer["ROWS"].item(), answer["COUNT_OUT"].item()


@pytest.mark.parametrize(
    ("name", "changes", "alone"),
    [
        ("not_padded", {"padded": False}, 1),
        ("to_the_maximum", {}, 8),
        ("to_the_preferred", {"oldest": "preferred_batch_size: [ 6, 3 ]"}, 3),
        ("direct", {"direct": ""}, 8),
        ("of_one", {"max_batch_size": 1}, 1),
    ],
)
def test_a_run_for_one_request_has_this_many_rows(deployment, name, changes, alone):
    model = deployment.serve(rows_of_the_run(f"rows_{name}", **{"max_batch_size": 8, **changes}))
    client = deployment.connect()
    assert rows(client, model, 1, start=True) == (alone, 1)
    assert rows(client, model, 2, start=True) == (alone, 1)
    assert rows(client, model, 1) == (alone, 2)
    # statistics count requests, not padding
    eventually(lambda: deployment.statistics(model).inference_count, lambda count: count == 3)
    if name != "direct":  # there, core's own fillers count
        assert {batch.batch_size for batch in deployment.statistics(model).batch_stats} == {1}


def test_a_batch_is_filled_up_to_the_next_preferred_size(deployment):
    model = rows_of_the_run(
        "rows_between",
        max_batch_size=8,
        oldest="preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 500000",
    )
    client = deployment.connect()
    deployment.serve(model)
    together(lambda number=number: rows(client, model, number, start=True) for number in range(1, 4))
    # three that wait for a fourth; core may cut them apart, so the largest counts
    seen = [together(lambda n=n: rows(client, model, n) for n in range(1, 4)) for _ in range(3)]
    assert {size for step in seen for size, _ in step} == {4}
    assert [count for step in seen for _, count in step] == [2] * 3 + [3] * 3 + [4] * 3


EXACT = [
    models.counter,
    models.axes,
    models.accumulate,
    models.controls,
    models.many_states,
    models.accumulate_fp32,
    models.speech_like,
]


@pytest.mark.parametrize("make", EXACT, ids=lambda make: make.__name__)
@pytest.mark.host_and_device
def test_padding_touches_no_state(deployment, make):
    model = make(name=f"{make.__name__}_padded", max_batch_size=5)
    model = deployment.serve(model.with_parameters(model.name, always_pad_to_max_batch=1))
    client = deployment.connect()
    interleave(client, model, np.random.default_rng(1), sequences=6)
    together(lambda seed=seed: Conversation(client, model, np.random.default_rng(seed)).whole(8) for seed in range(7))
    deployment.settles("stateful_live_sequences", model, 0)


def test_padding_does_not_fail_where_the_rows_do_not(deployment):
    """Rows of zeros would: this model looks (input - 1) * 2 up in a table of one."""

    def build():
        one = [BATCH, 1]
        return graph(
            [
                node("Sub", "INPUT ONE", "INDEX"),
                node("Mul", "INDEX TWO", "DOUBLE"),
                *checked_gather("TABLE", "DOUBLE", "WORTH", TensorProto.INT32),
                node("Add", "SUM_IN WORTH", "SUM_OUT"),
                node("Identity", "SUM_OUT", "OUTPUT"),
            ],
            [("INPUT", "int64", one), ("SUM_IN", "int32", one)],
            [("OUTPUT", "int32", one), ("SUM_OUT", "int32", one)],
            {
                "TABLE": numbers(7),
                "ONE": np.array(1, np.int64),
                "TWO": np.array(2, np.int64),
            },
        )

    model = models.fails("fails_on_zeros", build=build, inputs=(Tensor("INPUT", "int64", (1,), between=(1, 1)),))
    model = deployment.serve(model.with_parameters(model.name, always_pad_to_max_batch=1))
    client = deployment.connect()
    talk = Conversation(client, model, np.random.default_rng(2))
    talk.start()
    with pytest.raises(InferenceServerException, match="out of data bounds"):
        client.step(model.name, talk.sequence_id, {"INPUT": np.zeros((1, 1), np.int64)})
    talk.step()
    talk.end()


def test_a_padded_run_that_fails_fails_only_the_request_at_fault(deployment):
    """The original's stale padding rows failed later, valid runs too."""
    model = models.fails(
        "fails_padded",
        max_batch_size=4,
        oldest="preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 300000",
    )
    model = deployment.serve(model.with_parameters(model.name, always_pad_to_max_batch=1))
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng(seed)) for seed in range(3)]
    together(talk.start for talk in talks)
    for at in range(3):
        bad = {"INPUT": np.array([[99]], np.int64)}
        came = together(
            lambda i=i, talk=talk, at=at, bad=bad: outcome(lambda: talk.step(bad if i == at else None))
            for i, talk in enumerate(talks)
        )
        assert [isinstance(answer, InferenceServerException) for answer in came] == [i == at for i in range(3)]
    for talk in talks:
        talk.step()
        talk.end()

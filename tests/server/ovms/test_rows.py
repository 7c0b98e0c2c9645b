"""Several sequences in one request: a row each, with ids of shape [B, 1]."""

import numpy as np
import pytest

from harness.own import ANSWERED_ID, Talk, fails_with, fed, total
from harness.raw import PROTOCOLS, Refused


def rows(values, ids=None, controls=None, works=None) -> dict[str, np.ndarray]:
    """A request of `models.work` with a row for each value."""
    column = lambda of, dtype: np.array(of, dtype).reshape(-1, 1)  # noqa: E731
    inputs = {"INPUT": column(values, np.int64), "WORK": column(works or [0] * len(values), np.int64)}
    if ids is not None:
        inputs["sequence_id"] = column(ids, np.uint64)
    if controls is not None:
        inputs["sequence_control_input"] = column(controls, np.uint32)
    return inputs


def column_of(answer, name="OUTPUT") -> list[int]:
    assert answer.outputs[name].shape == (answer.outputs[name].size, 1)
    return answer.outputs[name].ravel().tolist()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_each_row_is_a_request_of_its_sequence(deployment, serve, connect, protocol):
    model, client = serve(), connect(protocol)
    answer = client.ask(model.name, rows([1, 2, 3], [10, 20, 30], [1, 1, 1]), {})
    assert column_of(answer) == [1, 2, 3] and column_of(answer, "sequence_id") == [10, 20, 30]
    answer = client.ask(model.name, rows([100, 200], [30, 10]), {})
    assert column_of(answer) == [103, 201] and column_of(answer, "sequence_id") == [30, 10]
    answer = client.ask(model.name, rows([1, 1, 1, 1], [10, 40, 20, 30], [2, 1, 0, 2]), {})
    assert column_of(answer) == [202, 1, 3, 104]
    for gone in (10, 30):
        with fails_with("SEQUENCE_MISSING", gone):
            Talk(client, model, gone).step()
    deployment.settles("stateful_live_sequences", model, 2)


def test_each_row_without_an_id_gets_one(serve, connect):
    model, client = serve(), connect()
    answer = client.ask(model.name, rows([1, 2, 3], controls=[1, 1, 1]), {})
    assert column_of(answer, "sequence_id") == [1, 2, 3]
    answer = client.ask(model.name, rows([1, 2, 3], [0, 7, 0], [1, 1, 1]), {})
    assert column_of(answer, "sequence_id") == [4, 7, 5]


def test_rows_of_one_sequence_run_one_after_the_other(serve, connect):
    model, client = serve(), connect()
    answer = client.ask(model.name, rows([1, 2, 4, 8], [42] * 4, [1, 0, 0, 2]), {})
    assert column_of(answer) == [1, 3, 7, 15]
    with fails_with("SEQUENCE_MISSING", 42):
        Talk(client, model, 42).step()


@pytest.mark.parametrize("workers", [1, 2])
def test_rows_may_belong_to_sequences_of_several_workers(serve, connect, workers):
    model, client = serve(parameters={"worker_count": workers}), connect()
    client.ask(model.name, rows(range(8), range(1, 9), [1] * 8), {})
    for step in range(1, 5):
        answer = client.ask(model.name, rows([10] * 8, range(8, 0, -1)), {})
        assert column_of(answer) == [i + 10 * step for i in range(7, -1, -1)]


def test_a_row_of_no_sequence_refuses_the_request_and_no_row_runs(serve, connect):
    model, client = serve(), connect()
    client.ask(model.name, rows([1, 2], [10, 20], [1, 1]), {})
    with pytest.raises(Refused) as caught:
        client.ask(model.name, rows([100, 100, 100], [10, 99, 20]), {})
    assert caught.value.code == "NOT_FOUND"
    assert (
        caught.value.text.startswith("SEQUENCE_MISSING") and "row 1" in caught.value.text and "99" in caught.value.text
    )
    assert column_of(client.ask(model.name, rows([1, 1], [10, 20], [2, 2]), {})) == [2, 3]


@pytest.mark.parametrize(
    ("ids", "controls", "word"),
    [
        ([10, 99, 20], [0, 2, 0], "SEQUENCE_MISSING"),
        ([10, 30, 20], [0, 1, 1], "SEQUENCE_ALREADY_EXISTS"),
        ([30, 30], [1, 1], "SEQUENCE_ALREADY_EXISTS"),
        ([30, 40, 10], [1, 1, 2], "MAX_SEQUENCE_NUMBER_REACHED"),
        ([10, 10], [2, 0], "SEQUENCE_MISSING"),
    ],
)
def test_a_row_that_is_refused_leaves_all_sequences_as_they_were(deployment, serve, connect, ids, controls, word):
    model, client = serve(parameters={"max_sequence_number": 3}), connect()
    client.ask(model.name, rows([1, 2], [10, 20], [1, 1]), {})
    with fails_with(word):
        client.ask(model.name, rows([100] * len(ids), ids, controls), {})
    assert column_of(client.ask(model.name, rows([0, 0], [10, 20]), {})) == [1, 2]
    with fails_with("SEQUENCE_MISSING", 30):
        Talk(client, model, 30).step()
    deployment.settles("stateful_live_sequences", model, 2)


def test_a_row_whose_run_fails_costs_the_others_nothing_but_the_answer(serve, connect):
    model, client = serve(), connect()
    client.ask(model.name, rows([1, 2, 3], [10, 20, 30], [1, 1, 1]), {})
    with pytest.raises(Refused, match="row 1: .*ONNX Runtime|ONNX Runtime.*row 1"):
        client.ask(model.name, rows([100, 1000, 100], [10, 20, 30]), {})
    assert column_of(client.ask(model.name, rows([0, 0, 0], [10, 20, 30], [2, 2, 2]), {})) == [101, 2, 103]


def test_a_wrong_control_of_one_row_refuses_the_request(serve, connect):
    """It is checked before any row is queued."""
    model, client = serve(), connect()
    client.ask(model.name, rows([1, 2], [10, 20], [1, 1]), {})
    with fails_with("INVALID_SEQUENCE_CONTROL_INPUT"):
        client.ask(model.name, rows([100, 100], [10, 20], [0, 3]), {})
    with fails_with("SEQUENCE_ID_NOT_PROVIDED"):
        client.ask(model.name, rows([100, 100], [10, 0]), {})
    assert column_of(client.ask(model.name, rows([0, 0], [10, 20]), {})) == [1, 2]


def test_the_parameters_name_one_sequence_and_so_one_row(serve, connect):
    model, client = serve(), connect()
    with pytest.raises(Refused) as caught:
        client.ask(model.name, rows([1, 2]), {"sequence_id": 42, "sequence_start": True})
    assert caught.value.code == "INVALID_ARGUMENT"
    with fails_with("SEQUENCE_MISSING", 42):
        Talk(client, model, 42).step()


def test_a_request_of_one_row_says_its_id_in_a_parameter(serve, connect):
    model, client = serve(), connect()
    assert client.ask(model.name, rows([1], [10], [1]), {}).parameters[ANSWERED_ID] == 10
    assert total(client.ask(model.name, {**fed(2), **rows([2], [10])}, {})) == 3


def test_many_requests_of_many_rows(deployment, serve, connect):
    """Several streams, each with its own sequences, all of them in every request."""
    model = serve(parameters={"worker_count": 2}, max_batch_size=16)
    stream = connect("stream")
    rng = np.random.default_rng(1)
    sums = np.zeros(12, np.int64)
    expected = []
    for step in range(50):
        order = rng.permutation(12)
        values = rng.integers(-99, 100, 12)
        sums[order] += values
        controls = [1 if step == 0 else 2 if step == 49 else 0] * 12
        stream.send(model.name, rows(values, order + 1, controls), {})
        expected.append(sums[order].tolist())
    replies = stream.all_replies(50)
    assert [column_of(replies[step]) for step in range(50)] == expected
    deployment.settles("stateful_live_sequences", model, 0)

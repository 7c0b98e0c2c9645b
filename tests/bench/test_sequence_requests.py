"""The requests that perf_analyzer sends to a model that the backend schedules. No server."""

import base64

import numpy as np
import pytest

from support import sequence_requests
from support.sequence_requests import random_inputs, requests

ROW = np.array([1, 2], np.float32)


def test_each_thread_finds_the_steps_of_one_sequence_in_order():
    """perf_analyzer's thread n of 3 takes the requests n, n + 3, n + 6, …"""
    data = requests({"X": ROW}, sequences=3, length=4)["data"]
    assert len(data) == 12
    ids = set()
    for thread in range(3):
        of_thread = data[thread::3]
        assert [request["sequence_control_input"] for request in of_thread] == [[1], [0], [0], [2]]
        ids |= {request["sequence_id"][0] for request in of_thread}
        assert len({request["sequence_id"][0] for request in of_thread}) == 1
    assert len(ids) == 3
    assert min(ids) > 0


def test_ids_begin_where_they_are_told_to():
    data = requests({"X": ROW}, sequences=2, length=2, first_id=7)["data"]
    assert [request["sequence_id"] for request in data] == [[7], [8]] * 2


def test_inputs_are_written_as_bytes_with_their_shape():
    of = requests({"X": ROW}, sequences=1, length=2)["data"][0]["X"]
    assert of["shape"] == [2]
    assert base64.b64decode(of["content"]["b64"]) == ROW.tobytes()


def tensor(name: str, kind: str = "TYPE_FP32", dims: tuple[int, ...] = (80,), **more: object) -> dict:
    return {"name": name, "data_type": kind, "dims": [str(dim) for dim in dims]} | more


def test_required_inputs_get_random_values_of_their_type():
    required = [tensor("X"), tensor("N", "TYPE_INT64"), tensor("B", "TYPE_BOOL")]
    found = random_inputs({"input": [*required, tensor("O", optional=True), tensor("sequence_id")]}, {})
    assert {name: (value.dtype, value.shape) for name, value in found.items()} == {
        "X": (np.dtype(np.float32), (80,)),
        "N": (np.dtype(np.int64), (80,)),
        "B": (np.dtype(np.bool_), (80,)),
    }
    assert all(len(np.unique(value)) > 1 for value in found.values())


def test_open_dims_are_asked_for():
    config = {"input": [tensor("X", dims=(-1, 80))]}
    with pytest.raises(ValueError, match="--shape X:1,80"):
        random_inputs(config, {})
    assert random_inputs(config, {"X": [4, 80]})["X"].shape == (4, 80)


def test_strings_are_refused():
    with pytest.raises(ValueError, match="'X' is STRING"):
        random_inputs({"input": [tensor("X", "TYPE_STRING", (1,))]}, {})


def test_perf_analyzer_gets_a_thread_for_each_sequence(tmp_path):
    given = sequence_requests.arguments(tmp_path / "file", 16)
    assert given[given.index("--max-threads") + 1] == "16"

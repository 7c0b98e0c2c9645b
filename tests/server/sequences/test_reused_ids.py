"""Ids used again without waiting while there is no room, and ids that are no text: no sequence meets another."""

import http.client
import json

import numpy as np
import pytest

from harness import models
from harness.conversations import Conversation, pipeline, script
from harness.deployment import new_id


@pytest.mark.parametrize(("max_batch_size", "candidates", "open_already"), [(1, 4, 0), (2, 4, 0), (4, 10, 8)])
def test_an_id_reused_without_waiting_in_a_full_pool_never_mixes_its_lives(
    deployment, max_batch_size, candidates, open_already
):
    ratio = "0.25" if open_already == 0 else "0.9"
    name = f"crowded_{max_batch_size}_{candidates}"
    model = models.counter(name=name, max_batch_size=max_batch_size, max_candidates=candidates)
    model = deployment.serve(model.with_parameters(name, max_candidate_sequence_use_ratio=ratio))
    rng = np.random.default_rng(5)
    client = deployment.connect()
    fillers = [Conversation(client, model, rng) for _ in range(open_already)]
    for filler in fillers:
        filler.start()
    for _ in range(10):
        pipeline(deployment.connect("stream"), model, rng, [script(model, rng, new_id(), lives=3)])
    for filler in fillers:
        filler.step()
        filler.end()


def test_ids_that_are_no_text_are_different_sequences(deployment):
    model = deployment.serve(models.accumulate(name="ids_of_bytes"))

    def add(value: int, sequence_id: bytes, start: bool = False, end: bool = False) -> float:
        body = {
            "parameters": {"sequence_id": "ID", "sequence_start": start, "sequence_end": end},
            "inputs": [{"name": "INPUT", "shape": [1, 1], "datatype": "FP32", "data": [value]}],
        }
        connection = http.client.HTTPConnection(deployment.server.http_url)
        text = json.dumps(body).encode().replace(b'"ID"', b'"' + sequence_id + b'"')
        connection.request("POST", f"/v2/models/{model.name}/infer", text)
        answer = json.loads(connection.getresponse().read())
        connection.close()
        assert "outputs" in answer, answer
        return answer["outputs"][0]["data"][0]

    assert add(1, b"\xff", start=True) == 1
    assert add(100, b"\xfe", start=True) == 100
    assert add(2, b"\xff") == 3
    assert add(200, b"\xfe") == 300
    assert add(4, b"\xff", end=True) == 7
    assert add(400, b"\xfe", end=True) == 700

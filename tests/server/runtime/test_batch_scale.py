"""Models that quantize with one scale for the whole batch: no sequence may change another's answers, unless the user
asks for batches, and is told."""

import subprocess

import numpy as np
import pytest

from harness import models
from harness.clients import new_id
from harness.conversations import Conversation, together
from harness.models.exports import Bare
from support.paths import INSPECT


def quiet_beside_loud(client, model) -> None:
    """A quiet sequence and loud ones, all at once, each against an oracle that runs it alone."""
    rng = np.random.default_rng(1)
    talks = [Conversation(client, model, rng) for _ in range(6)]

    def chunk(loudness: float) -> dict:
        return {"x": loudness * rng.standard_normal((1, 4)).astype(np.float32)}

    for start, end in [(True, False), *[(False, False)] * 5, (False, True)]:
        chunks = [chunk(0.1 if talk is talks[0] else 100) for talk in talks]
        together(
            lambda talk=talk, fed=fed: talk.step(fed, start=start, end=end)
            for talk, fed in zip(talks, chunks, strict=True)
        )


IDLE = "max_sequence_idle_microseconds: 60000000"
ROWS = 'parameters { key: "max_rows_per_run" value { string_value: "1" } }'


@pytest.mark.parametrize(
    ("name", "written", "max_batch_size"),
    [
        ("nothing.stateful", None, 1),
        ("one_line", 'backend: "stateful"', 1),
        # with `direct` there are as many sequences as rows
        ("direct", f'backend: "stateful" sequence_batching {{ direct {{ }} {IDLE} }}', 64),
        ("rows", f'backend: "stateful" {ROWS}', 64),
        ("batches_and_rows", f'backend: "stateful" max_batch_size: 4 {ROWS}', 4),
    ],
)
def test_a_clients_answers_are_the_same_alone_and_beside_others(deployment, name, written, max_batch_size):
    name = f"batch_scale_{name}"
    file_name = "quantized.onnx" if written is None else "model.onnx"
    model = deployment.serve(Bare(**vars(models.quantized(name, file_name=file_name)), written=written))
    assert deployment.admin.get_model_config(model.name).config.max_batch_size == max_batch_size
    quiet_beside_loud(deployment.connect(), model)
    assert {batch.batch_size for batch in deployment.statistics(model).batch_stats} == {1}
    assert f"model {name} version 1: node 'rounding' (DynamicQuantizeLinear)" in deployment.server.log_text()


def test_batches_that_are_asked_for_are_run_with_a_warning(deployment):
    delay = "preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 30000000"
    model = models.quantized("batch_scale_asked_for", max_batch_size=2, oldest=delay)
    text = deployment.load_error(model)
    assert "node 'rounding' (DynamicQuantizeLinear) takes one scale over all rows" in text and "'trust_batch'" in text
    model = deployment.serve(model.with_parameters(model.name, trust_batch="true"))
    client = deployment.connect()

    def largest(sequence_id, value, **flags):
        fed = {"x": np.array([[0, value / 3, value / 2, value]], np.float32)}
        return client.step(model.name, sequence_id, fed, **flags)["y"].max()

    loud, quiet = new_id(), new_id()
    for flags in ({"start": True}, {"end": True}):
        # both are in one batch, and the steps of its scale are 1 and then 2: this is what the warning is about
        of_loud, of_quiet = together(
            [lambda flags=flags: largest(loud, 255.0, **flags), lambda flags=flags: largest(quiet, 0.4, **flags)]
        )
        assert (of_loud > 200, of_quiet) == (True, 0)
    log = deployment.server.log_text().splitlines()
    (warning,) = [line for line in log if line.startswith("W") and f"{model.name} version 1: node 'rounding'" in line]
    assert "up to 2 sequences share a run" in warning and "max_rows_per_run" in warning


def test_stateful_inspect_says_it(tmp_path):
    file = tmp_path / "model.onnx"
    file.write_bytes(models.quantized().build().SerializeToString())
    printed = subprocess.run([INSPECT, file], capture_output=True, text=True, check=True)
    assert "max_batch_size: 1\n" in printed.stdout
    assert "node 'rounding' (DynamicQuantizeLinear)" in printed.stderr
    trusted = [INSPECT, file, "--max-batch-size", "8", "--parameter", "trust_batch=true"]
    printed = subprocess.run(trusted, capture_output=True, text=True, check=True)
    assert "max_batch_size: 8\n" in printed.stdout
    assert "up to 8 sequences share a run" in printed.stderr

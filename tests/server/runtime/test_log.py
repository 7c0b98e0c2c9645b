"""What an operator finds in the log when a model loads."""

import dataclasses
import os
import re

import onnxruntime
import pytest

from harness import models
from harness.logs import log_of_load, warnings_of_load
from harness.model import KIND
from harness.own import own


def test_the_resolved_configuration_is_logged_with_the_pool_in_numbers(deployment):
    # 1024 floats a sequence are 4096 bytes; 50 candidates give 50 slots
    model = models.counter(name="logged_in_full", width=1024, max_candidates=50)
    model = model.with_parameters(model.name, sequence_idle_margin_microseconds=7654321)
    text = log_of_load(deployment, model)
    assert re.search(r"\b50\b", text), text
    assert "all slots made at load" in text, text
    assert re.search(r"\b4096\b", text), text
    assert re.search(rf"\b{50 * 4096}\b", text), text
    assert "67.654321" in text, "a minute, and the margin"
    for name in ("STATE_IN", "STATE_OUT"):
        assert name in text


def test_the_onnx_runtime_in_use_is_logged_with_its_path_and_version(deployment):
    version = re.compile(rf"\b{re.escape(onnxruntime.__version__)}\b")
    log = deployment.server.log_text().splitlines()
    assert any(version.search(line) and re.search(r"/libonnxruntime\.so", line) for line in log)


def test_the_sizes_of_lazy_buffers_are_logged(deployment):
    sizes = dict(
        initial_buffer_size=16, subsequent_buffer_size=8, buffer_alloc_threshold=8, buffer_dealloc_threshold=12
    )
    model = models.counter(name="logged_lazy").with_parameters("logged_lazy", **sizes)
    text = log_of_load(deployment, model)
    assert "first slab 16, next slabs 8, grows below 8 free, shrinks above 12 free" in text, text


@pytest.mark.parametrize("name", ["max_state_bytes", "max_state_bytes_per_sequence"])
def test_a_bound_of_growing_states_where_none_grows_is_warned_of(deployment, name):
    model = models.counter(name=f"logged_{name}").with_parameters(f"logged_{name}", **{name: 4})
    warnings = warnings_of_load(deployment, model)
    assert any(name in line and "no effect" in line for line in warnings), warnings


@pytest.mark.parametrize(
    ("batching", "schedule", "warned"),
    [
        ("dynamic_batching { }", own, True),
        ("dynamic_batching { max_queue_delay_microseconds: 100 preserve_ordering: false }", own, True),
        ("dynamic_batching { preserve_ordering: true }", own, False),
        ("", own, False),
        ("", lambda model: model, False),
    ],
)
def test_dynamic_batching_that_loses_the_order_in_ensembles_is_warned_of(deployment, batching, schedule, warned):
    model = models.counter(name=f"logged_order_{len(batching)}_{schedule is own}", more=batching)
    warnings = [line for line in warnings_of_load(deployment, schedule(model)) if "dynamic_batching" in line]
    assert len(warnings) == warned, warnings
    assert all("preserve_ordering" in line and "25.06" in line for line in warnings)


@pytest.mark.parametrize("schedule", [lambda model: model, lambda model: model.variant(model.name, direct="")])
@pytest.mark.parametrize(
    "limiter", ['rate_limiter { resources { name: "R1" count: 1 } }', "rate_limiter { priority: 1 }"]
)
def test_resources_that_keep_requests_from_an_idle_instance_are_warned_of(deployment, limiter, schedule):
    group = f"instance_group {{ kind: {KIND} count: 1 {limiter} }}"
    model = schedule(models.counter(more=group))
    model = model.variant(f"logged_resources_{len(limiter)}_{model.direct is None}")
    warnings = [line for line in warnings_of_load(deployment, model) if "--rate-limit" in line]
    assert len(warnings) == ("resources" in limiter and model.direct is None), warnings


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            own(models.counter(name="logged_one_worker")),
            "up to 1 run(s) at a time (worker_count 1), each with intra_op_thread_count 1;",
        ),
        (
            own(models.counter(name="logged_workers"), worker_count=3, intra_op_thread_count=0),
            "up to 3 run(s) at a time (worker_count 3), each with intra_op_thread_count 0 (all cores);",
        ),
        (
            models.counter(name="logged_instances", instances=2),
            "up to 2 run(s) at a time (instance_group.count 2), each with intra_op_thread_count 1;",
        ),
    ],
)
def test_the_cores_that_the_model_can_use_are_logged(deployment, model, said):
    text = log_of_load(deployment, model)
    assert said in text, text
    [cores] = re.findall(r"this server may use (\d+) core\(s\)", text)
    # a container may have a smaller share of them
    assert 1 <= int(cores) <= len(os.sched_getaffinity(0))


def test_requests_with_triton_s_batch_dimension_in_front_are_logged_as_such(deployment):
    inside = "Triton's batch dimension in front of the model's"
    assert inside in log_of_load(deployment, models.accumulate_fp32("logged_inside"))
    assert inside not in log_of_load(deployment, models.counter(name="logged_in_front"))


@pytest.mark.parametrize(("size", "direct", "warned"), [(0, "", True), (1, "", True), (4, "", False), (0, None, False)])
def test_direct_that_holds_one_sequence_is_warned_of(deployment, size, direct, warned):
    model = models.counter(name=f"logged_direct_{size}_{direct is None}", max_batch_size=size, direct=direct)
    if size == 0:
        whole = {
            side: tuple(dataclasses.replace(t, dims=(1, *t.dims)) for t in getattr(model, side))
            for side in ("inputs", "outputs")
        }
        model = dataclasses.replace(model, **whole)
    warnings = [line for line in warnings_of_load(deployment, model) if "holds one sequence" in line]
    assert len(warnings) == warned, warnings
    assert all(
        f"max_batch_size {size}" in line and "oldest { max_candidate_sequences: 1024 }" in line for line in warnings
    )

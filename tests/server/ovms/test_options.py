"""Options of OpenVINO Model Server in `parameters`: case O59, and what a load refuses."""

import pytest

from harness import models
from harness.model import Model
from harness.own import ID_OUTPUT, Talk, own
from harness.raw import Refused
from harness.refusals import refused
from harness.ways import through_gateway


@through_gateway
def test_o59_options_of_stateful_models_are_understood(serve, connect):
    options = {
        "stateful": "true",
        "low_latency_transformation": "true",
        "max_sequence_number": "100",
        "idle_sequence_cleanup": "false",
        "sequence_cleaner_poll_wait_minutes": "5",
    }
    Talk(connect(), serve(parameters=options), 42).whole(3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stateful", "false"),
        ("stateful", "perhaps"),
        ("low_latency_transformation", "perhaps"),
        ("max_sequence_number", "0"),
        ("max_sequence_number", "-1"),
        ("max_sequence_number", "many"),
        ("max_queue_size", "-1"),
        ("max_queued_requests_per_sequence", "0"),
        ("idle_sequence_cleanup", "perhaps"),
        ("sequence_cleaner_poll_wait_minutes", "-1"),
        ("sequence_cleaner_poll_wait_minutes", "soon"),
        ("sequence_idle_timeout_ms", "0"),
        ("queue_timeout_ms", "0"),
        ("on_duplicate_start", "replace"),
        ("id_reuse", "always"),
        ("worker_count", "0"),
        ("worker_count", "two"),
        ("scheduling", "newest"),
    ],
)
def test_o59_a_value_that_an_option_cannot_have_is_refused(deployment, name, value):
    model = own(models.counter(name=f"option_{name}_{value}"), **{name: value})
    refused(deployment, model, name, value)


def test_o59_a_misspelt_option_is_refused_and_the_right_one_named(deployment):
    refused(deployment, own(models.counter(name="option_misspelt"), max_sequence_numbers=5), "max_sequence_number")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("nireq", "worker_count"),
        ("plugin_config", "intra_op_thread_count"),
        ("batch_size", "max_batch_size"),
        ("target_device", "instance_group"),
    ],
)
def test_o59_an_option_with_another_name_here_is_refused_with_the_name_to_use(deployment, name, wanted):
    refused(deployment, own(models.counter(name=f"option_of_ovms_{name}"), **{name: "4"}), name, wanted)


@pytest.mark.parametrize(
    "name",
    [
        "max_sequence_number",
        "max_queue_size",
        "max_queued_requests_per_sequence",
        "worker_count",
        "on_duplicate_start",
        "id_reuse",
    ],
)
def test_o59_an_option_of_ours_is_refused_where_triton_schedules(deployment, name):
    value = {"on_duplicate_start": "reject", "id_reuse": "ovms"}.get(name, "5")
    model = models.counter(name=f"option_beside_{name}").with_parameters(f"option_beside_{name}", **{name: value})
    refused(deployment, model, name, "sequence_batching")


def test_several_instances_are_refused(deployment):
    """Core's threads could hand over two requests of a sequence in either order."""
    for count, parameters in ((3, {}), (2, {"scheduling": "own"}), (2, {"max_sequence_number": 5})):
        model = own(models.counter(name=f"option_instances_{'_'.join(parameters)}", instances=count), **parameters)
        refused(deployment, model, "'count: 1'", f"parameter 'worker_count' {count}", "sequence_batching")


def test_several_instances_may_be_left_to_triton(deployment, connect):
    model = deployment.serve(own(models.counter(name="option_two_instances", instances=2), scheduling="oldest"))
    with pytest.raises(Refused, match="must specify the START flag"):
        Talk(connect(), model, 42).step()


def test_a_model_may_be_left_to_triton(deployment, connect):
    model = deployment.serve(own(models.counter(name="option_oldest"), scheduling="oldest"))
    with pytest.raises(Refused, match="must specify the START flag"):
        Talk(connect(), model, 42).step()


@pytest.mark.parametrize(
    "more",
    ["", "dynamic_batching { }", "dynamic_batching { preserve_ordering: true }"],
    ids=["nothing", "dynamic_batching", "preserve_ordering"],
)
def test_a_model_without_sequence_batching_is_served(serve, connect, more):
    Talk(connect(), serve(more=more + ID_OUTPUT), 42).whole(3)


def test_a_configuration_of_one_line_is_served(deployment, connect):
    """Everything else is filled in."""
    name = "option_bare"
    folder = deployment.repository / name
    model: Model = models.counter(name=name)
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(model.build().SerializeToString())
    (folder / "config.pbtxt").write_text('backend: "stateful"')
    deployment.admin.load_model(name)
    Talk(connect(), model, None).whole(3)
    config = deployment.admin.get_model_config(name).config
    assert {tensor.name: tensor.optional for tensor in config.input} == {
        "INPUT": False,
        "sequence_id": True,
        "sequence_control_input": True,
    }
    assert {tensor.name for tensor in config.output} == {"OUTPUT"}
    assert not config.HasField("sequence_batching")

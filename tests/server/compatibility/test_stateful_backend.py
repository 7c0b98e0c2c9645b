"""The four example models of NVIDIA's stateful_backend: their configurations, our library, the
answers that its documentation and its client promise."""

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import models
from harness.clients import PROTOCOLS, new_id
from harness.conversations import Conversation, interleave, together

# The parameters that all four configurations have, as they are there.
LAZY = {
    "initial_buffer_size": "512",
    "subsequent_buffer_size": "100",
    "buffer_alloc_threshold": "32",
    "buffer_dealloc_threshold": "200",
}
ORIGINAL = {
    **LAZY,
    "error_inject_rate": "15",
    "ort_ep": "trt",
    "compute_precision": "fp32",
    "store_states_as_fp16": "0",
    "metric_logging_frequency_seconds": "2",
    "always_pad_to_max_batch": "0",
    "enable_trt_caching": "1",
    "enable_cuda_graph": "1",
    "trt_cache_dir": "/tmp/trt_cache",
    "infer_end_requests": "1",
    "detailed_metrics_logging_level": "INFO",
    "batch_info_logging_level": "VERBOSE",
    "logging_level": "VERBOSE",
}
EXAMPLES = [
    models.accumulate_fp32,
    models.accumulate_int32,
    models.mixed_io_bool_int8,
    models.mixed_io_int32_fp16,
]
EVERY = pytest.mark.parametrize("make", EXAMPLES, ids=lambda make: make.__name__)


def configured(make, name: str, **parameters: str):
    """The example as its configuration has it: with commas between the pairs."""
    model = make(f"{make.__name__}{name}", file_name=f"{make.__name__}.onnx")
    given = {**ORIGINAL, "onnx_file_name": model.file_name, **parameters}
    pairs = ",".join(f"<<<{source}, {target}>>>" for source, target in model.states)
    return model.variant(model.name, parameters={**given, "state_pairs": pairs})


@EVERY
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_example_answers_as_if_each_sequence_were_alone(deployment, make, protocol):
    model = deployment.serve(configured(make, ""))
    client = deployment.connect(protocol)
    rng = np.random.default_rng(1)
    talks = [Conversation(client, model, rng) for _ in range(6)]
    for talk in talks:
        talk.start()
    for _ in range(3):
        for talk in talks:
            talk.step()
    for talk in talks:
        talk.end()


@EVERY
def test_many_sequences_of_an_example_at_once(deployment, make):
    model = deployment.serve(configured(make, ""))
    client = deployment.connect()
    together(lambda seed=seed: Conversation(client, model, np.random.default_rng(seed)).whole(7) for seed in range(12))
    sizes = {batch.batch_size for batch in deployment.statistics(model).batch_stats}
    assert max(sizes) > 1, f"the sequences never shared a run: {sizes}"


@EVERY
def test_the_arithmetic_is_what_the_documentation_says(deployment, make):
    """Without an oracle: the input summed over its first axis is added to a running sum, and the
    answer is the running sum plus the input."""
    model = deployment.serve(configured(make, ""))
    client = deployment.connect()
    rng = np.random.default_rng(2)
    talk = Conversation(client, model, rng)
    total = {tensor.name: 0 for tensor in model.inputs}
    for i in range(4):
        fed = model.draw(rng)
        answer = client.step(model.name, talk.sequence_id, fed, start=i == 0, end=i == 3)
        for source, target in zip(model.inputs, model.outputs, strict=True):
            value = fed[source.name]
            assert value.shape == (1, 4, 1, source.dims[2]), "Triton's batch in front, then the configured dims"
            wide = value[0].astype(np.float64)
            total[source.name] = total[source.name] + wide.sum(axis=0)
            wanted = (wide + total[source.name]).astype(value.dtype)
            assert answer[target.name].shape == (4, 1, source.dims[2]), "the configured dims, 1 for the batch"
            np.testing.assert_array_equal(answer[target.name], wanted)


@EVERY
def test_a_shape_that_the_original_cut_silently_is_refused(deployment, make):
    model = deployment.serve(configured(make, ""))
    client = deployment.connect()
    talk = Conversation(client, model, np.random.default_rng(3))
    talk.start()
    first = model.inputs[0].name
    for shape in (
        (1, 4, 2, model.inputs[0].dims[2]),
        (1, 7, 1, model.inputs[0].dims[2]),
        (1, 4, 0, model.inputs[0].dims[2]),
    ):
        fed = model.draw(talk.rng)
        fed[first] = np.zeros(shape, fed[first].dtype)
        with pytest.raises(InferenceServerException) as refused:
            client.step(model.name, talk.sequence_id, fed)
        assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
    talk.step()
    talk.end()


def test_ids_of_the_other_type_harm_nobody(deployment, server_version):
    """The original's server ended at such a request. From 25.01 on, core refuses it."""
    numbers = deployment.serve(configured(models.accumulate_fp32, ""))
    strings = deployment.serve(configured(models.mixed_io_bool_int8, ""))
    client = deployment.connect()
    for model, sequence_id in ((numbers, "a-name"), (strings, new_id())):
        talk = Conversation(client, model, np.random.default_rng(4), sequence_id)
        if server_version < (2, 54):
            talk.whole(4)
            continue
        with pytest.raises(InferenceServerException, match="data-type is"):
            talk.start()


def test_a_configuration_without_the_end_control_is_served(deployment):
    """The original's server ended at the first request."""
    model = configured(models.accumulate_fp32, "_startonly")
    model = model.variant(model.name, controls=model.controls[:1])
    interleave(deployment.connect(), deployment.serve(model), np.random.default_rng(5), sequences=6)


def test_the_pool_has_the_sizes_that_the_configuration_gives(deployment):
    model = deployment.serve(configured(models.accumulate_fp32, "_pool"))
    # nine tenths of 1280 candidates; the first buffer of 512
    assert deployment.metric("stateful_slot_capacity", model) == 1152
    assert deployment.metric("stateful_slots_allocated", model) == 512


def test_the_state_pairs_may_stand_in_the_graph_s_description(deployment):
    """What the original falls back on where the parameter is absent."""
    made = models.mixed_io_int32_fp16("pairs_from_the_graph")

    def build():
        model = made.build()
        groups = " ".join(f"<<<{target}, {source}>>>" for source, target in made.states)
        model.graph.doc_string = f"exported by hand\nOutputState, InputState: {groups}\n"
        return model

    model = made.variant(made.name, build=build, parameters={"state_pairs": None})
    client = deployment.connect()
    deployment.serve(model)
    for seed in range(3):
        Conversation(client, model, np.random.default_rng(seed)).whole(5)


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("spaces", "<<<A_IN, Z_OUT>>> <<<B_IN, Y_OUT>>>"),
        ("commas", "<<<A_IN, Z_OUT>>>,<<<B_IN, Y_OUT>>>"),
        ("nothing_between", "<<<A_IN,Z_OUT>>><<<B_IN,Y_OUT>>>"),
        ("everywhere", "  <<<  A_IN ,  Z_OUT >>> ,  <<< B_IN,Y_OUT>>>  "),
        ("other_order", "<<<B_IN, Y_OUT>>> <<<A_IN, Z_OUT>>>"),
    ],
)
def test_state_pairs_may_be_written_in_these_ways(deployment, name, pairs):
    model = models.crossed(f"crossed_{name}").with_parameters(f"crossed_{name}", state_pairs=pairs)
    interleave(deployment.connect(), deployment.serve(model), np.random.default_rng(6), sequences=4)


def test_initial_values_come_from_the_model_s_own_constants(deployment):
    initial = (1.5, -2.0, 0.25, 1e6, -0.0)
    model = deployment.serve(models.accumulate_fp32("accumulate_from_elsewhere", initial=initial))
    client = deployment.connect()
    zeros = {"Input": np.zeros((1, 4, 1, 5), np.float32)}
    talk = Conversation(client, model, np.random.default_rng(7))
    answer = talk.start(zeros)
    np.testing.assert_array_equal(answer["Output"], np.broadcast_to(np.float32(initial), (4, 1, 5)))
    talk.step()
    talk.end()
    interleave(client, model, np.random.default_rng(8), sequences=6)

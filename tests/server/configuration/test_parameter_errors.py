"""Bad values of the original's parameters and of the options that came with them: the load fails,
names parameter, value and rule, and the server goes on with its other models."""

import numpy as np
import pytest

from harness import models
from harness.conversations import Conversation
from harness.refusals import refused
from support.paths import TEST_DEVICE

SWITCHES = [
    "store_states_as_fp16",
    "always_pad_to_max_batch",
    "infer_end_requests",
    "enable_trt_caching",
    "enable_cuda_graph",
    "execution_mode",
    "enable_mem_arena",
    "enable_mem_pattern",
]
LEVELS = ["logging_level", "batch_info_logging_level", "detailed_metrics_logging_level"]
NUMBERS = [
    "metric_logging_frequency_seconds",
    "intra_op_thread_count",
    "inter_op_thread_count",
    "error_inject_rate",
]
LAZY = {
    "initial_buffer_size": "16",
    "subsequent_buffer_size": "8",
    "buffer_alloc_threshold": "8",
    "buffer_dealloc_threshold": "8",
}

# test -> (parameters, words that the error has to have); max_batch_size is 8
CASES = {
    **{
        f"{name}_{what}": ({name: value}, [name, value or "''", "'0'", "'1'"])
        for name in SWITCHES
        for what, value in (("two", "2"), ("negative", "-1"), ("word", "yes"), ("empty", ""))
    },
    **{
        f"{name}_{what}": ({name: value}, [name, value, "NONE", "INFO", "VERBOSE"])
        for name in LEVELS
        for what, value in (("number", "1"), ("unknown", "LOUD"))
    },
    **{
        f"{name}_{what}": ({name: value}, [name, value, "0"])
        for name in NUMBERS
        for what, value in (("negative", "-1"), ("word", "often"), ("fraction", "1.5"), ("huge", "9" * 30))
    },
    "error_inject_rate_above_all": ({"error_inject_rate": "101"}, ["error_inject_rate", "101", "100"]),
    "intra_threads_too_many": ({"intra_op_thread_count": "1025"}, ["intra_op_thread_count", "1025", "1024"]),
    "provider_unknown": ({"ort_ep": "tensorrt"}, ["ort_ep", "tensorrt", "trt", "cuda", "cpu"]),
    "memory_limit": ({"gpu_mem_limit": "4G"}, ["gpu_mem_limit", "4G", "bytes"]),
    "tensor_floats": ({"use_tf32": "yes"}, ["use_tf32", "yes", "'0' or '1'"]),
    "not_to_be_set": ({"trt_cuda_graph_enable": "1"}, ["trt_cuda_graph_enable", "TensorRT replays the first graph"]),
    "provider_case": ({"ort_ep": "CUDA"}, ["ort_ep", "CUDA", "cuda"]),
    "precision_unknown": ({"compute_precision": "int8"}, ["compute_precision", "int8", "fp32", "fp16"]),
    "precision_without_tensorrt": (
        {"compute_precision": "fp16"},
        ["compute_precision", "fp16", "TensorRT", "fp32"],
    ),
    "cache_folder_relative": (
        {"enable_trt_caching": "1", "trt_cache_dir": "cache"},
        ["trt_cache_dir", "cache", "absolute"],
    ),
    "shrinkage_of_nothing": (
        {"memory.enable_memory_arena_shrinkage": "yes"},
        ["memory.enable_memory_arena_shrinkage", "yes", "cpu:0"],
    ),
    "lazy_three_of_four": (
        {name: value for name, value in LAZY.items() if name != "buffer_dealloc_threshold"},
        ["buffer_dealloc_threshold", "initial_buffer_size", "all four"],
    ),
    "lazy_one_of_four": ({"buffer_alloc_threshold": "8"}, ["initial_buffer_size", "all four"]),
    "lazy_word": ({**LAZY, "initial_buffer_size": "many"}, ["initial_buffer_size", "many"]),
    "ratio_word": (
        {"max_candidate_sequence_use_ratio": "all"},
        ["max_candidate_sequence_use_ratio", "all", "1"],
    ),
    "pair_twice": (
        {"state_pairs": "<<<STATE_IN, STATE_OUT>>>,<<<STATE_IN, STATE_OUT>>>"},
        ["state_pairs", "STATE_IN", "one pair"],
    ),
    "pair_of_strangers": ({"state_pairs": "<<<SOMETHING, STATE_OUT>>>"}, ["state_pairs", "SOMETHING"]),
    "pair_back_to_front": (
        {"state_pairs": "<<<STATE_OUT, STATE_IN>>>"},
        ["state_pairs", "STATE_OUT", "input"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_value_is_refused_by_name_value_and_rule(deployment, case):
    parameters, words = CASES[case]
    refused(deployment, models.counter(name=f"refused_{case}".lower(), parameters=parameters), *words)


def test_pairs_in_a_description_that_cannot_be_read_are_refused(deployment):
    made = models.counter(name="refused_description", parameters={"state_pairs": None})

    def build():
        model = made.build()
        model.graph.doc_string = "InputState, OutputState: <<<STATE_IN>>>"
        return model

    refused(deployment, made.variant(made.name, build=build), "state_pairs", "<<<STATE_IN>>>")


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("level", "optimization { graph { level: 3 } }", ["optimization.graph.level", "3", "-1"]),
        (
            "accelerator",
            'optimization { execution_accelerators { cpu_execution_accelerator [ { name: "openvino" } ] } }',
            ["cpu_execution_accelerator", "openvino"],
        ),
    ],
)
def test_an_optimization_that_is_not_there_is_refused(deployment, name, more, words):
    refused(deployment, models.counter(name=f"refused_{name}", more=more), *words)


def test_an_unknown_session_entry_is_onnx_runtime_s_business(deployment):
    """It takes any; what it knows and cannot read it refuses."""
    model = models.counter(name="session_entry")
    model = deployment.serve(model.variant(model.name, parameters={"session.of_nobody": "1"}))
    Conversation(deployment.connect(), model, np.random.default_rng(1)).whole(3)


@pytest.mark.skipif(TEST_DEVICE == "gpu", reason="there is a GPU")
def test_a_gpu_instance_without_a_gpu_is_refused(deployment):
    made = models.accumulate_fp32("refused_gpu")

    def on_gpu(folder):
        config = folder / "config.pbtxt"
        config.write_text(config.read_text().replace("kind: KIND_CPU", "kind: KIND_GPU"))

    text = deployment.load_error(made, prepare=on_gpu)
    # Triton itself refuses before the backend is asked; what the backend says is in tests/exactly_once/
    assert "instance group refused_gpu_0 of model refused_gpu has kind KIND_GPU" in text
    assert "no GPUs are available" in text


def test_what_only_a_gpu_uses_changes_nothing_on_the_cpu(deployment):
    parameters = {
        "ort_ep": "trt",
        "compute_precision": "fp32",
        "enable_trt_caching": "1",
        "trt_cache_dir": "/tmp/nowhere-yet",
        "enable_cuda_graph": "1",
        "error_inject_rate": "100",
    }
    model = deployment.serve(models.counter(name="gpu_words_on_the_cpu", parameters=parameters))
    Conversation(deployment.connect(), model, np.random.default_rng(2)).whole(20)
    for name in ("ort_ep", "enable_trt_caching", "enable_cuda_graph"):
        assert f"'{name}' has no effect" in deployment.server.log_text()

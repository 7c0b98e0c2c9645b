"""Configurations that are wrong: the load fails, says which parameter, what it was and the rule,
and the server goes on with its other models."""

import dataclasses
import shutil

import pytest

from harness import models
from harness.model import START, Control, Model
from harness.refusals import refused

LAZY = {
    "initial_buffer_size": 16,
    "subsequent_buffer_size": 8,
    "buffer_alloc_threshold": 8,
    "buffer_dealloc_threshold": 8,
}

# test -> (parameters, words that the error has to have); max_batch_size is 8
PARAMETERS = {
    "unknown": ({"gain": "3"}, ["gain"]),
    "unknown_names_the_nearest": ({"initial_bufer_size": "8"}, ["initial_bufer_size", "initial_buffer_size"]),
    "unknown_singular": ({"state_pair": "x"}, ["state_pair", "state_pairs"]),
    "unknown_case": ({"Onnx_File_Name": "model.onnx"}, ["Onnx_File_Name", "onnx_file_name"]),
    "ratio_zero": ({"max_candidate_sequence_use_ratio": "0"}, ["max_candidate_sequence_use_ratio", "0", "1"]),
    "ratio_negative": (
        {"max_candidate_sequence_use_ratio": "-0.5"},
        ["max_candidate_sequence_use_ratio", "-0.5"],
    ),
    "ratio_above_one": (
        {"max_candidate_sequence_use_ratio": "1.5"},
        ["max_candidate_sequence_use_ratio", "1.5", "1"],
    ),
    "ratio_not_a_number": (
        {"max_candidate_sequence_use_ratio": "most"},
        ["max_candidate_sequence_use_ratio", "most"],
    ),
    "ratio_nan": ({"max_candidate_sequence_use_ratio": "nan"}, ["max_candidate_sequence_use_ratio", "nan"]),
    "margin_not_a_number": (
        {"sequence_idle_margin_microseconds": "1s"},
        ["sequence_idle_margin_microseconds", "1s"],
    ),
    "margin_negative": (
        {"sequence_idle_margin_microseconds": "-1"},
        ["sequence_idle_margin_microseconds", "-1"],
    ),
    "lazy_initial_below_batch": (
        {**LAZY, "initial_buffer_size": 7, "buffer_alloc_threshold": 8},
        ["initial_buffer_size", "7", "max_batch_size", "8"],
    ),
    "lazy_subsequent_below_batch": (
        {**LAZY, "subsequent_buffer_size": 6},
        ["subsequent_buffer_size", "6", "max_batch_size", "8"],
    ),
    "lazy_alloc_threshold_below_batch": (
        {**LAZY, "buffer_alloc_threshold": 5},
        ["buffer_alloc_threshold", "5", "max_batch_size", "8"],
    ),
    "lazy_alloc_threshold_above_initial": (
        {**LAZY, "buffer_alloc_threshold": 17},
        ["buffer_alloc_threshold", "17", "initial_buffer_size", "16"],
    ),
    **{
        f"lazy_without_{missing}": (
            {key: value for key, value in LAZY.items() if key != missing},
            [missing],
        )
        for missing in LAZY
    },
    **{
        f"lazy_{name}_{what}": ({**LAZY, name: value}, [name, value])
        for name in LAZY
        for what, value in (
            ("negative", "-1"),
            ("not_a_number", "many"),
            ("fraction", "8.5"),
            ("huge", "99999999999999999999999"),
        )
    },
    **{
        f"rows_per_run_{value}": ({"max_rows_per_run": value}, ["max_rows_per_run", value, "max_batch_size", "8"])
        for value in ("0", "9", "many")
    },
    "warmup_above_rows_per_run": (
        {"max_rows_per_run": "2", "warmup_batch_sizes": "4"},
        ["warmup_batch_sizes", "4", "2"],
    ),
    "file_missing": ({"onnx_file_name": "nowhere.onnx"}, ["onnx_file_name", "nowhere.onnx"]),
    "file_outside": ({"onnx_file_name": "../1/model.onnx"}, ["onnx_file_name", "../1/model.onnx"]),
    "pairs_not_in_brackets": (
        {"state_pairs": "STATE_IN, STATE_OUT"},
        ["state_pairs", "STATE_IN, STATE_OUT", "<<<"],
    ),
    "pairs_half_open": ({"state_pairs": "<<<STATE_IN, STATE_OUT"}, ["state_pairs", "<<<STATE_IN"]),
    "pairs_of_one": ({"state_pairs": "<<<STATE_IN>>>"}, ["state_pairs", "STATE_IN"]),
    "pairs_of_three": ({"state_pairs": "<<<STATE_IN, STATE_OUT, MORE>>>"}, ["state_pairs", "MORE"]),
    "pairs_with_an_empty_name": ({"state_pairs": "<<<STATE_IN, >>>"}, ["state_pairs"]),
    "pairs_empty": ({"state_pairs": ""}, ["state_pairs"]),
    "pair_twice": (
        {"state_pairs": "<<<STATE_IN, STATE_OUT>>> <<<STATE_IN, STATE_OUT>>>"},
        ["state_pairs", "STATE_IN"],
    ),
    "pair_shares_its_output": (
        {"state_pairs": "<<<STATE_IN, STATE_OUT>>> <<<INPUT, STATE_OUT>>>"},
        ["state_pairs", "STATE_OUT"],
    ),
    "constant_without_value": ({"constant_inputs": "INPUT"}, ["constant_inputs", "INPUT"]),
    "constant_of_nothing": ({"constant_inputs": "rate=1"}, ["constant_inputs", "rate"]),
    "constant_twice": ({"constant_inputs": "rate=1 rate=2"}, ["constant_inputs", "rate"]),
}


@pytest.mark.parametrize("case", PARAMETERS)
def test_a_bad_parameter_is_refused_by_name_value_and_rule(deployment, case):
    parameters, words = PARAMETERS[case]
    texts = {key: None if value is None else str(value) for key, value in parameters.items()}
    refused(deployment, models.counter(name=f"refused_{case}", parameters=texts), *words)


@pytest.mark.parametrize(
    ("name", "written", "words"),
    [
        ("not_a_number", "sr=fast gain=[1,2]", ["sr", "fast"]),
        ("fraction_for_an_integer", "sr=1.5 gain=[1,2]", ["sr", "1.5"]),
        ("too_large_for_its_type", "sr=1 gain=[1,1e39]", ["gain", "1e39", "FP32"]),
        ("too_few_values", "sr=1 gain=[1]", ["gain"]),
        ("too_many_values", "sr=1 gain=[1,2,3]", ["gain"]),
        ("list_for_a_scalar", "sr=[1,2] gain=[1,2]", ["sr"]),
        ("open_list", "sr=1 gain=[1,2", ["gain"]),
        ("forgotten", "sr=1", ["gain"]),
    ],
)
def test_a_bad_constant_input_is_refused_by_name(deployment, name, written, words):
    model = models.speech_like(f"refused_constant_{name}")
    refused(deployment, model.with_parameters(model.name, constant_inputs=written), *words)


def scheduled(name: str, scheduling: str, **changes):
    return models.counter(name=f"refused_{name}", scheduling=scheduling, **changes)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            scheduled("iterative", "sequence_batching { iterative_sequence: true oldest { } }"),
            ["iterative_sequence"],
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Model) else "",
)
def test_what_cannot_be_served_is_refused_by_name(deployment, model, words):
    refused(deployment, model, *words)


@pytest.mark.parametrize(
    ("name", "false_true", "words"),
    [("both_true", (0.2, 1), ["RESET", "0.2", "1", "BOOL"]), ("the_same", (1, 1), ["RESET", "1", "BOOL"])],
)
def test_control_values_that_are_the_same_for_the_model_are_refused(deployment, name, false_true, words):
    # the configuration names another type than the model's, as stateful_backend's do
    controls = (Control("RESET", START, "fp32", false_true),)
    refused(deployment, models.accumulate(f"refused_control_{name}", controls=controls), *words)


def test_no_onnx_file_at_all_is_refused(deployment):
    model = models.counter(name="refused_no_file")
    refused(deployment, model, "onnx", prepare=lambda folder: (folder / "1" / "model.onnx").unlink())


def test_several_onnx_files_and_no_name_are_refused_by_their_names(deployment):
    model = models.counter(name="refused_two_files", file_name="left.onnx")
    refused(
        deployment,
        model,
        "left.onnx",
        "right.onnx",
        "onnx_file_name",
        prepare=lambda folder: shutil.copy(folder / "1" / "left.onnx", folder / "1" / "right.onnx"),
    )


def test_a_file_that_is_no_onnx_model_is_refused(deployment):
    model = models.counter(name="refused_garbage")
    refused(
        deployment,
        model,
        "model.onnx",
        prepare=lambda folder: (folder / "1" / "model.onnx").write_bytes(b"\x08\x07 this is no model"),
    )


def test_a_model_loads_once_its_configuration_is_put_right(deployment):
    broken = models.counter(name="put_right", parameters={"onnx_file_name": "nowhere.onnx"})
    refused(deployment, broken, "nowhere.onnx")
    deployment.serve(dataclasses.replace(broken, parameters={}))
    deployment.unload(broken)

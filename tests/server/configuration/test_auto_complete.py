"""Models with no configuration, or a part of one: the rest comes from the ONNX signature."""

import re
import subprocess

import pytest

from harness import models
from harness.conversations import talk
from harness.deployment import Deployment
from harness.logs import warnings_of_load
from harness.models import families
from harness.models.exports import EXPORTS, Bare, Export
from harness.refusals import refused
from support.paths import INSPECT

#: What needs no configuration.
WITHOUT = EXPORTS | {
    made.__name__: made()
    for made in (
        families.silero_vad_v5,
        families.silero_vad_legacy,
        families.silero_vad_sherpa,
        families.gtcrn,
        families.zipformer,
        families.rsl_rl,
    )
}


@pytest.mark.parametrize("name", WITHOUT)
def test_an_exported_model_is_served_without_any_configuration(deployment, name):
    model = WITHOUT[name].served(name, f"none_{name}.stateful")
    talk(deployment, model)
    warnings = [text for text in warnings_of_load(deployment, model) if "the signature is that of" not in text]
    # The batch of the first has no usual name. The others have the same name for the length before and after a run.
    doubts = {
        "dynamo_time_first": "'s27'",
        "decoder": "have no elements",
        "one_sequence_that_grows": "have no elements",
    }
    expected = [doubts[name]] if name in doubts else []
    assert [word for text, word in zip(warnings, expected, strict=True) if word in text] == expected


@pytest.mark.parametrize("name", ["silero_vad_v5", "zipformer", "decoder", "gtcrn"])
def test_one_line_of_configuration_is_enough(deployment, name):
    export = WITHOUT[name].served(name, f"one_line_{name}", file_name="model.onnx", written='backend: "stateful"')
    talk(deployment, export)


@pytest.mark.parametrize("name", WITHOUT)
def test_what_stateful_inspect_prints_is_a_configuration(deployment, tmp_path, name):
    export = WITHOUT[name].served(name, f"inspected_{name}")
    file = tmp_path / "model.onnx"
    file.write_bytes(export.build().SerializeToString())
    printed = subprocess.run([INSPECT, file], capture_output=True, text=True, check=True)
    for source, target in export.states:
        assert re.search(rf"^ {re.escape(target)} -> {re.escape(source)} .* their names$", printed.stderr, re.M)
    assert "instance_group { kind: KIND_CPU }" in printed.stdout, "a GPU would be taken where there is one"
    talk(deployment, export.variant(f"inspected_{name}", file_name="model.onnx", written=printed.stdout))


def bare(name: str, written: str, **changes) -> Bare:
    return EXPORTS["next_state"].served("model", name, written=f'backend: "stateful"\n{written}', **changes)


INPUT = 'input { name: "observation" data_type: TYPE_FP32 dims: [ 4 ] }'
OUTPUT = 'output { name: "action" data_type: TYPE_FP32 dims: [ 2 ] }'
FULL_INPUT = INPUT.replace("4", "-1, 4")


@pytest.mark.parametrize(
    ("name", "written", "kept"),
    [
        ("input", INPUT, {}),
        ("output", OUTPUT, {}),
        ("both", INPUT + OUTPUT, {}),
        ("batch", "max_batch_size: 3", {"max_batch_size": 3}),
        ("direct", "sequence_batching { direct { } }", {"strategy": "direct"}),
        ("idle", "sequence_batching { max_sequence_idle_microseconds: 7000000 }", {"idle": 7000000}),
        ("pairs", 'parameters { key: "state_pairs" value { string_value: "auto" } }', {}),
    ],
)
def test_a_part_of_a_configuration_is_kept_and_the_rest_filled_in(deployment, name, written, kept):
    model = bare(f"part_{name}", written)
    talk(deployment, model)
    config = deployment.admin.get_model_config(model.name).config
    assert config.max_batch_size == kept.get("max_batch_size", 64)
    batching = config.sequence_batching
    inputs = ["observation"]
    if "sequence_batching" not in written:
        # the backend schedules the model
        assert not config.HasField("sequence_batching")
        inputs += ["sequence_id", "sequence_control_input"]
    else:
        assert not batching.HasField("oldest")
        assert batching.max_sequence_idle_microseconds == kept.get("idle", 1_000_000)
    assert [tensor.name for tensor in config.input] == inputs
    assert [tensor.name for tensor in config.output] == ["action"]


def test_listed_dims_with_the_batch_in_them_say_that_there_is_none(deployment):
    model = bare("part_without_batch", FULL_INPUT, max_batch_size=0)
    deployment.serve(model)
    config = deployment.admin.get_model_config(model.name).config
    assert config.max_batch_size == 0
    assert list(config.output[0].dims) == [-1, 2]


@pytest.mark.parametrize(("name", "pair"), [("star", "<<<c*, q*>>>"), ("no_star", "<<<cell, q>>>")])
def test_patterns_name_what_is_a_pair(deployment, name, pair):
    output = "q" if name == "no_star" else "qell"
    export = Export(
        {"x": ("batch", 4), "cell": ("batch", 8)}, {"y": ("batch", 2), output: ("batch", 8)}, {"cell": output}
    )
    pattern = f'backend: "stateful"\nparameters {{ key: "state_pair_patterns" value {{ string_value: "{pair}" }} }}'
    talk(deployment, export.served("model", f"with_pattern_{name}", written=pattern))


@pytest.mark.parametrize(
    ("name", "model", "words"),
    [
        ("nothing", models.counter(name="x", width=4), ["state_pairs", "STATE_IN", "INPUT"]),
        ("ambiguous", None, ["<<<hidden, hidden_next>>>", "<<<hidden, new_hidden>>>", "state_pairs"]),
    ],
)
def test_names_that_do_not_say_which_are_the_states_are_refused(deployment, name, model, words):
    """`counter`'s STATE_IN and STATE_OUT are a pair, so its names are changed first."""
    export = EXPORTS["next_state"]
    if name == "ambiguous":
        outputs = {**export.outputs, "new_hidden": ("batch", 8)}
        changed = Export(export.inputs, outputs, {"hidden": "hidden_next"})
    else:
        words = ["no input and output", "state_pairs", "cell", "q"]
        changed = Export(
            {"x": ("batch", 4), "cell": ("batch", 8)}, {"y": ("batch", 2), "q": ("batch", 8)}, {"cell": "q"}
        )
    refused(deployment, changed.served("model", f"refused_{name}", written='backend: "stateful"'), *words)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("one_star", "<<<hidd*, hidden_next>>>", ["state_pair_patterns", "<<<hidd*, hidden_next>>>", "*"]),
        (
            "of_no_names",
            "<<<hidden, next_hidden>>>",
            ["state_pair_patterns", "<<<hidden, next_hidden>>>", "hidden_next"],
        ),
        ("two_stars", "<<<a**, b*>>>", ["state_pair_patterns", "*"]),
    ],
)
def test_a_bad_pattern_is_refused_by_name(deployment, name, value, words):
    written = f'parameters {{ key: "state_pair_patterns" value {{ string_value: "{value}" }} }}'
    refused(deployment, bare(f"refused_pattern_{name}", written), *words)


def test_a_server_that_completes_nothing_wants_it_written(tmp_path):
    own = Deployment(tmp_path, extra_args=["--disable-auto-complete-config"])
    try:
        refused(own, bare("off", "max_batch_size: 4\n" + INPUT + OUTPUT), "state_pairs")
        auto = 'parameters { key: "state_pairs" value { string_value: "auto" } }\nsequence_batching { oldest { } }'
        talk(own, bare("off_auto", "\n".join(["max_batch_size: 4", INPUT, OUTPUT, auto])), sequences=2)
        own.assert_healthy()
    finally:
        own.stop()


def test_stateful_inspect_says_what_is_wrong(tmp_path):
    def said(*arguments) -> str:
        ran = subprocess.run([INSPECT, *arguments], capture_output=True, text=True)
        assert (ran.returncode, ran.stdout) != (0, ""), ran
        return ran.stderr

    assert "nowhere.onnx is no file" in said("nowhere.onnx")
    garbage = tmp_path / "garbage.onnx"
    garbage.write_bytes(b"this is no model")
    assert "garbage.onnx" in said(garbage)
    file = tmp_path / "model.onnx"
    file.write_bytes(models.counter().build().SerializeToString())
    assert "state_pars" in said(file, "-p", "state_pars=x")
    assert "NAME=VALUE" in said(file, "-p", "x")

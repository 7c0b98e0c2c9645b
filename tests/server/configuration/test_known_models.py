"""Signatures that are known: what the log says, and pairs that only their dims and order show."""

import subprocess

import pytest

from harness.conversations import talk
from harness.logs import log_of_load, messages, warnings_of_load
from harness.models.exports import Export
from harness.refusals import refused
from support.paths import INSPECT

SILERO = Export(
    {"input": ("batch", "sequence"), "state": (2, "batch", 128), "sr": ("int64", ())},
    {"output": ("batch", 1), "stateN": (2, "batch", 128)},
    {"state": "stateN"},
)


def written(**parameters: str) -> str:
    lines = [
        f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}' for name, value in parameters.items()
    ]
    return "\n".join(['backend: "stateful"', *lines])


def test_silero_without_its_context_is_warned_of(deployment, tmp_path):
    model = SILERO.served("silero_vad", "known_silero", written=written())
    log = messages(log_of_load(deployment, model), "IW")
    said = [line for line in log if "the signature is that of Silero VAD 5 or 6" in line]
    lines = ["{ key: 'input_context' value { string_value: 'input=64+512@1' } }"]
    lines += ["{ key: 'constant_inputs' value { string_value: 'sr=16000' } }"]
    lines += ["{ key: 'input_windows' value { string_value: 'input=512@1' } }"]
    assert len(said) == 3 and all(any(line in text for text in said) for line in lines), log
    assert [lines[0] in warning for warning in warnings_of_load(deployment, model)] == [True]
    whole = written(input_context="input=64+512@1", constant_inputs="sr=16000")
    assert warnings_of_load(deployment, SILERO.served("silero_vad", "known_silero_whole", written=whole)) == []
    file = tmp_path / "silero_vad.onnx"
    file.write_bytes(model.build().SerializeToString())
    parameters = ["-p", "constant_inputs=sr=16000"]
    printed = subprocess.run([INSPECT, file, "--quiet", *parameters], capture_output=True, text=True, check=True)
    assert lines[0] in printed.stderr and lines[1] not in printed.stderr


#: The two graphs of DTLN, as Keras names their tensors.
DTLN = {
    "first": Export(
        {"input_2": (1, 1, 257), "input_3": (1, 2, 128, 2)},
        {"activation_2": (1, 1, 257), "tf_op_layer_stack_2": (1, 2, 128, 2)},
        {"input_3": "tf_op_layer_stack_2"},
        batch=None,
    ),
    "second": Export(
        {"input_4": (1, 1, 512), "input_5": (1, 2, 128, 2)},
        {"conv1d_3": (1, 1, 512), "tf_op_layer_stack_5": (1, 2, 128, 2)},
        {"input_5": "tf_op_layer_stack_5"},
        batch=None,
    ),
}


@pytest.mark.parametrize("number", DTLN)
def test_names_of_keras_are_paired_by_shape_once_that_is_confirmed(deployment, tmp_path, number):
    export = DTLN[number]
    [(source, target)] = export.pairs.items()
    line = "parameters { key: 'state_pairs' value { string_value: 'auto-by-shape' } }"
    words = [f"<<<{source}, {target}>>>", line, "onnxruntime"]
    bare = export.served("model", f"known_dtln_{number}.stateful", file_name="dtln.onnx")
    refused(deployment, bare, *words)
    file = tmp_path / "dtln.onnx"
    file.write_bytes(bare.build().SerializeToString())
    printed = subprocess.run([INSPECT, file], capture_output=True, text=True)
    assert printed.returncode and all(word in printed.stderr for word in words), printed.stderr
    confirmed = f'backend: "stateful"\n{line}'
    talk(deployment, export.served("model", f"known_dtln_{number}_confirmed", file_name="dtln.onnx", written=confirmed))


def test_two_assignments_are_refused_even_if_confirmed(deployment):
    export = Export(
        {"input_1": (1, 80), "input_2": (1, 8), "input_3": (1, 8)}, {"dense": (1, 3), "lstm": (1, 8)}, {}, batch=None
    )
    model = export.served("model", "known_two_assignments", written=written(state_pairs="auto-by-shape"))
    refused(deployment, model, "auto-by-shape", "'input_2', 'input_3'", "'lstm'", "[1, 8]")
    export = Export({"input_1": ("N", 8), "input_2": ("N", 8)}, {"dense": ("N", 8), "lstm": ("N", 8)}, {}, batch="N")
    model = export.served("model", "known_like_data", written=written(state_pairs="auto-by-shape"))
    refused(deployment, model, "auto-by-shape", "'input_1', 'input_2'", "'dense', 'lstm'", "[-1, 8]")


def test_a_model_without_states_is_refused_with_what_to_do(deployment):
    """A decoder of icefall, which accompanies a stateful encoder."""
    export = Export({"y": ("int64", ("N", 2))}, {"decoder_out": ("N", 8)}, {}, batch="N")
    words = ["onnxruntime", "sequence_batching { oldest { max_candidate_sequences: 1024 } }"]
    refused(deployment, export.served("decoder", "known_decoder.stateful"), *words)


def test_names_of_sherpa_s_wenet_are_pairs(deployment):
    export = Export(
        {"x": ("B", "T", 8), "attn_cache": ("B", 4, 6, 8), "conv_cache": ("B", 3, 7)},
        {"log_probs": ("B", "T", 5), "next_att_cache": ("B", 4, 6, 8), "next_conv_cache": ("B", 3, 7)},
        {"attn_cache": "next_att_cache", "conv_cache": "next_conv_cache"},
        batch="B",
    )
    talk(deployment, export.served("wenet", "known_wenet.stateful"))


def test_wav_is_what_requests_carry_whatever_else_they_carry(deployment):
    export = Export(
        {"wav_in": (1, 9, 1), "speaker": (1, 4), "cache_in_0": (1, 2, 3), "cache_in_1": (1, 5)},
        {"wav_out": (1, 9, 1), "vad": (1, 2), "cache_out_0": (1, 2, 3), "cache_out_1": (1, 5)},
        {"cache_in_0": "cache_out_0", "cache_in_1": "cache_out_1"},
        batch=None,
    )
    talk(deployment, export.served("filter", "known_wav.stateful"))

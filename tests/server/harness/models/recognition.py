"""The signatures of streaming recognisers: icefall's, NeMo's and WeNet's graphs, and sherpa-onnx's exports of them.

Each function names the exporter's repository and file. Where dims depend on the trained model, they are those of a published
one.
"""

from __future__ import annotations

import numpy as np

from harness.models.exports import Dims, Export, Signature


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

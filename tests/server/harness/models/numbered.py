"""Exports whose dimensions have numbers for names, and exports with tensors that have no batch dimension.

The names, types and dims are those of the real exporters; a few lengths are smaller.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import onnx

from harness.graphs import node
from harness.model import TYPES, Tensor
from harness.models.exports import Bare, Export


@dataclasses.dataclass(frozen=True)
class Served(Bare):
    """A model of which some outputs are [batch] or have no batch. Responses have a dimension of 1 more in front."""

    in_front: tuple[str, ...] = ()

    def as_answered(self, name: str, value: np.ndarray) -> np.ndarray:
        return value[np.newaxis] if name in self.in_front else value


def served(export: Export, folder: str, **changes) -> Served:
    """The export, with no configuration if the changes give none. Requests and responses have [1] for a scalar."""
    model = export.served("export", folder)
    inputs = model.inputs
    if export.batch is None:
        inputs = tuple(scalar_of_requests(tensor) for tensor in inputs)
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    flat = [(), (export.batch,), ("int32", (export.batch,)), ("int64", (export.batch,))]
    in_front = tuple(name for name, spec in export.outputs.items() if spec in flat)
    return dataclasses.replace(Served(**{**fields, "inputs": inputs, "in_front": in_front}), **changes)


def scalar_of_requests(tensor: Tensor) -> Tensor:
    return tensor if tensor.dims else dataclasses.replace(tensor, dims=(1,), unbatched=())


def numbered(model: Served, opened: Mapping[str, tuple[int, ...]] = {}) -> Served:
    """The model with the names that PyTorch gives to dimensions that the exporting script lists without one.

    `opened`: more dimensions that are open in the signature, though the graph works with one length only.
    """

    def build() -> onnx.ModelProto:
        made = model.build()
        for value in [*made.graph.input, *made.graph.output]:
            dims = value.type.tensor_type.shape.dim
            open_dims = [dim for at, dim in enumerate(dims) if dim.dim_param or at in opened.get(value.name, ())]
            for number, dim in enumerate(open_dims, start=1):
                dim.dim_param = f"{value.name}_dynamic_axes_{number}"
        return made

    return dataclasses.replace(model, build=build)


def with_constants(model: Served, constants: Mapping[str, np.ndarray]) -> Served:
    """The model with outputs that give these values in every run."""

    def build() -> onnx.ModelProto:
        made = model.build()
        for name, value in constants.items():
            made.graph.initializer.append(onnx.numpy_helper.from_array(value, f"{name}/value"))
            made.graph.node.append(node("Identity", f"{name}/value", name))
            kind = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
            made.graph.output.insert(0, onnx.helper.make_tensor_value_info(name, kind, value.shape))
        onnx.checker.check_model(made)
        return made

    kinds = {dtype: kind for kind, (dtype, _) in TYPES.items()}
    outputs = tuple(Tensor(name, kinds[value.dtype.type], value.shape) for name, value in constants.items())
    return dataclasses.replace(
        model, build=build, outputs=(*outputs, *model.outputs), in_front=(*model.in_front, *constants)
    )


#: NeMo's cache-aware FastConformer: encoder. The graph works with 7 frames of cache and 5 of convolution.
FASTCONFORMER = Export(
    {
        "audio_signal": ("batch", 80, "time"),
        "length": ("int64", ("batch",)),
        "cache_last_channel": ("batch", 3, 7, 8),
        "cache_last_time": ("batch", 3, 8, 5),
        "cache_last_channel_len": ("int64", ("batch",)),
    },
    {
        "outputs": ("batch", 8, "frames"),
        "encoded_lengths": ("int64", ("batch",)),
        "cache_last_channel_next": ("batch", 3, 7, 8),
        "cache_last_time_next": ("batch", 3, 8, 5),
        "cache_last_channel_next_len": ("int64", ("batch",)),
    },
    {
        "cache_last_channel": "cache_last_channel_next",
        "cache_last_time": "cache_last_time_next",
        "cache_last_channel_len": "cache_last_channel_next_len",
    },
)
FASTCONFORMER_OPENED = {
    "cache_last_channel": (2,),
    "cache_last_channel_next": (2,),
    "cache_last_time": (3,),
    "cache_last_time_next": (3,),
}
FASTCONFORMER_LENGTHS = {"cache_last_channel_dynamic_axes_2": 7, "cache_last_time_dynamic_axes_2": 5}


def fastconformer(folder: str, **changes) -> Served:
    model = served(FASTCONFORMER, folder, lengths_at_start=FASTCONFORMER_LENGTHS, **changes)
    return numbered(model, FASTCONFORMER_OPENED)


#: Its RNN-T predictor and joiner.
DECODER_JOINT = Export(
    {
        "encoder_outputs": ("batch", 8, "time"),
        "targets": ("int32", ("batch", "tokens")),
        "target_length": ("int32", ("batch",)),
        "input_states_1": (1, "batch", 6),
        "input_states_2": (1, "batch", 6),
    },
    {
        "outputs": ("batch", "time", "tokens", 11),
        "prednet_lengths": ("int32", ("batch",)),
        "output_states_1": (1, "batch", 6),
        "output_states_2": (1, "batch", 6),
    },
    {"input_states_1": "output_states_1", "input_states_2": "output_states_2"},
)

#: A decoder whose cache grows; only the batch has a name.
GROWING = Export(
    {"tokens": ("int64", ("batch", "count")), "past": ("batch", 2, "past_length", 4)},
    {"logits": ("batch", 1, 11), "present": ("batch", 2, "past_length", 4)},
    {"past": "present"},
)

#: A Unity ML-Agents policy with memory.
ML_AGENTS = Export(
    {"obs_0": ("batch", 6), "action_masks": ("batch", 3), "recurrent_in": ("batch", 1, 8)},
    {"discrete_actions": ("batch", 1), "recurrent_out": ("batch", 1, 8)},
    {"recurrent_in": "recurrent_out"},
)
ML_AGENTS_CONSTANTS = {
    "version_number": np.array([3], np.float32),
    "memory_size": np.array([16], np.float32),
    "discrete_action_output_shape": np.array([[2, 5]], np.float32),
}

#: DeepFilterNet as one graph.
DEEP_FILTER = Export(
    {"input_frame": (480,), "states": (45,), "atten_lim_db": ()},
    {"enhanced_audio_frame": (480,), "new_states": (45,), "lsnr": ()},
    {"states": "new_states"},
    batch=None,
)

#: WeNet's encoder as export_onnx_cpu.py writes it.
WENET = Export(
    {
        "chunk": (1, "T", 80),
        "offset": ("int64", ()),
        "required_cache_size": ("int64", ()),
        "att_cache": (2, 4, "T_CACHE", 8),
        "cnn_cache": (2, 1, 6, 7),
        "att_mask": ("bool", (1, 1, "T_ADD_T_CACHE")),
    },
    {"output": (1, "T", 80), "r_att_cache": (2, 4, "T_CACHE", 8), "r_cnn_cache": (2, 1, 6, 7)},
    {"att_cache": "r_att_cache", "cnn_cache": "r_cnn_cache"},
    batch=None,
)

#: A state that is a scalar.
COUNTER = Export(
    {"x": (1, 4), "count_in": ("int64", ())},
    {"y": (1, 4), "sum": (), "count_out": ("int64", ())},
    {"count_in": "count_out"},
    batch=None,
)

#: A cache without a batch dimension in a model that has one.
MIXED = Export(
    {"chunk": ("batch", "T", 8), "att_cache": (2, 3, "T_CACHE", 4), "cnn_cache": ("batch", 3, 4)},
    {"output": ("batch", 1, 8), "r_att_cache": (2, 3, "T_CACHE", 4), "r_cnn_cache": ("batch", 3, 4)},
    {"att_cache": "r_att_cache", "cnn_cache": "r_cnn_cache"},
)

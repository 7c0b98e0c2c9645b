"""Initial values from .npz files and from the model's metadata.

The models here answer the state that they were fed, and add nothing to it.
"""

import dataclasses
import io
import json
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from harness.conversations import Conversation, talk
from harness.graphs import BATCH, graph, node
from harness.model import TYPES, Model, Tensor
from harness.refusals import refused

pytestmark = pytest.mark.simulated_device


def holding(name: str, type: str, shape: list, says: str, value: Any = None, **changes) -> Model:
    """Keeps S as it begins, which is `value`, and answers it as SEEN."""

    def build():
        made = graph(
            [node("Identity", "S", "S_NEXT"), node("Identity", "S", "SEEN"), node("Identity", "X", "Y")],
            [("X", "fp32", [BATCH, 1]), ("S", type, shape)],
            [("Y", "fp32", [BATCH, 1]), ("S_NEXT", type, shape), ("SEEN", type, shape)],
            {},
        )
        for key, text in (changes.get("metadata") or {}).items():
            made.metadata_props.add(key=key, value=text)
        return made

    dims = tuple(-1 if isinstance(dim, str) else dim for dim in shape)
    inside = shape[0] != BATCH
    model = Model(
        name,
        build,
        inputs=(Tensor("X", "fp32", (1,)),),
        outputs=(
            Tensor("Y", "fp32", (1,)),
            Tensor("SEEN", type, dims if inside else dims[1:], batch_inside=inside),
        ),
        states=(("S", "S_NEXT"),),
        parameters={"initial_states": says},
        initial={} if value is None else {"S": value},
    )
    return dataclasses.replace(model, **{key: value for key, value in changes.items() if key != "metadata"})


def npz(compressed: bool = False, /, **arrays: np.ndarray) -> Mapping[str, bytes]:
    """The file of a model's folder with these arrays."""
    content = io.BytesIO()
    save: Callable = np.savez_compressed if compressed else np.savez
    save(content, **arrays)
    return {"initial_state/start.npz": content.getvalue()}


def row(type: str, *shape: int) -> np.ndarray:
    values = np.random.default_rng(1).integers(0, 100, shape)
    if type == "string":
        return np.array([f"é{value}" for value in values.ravel()], np.object_).reshape(shape)
    return (values % 2 == 0 if type == "bool" else values).astype(TYPES[type][0])


@pytest.mark.parametrize(
    "type",
    ["bool", "int64", "uint8", "fp16", "fp32", "string"]
    + [pytest.param(t, marks=pytest.mark.repetition) for t in ("int8", "int16", "int32", "uint16", "uint64", "fp64")],
)
def test_an_array_gives_a_state_of_every_type(deployment, type):
    value = row(type, 1, 2, 3)
    stored = value.astype(np.str_) if type == "string" else value
    model = holding(f"array_{type}", type, [BATCH, 2, 3], "S=npz:start.npz", value, files=npz(S=stored))
    talk(deployment, model, sequences=3)


FORMS = {
    "big_endian": (lambda value: value.astype(">f4"), "S=npz:start.npz:a", False),
    "columns_first": (np.asfortranarray, "S=npz:start.npz:a", False),
    "compressed": (lambda value: value, "S=npz:start.npz:a", True),
    "without_the_batch": (lambda value: value[:, 0], "S=npz:start.npz:a", False),
}


@pytest.mark.parametrize("form", FORMS)
def test_it_may_be_stored_in_any_form(deployment, form):
    stored, says, compressed = FORMS[form]
    value = np.arange(24, dtype=np.float32).reshape(2, 1, 3, 4)
    value[0, 0, 1, 2] = np.nan
    files = npz(compressed, a=stored(value), S=np.zeros(7))
    model = holding(f"array_{form}", "fp32", [2, BATCH, 3, 4], says, value, files=files)
    talk(deployment, model, sequences=3)


def test_an_open_dimension_has_the_length_of_the_array(deployment):
    for length in (3, 0):
        value = np.arange(4 * length, dtype=np.float32).reshape(1, length, 4)
        shape = [BATCH, "T", 4]
        talk(deployment, holding(f"array_open_{length}", "fp32", shape, "S=npz:start.npz", value, files=npz(S=value)))


def test_values_of_speech_synthesis_are_kept(deployment):
    """NaN in every element, a flag that begins as true, and a state without elements."""
    talk(deployment, holding("start_nan", "fp32", [BATCH, 5], "S=nan", np.full((1, 5), np.nan, np.float32)))
    talk(deployment, holding("start_true", "bool", [BATCH, 2], "S=true", np.ones((1, 2), np.bool_)))
    nothing = np.zeros((1, 0, 3), np.float32)
    model = holding("start_nothing", "fp32", [BATCH, 0, 3], "S=npz:start.npz", nothing, files=npz(S=nothing))
    # Triton has no outputs without elements.
    talk(deployment, dataclasses.replace(model, outputs=model.outputs[:1]))


METADATA = {
    "commas": "1.5,-2,3e-3",
    "spaces": " 1.5 -2\n3e-3 ",
    "json": json.dumps([[1.5, -2], [3e-3]]),
}


@pytest.mark.parametrize("form", METADATA)
def test_metadata_gives_a_state(deployment, form):
    value = np.array([[1.5, -2, 3e-3]], np.float32)
    says, metadata = "S=metadata:init", {"init": METADATA[form], "other": "text"}
    talk(deployment, holding(f"metadata_{form}", "fp32", [BATCH, 3], says, value, metadata=metadata))


def test_metadata_may_be_joined_and_filled_up(deployment):
    """As DPDFNet's packages have it: two normalisations at the front of one state."""
    value = np.array([[-60, -90, 0.001, 0.0001, 0, 0, 0, 0]], np.float32)
    metadata = {"erb_norm_init": "-60,-90", "spec_norm_init": "0.001,0.0001"}
    says = "S=metadata:erb_norm_init+spec_norm_init+zeros"
    talk(deployment, holding("metadata_joined", "fp32", [BATCH, 8], says, value, metadata=metadata))
    whole = holding("metadata_flags", "bool", [BATCH, 2], "S=metadata:flags", np.array([[1, 0]], np.bool_))
    made = holding("metadata_flags", "bool", [BATCH, 2], "S=metadata:flags", metadata={"flags": "[true, false]"})
    talk(deployment, dataclasses.replace(whole, build=made.build))


def arrays(says: str, type: str = "fp32", **arrays: np.ndarray) -> Model:
    return holding("", type, [BATCH, 2, 3], says, files=npz(**arrays))


def with_header(shape: str) -> Mapping[str, bytes]:
    """A file whose array S has this text as its shape."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("S.npy", b"\x93NUMPY\x02\x00" + len(header).to_bytes(4, "little") + header)
    return {"initial_state/start.npz": content.getvalue()}


def of_metadata(says: str, **metadata: str) -> Model:
    return holding("", "fp32", [BATCH, 3], says, metadata=metadata)


RIGHT = np.zeros((1, 2, 3), np.float32)

REFUSED = {
    "other_type": (arrays("S=npz:start.npz", S=RIGHT.astype(np.float64)), ["'start.npz'", "<f8", "TYPE_FP32"]),
    "objects": (arrays("S=npz:start.npz", "string", S=np.array([[[None] * 3] * 2])), ["|O", "TYPE_STRING"]),
    "other_shape": (arrays("S=npz:start.npz", S=RIGHT.reshape(3, 2)), ["[3, 2]", "[1, 2, 3]"]),
    "several_rows": (arrays("S=npz:start.npz", S=np.zeros((2, 2, 3), np.float32)), ["[2, 2, 3]", "[1, 2, 3]"]),
    "no_such_array": (arrays("S=npz:start.npz:b", a=RIGHT, c=RIGHT), ["no array 'b'", "'a'", "'c'"]),
    "no_such_file": (arrays("S=npz:other.npz", S=RIGHT), ["'other.npz'", "state 'S'"]),
    "no_archive": (
        holding("", "fp32", [BATCH, 2, 3], "S=npz:start.npz", files={"initial_state/start.npz": RIGHT.tobytes()}),
        ["'start.npz'", "no .npz file"],
    ),
    "outside": (arrays("S=npz:../1/model.onnx", S=RIGHT), ["'../1/model.onnx'", "that folder"]),
    "no_such_key": (of_metadata("S=metadata:init", start="1"), ["no metadata 'init'", "'start'"]),
    "no_number": (of_metadata("S=metadata:init", init="1,x,2"), ["metadata 'init'", "'x'"]),
    "gap": (of_metadata("S=metadata:init", init="1,,2,3"), ["metadata 'init'", "a comma without a number before it"]),
    "nested_header": (
        holding("", "fp32", [BATCH, 2, 3], "S=npz:start.npz", files=with_header("(" * 5000 + "1" + ",)" * 5000)),
        ["'start.npz'", "array 'S'", "at most 10000"],
    ),
    "brackets": (
        holding("", "fp32", [BATCH, 2, 3], "S=npz:start.npz", files=with_header("[" * 40 + "]" * 40)),
        ["'start.npz'", "array 'S'", "41 opening brackets"],
    ),
    "too_few": (of_metadata("S=metadata:init", init="1,2"), ["metadata 'init'", "2 elements", "3"]),
    "too_many": (of_metadata("S=metadata:init+zeros", init="1,2,3,4"), ["metadata 'init'", "4 elements", "3"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(deployment, case):
    model, words = REFUSED[case]
    refused(deployment, model.variant(f"refused_array_{case}"), *words)


def test_sequences_that_start_over_begin_with_it_again(deployment):
    value = row("fp32", 1, 2, 3)
    model = holding("array_again", "fp32", [BATCH, 2, 3], "S=npz:start.npz", value, files=npz(S=value))
    sequence = Conversation(deployment.connect(), deployment.serve(model), np.random.default_rng(2))
    for start in (True, False, True, False):
        sequence.step(start=start)
    sequence.end()

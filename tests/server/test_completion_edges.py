"""Models whose names or dims could be read wrongly when their configuration is completed: served rightly, or refused."""

import pytest

from exports import Export
from refusals import refused
from test_auto_complete import talk

LENGTHS = Export(
    {"x": ("batch", 4), "cell": ("batch", 8), "length": ("int64", ("batch", 1))},
    {"y": ("batch", 2), "cell_out": ("batch", 8), "length_out": ("int64", ("batch", 1))},
    {"cell": "cell_out"},
)


def denoiser(*answers: str) -> Export:
    """`band_in` and `band_out` are what clients send and get, though they look like a state."""
    inputs = {"band_in": ("batch", 9), "state_in": ("batch", 4), "sr": ("int64", ())}
    outputs = {"band_out": ("batch", 9), "state_out": ("batch", 4), **{name: ("batch", 1) for name in answers}}
    return Export(inputs, outputs, {"state_in": "state_out"})


def scalar(*answers: str) -> Export:
    inputs = {"x": (1, 4), "cell": (1, 8), "sr": ("int64", ())}
    outputs = {name: (1, 2) for name in answers}
    return Export(inputs, {**outputs, "cell_out": (1, 8)}, {"cell": "cell_out"}, batch=None)


def parameter(name: str, value: str) -> str:
    return f'backend: "stateful"\nparameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'


def test_lengths_that_go_in_and_out_are_no_state(deployment):
    talk(deployment, LENGTHS.served("edge", "edge_lengths.stateful"))


@pytest.mark.parametrize("answers", [(), ("vad",)])
@pytest.mark.parametrize("written", [None, parameter("constant_inputs", "sr=16000")])
def test_a_signal_named_like_a_state_is_asked_for(deployment, answers, written):
    name = f"edge_signal_{len(answers)}_{written is None}.stateful"
    model = denoiser(*answers).served("edge", name, written=written)
    refused(deployment, model, "<<<band_in, band_out>>>", "state_pairs", "'input'")


def test_a_signal_named_like_a_state_is_served_once_it_is_listed(deployment):
    listed = (
        'input [ { name: "band_in" data_type: TYPE_FP32 dims: [ 9 ] },'
        ' { name: "sr" data_type: TYPE_INT64 dims: [ 1 ] reshape { shape: [ ] } } ]'
    )
    talk(deployment, denoiser("vad").served("edge", "edge_listed", written=f'backend: "stateful"\n{listed}'))


def test_a_scalar_without_a_batch_has_to_be_a_constant(deployment):
    refused(deployment, scalar("y").served("edge", "edge_scalar.stateful"), "'sr'", "scalar", "constant_inputs")
    constant = parameter("constant_inputs", "sr=16000")
    export = scalar("y").served("edge", "edge_constant", written=constant, constants={"sr": 16000})
    inputs = tuple(tensor for tensor in export.inputs if tensor.name != "sr")
    talk(deployment, export.variant("edge_constant", inputs=inputs))

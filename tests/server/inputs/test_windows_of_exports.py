"""`input_windows` of models with the signatures of real exporters: echo cancellers, denoisers, encoders of recognisers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from harness.conversations import together
from harness.model import KIND, Model, Tensor, parameter
from harness.models import families
from harness.models.exports import Export
from harness.raw import Unary
from harness.windows import Cut, WindowOracle, WindowTalk

pytestmark = pytest.mark.simulated_device


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of a family, and how its inputs are cut."""

    export: Export
    parameters: Mapping[str, str]
    cuts: Mapping[str, Cut]
    # input -> elements in front of a window, their axis, and what a sequence begins with
    contexts: Mapping[str, tuple[int, int, str]] = dataclasses.field(default_factory=dict)
    # as the model is fed
    constants: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    generated: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
    # the outputs that are compared, with the dims of answers
    outputs: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    longest: int = 5
    """Windows of a request, at most."""

    def model(self, name: str) -> Model:
        given = {**self.constants, **self.generated}
        constants = " ".join(f"{key}={value.ravel()[0]}" for key, value in self.constants.items())
        parameters = {**self.parameters, **({"constant_inputs": constants} if constants else {})}
        lines = ['backend: "stateful"', f"instance_group {{ kind: {KIND} }}"]
        written = "\n".join([*lines, *(parameter(key, value) for key, value in parameters.items())])
        served = self.export.served("model", name, written=written)
        inputs = tuple(self._cut(tensor) for tensor in served.inputs if tensor.name not in given)
        outputs = tuple(
            dataclasses.replace(tensor, dims=self.outputs[tensor.name])
            for tensor in served.outputs
            if tensor.name in self.outputs
        )
        return dataclasses.replace(
            served, inputs=inputs, outputs=outputs, constants=self.constants, generated=self.generated
        )

    def _cut(self, tensor: Tensor) -> Tensor:
        if tensor.name not in self.contexts:
            return tensor
        elements, axis, first = self.contexts[tensor.name]
        return dataclasses.replace(tensor, context=(elements, axis), first=first)


#: DTLN-aec's second graph: the microphone and what the loudspeaker plays, 128 new samples of 512 each.
ECHO_CANCELLER = Export(
    {"near": (1, 1, 512), "far": (1, 1, 512), "states_in": (1, 2, 128, 2)},
    {"near_out": (1, 1, 512), "states_out": (1, 2, 128, 2)},
    {"states_in": "states_out"},
    batch=None,
)

CASES = {
    "echo_canceller": Case(
        ECHO_CANCELLER,
        {
            "state_pairs": "<<<states_in, states_out>>>",
            "input_windows": "near=128@2 far=128@2",
            "input_context": "near=384@2 far=384@2",
        },
        {"near": Cut(128, axis=2), "far": Cut(128, axis=2)},
        contexts={"near": (384, 2, "zeros"), "far": (384, 2, "zeros")},
        outputs={"near_out": (-1, 1, 1, 512)},
    ),
    "gtcrn": Case(
        families.gtcrn(), {"input_windows": "mix=1@2"}, {"mix": Cut(1, axis=2)}, outputs={"enh": (-1, 1, 257, 1, 2)}
    ),
    "deep_filter_net": Case(
        families.deep_filter_net(),
        {"input_windows": "input_frame=480"},
        {"input_frame": Cut(480, axis=0)},
        constants={"atten_lim_db": np.array(0)},
        outputs={"enhanced_audio_frame": (-1, 480), "lsnr": (-1, 1)},
    ),
    "zipformer": Case(
        families.zipformer(),
        {"input_windows": "x=32@1", "input_context": "x=13@1:whole"},
        {"x": Cut(32)},
        contexts={"x": (13, 1, "whole")},
        outputs={"encoder_out": (-1, 16, 512)},
        longest=2,
    ),
    "nemo": Case(
        families.nemo_encoder(),
        {
            "state_dims": "cache_last_channel=[batch, 17, 70, 512] cache_last_time=[batch, 17, 512, 8]",
            "input_windows": "audio_signal=112@2",
            "input_context": "audio_signal=9@2:whole",
        },
        {"audio_signal": Cut(112, axis=2)},
        contexts={"audio_signal": (9, 2, "whole")},
        constants={"length": np.array([121])},
        outputs={"outputs": (512, -1)},
        longest=2,
    ),
    "wenet": Case(
        families.wenet(),
        {
            "generated_inputs": "offset=steps*16",
            "input_windows": "chunk=64@1",
            "input_context": "chunk=3@1:whole",
        },
        {"chunk": Cut(64)},
        contexts={"chunk": (3, 1, "whole")},
        generated={"offset": lambda context, fed, state: 16 * context.steps},
        outputs={"output": (1, -1, 256)},
        longest=3,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_sequences_bring_any_number_of_elements(deployment, name):
    case = CASES[name]
    model = deployment.serve(case.model(f"windows_{name}"))
    client = Unary(deployment)
    [first, *_] = case.cuts
    longer = case.contexts[first][0] if first in case.contexts and case.contexts[first][2] == "whole" else 0

    def talk(seed: int) -> None:
        oracle = WindowOracle(model, case.cuts, first_longer=longer)
        one = WindowTalk(client, oracle, np.random.default_rng(seed))
        length = case.cuts[first].length
        for at in range(5):
            most = length if at % 2 else case.longest * length + longer
            one.ask(int(one.rng.integers(0, most + 1)), start=at == 0, end=at == 4)
        assert oracle.made, "the sequence made no step"

    together(lambda seed=seed: talk(seed) for seed in range(4))

"""`input_windows`: requests of any length, which the server cuts into steps."""

import dataclasses

import numpy as np
import onnx
import pytest

from harness import models
from harness.conversations import together
from harness.model import Control, Model, Tensor
from harness.models.windows import FAILS
from harness.raw import PROTOCOLS, Refused, Unary
from harness.refusals import refused
from harness.shared_memory import SharedMemory
from harness.state_api import DIRECT, OLDEST, OWN, with_state_api
from harness.windows import Cut, WindowOracle, WindowTalk
from support.paths import SILERO_VAD

pytestmark = pytest.mark.simulated_device

AUDIO = {"AUDIO": Cut(5)}

#: Runs a test under each kind of scheduling.
every_scheduler = pytest.mark.parametrize("by", [OWN, OLDEST, DIRECT])


def scheduled(model: Model, by: str = OWN) -> Model:
    return model.variant(f"{model.name}_{by}", **{OWN: {"scheduling": ""}, OLDEST: {}, DIRECT: {"direct": ""}}[by])


def talks(deployment, model: Model, count: int, cuts=AUDIO, **how) -> list[WindowTalk]:
    client = Unary(deployment)
    return [WindowTalk(client, WindowOracle(model, cuts, **how), np.random.default_rng(7 + n)) for n in range(count)]


def at_random(talk: WindowTalk, requests: int = 12, longest: int = 42) -> None:
    """START, some requests and END, of random lengths; many of them make no step."""
    for n in range(requests):
        elements = int(talk.rng.integers(0, int(talk.rng.choice([4, longest])) + 1))
        talk.ask(elements, start=n == 0, end=n == requests - 1)


def all_at_random(deployment, model: Model, cuts=AUDIO, count: int = 8, **how) -> None:
    deployment.serve(model)
    together(lambda talk=talk: at_random(talk) for talk in talks(deployment, model, count, cuts, **how))


@every_scheduler
@pytest.mark.parametrize("context", [0, 3])
def test_requests_of_any_length_give_what_windows_give(deployment, by, context):
    all_at_random(deployment, scheduled(models.cut(f"windows_after_{context}", 5, context), by))


def test_an_input_for_end_says_so_in_the_last_step_only(deployment):
    cut = models.cut("windows_told_of_the_end")
    ends = Control("GAIN", "CONTROL_SEQUENCE_END", "fp32", (0, 1))
    model = dataclasses.replace(cut, inputs=cut.inputs[:1], controls=(ends,))
    model = deployment.serve(scheduled(model, OLDEST))
    audio = np.arange(15, dtype=np.float32)[None]
    alone = {"sequence_id": 1, "sequence_start": True, "sequence_end": True}
    answer = Unary(deployment).ask(model.name, {"AUDIO": audio}, alone)
    assert answer.outputs["TOTAL"].ravel().tolist() == [0, 0, 10 + 11 + 12 + 13 + 14]


def test_a_request_of_several_sequences_is_refused(deployment):
    """Each may make another number of steps, and one answer has no room for that. None of them takes anything."""
    model = deployment.serve(scheduled(models.cut("windows_of_several")))
    client = Unary(deployment)
    ids = {"sequence_id": np.array([[1], [2]], np.uint64), "sequence_control_input": np.array([[1], [1]], np.uint32)}
    with pytest.raises(Refused, match=r"2 sequences.*input_windows.*a request for each"):
        client.ask(model.name, {"AUDIO": np.zeros((2, 7), np.float32), "GAIN": np.ones((2, 1), np.float32), **ids}, {})
    all_at_random(deployment, model, count=2)


@every_scheduler
def test_zeros_fill_up_the_last_window(deployment, by):
    model = scheduled(models.cut("windows_filled_up", 5, 3, says="AUDIO=5:pad"), by)
    all_at_random(deployment, model, pads=True)


def test_a_dimension_that_the_model_leaves_open_is_cut_and_its_outputs_are_joined(deployment):
    all_at_random(deployment, scheduled(models.cut("windows_of_open", 5, 3, model_length="T")))


def test_a_model_without_triton_s_batch_dimension_is_cut_too(deployment):
    model = models.cut("windows_unbatched", 5, 3, max_batch_size=0)
    inputs = tuple(dataclasses.replace(tensor, dims=(1, *tensor.dims), ragged=False) for tensor in model.inputs)
    outputs = (Tensor("TOTAL", "fp32", (-1, 1, 1)), Tensor("WINDOW", "fp32", (-1, 1, 8)))
    model = dataclasses.replace(scheduled(model), inputs=inputs, outputs=outputs)
    all_at_random(deployment, model)


def test_a_batch_of_one_row_is_cut_too(deployment):
    all_at_random(deployment, scheduled(models.cut("windows_alone", 5, 3, max_batch_size=1)))


@pytest.mark.parametrize("protocol", [*PROTOCOLS, "shared memory"])
def test_every_way_of_sending_carries_any_length(deployment, protocol):
    model = deployment.serve(scheduled(models.cut("windows_of_protocols", 5, 3)))
    client = SharedMemory(deployment, model) if protocol == "shared memory" else PROTOCOLS[protocol](deployment)
    at_random(WindowTalk(client, WindowOracle(model, AUDIO), np.random.default_rng(3)))
    client.close()


@every_scheduler
def test_an_end_drops_what_is_left_and_says_so(deployment, by):
    model = deployment.serve(scheduled(models.cut("windows_ended"), by))
    [talk] = talks(deployment, model, 1)
    talk.ask(4, start=True)
    assert talk.ask(4, end=True).parameters == {"steps": 1, "left": 3, **said_id(talk, by)}
    # the next sequence begins with nothing
    talk.ask(4, start=True)
    assert talk.ask(0, end=True).parameters == {"steps": 0, "left": 4, **said_id(talk, by)}


def said_id(talk: WindowTalk, by: str) -> dict[str, int]:
    return {"stateful_sequence_id": talk.sequence_id} if by == OWN else {}


@every_scheduler
def test_a_request_that_fails_in_the_middle_changes_nothing(deployment, by):
    model = deployment.serve(scheduled(models.cut("windows_that_fail", 5, 3), by))
    talk, *others = talks(deployment, model, 4)
    for other in others:
        other.ask(3, start=True)
    talk.ask(7, start=True)
    for failing in (1, 3, 4):
        talk.fail_beside(others, failing)
        talk.ask(12)
    talk.ask(9, end=True)
    for other in others:
        other.ask(11, end=True)


@every_scheduler
def test_a_start_that_fails_in_the_middle_leaves_no_sequence(deployment, by):
    model = deployment.serve(scheduled(models.cut("windows_that_fail_at_start"), by))
    [talk] = talks(deployment, model, 1)
    inputs = talk.draw(17)
    inputs["AUDIO"][0, 9] = FAILS
    with pytest.raises(Refused, match="step 2 of 3"):
        talk.ask(inputs, start=True)
    with pytest.raises(Refused):
        talk.ask(5)
    talk.ask(17, start=True)
    talk.ask(17, end=True)


def test_a_request_has_so_many_steps_at_most(deployment):
    model = scheduled(models.cut("windows_bounded").with_parameters("windows_bounded", max_steps_per_request=3))
    deployment.serve(model)
    [talk] = talks(deployment, model, 1)
    talk.ask(19, start=True)
    with pytest.raises(Refused, match=r"(?s)AUDIO.*16 elements.*4 steps.*3 are allowed.*max_steps_per_request"):
        talk.ask(16)
    talk.ask(15, end=True)


def test_several_inputs_bring_as_many_windows(deployment):
    model = scheduled(models.cut_pair("windows_of_two"))
    cuts = {"NEAR": Cut(4), "FAR": Cut(2, axis=2)}
    all_at_random(deployment, model, cuts)
    [talk] = talks(deployment, model, 1, cuts)
    talk.ask(6, start=True)
    uneven = {**talk.draw(8), "FAR": talk.draw(6)["FAR"]}
    with pytest.raises(Refused, match=r"same number of windows.*8 for 'NEAR' and 2 left over.*3 for 'FAR'"):
        talk.ask(uneven)
    talk.ask(8, end=True)


def test_a_request_without_an_input_learns_what_to_send(deployment):
    model = with_state_api(scheduled(models.cut("windows_missing")))
    deployment.serve(model)
    [talk] = talks(deployment, model, 1)
    talk.ask(3, start=True)
    inputs = talk.draw(3)
    del inputs["AUDIO"]
    with pytest.raises(Refused, match="lacks input 'AUDIO', which 'input_windows' cuts: send the input in each"):
        talk.ask(inputs)
    talk.ask(3, end=True)


@every_scheduler
def test_generated_inputs_count_steps(deployment, by):
    all_at_random(deployment, scheduled(models.cut_counted("windows_counted"), by))


def test_lengths_are_those_of_windows(deployment):
    model = scheduled(models.masked("windows_padded").with_parameters("windows_padded", input_windows="X=4"))
    all_at_random(deployment, model, {"X": Cut(4)})


def test_the_first_window_can_be_whole(deployment):
    model = models.framed("windows_whole", ["N", 8], (3, 1), (-1,), "FRAMES=3:whole", first="whole", window=8)
    outputs = (Tensor("WINDOW", "fp32", (-1, 8)), Tensor("COUNT", "int64", (-1, 1)))
    model = dataclasses.replace(scheduled(model.with_parameters(model.name, input_windows="FRAMES=5")), outputs=outputs)
    all_at_random(deployment, model, {"FRAMES": Cut(5)}, first_longer=3)


@pytest.mark.parametrize(
    ("name", "model", "words"),
    [
        ("none", {"says": "SOUND=5"}, ["input_windows", "SOUND", "AUDIO"]),
        ("axis", {"says": "AUDIO=5@2"}, ["input_windows", "axis 2"]),
        ("length", {"says": "AUDIO=4"}, ["input_windows", "AUDIO=4", "[-1, 8]", "7"]),
        ("zero", {"says": "AUDIO=0"}, ["input_windows", "1 or more"]),
        (
            "ends",
            {"parameters": {"input_windows": "AUDIO=5", "input_context": "AUDIO=3", "infer_end_requests": "0"}},
            ["infer_end_requests", "END"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_at_load(deployment, name, model, words):
    cut = models.cut(f"refused_windows_{name}", 5, 3, **model)
    refused(deployment, cut, *words)


def silero(name: str, by: str = OWN) -> Model:
    """The trained model, which takes the last 64 samples and 512 new ones. Its inputs and outputs are filled in."""
    model = Model(
        name,
        lambda: onnx.load(SILERO_VAD),
        inputs=(Tensor("input", "fp32", (-1,), context=(64, 1)),),
        outputs=(Tensor("output", "fp32", (-1, 1)),),
        states=(("state", "stateN"),),
        constants={"sr": 16000},
        parameters={"input_windows": "input=512@1", "input_context": "input=64@1"},
        max_batch_size=64,
        tolerance=1e-5,
    )
    return scheduled(model, by)


@pytest.mark.parametrize("by", [OWN, OLDEST])
def test_a_trained_model_takes_any_length_of_64_sequences_at_once(deployment, by):
    model = deployment.serve(silero("windows_of_speech", by))
    client = Unary(deployment)

    def talk(seed: int) -> None:
        one = WindowTalk(client, WindowOracle(model, {"input": Cut(512)}), np.random.default_rng(seed))
        lengths = one.rng.integers(0, 5001, 4)
        for at, length in enumerate(lengths):
            sound = one.rng.normal(scale=0.1, size=(1, length)).astype(np.float32)
            one.ask({"input": sound}, start=at == 0, end=at == len(lengths) - 1)

    together(lambda seed=seed: talk(seed) for seed in range(64))

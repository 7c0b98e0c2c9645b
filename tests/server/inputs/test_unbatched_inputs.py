"""Inputs without a batch dimension, inputs with a default in the model, and outputs whose shapes only
a run tells."""

import dataclasses

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import models
from harness.batches import TOGETHER, four, runs_of, steps
from harness.conversations import Conversation, interleave, together
from harness.model import Tensor
from harness.refusals import refused
from harness.strategies import both_strategies, strategy

pytestmark = pytest.mark.simulated_device

SHAPES = {"scalar": (), "one": (1,), "two": (2,)}


def turned(model, value) -> dict[str, np.ndarray]:
    """A request whose KNOB is this value, or has these."""
    (shape,) = (tensor.unbatched for tensor in model.inputs if tensor.name == "KNOB")
    knob = np.zeros((1, *(shape or (1,))), np.float32)
    knob[...] = value
    return {"INPUT": np.array([[3, -7]], np.float32), "KNOB": knob}


# ---- values that each request brings


@both_strategies
@pytest.mark.parametrize("max_batch_size", [8, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_request_brings_its_own_value(deployment, shape, max_batch_size, direct):
    model = models.knob(
        f"knob_{shape}_{max_batch_size}_{strategy(direct)}",
        shape=SHAPES[shape],
        max_batch_size=max_batch_size,
        direct=direct,
    )
    sequences = 6 if direct is None else 1
    interleave(deployment.connect(), deployment.serve(model), np.random.default_rng(1), sequences)


@pytest.mark.parametrize("type", ["bool", "int8", "int32", "int64", "uint8", "fp16", "fp64"])
def test_the_value_may_have_any_type(deployment, type):
    model = deployment.serve(models.knob(f"knob_of_{type}", type))
    interleave(deployment.connect(), model, np.random.default_rng(2), sequences=3, longest=4)


@pytest.mark.parametrize("shape", ["scalar", "one"])
def test_the_value_may_be_a_string(deployment, shape):
    model = deployment.serve(models.knob(f"knob_of_words_{shape}", "string", SHAPES[shape], **TOGETHER))

    def said(word):
        return {"INPUT": np.ones((1, 2), np.float32), "KNOB": np.array([[word]], np.object_)}

    talks = four(deployment, model)
    steps(talks, [said("two")] * 4, start=True)()
    # unequal ones in one batch
    steps(talks, [said(word) for word in ("one", "three", "one", "two")])()
    steps(talks, [said("three")] * 4, end=True)()


@pytest.mark.parametrize("shape", ["one", "two"])
def test_a_model_without_triton_s_batch_dimension_takes_such_values(deployment, shape):
    model = models.knob(f"knob_{shape}_alone", shape=SHAPES[shape], max_batch_size=0)
    said, knob = model.inputs
    model = deployment.serve(
        dataclasses.replace(
            model,
            inputs=(dataclasses.replace(said, dims=(1, 2)), knob),
            outputs=(Tensor("OUTPUT", "fp32", (1, 2)),),
        )
    )
    interleave(deployment.connect(), model, np.random.default_rng(3), sequences=5)


# ---- and who shares a batch


@pytest.mark.parametrize("shape", SHAPES)
def test_requests_with_equal_values_share_a_batch(deployment, shape):
    model = deployment.serve(models.knob(f"knob_{shape}_shared", shape=SHAPES[shape], **TOGETHER))
    talks = four(deployment, model)
    same = [turned(model, 3)] * 4
    assert runs_of(deployment, model, steps(talks, same, start=True)) == {4: 1}
    assert runs_of(deployment, model, steps(talks, same)) == {4: 1}


@pytest.mark.parametrize("shape", SHAPES)
def test_requests_with_unequal_values_run_apart(deployment, shape):
    model = deployment.serve(models.knob(f"knob_{shape}_apart", shape=SHAPES[shape], **TOGETHER))
    talks = four(deployment, model)
    steps(talks, [turned(model, 2)] * 4, start=True)()
    pairs = [turned(model, value) for value in (3, 5, 3, 5)]
    assert runs_of(deployment, model, steps(talks, pairs)) == {2: 2}
    each = [turned(model, value) for value in (1, 2, 3, 4)]
    assert runs_of(deployment, model, steps(talks, each)) == {1: 4}


def test_every_element_of_a_value_counts(deployment):
    model = deployment.serve(models.knob("knob_two_elements", shape=(2,), **TOGETHER))
    talks = four(deployment, model)
    steps(talks, [turned(model, 2)] * 4, start=True)()
    asked = [turned(model, value) for value in ([1, 2], [1, 3], [1, 2], [2, 2])]
    assert runs_of(deployment, model, steps(talks, asked)) == {1: 2, 2: 1}


def test_many_sequences_with_changing_values_are_all_right(deployment):
    model = models.knob(
        "knob_crowd", max_batch_size=8, oldest="preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 2000"
    )
    model = deployment.serve(model)
    client = deployment.connect()

    def talk(seed):
        rng = np.random.default_rng(seed)
        for _ in range(3):
            Conversation(client, model, rng).whole(6)

    together(lambda seed=seed: talk(seed) for seed in range(12))


def test_a_value_of_the_wrong_shape_is_refused_and_the_sequence_goes_on(deployment):
    model = deployment.serve(models.knob("knob_misshapen", shape=(2,)))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(4))
    talk.start()
    for shape in ((1, 3), (1, 1), (2,), (2, 2)):
        fed = {"INPUT": np.ones((1, 2), np.float32), "KNOB": np.ones(shape, np.float32)}
        with pytest.raises(InferenceServerException):
            talk.step(fed)
    talk.step()
    talk.end()


# ---- given once, in the configuration


@pytest.mark.parametrize("shape", SHAPES)
def test_a_value_may_be_given_once_for_all(deployment, shape):
    model = models.knob(f"knob_{shape}_constant", shape=SHAPES[shape])
    value = [2, -3] if shape == "two" else [5] if shape == "one" else 5
    model = dataclasses.replace(model, inputs=model.inputs[:1], constants={"KNOB": value})
    interleave(deployment.connect(), deployment.serve(model), np.random.default_rng(5), sequences=5)


# ---- defaults


GAIN = Tensor("GAIN", "fp32", (1,), between=(1, 3), unbatched=(1,))
OFFSET = Tensor("OFFSET", "fp32", (1,), between=(-5, 5), unbatched=())


def optional(tensor: Tensor) -> Tensor:
    return dataclasses.replace(tensor, optional=True)


def with_inputs(name: str, *more: Tensor, **changes):
    model = models.defaults(name)
    return dataclasses.replace(model, inputs=(*model.inputs, *more), **changes)


def test_a_default_of_the_model_holds_where_nothing_is_said(deployment):
    model = deployment.serve(models.defaults("defaults_alone"))
    interleave(deployment.connect(), model, np.random.default_rng(6), sequences=4)


@pytest.mark.parametrize(
    "constants", [{"GAIN": [7]}, {"OFFSET": -1}, {"GAIN": [7], "OFFSET": -1}], ids=["one", "scalar", "both"]
)
def test_a_constant_takes_the_place_of_a_default(deployment, constants):
    model = models.defaults(f"defaults_{'_'.join(constants)}_given", constants=constants)
    interleave(deployment.connect(), deployment.serve(model), np.random.default_rng(7), sequences=4)


def test_a_listed_default_must_be_in_each_request(deployment):
    model = deployment.serve(with_inputs("defaults_listed", GAIN))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(8))
    talk.start()
    with pytest.raises(InferenceServerException):
        talk.step({"INPUT": np.ones((1, 2), np.float32)})
    talk.step()
    talk.end()


@both_strategies
@pytest.mark.parametrize("max_batch_size", [8, 1])
def test_an_optional_default_may_be_in_a_request_or_not(deployment, max_batch_size, direct):
    model = with_inputs(
        f"defaults_optional_{max_batch_size}_{strategy(direct)}",
        optional(GAIN),
        optional(OFFSET),
        max_batch_size=max_batch_size,
        direct=direct,
    )
    sequences = 8 if direct is None else 1
    interleave(deployment.connect(), deployment.serve(model), np.random.default_rng(9), sequences)


def asked_with(**values) -> dict[str, np.ndarray]:
    given = {name: np.array([[value]], np.float32) for name, value in values.items()}
    return {"INPUT": np.array([[3, -7]], np.float32), **given}


def test_requests_with_and_without_an_optional_input_may_come_together(deployment):
    model = with_inputs("defaults_together", optional(GAIN), **TOGETHER)
    talks = four(deployment, deployment.serve(model))
    steps(talks, [asked_with()] * 4, start=True)()
    steps(talks, [asked_with(), asked_with(GAIN=5), asked_with(), asked_with(GAIN=5)])()
    steps(talks, [asked_with(GAIN=5), asked_with(), asked_with(GAIN=2), asked_with(GAIN=9)])()
    steps(talks, [asked_with(GAIN=value) for value in (1, 2, 1, 2)], end=True)()


def test_requests_without_the_optional_input_share_a_batch(deployment):
    model = with_inputs("defaults_shared", optional(GAIN), optional(OFFSET), **TOGETHER)
    talks = four(deployment, deployment.serve(model))
    assert runs_of(deployment, model, steps(talks, [asked_with()] * 4, start=True)) == {4: 1}
    given = [asked_with(GAIN=4, OFFSET=1)] * 4
    assert runs_of(deployment, model, steps(talks, given)) == {4: 1}


def test_many_sequences_that_give_it_or_not_are_all_right(deployment):
    model = with_inputs(
        "defaults_crowd",
        optional(GAIN),
        optional(OFFSET),
        oldest="preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 2000",
    )
    model = deployment.serve(model)
    client = deployment.connect()

    def talk(seed):
        rng = np.random.default_rng(seed)
        for _ in range(3):
            Conversation(client, model, rng).whole(6)

    together(lambda seed=seed: talk(seed) for seed in range(12))


REFUSED = {
    "optional_without_a_default": (
        dataclasses.replace(
            models.two_inputs(),
            inputs=(models.two_inputs().inputs[0], optional(Tensor("RIGHT", "fp32", (2,)))),
        ),
        ["RIGHT", "optional"],
    ),
    "optional_knob_without_a_default": (
        dataclasses.replace(
            models.knob("", shape=(1,)),
            inputs=(models.knob("").inputs[0], optional(Tensor("KNOB", "fp32", (1,)))),
        ),
        ["KNOB", "optional"],
    ),
    "unlisted_without_a_default": (
        dataclasses.replace(models.knob(""), inputs=models.knob("").inputs[:1]),
        ["KNOB", "constant_inputs"],
    ),
    "constant_and_listed": (with_inputs("", optional(GAIN), constants={"GAIN": [3]}), ["GAIN"]),
    "dims_that_are_not_the_models": (with_inputs("", Tensor("GAIN", "fp32", (3,))), ["GAIN", "3"]),
    "type_that_is_not_the_models": (with_inputs("", Tensor("GAIN", "int32", (1,))), ["GAIN", "INT32", "FP32"]),
    "constant_with_too_many_values": (models.defaults("", constants={"GAIN": [1, 2]}), ["GAIN"]),
    "constant_that_is_no_number": (models.defaults("", constants={"GAIN": "loud"}), ["GAIN", "loud"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_fed_is_refused_by_name(deployment, case):
    model, words = REFUSED[case]
    refused(deployment, model.variant(f"refused_{case}"), *words)


# ---- outputs whose shapes the model leaves open


@pytest.mark.parametrize("ranks", [True, False], ids=["dims", "rank"])
@pytest.mark.parametrize("max_batch_size", [8, 1])
def test_a_model_may_leave_the_shapes_of_its_outputs_open(deployment, ranks, max_batch_size):
    model = models.open_shapes(f"open_{ranks}_{max_batch_size}", ranks, max_batch_size=max_batch_size)
    interleave(deployment.connect(), deployment.serve(model), np.random.default_rng(10), sequences=5)


@pytest.mark.parametrize("ranks", [True, False], ids=["dims", "rank"])
def test_open_shapes_share_a_batch(deployment, ranks):
    model = deployment.serve(models.open_shapes(f"open_{ranks}_shared", ranks, **TOGETHER))
    talks = four(deployment, model)
    together(talk.start for talk in talks)
    assert runs_of(deployment, model, lambda: together(talk.step for talk in talks)) == {4: 1}


@pytest.mark.parametrize("ranks", [True, False], ids=["dims", "rank"])
@pytest.mark.parametrize("width", [5, 3])
def test_a_state_that_comes_out_with_another_shape_is_an_error_and_changes_nothing(deployment, width, ranks):
    model = deployment.serve(models.open_shapes(f"open_{ranks}_wrong", ranks))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(11))
    wrong = {"INPUT": np.ones((1, 4), np.float32), "WIDTH": np.full((1, 1), width, np.float32)}
    talk.start()
    for _ in range(2):
        with pytest.raises(InferenceServerException) as error:
            talk.step(wrong)
        assert "STATE_OUT" in error.value.message(), error.value
        assert str(width) in error.value.message(), error.value
    talk.step()
    talk.end()

    # and a START whose state is wrong begins nothing
    with pytest.raises(InferenceServerException, match="STATE_OUT"):
        talk.start(wrong)
    with pytest.raises(InferenceServerException):
        talk.step()
    talk.start()
    talk.end()

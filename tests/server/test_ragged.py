"""Chunks of different lengths in flight together: apart, or filled up to one length where the model takes lengths."""

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

import models
from batches import TOGETHER, four, runs_of, steps
from conversations import Conversation, interleave, together
from refusals import refused

LENGTHS = (1, 4, 4, 7)


def x(length: int, value: float = 1) -> dict[str, np.ndarray]:
    return {"X": np.arange(value, value + length, dtype=np.float32)[None]}


def of_lengths(talks, lengths, step: int, **how):
    return steps(talks, [x(length, 10 * number + step) for number, length in enumerate(lengths)], **how)


@pytest.mark.parametrize("lengths", ["int32", "int64"])
def test_rows_of_different_lengths_share_a_run_and_are_as_if_alone(deployment, lengths):
    model = deployment.serve(models.masked(f"padded_{lengths}", lengths, **TOGETHER))
    talks = four(deployment, model)
    assert runs_of(deployment, model, of_lengths(talks, LENGTHS, 0, start=True)) == {4: 1}
    for step, of in enumerate([(7, 1, 2, 2), (3, 3, 3, 3), (1, 9, 1, 9)]):
        assert runs_of(deployment, model, of_lengths(talks, of, step)) == {4: 1}
    of_lengths(talks, LENGTHS, 9, end=True)()


def test_states_of_a_padded_lstm_are_the_rows_own(deployment):
    model = deployment.serve(models.padded_lstm("padded_lstm", **TOGETHER))
    talks = four(deployment, model)

    def asked(lengths):
        return [{"X": talk.rng.standard_normal((1, n, 3)).astype(np.float32)} for talk, n in zip(talks, lengths, strict=True)]

    assert runs_of(deployment, model, steps(talks, asked(LENGTHS), start=True)) == {4: 1}
    for lengths in [(5, 1, 3, 2), (2, 2, 2, 2), (6, 1, 1, 1)]:
        steps(talks, asked(lengths))()
    steps(talks, asked(LENGTHS), end=True)()


@pytest.mark.parametrize(
    ("name", "outputs", "says"),
    [
        ("by_length", (models.HALVES,), "HALVES=HALF_LENGTHS"),
        ("both", (models.HALVES, models.LENGTH), "HALVES=HALF_LENGTHS"),
    ],
)
def test_an_output_is_cut_to_what_another_says_of_the_row(deployment, name, outputs, says):
    model = models.masked(f"padded_{name}", **TOGETHER)
    model = model.variant(model.name, outputs=(*model.outputs, *outputs))
    model = deployment.serve(model.with_parameters(model.name, padded_outputs=says))

    def cut(talk, length, **how):
        client, fed = talk.client, x(length)
        came = client.step(model.name, talk.sequence_id, fed, **how)
        right = talk.oracle.step(fed, **how)
        np.testing.assert_array_equal(came["HALVES"], right["HALVES"][:, : (length + 1) // 2])
        np.testing.assert_array_equal(came["SUMS"], right["SUMS"])

    talks = four(deployment, model)
    for how in ({"start": True}, {}, {"end": True}):
        together(lambda talk=talk, n=n: cut(talk, n, **how) for talk, n in zip(talks, LENGTHS, strict=True))


def test_an_output_that_is_all_of_the_rows_is_sent_as_wide_as_the_run(deployment):
    model = models.masked("padded_all", **TOGETHER)
    model = model.variant(model.name, outputs=(models.RAW, models.WIDTH))
    model = deployment.serve(model.with_parameters(model.name, padded_outputs="RAW=all"))
    talks = four(deployment, model)

    def wide(talk, length):
        came = talk.client.step(model.name, talk.sequence_id, x(length), start=True)
        width = came["WIDTH"].item()
        assert came["RAW"].shape == (1, width)
        np.testing.assert_array_equal(came["RAW"][:, :length], x(length)["X"])
        assert not came["RAW"][:, length:].any(), "what fills up is zeros"
        return width

    widths = together(lambda talk=talk, n=n: wide(talk, n) for talk, n in zip(talks, LENGTHS, strict=True))
    assert widths == [7] * 4


def test_a_row_without_elements_is_not_filled_up(deployment):
    # this model makes no state of it, which is an error of that row alone
    model = deployment.serve(models.masked("padded_empty", **TOGETHER))
    talks = four(deployment, model)
    of_lengths(talks, LENGTHS, 0, start=True)()

    def fails(talk):
        with pytest.raises(InferenceServerException, match="TOTAL_OUT"):
            talk.client.step(model.name, talk.sequence_id, x(0))

    others = [lambda talk=talk, n=n: talk.step(x(n)) for talk, n in zip(talks[1:], (2, 3, 5), strict=True)]
    together([lambda: fails(talks[0]), *others])
    of_lengths(talks, LENGTHS, 2, end=True)()


def test_context_and_padding_go_together(deployment):
    model = models.masked("padded_context", context=3, **TOGETHER)
    model = deployment.serve(model.with_parameters(model.name, input_context="X=3"))
    talks = four(deployment, model)
    assert runs_of(deployment, model, of_lengths(talks, LENGTHS, 0, start=True)) == {4: 1}
    for step, of in enumerate([(2, 1, 5, 1), (1, 1, 1, 1), (9, 2, 1, 4)]):
        of_lengths(talks, of, step)()
    of_lengths(talks, LENGTHS, 9, end=True)()


def test_with_growing_states_nothing_is_filled_up_and_the_lengths_are_fed(deployment):
    model = deployment.serve(models.cached("padded_never", **TOGETHER))
    talks = four(deployment, model)
    runs = runs_of(deployment, model, of_lengths(talks, LENGTHS, 0, start=True))
    assert runs == {1: 2, 2: 1}, "the two of one length share a run"
    for step, of in enumerate([(2, 1, 1, 5), (3, 3, 3, 3)]):
        of_lengths(talks, of, step)()
    of_lengths(talks, LENGTHS, 9, end=True)()


def test_without_padding_rows_of_one_length_share_a_run(deployment):
    model = models.accumulate("unpadded", **TOGETHER)
    [tensor] = model.inputs
    model = deployment.serve(model.variant(model.name, inputs=(type(tensor)(**{**vars(tensor), "ragged": True}),)))
    talks = four(deployment, model)
    asked = [{"INPUT": np.ones((1, length), np.float32)} for length in LENGTHS]
    assert runs_of(deployment, model, steps(talks, asked, start=True)) == {1: 2, 2: 1}


def test_a_run_that_fails_fails_its_row_only(deployment):
    model = deployment.serve(models.masked("padded_failing", **TOGETHER))
    talks = four(deployment, model)
    of_lengths(talks, LENGTHS, 0, start=True)()

    def fails(talk):
        with pytest.raises(InferenceServerException, match="ONNX Runtime"):
            talk.client.step(model.name, talk.sequence_id, x(3, 2000))

    together([lambda: fails(talks[0]), *(lambda t=t, n=n: t.step(x(n)) for t, n in zip(talks[1:], LENGTHS[1:], strict=True))])
    of_lengths(talks, LENGTHS, 1, end=True)()


@pytest.mark.parametrize("direct", [None, ""], ids=["oldest", "direct"])
def test_many_sequences_of_random_chunks_are_right(deployment, direct):
    model = models.masked(f"padded_many_{'oldest' if direct is None else 'direct'}", direct=direct, instances=2)
    interleave(deployment.connect(), deployment.serve(model), np.random.default_rng(1), sequences=12)


REFUSED = {
    "input_unknown": ({"padded_inputs": "Z=LENGTHS"}, ["padded_inputs", "Z", "X"]),
    "lengths_unknown": ({"padded_inputs": "X=NONE"}, ["padded_inputs", "NONE"]),
    "lengths_not_whole": ({"padded_inputs": "X=TOTAL_IN"}, ["padded_inputs", "TOTAL_IN", "whole numbers"]),
    "axis_not_open": ({"padded_inputs": "X=LENGTHS@3"}, ["padded_inputs", "axis 3"]),
    "axis_no_number": ({"padded_inputs": "X=LENGTHS@T"}, ["padded_inputs", "'T'"]),
    "form": ({"padded_inputs": "X"}, ["padded_inputs", "lengths_input"]),
    "output_unknown": ({"padded_outputs": "Z=all"}, ["padded_outputs", "Z"]),
    "output_lengths_unknown": ({"padded_outputs": "SUMS=NONE"}, ["padded_outputs", "NONE"]),
    "output_lengths_not_whole": ({"padded_outputs": "SUMS=RAW"}, ["padded_outputs", "RAW", "whole numbers"]),
    "outputs_alone": ({"padded_inputs": None, "padded_outputs": "SUMS=all"}, ["padded_outputs", "padded_inputs"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_padding_is_refused_by_name_value_and_rule(deployment, case):
    parameters, words = REFUSED[case]
    model = models.masked(f"refused_padding_{case}")
    refused(deployment, model.variant(model.name, parameters={**model.parameters, **parameters}), *words)


def test_an_output_of_which_nobody_says_what_belongs_to_a_row_is_refused(deployment):
    model = models.masked("refused_padding_untold")
    refused(deployment, model.variant(model.name, outputs=(models.HALVES,)), "HALVES", "padded_outputs", "all")

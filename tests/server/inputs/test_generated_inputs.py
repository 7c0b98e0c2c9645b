"""Inputs that the backend makes (`generated_inputs`): each answer is held against ONNX Runtime stepped by hand, which is fed
what a plain count in Python says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness.batches import TOGETHER, four, runs_of, steps
from harness.conversations import Conversation, interleave, some_at_once, together
from harness.graphs import BATCH
from harness.model import Model, Tensor
from harness.models import generated
from harness.models.generated import Made, counted
from harness.raw import Refused
from harness.raw import Unary as Raw
from harness.refusals import refused
from harness.state_api import OWN, StateSequence, every_scheduler, with_state_api
from support.paths import TEST_BACKENDS


def tokens(*values: int) -> dict[str, np.ndarray]:
    return {"INPUT": np.array([values], np.int64)}


#: The run fails.
FAILS = tokens(9)


def scheduled(model: Model, by: str, **parameters: object) -> Model:
    return with_state_api(model, by, state_api=None, **parameters)


# ---- what the model is fed


@pytest.mark.simulated_device
@every_scheduler
@pytest.mark.parametrize("shared", [False, True], ids=["per row", "shared"])
def test_each_kind_in_sequences_that_take_turns_and_that_come_together(deployment, by, shared):
    made = generated.SHARED if shared else generated.OF_EACH_KIND
    model = deployment.serve(scheduled(counted(f"each_kind_{by}_{shared}", *made), by))
    rng = np.random.default_rng(3)
    interleave(deployment.connect(), model, rng, sequences=6)
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng(seed)) for seed in range(6)]
    for talk in talks:
        talk.start()
    some_at_once(talks, rng, rounds=12)
    for talk in talks:
        talk.end()


def test_a_decoder_needs_nothing_but_its_tokens(deployment):
    model = deployment.serve(generated.decoder("generated_decoder"))
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng(seed)) for seed in range(4)]
    for talk in talks:
        talk.start()
    some_at_once(talks, np.random.default_rng(5), rounds=10)
    for talk in talks:
        talk.end()


@pytest.mark.parametrize("mask_type", ["int32", "fp32", "bool"])
def test_a_decoder_is_completed_without_its_generated_inputs(deployment, mask_type):
    """Nothing is listed under `input`: what is left for requests are the tokens."""
    model = generated.decoder(f"generated_bare_{mask_type}", mask_type=mask_type)
    entries = model.parameters["generated_inputs"]
    deployment.serve(
        model.variant(
            model.name,
            inputs=(),
            outputs=(),
            scheduling="",
            max_batch_size=0,
            states=(),
            parameters={"state_pairs": "auto", "generated_inputs": entries},
        )
    )
    interleave(deployment.connect(), model, np.random.default_rng(6), sequences=3, longest=4)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="16_-1"),
        pytest.param({"has_mask": True}, id="16_-1_with_mask"),
        pytest.param({"left_chunks": 4}, id="16_4"),
        pytest.param({"left_chunks": 4, "has_open_dims": False}, id="16_4_fixed"),
    ],
)
def test_wenets_encoder_needs_nothing_but_its_chunks(deployment, request, how):
    """Nothing is listed in its configuration. Of 8 chunks, the last ones have all of a past of 4."""
    model = generated.wenet("generated_wenet_" + request.node.callspec.id.replace("-", "m"), **how)
    deployment.serve(model.variant(model.name, inputs=(), outputs=(), scheduling="", states=()))
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng(seed)) for seed in range(2)]
    for number in range(8):
        for talk in talks:
            talk.step(start=number == 0, end=number == 7)


@pytest.mark.simulated_device
def test_warm_up_and_rows_of_padding_count_nothing(deployment):
    before = len(deployment.server.log_text())
    for name, made in (("generated_warm", generated.OF_EACH_KIND), ("generated_warm_shared", generated.SHARED)):
        parameters = {"warmup_batch_sizes": "1 3 8", "always_pad_to_max_batch": "1"}
        model = deployment.serve(counted(name, *made).with_parameters(name, **parameters))
        assert "warm-up" not in deployment.server.log_text()[before:], "a failure would be there"
        interleave(deployment.connect(), model, np.random.default_rng(2), sequences=4)


# ---- which rows share a run


STEPS = Made("steps", "int32", (BATCH,), "steps", generated.steps())
OFFSET = Made("offset", "int64", (), "steps", generated.steps())


def test_sequences_with_other_counts_share_a_run(deployment):
    model = deployment.serve(counted("counts_together", STEPS, **TOGETHER))
    talks = four(deployment, model)
    # the same length of the cache, in one, two, three and four steps

    def begin(talk, steps_before):
        talk.start(tokens(*[1] * (4 - steps_before)))
        for _ in range(steps_before):
            talk.step(tokens(1))

    together(lambda talk=talk, count=count: begin(talk, count) for count, talk in enumerate(talks))
    assert runs_of(deployment, model, steps(talks, [tokens(2, 3)] * 4)) == {4: 1}


def test_rows_of_different_lengths_have_their_own_positions(deployment):
    model = deployment.serve(generated.ragged("counts_ragged", **TOGETHER))
    talks = four(deployment, model)
    together(talk.start for talk in talks)
    for _ in range(3):
        asked = [{"INPUT": np.ones((1, length), np.float32)} for length in talks[0].rng.permutation([1, 2, 5, 6])]
        assert runs_of(deployment, model, steps(talks, asked)) == {4: 1}


def test_rows_share_a_run_only_if_what_they_share_is_equal(deployment):
    model = deployment.serve(counted("counts_shared", OFFSET, **TOGETHER))
    talks = four(deployment, model)
    together(
        [
            *(lambda talk=talk: talk.start(tokens(1, 1)) for talk in talks[:2]),
            *(lambda talk=talk: talk.start(tokens(1)) for talk in talks[2:]),
        ]
    )
    together(lambda talk=talk: talk.step(tokens(1)) for talk in talks[2:])
    assert runs_of(deployment, model, steps(talks, [tokens(2)] * 4)) == {2: 2}


# ---- what changes a count


@pytest.fixture
def sequence(deployment):
    raw = Raw(deployment)

    def made(name: str, by: str, *made: Made, **parameters) -> StateSequence:
        model = deployment.serve(with_state_api(counted(name, *(made or generated.OF_EACH_KIND)), by, **parameters))
        return StateSequence(raw, model, np.random.default_rng(5))

    yield made
    raw.close()


def fails(one: StateSequence, **how) -> None:
    with pytest.raises(Refused, match="ONNX Runtime"):
        one.step(FAILS, **how)


@pytest.mark.simulated_device
@every_scheduler
def test_only_an_inference_that_changes_the_state_counts(sequence, by):
    one = sequence(f"what_counts_{by}", by)
    one.start(tokens(1, 2, 3))
    fails(one)
    one.step(tokens(1), commit=False)
    one.ask(get_state=True, query_state=True)
    one.step(tokens(3, 1))
    fails(one, commit=False)
    fails(one, reset_state=True)
    one.step(tokens(0), reset_state="CACHE")
    one.step(tokens(0, 0))
    one.end(tokens(1))


@pytest.mark.skipif(
    not (TEST_BACKENDS / "stateful" / "libtriton_stateful.so").exists(),
    reason="no library with injected faults; scripts/test builds it",
)
def test_a_panic_counts_nothing(deploy):
    deployed = deploy(backends=TEST_BACKENDS)
    model = deployed.serve(scheduled(counted("counts_panic", *generated.OF_EACH_KIND), OWN))
    raw = Raw(deployed)
    one = StateSequence(raw, model, np.random.default_rng(5))
    one.start()
    for stage in ("gather", "run", "respond"):
        with pytest.raises(Refused, match="panicked"):
            one.step(inject_panic=stage)
        one.step()
    one.end()
    raw.close()


@every_scheduler
def test_a_start_and_a_reset_of_all_states_count_from_zero(sequence, by):
    one = sequence(f"count_again_{by}", by, on_duplicate_start="restart" if by == OWN else None)
    one.start(tokens(1, 2))
    one.step(tokens(3))
    one.step(tokens(3), reset_state=True, commit=False)
    one.step(tokens(2, 2))
    one.step(tokens(1), reset_state=True)
    one.step(tokens(1))
    one.ask(reset_state=True)
    one.step(tokens(2))
    one.start(tokens(0))
    one.step(tokens(1))
    one.end()
    one.start(tokens(0, 1), commit=False)
    one.step(tokens(1))
    one.end()


@every_scheduler
@pytest.mark.host_and_device
def test_snapshots_and_clones_have_the_counts(sequence, by):
    one = sequence(f"counts_move_{by}", by)
    one.start(tokens(1, 2))
    saved = one.save(tokens(3))
    clone = one.clone(tokens(0, 0))
    silent = one.clone()
    one.step(tokens(2))
    clone.step(tokens(1))
    silent.step(tokens(1, 1))
    one.ask(tokens(1), restore=saved, commit=False)
    one.step(tokens(1))
    one.ask(tokens(1), restore=saved)
    one.step(tokens(1))
    one.ask(restore=saved)
    one.step(tokens(1))
    one.ask(tokens(1), restore=saved, reset_state=True)
    one.step(tokens(1))
    fresh = one.restored(saved, tokens(1), commit=False)
    fresh.step(tokens(2, 2))
    for other in (one, clone, silent, fresh):
        other.end()


def test_a_snapshot_of_a_model_with_other_counters_is_refused(sequence):
    one = sequence("counts_steps", OWN, STEPS)
    one.start(tokens(1))
    saved = one.save()
    other = sequence("counts_nothing", OWN, Made("m", "int64", (BATCH, "T"), "mask(CACHE)", generated.mask("CACHE")))
    with pytest.raises(Refused, match="its counters are steps, and the model's none"):
        other.ask(start=True, restore=saved)


@pytest.mark.simulated_device
@every_scheduler
def test_sequences_of_which_anything_is_asked(sequence, by):
    """Random requests of sequences that come together: failures, `commit: false`, resets, restarts, clones and snapshots."""
    first = sequence(f"any_count_{by}", by)
    rng = np.random.default_rng(11)
    talks = [first, *(StateSequence(first.client, first.model, np.random.default_rng(seed)) for seed in range(4))]
    saved = []
    for talk in talks:
        talk.start()

    def ask(talk: StateSequence, kind: int) -> None:
        if kind == 0:
            fails(talk, commit=bool(talk.rng.integers(2)))
        elif kind == 1:
            talk.step(commit=False)
        elif kind == 2:
            talk.step(reset_state=bool(talk.rng.integers(2)))
        elif kind == 3 and saved:
            talk.ask(tokens(1), restore=saved[-1])
        else:
            talk.step()

    for _ in range(25):
        chosen = rng.choice(len(talks), 3, replace=False)
        kinds = rng.integers(0, 8, 3)
        together(lambda at=at, kind=kind: ask(talks[at], kind) for at, kind in zip(chosen, kinds, strict=True))
        what = int(rng.integers(4))
        at = int(rng.integers(len(talks)))
        if what == 0:
            saved.append(talks[at].save())
        elif what == 1:
            talks[at].end()
            talks[at].start()
        elif what == 2:
            other = (at + 1) % len(talks)
            talks[other].end()
            talks[other] = talks[at].clone()
    for talk in talks:
        talk.end()


# ---- what is refused


def test_a_value_that_the_type_cannot_hold_is_refused_and_changes_nothing(deployment):
    made = (
        Made("places", "uint8", (BATCH, "n"), "positions(INPUT)*50", generated.positions("INPUT", factor=50)),
        Made("far", "fp16", (BATCH,), "steps*100", generated.steps(100)),
    )
    model = deployment.serve(counted("counts_too_far", *made))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(1))
    talk.start(tokens(1, 2, 3, 0))
    for _ in range(2):
        with pytest.raises(InferenceServerException) as error:
            talk.step(tokens(1, 2, 3))
        assert error.value.status() == "StatusCode.INVALID_ARGUMENT"
        for word in ("'places'", "positions(INPUT)*50", "would be 300", "TYPE_UINT8", "255"):
            assert word in error.value.message(), error.value
        talk.step(tokens())
    talk.step(tokens(1, 2))
    with pytest.raises(InferenceServerException, match="'places'"):
        talk.step(tokens(1))
    for _ in range(17):
        talk.step(tokens())
    with pytest.raises(InferenceServerException, match="'far'"):
        talk.step(tokens())
    talk.start(tokens(1))
    talk.end()


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ("steps=counter", ["'counter' is no kind"]),
        ("other=steps", ["'generated_inputs' names 'other'", "INPUT, CACHE, steps"]),
        ("steps=elements(other)", ["'other' is no input that requests carry", "INPUT"]),
        ("steps=elements(CACHE)", ["'CACHE' is no input that requests carry", "INPUT"]),
        ("steps=length(INPUT)", ["no state has the input 'INPUT'", "CACHE"]),
        ("steps=positions(INPUT)", ["TYPE_INT32 [-1]", "no dimension beside the batch is open"]),
        ("steps=last(steps)", ["TYPE_INT32 [-1]", "write 'last(steps, LENGTH)'"]),
        ("steps=steps INPUT=steps", ["'INPUT'", "'input'", "'generated_inputs'"]),
    ],
)
def test_an_entry_that_does_not_fit_is_refused_at_load(deployment, entries, words):
    model = counted("counts_refused", STEPS).with_parameters("counts_refused", generated_inputs=entries)
    refused(deployment, model, "generated_inputs", *words)


def test_a_generated_input_is_no_input_of_requests(deployment):
    model = counted("counts_listed", dataclasses.replace(STEPS, dims=(BATCH, 1)))
    listed = model.variant(model.name, inputs=(*model.inputs, Tensor("steps", "int32", (1,))))
    refused(deployment, listed, "'steps'", "'input'", "'generated_inputs'")


def test_the_load_log_says_what_could_be_generated(deployment):
    """The line that it gives is the one that a decoder needs, and no longer there with it."""
    model = generated.decoder("generated_proposed")
    entries = "position_ids=positions(input_ids) attention_mask=mask(past_key_values.0.key, input_ids)"
    line = f"write parameters {{ key: 'generated_inputs' value {{ string_value: '{entries}' }} }}"
    carried = (Tensor("attention_mask", "int64", (-1,)), Tensor("position_ids", "int64", (-1,)))
    before = len(deployment.server.log_text())
    deployment.serve(
        model.variant("generated_not_yet", inputs=(*model.inputs, *carried), parameters={}, generated={}),
    )
    assert line in deployment.server.log_text()[before:]
    before = len(deployment.server.log_text())
    deployment.serve(model.with_parameters(model.name, generated_inputs=entries))
    assert "can make inputs" not in deployment.server.log_text()[before:]
    interleave(deployment.connect(), model, np.random.default_rng(4), sequences=2)


def test_the_load_log_shows_what_is_generated(deployment):
    before = len(deployment.server.log_text())
    deployment.serve(counted("counts_logged", *generated.OF_EACH_KIND))
    log = deployment.server.log_text()[before:]
    for of in generated.OF_EACH_KIND:
        assert f"generated: {of.entry}" in log, log

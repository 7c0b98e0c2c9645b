"""Rows whose growing states have different lengths in one run (`growing_padding`): every answer and state is that of ONNX
Runtime stepped by hand, one sequence at a time."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from tritonclient.utils import InferenceServerException

from harness.batches import TOGETHER, batch_sizes, four, runs_of, steps
from harness.conversations import Conversation, interleave, outcome, some_at_once, together
from harness.deployment import eventually
from harness.model import Model, Tensor
from harness.models import padded_states
from harness.models.generated import mask, positions
from harness.raw import Unary
from harness.refusals import refused
from harness.repetitions import repeated
from harness.state_api import OLDEST, OWN, StateSequence, every_scheduler, with_state_api
from support.paths import ROOT

F32 = np.float32
SIDES = ("left", "right")
KEY = "past_key_values.0.key"

both_sides = pytest.mark.parametrize("side", SIDES)


def chunk(length: int, seed: int = 0) -> dict[str, np.ndarray]:
    return {"INPUT": np.random.default_rng([length, seed]).integers(-9, 10, (1, length, 2)).astype(F32)}


def started(talks: list[Conversation], lengths: list[int]) -> None:
    """Each sequence has a state of its own length."""
    together(
        lambda talk=talk, length=length: talk.start(chunk(length)) for talk, length in zip(talks, lengths, strict=True)
    )


# ---- answers and states


@pytest.mark.simulated_device
@both_sides
@every_scheduler
@pytest.mark.host_and_device
def test_sequences_of_any_length_get_their_own_answers(deployment, by, side):
    model = deployment.serve(with_state_api(padded_states.ranked(f"padded_{by}_{side}", side), by, state_api=None))
    rng = np.random.default_rng(1)
    client = deployment.connect()
    interleave(client, model, rng, sequences=6)
    talks = [Conversation(client, model, np.random.default_rng([2, seed])) for seed in range(7)]
    together(talk.start for talk in talks)
    some_at_once(talks, rng, rounds=12)
    deployment.settles("stateful_live_sequences", model, 7)
    talks[0].end()
    talks[0].start()
    some_at_once(talks, rng, rounds=6)
    together(talk.end for talk in talks)
    deployment.settles("stateful_growing_state_bytes", model, 0)


@pytest.mark.simulated_device
@both_sides
@pytest.mark.parametrize("layout", ["NTW", *repeated("NWT", "TNW", "TWN", "WNT", "WTN")])
def test_states_are_padded_along_any_axis(deployment, layout, side):
    model = deployment.serve(padded_states.ranked(f"padded_{layout}_{side}", side, layout, **TOGETHER))
    talks = four(deployment, model)
    started(talks, [1, 7, 3, 5])
    for count in (2, 1):
        ran = runs_of(deployment, model, steps(talks, [chunk(count, seed) for seed in range(4)]))
        assert ran == {4: 1}, "states of 1 to 7 elements share a run"
    ran = runs_of(deployment, model, steps(talks, [chunk(2, seed) for seed in range(4)], end=True))
    assert ran == {4: 1}


@pytest.mark.simulated_device
@both_sides
@pytest.mark.parametrize("type", ["fp32", "fp16"])
def test_states_that_are_kept_as_fp16_are_padded(deployment, type, side):
    made = padded_states.ranked(f"padded_narrow_{type}_{side}", side, type=type, **TOGETHER)
    model = deployment.serve(made.with_parameters(made.name, store_states_as_fp16="1"))
    talks = four(deployment, model)
    started(talks, [4, 1, 6, 2])
    for round in range(3):
        ran = runs_of(deployment, model, steps(talks, [chunk(1, 10 * round + seed) for seed in range(4)]))
        assert ran == {4: 1}


@pytest.mark.simulated_device
@both_sides
@pytest.mark.host_and_device
def test_states_are_read_cloned_restored_and_discarded_without_their_padding(deployment, side):
    made = padded_states.ranked(f"padded_api_{side}", side)
    model = deployment.serve(with_state_api(made, OWN))
    client = Unary(deployment)
    talks = [StateSequence(client, model, np.random.default_rng(seed)) for seed in range(5)]
    for talk, length in zip(talks, (1, 9, 4, 2, 6), strict=True):
        talk.start(chunk(length))
    rng = np.random.default_rng(3)
    saved = None
    for round in range(6):
        together(lambda talk=talk: talk.step(chunk(2, int(talk.sequence_id) + round)) for talk in talks)
        for talk in rng.permutation(talks)[:2]:
            talk.states()
        talks[1].step(chunk(1), commit=False)
        talks[2].step(chunk(2), get_state=True, commit=False)
        saved = saved or talks[3].save()
        talks.append(talks[0].clone(chunk(1)))
        together(lambda talk=talk: talk.step(chunk(1, round), get_state=True) for talk in talks)
        talks[2].ask(set={"CACHE_IN": chunk(3)["INPUT"], "TAIL_IN": np.arange(6).reshape(1, 2, 3)})
        talks[4] = talks[0].restored(saved)
    for talk in talks:
        talk.states()


def test_a_row_that_fails_leaves_the_others_their_answers_and_states(deployment):
    model = deployment.serve(padded_states.ranked("padded_fails", **TOGETHER))
    talks = four(deployment, model)
    started(talks, [2, 8, 5, 3])
    poison = {"INPUT": np.full((1, 1, 2), padded_states.TOO_LARGE + 1, F32)}
    for victim in range(4):
        asked = [poison if at == victim else chunk(1, at) for at in range(4)]
        ends = together(
            lambda talk=talk, fed=fed: outcome(lambda: talk.step(fed)) for talk, fed in zip(talks, asked, strict=True)
        )
        failed = [at for at, end in enumerate(ends) if isinstance(end, InferenceServerException)]
        assert failed == [victim]
        together(lambda talk=talk: talk.step(chunk(2)) for talk in talks)


def test_padding_is_not_counted_as_state(deployment):
    made = padded_states.ranked("padded_bytes", **TOGETHER)
    model = deployment.serve(made.with_parameters(made.name, max_state_bytes_per_sequence=1024))
    talks = four(deployment, model)
    lengths = [1, 20, 40, 10]
    started(talks, lengths)
    # CACHE has 8 bytes an element, and TAIL 16
    deployment.settles("stateful_growing_state_bytes", model, 24 * sum(lengths))
    assert runs_of(deployment, model, steps(talks, [chunk(1)] * 4)) == {4: 1}
    deployment.settles("stateful_growing_state_bytes", model, 24 * (sum(lengths) + 4))
    with pytest.raises(InferenceServerException, match="1032 bytes, and 1024 are allowed"):
        talks[2].step(chunk(2))
    together(lambda talk=talk: talk.step(chunk(1)) for talk in talks)


def test_a_batch_of_the_same_sequences_copies_nothing(deployment):
    model = deployment.serve(padded_states.ranked("padded_stays", **TOGETHER))
    talks = four(deployment, model)
    started(talks, [3, 9, 1, 5])
    steps(talks, [chunk(1, seed) for seed in range(4)])()
    before = deployment.metric("stateful_state_bytes_copied_total", model)
    ran = runs_of(deployment, model, lambda: [steps(talks, [chunk(1, seed) for seed in range(4)])() for _ in range(3)])
    assert ran == {4: 3}
    assert deployment.metric("stateful_state_bytes_copied_total", model) == before
    talks[1].step(chunk(1))
    steps(talks, [chunk(1, seed) for seed in range(4)])()


def test_a_long_row_is_not_padded_to_with_short_ones(deployment):
    """More than 4 MB, of which more than half would be padding. So many elements have no exact sum."""
    model = deployment.serve(padded_states.ranked("padded_long", tolerance=1e-4, **TOGETHER))
    talks = four(deployment, model)
    started(talks, [100_000, 60_000, 2, 3])
    # On a busy machine, a request may come when the others have waited for too long.
    tries = [runs_of(deployment, model, steps(talks, [chunk(1)] * 4)) for _ in range(3)]
    assert {2: 2} in tries
    assert max(max(runs) for runs in tries) == 2


def test_without_the_parameter_rows_of_different_lengths_run_apart(deployment):
    model = deployment.serve(padded_states.ranked("padded_not", None, **TOGETHER))
    talks = four(deployment, model)
    started(talks, [1, 7, 3, 3])
    assert runs_of(deployment, model, steps(talks, [chunk(1)] * 4)) == {1: 2, 2: 1}


# ---- what is refused


@pytest.mark.parametrize("deployment_side", SIDES)
def test_a_model_that_does_not_ignore_padding_is_refused_with_the_difference(deployment, deployment_side):
    model = padded_states.ranked(f"padded_unmasked_{deployment_side}", deployment_side, masked=False)
    refused(deployment, model, "growing_padding", f"'{deployment_side}'", "4 elements", "'OUTPUT'", "instead of")


@pytest.mark.parametrize("far", [8, 900])
def test_a_rule_on_the_longest_row_is_refused(deployment, far):
    model = padded_states.ranked(f"padded_far_{far}", far=far)
    refused(deployment, model, "growing_padding", "'OUTPUT'", "instead of")


def test_a_state_that_loses_elements_is_refused(deployment):
    model = padded_states.ranked("padded_window_8", window=8)
    refused(deployment, model, "growing_padding", "'CACHE_OUT'", "[3, 8, 2]", "9 elements along axis 1")


def test_a_state_that_stops_growing_later_ends_the_padding(deploy):
    deployment = deploy()
    model = deployment.serve(padded_states.ranked("padded_window_20", window=20, **TOGETHER))
    talks = four(deployment, model)
    started(talks, [2, 18, 6, 10])
    assert runs_of(deployment, model, steps(talks, [chunk(1)] * 4)) == {4: 1}
    assert "run apart" not in deployment.server.log_text()
    steps(talks, [chunk(4, seed) for seed in range(4)])()
    eventually(
        deployment.server.log_text,
        lambda text: "from now on, rows whose states have different lengths run apart" in text,
    )
    for round in range(6):
        steps(talks, [chunk(4, 10 * round + seed) for seed in range(4)])()


@pytest.mark.parametrize(
    "parameters, words",
    [
        ({"growing_padding": "up"}, ("growing_padding", "'up'", "'left'", "'right'")),
        ({"generated_inputs": None, "constant_inputs": None}, ("growing_padding", "mask(STATE, INPUT)")),
        ({"generated_inputs": "MASK=mask(CACHE_IN)"}, ("MASK=mask(CACHE_IN)", "mask(STATE, INPUT)")),
    ],
    ids=["no side", "no mask", "no input"],
)
def test_what_growing_padding_needs_is_said(deployment, parameters, words):
    made = padded_states.ranked(f"padded_refused_{len(words[0])}_{len(parameters)}")
    inputs = made.inputs
    if parameters.get("generated_inputs", "") is None:
        inputs = (*inputs, Tensor("MASK", "int64", (-1,)))
    refused(deployment, made.variant(made.name, inputs=inputs, parameters={**made.parameters, **parameters}), *words)


# ---- a real export


def decoder(name: str, side: str, **changes) -> Model:
    """A Llama of two layers, as Optimum exports it (scripts/support/bench/export_decoder.py makes the file)."""
    layers = [(layer, part) for layer in range(2) for part in ("key", "value")]
    return Model(
        name,
        lambda: onnx.load(ROOT / "assets" / "decoder.onnx"),
        inputs=(Tensor("input_ids", "int64", (-1,), between=(0, 63)),),
        outputs=(Tensor("logits", "fp32", (-1, 64)),),
        states=tuple((f"past_key_values.{layer}.{part}", f"present.{layer}.{part}") for layer, part in layers),
        lengths_at_start={"past_sequence_length": 0},
        parameters={
            "generated_inputs": f"attention_mask=mask({KEY}, input_ids) position_ids=positions(input_ids)",
            "growing_padding": side,
        },
        generated={
            "attention_mask": lambda *of: mask(KEY, 2, "input_ids")(*of)[None],
            "position_ids": lambda *of: positions("input_ids")(*of)[None],
        },
        tolerance=1e-4,
        **changes,
    )


@pytest.mark.simulated_device
@both_sides
@pytest.mark.parametrize("by", [OWN, OLDEST])
@pytest.mark.host_and_device
def test_greedy_loops_of_a_real_decoder_get_the_tokens_of_onnx_runtime(deployment, by, side):
    model = deployment.serve(with_state_api(decoder(f"decoder_{by}_{side}", side), by, state_api=None))
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng([5, seed])) for seed in range(6)]

    def loop(talk: Conversation, prompt: int, count: int) -> list[int]:
        """The tokens of a greedy loop. Each answer is compared with that of ONNX Runtime."""
        tokens, fed = [], talk.rng.integers(0, 64, (1, prompt))
        for step in range(count):
            answer = talk.step({"input_ids": fed}, start=step == 0, end=step == count - 1)
            fed = answer["logits"][:, -1:].argmax(-1)
            tokens.append(int(fed.item()))
        return tokens

    before = batch_sizes(deployment, model)
    prompts = [3, 17, 8, 1, 30, 12]
    together(
        lambda talk=talk, prompt=prompt: loop(talk, prompt, 25 + prompt % 4)
        for talk, prompt in zip(talks, prompts, strict=True)
    )
    sizes = {size: runs - before.get(size, 0) for size, runs in batch_sizes(deployment, model).items()}
    assert sum(runs for size, runs in sizes.items() if size > 1), f"no rows shared a run: {sizes}"

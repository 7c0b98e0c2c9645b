"""`input_context` with `:whole` and `:repeat`: what stands in front of the first request of a sequence.

The models answer the very tensor that they were fed.
"""

import contextlib
import dataclasses
import re

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import models
from harness.batches import TOGETHER, four, runs_of
from harness.clients import new_id
from harness.conversations import Conversation, interleave, script, together, windowed
from harness.graphs import BATCH
from harness.model import Model, Tensor
from harness.raw import Refused, Unary
from harness.refusals import refused
from harness.state_api import OLDEST, StateSequence, both_schedulers, with_state_api
from harness.strategies import both_strategies

pytestmark = pytest.mark.simulated_device

# a Zipformer takes 45 frames, and the first 13 repeat the chunk before
FRAMES = (13, 1)


def zipformer(name: str, **changes) -> Model:
    return models.framed(
        name, [BATCH, 45, 3], FRAMES, (-1, 3), "FRAMES=13@1:whole", first="whole", window=45, **changes
    )


def open_whole(name: str, **changes) -> Model:
    return models.framed(name, [BATCH, "T", 3], (4, 1), (-1, 3), "FRAMES=4:whole", first="whole", **changes)


def written_window(name: str, **changes) -> Model:
    """The model would take any length."""
    says = "FRAMES=13+32@1:whole"
    return models.framed(name, [BATCH, "T", 3], FRAMES, (-1, 3), says, first="whole", window=45, **changes)


def repeated(name: str, **changes) -> Model:
    return models.framed(name, [BATCH, "T", 3], (4, 1), (-1, 3), "FRAMES=4:repeat", first="repeat", **changes)


def frames(length: int, value: float = 0) -> dict[str, np.ndarray]:
    return {"FRAMES": np.arange(value, value + 3 * length, dtype=np.float32).reshape(1, length, 3)}


@pytest.fixture
def raw(deployment):
    with contextlib.closing(Unary(deployment)) as client:
        yield client


@both_strategies
@pytest.mark.parametrize("kind", [zipformer, written_window, open_whole, repeated])
def test_sequences_begin_with_what_the_parameter_says(deployment, kind, direct):
    model = kind(f"first_{kind.__name__}_{'oldest' if direct is None else 'direct'}", direct=direct)
    interleave(deployment.connect(), deployment.serve(model), np.random.default_rng(1), sequences=6)


@pytest.mark.parametrize("first", ["whole", "repeat"])
@pytest.mark.parametrize(
    ("name", "shape", "context", "dims", "more"),
    [
        ("time_first", ["T", BATCH, 5], (2, 0), (-1, -1, 5), {"batch_inside": True}),
        ("unbatched", [1, "T"], (3, 1), (1, -1), {"out": (1, -1), "max_batch_size": 0}),
    ],
)
def test_the_axis_may_be_any(deployment, name, shape, context, dims, more, first):
    says = f"FRAMES={context[0]}@{context[1]}:{first}"
    model = models.framed(f"first_{name}_{first}", shape, context, dims, says, first=first, **more)
    if not model.max_batch_size:
        model = dataclasses.replace(model, outputs=(model.outputs[0], Tensor("COUNT", "int64", (1, 1))))
    deployment.serve(model)
    talk = Conversation(deployment.connect(), model, np.random.default_rng(2))
    batch = (1,) if model.max_batch_size else ()
    for length, start in ((4, True), (1, False), (2, False), (5, True), (1, False)):
        if name == "time_first":
            value = np.arange(length * 5, dtype=np.float32).reshape(*batch, length, 1, 5)
        else:
            value = np.arange(length, dtype=np.float32).reshape(1, length)
        talk.step({"FRAMES": value}, start=start)


@pytest.mark.parametrize(("kind", "lengths"), [(zipformer, (45, 32)), (open_whole, (9, 5)), (repeated, (5, 5))])
def test_first_and_later_inferences_share_a_run(deployment, raw, kind, lengths):
    """A reset makes an inference a first one, and core sends those of live sequences together."""
    name = f"first_{kind.__name__}_together"
    model = kind(name, **TOGETHER)
    # Core puts different shapes into one batch only then.
    model = dataclasses.replace(model, inputs=(dataclasses.replace(model.inputs[0], ragged=True),))
    model = deployment.serve(with_state_api(model, OLDEST))
    talks = [StateSequence(raw, model) for _ in range(4)]
    together(lambda talk=talk: talk.start(frames(lengths[0], 7)) for talk in talks)
    first, later = lengths
    for resets in ((0, 2), (3,), (), (0, 1, 2, 3)):

        def asked(number: int, is_first: bool):
            value = frames(first if is_first else later, 100 * number)
            return lambda: talks[number].step(value, reset_state=is_first)

        tasks = [asked(number, number in resets) for number in range(4)]
        assert runs_of(deployment, model, lambda tasks=tasks: together(tasks)) == {4: 1}
    # In the same payloads, STARTs and ENDs.
    talks[0] = talks[0].other()
    together([lambda: talks[0].start(frames(first)), *(lambda t=talk: t.end(frames(later)) for talk in talks[1:])])


def test_starts_that_are_as_long_as_later_requests_run_apart(deployment):
    """In the model they are not as long: nothing stands in front of the START."""
    model = deployment.serve(open_whole("first_whole_apart", **TOGETHER))
    talks = four(deployment, model)
    together(lambda talk=talk: talk.start(frames(6)) for talk in talks)
    together([lambda: talks[0].start(frames(6, 50)), *(lambda t=talk: t.step(frames(6, 9)) for talk in talks[1:])])


def test_an_id_used_again_without_waiting_begins_with_its_own_window(deployment):
    model = deployment.serve(open_whole("first_whole_reused", max_candidates=200))
    rng = np.random.default_rng(3)
    windowed(
        deployment.connect("stream"), model, rng, [script(model, rng, new_id(), lives=5) for _ in range(4)], window=8
    )


def refuses(task, *words) -> None:
    with pytest.raises((InferenceServerException, Refused)) as caught:
        task()
    assert all(re.search(rf"(?<!\d){word}(?!\d)", str(caught.value)) for word in words), caught.value


@pytest.mark.parametrize("kind", [zipformer, written_window])
def test_a_request_of_the_wrong_length_is_refused_and_harms_nothing(deployment, kind):
    model = deployment.serve(kind(f"first_wrong_lengths_{kind.__name__}"))
    client = deployment.connect()
    talk = Conversation(client, model, np.random.default_rng(4))
    for length in (32, 44, 46, 0):
        refuses(lambda length=length: talk.start(frames(length)), "FRAMES", "axis 1", "first inference", 45, length)
    talk.start(frames(45))
    for length in (45, 31, 33, 0):
        refuses(lambda length=length: talk.step(frames(length)), "FRAMES", "after the first", 32, length)
    talk.step(frames(32, 90))
    # A START that is refused ends the sequence, as any START that fails.
    refuses(lambda: talk.start(frames(32)), "first inference")
    refuses(lambda: talk.step(frames(32)), "not live")


def test_without_a_window_the_first_request_has_the_context_at_least(deployment):
    client = deployment.connect()
    other = deployment.serve(open_whole("first_wrong_open_lengths"))
    talk = Conversation(client, other, np.random.default_rng(5))
    refuses(lambda: talk.start(frames(3)), "at least 4")
    talk.start(frames(4))
    talk.step(frames(1, 50))
    talk = Conversation(client, deployment.serve(repeated("first_wrong_repeat")), np.random.default_rng(6))
    refuses(lambda: talk.start(frames(0)), "at least 1")
    talk.start(frames(1, 5))
    talk.end(frames(2))


REFUSED = {
    "later_dims": (zipformer("", inputs=(Tensor("FRAMES", "fp32", (32, 3)),)), ["13@1:whole", "[32, 3]", "[-1, 3]"]),
    "window_dims": (zipformer("", inputs=(Tensor("FRAMES", "fp32", (45, 3)),)), ["13@1:whole", "[45, 3]", "[-1, 3]"]),
    "first": (zipformer("", parameters={"input_context": "FRAMES=13@1:all"}), ["'all'", "'zeros', 'repeat', 'whole'"]),
    "as_long": (zipformer("", parameters={"input_context": "FRAMES=45@1:whole"}), ["longer than 45"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_configuration_is_refused_by_what_to_write(deployment, case):
    model, words = REFUSED[case]
    refused(deployment, model.variant(f"refused_first_{case}"), "input_context", *words)


# ---- rows of different lengths


@pytest.mark.parametrize("first", ["whole", "repeat"])
def test_padded_rows_have_the_length_that_the_model_sees(deployment, first):
    model = models.masked(f"first_padded_{first}", context=2)
    inputs = tuple(dataclasses.replace(t, first=first) if t.context else t for t in model.inputs)
    model = dataclasses.replace(model, inputs=inputs).with_parameters(model.name, input_context=f"X=2:{first}")
    deployment.serve(model)
    client = deployment.connect()
    rng = np.random.default_rng(7)
    interleave(client, model, rng, sequences=5)
    together(lambda s=seed: Conversation(client, model, np.random.default_rng(s)).whole(6) for seed in range(8))


# ---- the State API


@both_schedulers
@pytest.mark.parametrize("kind", [open_whole, repeated])
def test_a_sequence_without_a_context_stays_without_it_until_an_inference(deployment, raw, kind, by):
    """Snapshots, clones and resets keep the difference between no context and one of zeros."""
    model = deployment.serve(with_state_api(kind(f"first_{kind.__name__}_states_{by}"), by))
    talk = StateSequence(raw, model)
    count = {"COUNT_IN": np.full((1, 1), 5, np.int64)}
    # A START without an inference, and one that does not commit: the next inference is the first.
    talk.ask(start=True, set=count)
    empty = talk.save()
    talk.step(frames(6, 10), commit=False)
    talk.step(frames(7, 20))
    talk.step(frames(2, 30))
    talk = talk.other()
    talk.start(frames(6, 40), commit=False)
    talk.step(frames(6, 50))
    # Clones and snapshots go on from the context, or from there being none.
    saved = talk.save()
    clone = talk.clone(frames(1, 60))
    talk.step(frames(2, 70))
    clone.step(frames(1, 80))
    talk.restored(saved).step(frames(1, 90))
    fresh = talk.restored(empty)
    fresh.clone().step(frames(5, 100))
    fresh.step(frames(8, 110))
    fresh.step(frames(1, 120))
    # A reset forgets it: with an inference at once, else for the next one.
    talk.step(frames(5, 130), reset_state=True)
    talk.step(frames(1, 140))
    talk.ask(reset_state=True)
    talk.step(frames(6, 150))
    # One that is not committed is a first inference, and leaves the context.
    asked = {"sequence_id": talk.sequence_id, "reset_state": True, "commit": False}
    answer = raw.ask(model.name, frames(4, 160), asked)
    assert answer.outputs["WINDOW"].shape[1] == (4 if kind is open_whole else 8)
    talk.step(frames(1, 170))
    # A live sequence that is set back to where it had none has none.
    talk.step(frames(5, 180), restore=empty)
    talk.end(frames(1, 190))


def test_lengths_follow_what_a_sequence_goes_on_from(deployment, raw):
    model = deployment.serve(with_state_api(zipformer("first_states_lengths")))
    talk = StateSequence(raw, model)
    talk.start(frames(45))
    # A START that goes on from another sequence is not its first inference.
    other = talk.other()
    refuses(lambda: other.ask(frames(45), start=True, clone_of=talk), "after the first", 32)
    talk.clone(frames(32, 7)).step(frames(32, 9))
    refuses(lambda: talk.ask(frames(32), reset_state=True), "first inference", 45)
    talk.step(frames(32, 5))
    talk.step(frames(45, 11), reset_state=True)
    talk.end(frames(32))

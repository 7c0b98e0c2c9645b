"""The slot pool as a client and an operator see it: how many sequences fit, and what it holds."""

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import models
from harness.conversations import Conversation, together
from harness.deployment import eventually
from harness.logs import messages
from support.paths import TEST_DEVICE

pytestmark = pytest.mark.simulated_device

MB = 1 << 20


def start_sequences(client, model, count):
    rng = np.random.default_rng(count)
    talks = [Conversation(client, model, rng) for _ in range(count)]
    for talk in talks:
        talk.start()
    return talks


@pytest.mark.parametrize(
    ("name", "candidates", "ratio", "capacity"),
    [
        ("default_ratio", 10, None, 10),
        ("rounded_down", 7, "0.5", 3),
        ("all", 6, "1.0", 6),
        ("at_least_one", 1, "0.1", 1),
    ],
)
def test_capacity_is_the_ratios_share_of_the_candidates(deployment, name, candidates, ratio, capacity):
    model = models.counter(name=f"pool_{name}", max_candidates=candidates, max_batch_size=1)
    if ratio:
        model = model.with_parameters(model.name, max_candidate_sequence_use_ratio=ratio)
    model = deployment.serve(model)
    assert deployment.metric("stateful_slot_capacity", model) == capacity
    for talk in start_sequences(deployment.connect(), model, capacity):
        talk.end()


def test_capacity_counts_for_each_instance(deployment):
    model = deployment.serve(models.counter(name="pool_of_two", max_candidates=10, instances=2))
    assert deployment.metric("stateful_slot_capacity", model) == 20


@pytest.mark.parametrize(
    ("protocol", "unavailable", "not_found"),
    [("unary", "StatusCode.UNAVAILABLE", "StatusCode.NOT_FOUND"), ("http", "503", "404")],
)
def test_a_start_that_finds_no_slot_is_refused_and_says_which_parameters_help(
    deployment, protocol, unavailable, not_found
):
    model = models.counter(name=f"pool_full_{protocol}", max_candidates=10, max_batch_size=2)
    model = deployment.serve(model.with_parameters(model.name, max_candidate_sequence_use_ratio=0.5))
    client = deployment.connect(protocol)
    talks = start_sequences(client, model, 5)

    late = Conversation(client, model, np.random.default_rng(1))
    with pytest.raises(InferenceServerException) as refused:
        late.start()
    assert refused.value.status() == unavailable
    assert "max_candidate_sequences" in refused.value.message()
    assert "max_candidate_sequence_use_ratio" in refused.value.message()
    with pytest.raises(InferenceServerException) as unknown:
        late.step()
    assert unknown.value.status() == not_found
    assert str(late.sequence_id) in unknown.value.message()

    for talk in talks:
        talk.step()
    talks.pop().end()
    late.start()
    for talk in (*talks, late):
        talk.end()
    deployment.settles("stateful_sequences_rejected_total", model, 1)


def test_a_start_on_a_live_sequence_needs_no_second_slot(deployment):
    model = models.counter(name="pool_restarts", max_candidates=4, max_batch_size=2)
    model = deployment.serve(model.with_parameters(model.name, max_candidate_sequence_use_ratio=0.5))
    talks = start_sequences(deployment.connect(), model, 2)
    for talk in (*talks, *talks):
        talk.start()
        talk.step()
    deployment.settles("stateful_live_sequences", model, 2)
    for talk in talks:
        talk.end()


def test_metrics_count_the_sequences(deployment):
    model = deployment.serve(models.counter(name="pool_counted", max_candidates=20))
    client = deployment.connect()
    talks = start_sequences(client, model, 6)
    deployment.settles("stateful_live_sequences", model, 6)
    deployment.settles("stateful_sequences_started_total", model, 6)
    for talk in talks[:4]:
        talk.end()
    Conversation(client, model, np.random.default_rng(1)).whole(1)
    deployment.settles("stateful_live_sequences", model, 2)
    deployment.settles("stateful_sequences_started_total", model, 7)
    deployment.settles("stateful_sequences_ended_total", model, 5)
    deployment.settles("stateful_sequences_expired_total", model, 0)
    deployment.settles("stateful_sequences_rejected_total", model, 0)
    for talk in talks[4:]:
        talk.end()


def test_all_slots_are_free_again_after_many_sequences_at_once(deployment):
    model = deployment.serve(models.counter(name="pool_busy", max_candidates=30, instances=2))
    client = deployment.connect()

    def talk(seed):
        rng = np.random.default_rng(seed)
        for _ in range(20):
            Conversation(client, model, rng).whole(int(rng.integers(1, 4)))

    together(lambda seed=seed: talk(seed) for seed in range(8))
    deployment.settles("stateful_live_sequences", model, 0)
    deployment.settles("stateful_sequences_started_total", model, 160)
    deployment.settles("stateful_sequences_ended_total", model, 160)


def test_a_crowd_on_a_small_pool_is_served_rightly_or_refused(deployment):
    model = models.counter(name="pool_crowded", max_candidates=16, max_batch_size=4)
    model = deployment.serve(model.with_parameters(model.name, max_candidate_sequence_use_ratio=0.25))
    client = deployment.connect()

    def talk(seed):
        rng = np.random.default_rng(seed)
        served = 0
        for _ in range(25):
            talk = Conversation(client, model, rng)
            try:
                talk.start()
            except InferenceServerException as full:
                assert full.status() == "StatusCode.UNAVAILABLE"
                # core still counts the sequence as one of its candidates: END says that it is not
                with pytest.raises(InferenceServerException) as unknown:
                    talk.end()
                assert unknown.value.status() == "StatusCode.NOT_FOUND"
                continue
            for _ in range(int(rng.integers(0, 4))):
                talk.step()
            talk.end()
            served += 1
        return served

    served = sum(together(lambda seed=seed: talk(seed) for seed in range(8)))
    deployment.settles("stateful_live_sequences", model, 0)
    deployment.settles("stateful_sequences_started_total", model, served)
    deployment.settles("stateful_sequences_ended_total", model, served)
    deployment.settles("stateful_sequences_rejected_total", model, 200 - served)


LAZY = {"initial_buffer_size": 4, "subsequent_buffer_size": 3, "buffer_alloc_threshold": 2}


def lazy(name: str, dealloc: int, **more):
    model = models.counter(name=name, max_batch_size=2, max_candidates=19)
    parameters = {"max_candidate_sequence_use_ratio": "1.0", "buffer_dealloc_threshold": dealloc}
    return model.with_parameters(name, **{**LAZY, **parameters, **more})


def test_without_lazy_parameters_all_slots_are_there_from_the_start(deployment):
    model = deployment.serve(models.counter(name="pool_eager", max_candidates=20))
    deployment.settles("stateful_slots_allocated", model, 20)
    deployment.settles("stateful_slabs", model, 1)


@pytest.mark.host_and_device
def test_slabs_are_added_when_free_slots_run_short_and_given_back_when_many_are_free(deployment):
    model = deployment.serve(lazy("pool_lazy", dealloc=3))

    def allocated():
        return deployment.metric("stateful_slots_allocated", model)

    client = deployment.connect()
    assert (allocated(), deployment.metric("stateful_slabs", model)) == (4, 1)

    rng = np.random.default_rng(1)
    talks, sizes = [], []
    for _ in range(19):
        talks.append(Conversation(client, model, rng))
        talks[-1].start()
        sizes.append(eventually(allocated, lambda size: size >= len(talks)))
    assert sizes[0] == 4, "one sequence needs no second slab"
    assert sizes == sorted(sizes)
    assert {(size - 4) % 3 for size in sizes} == {0}, f"slabs of 3 after the first of 4: {sizes}"
    deployment.settles("stateful_slots_allocated", model, 19)
    deployment.settles("stateful_slabs", model, 6)

    for talk in talks:  # states survive the growth
        talk.step()
    while talks:  # the newest first, so that the last slab empties first
        talks.pop().end()
        for talk in talks[-2:]:
            talk.step()
    eventually(allocated, lambda size: size == 4)
    deployment.settles("stateful_slabs", model, 1)

    for talk in start_sequences(client, model, 12):  # and again
        talk.end()
    eventually(allocated, lambda size: size == 4)


def test_slabs_stay_while_no_more_slots_are_free_than_the_threshold_allows(deployment):
    model = deployment.serve(lazy("pool_keeping", dealloc=100))
    for talk in start_sequences(deployment.connect(), model, 19):
        talk.end()
    deployment.settles("stateful_live_sequences", model, 0)
    deployment.settles("stateful_slots_allocated", model, 19)


def test_a_slab_with_a_live_slot_is_not_given_back(deployment):
    model = deployment.serve(lazy("pool_pinned", dealloc=3))
    talks = start_sequences(deployment.connect(), model, 19)
    last = talks.pop()
    for talk in talks:
        talk.end()
    for _ in range(3):
        last.step()
    deployment.settles("stateful_live_sequences", model, 1)
    last.end()
    deployment.settles("stateful_slots_allocated", model, 4)


def test_slabs_never_hold_more_than_the_capacity(deployment):
    model = lazy("pool_cut", dealloc=3, subsequent_buffer_size=10)
    model = deployment.serve(model)
    for talk in start_sequences(deployment.connect(), model, 19):
        talk.step()
        assert deployment.metric("stateful_slots_allocated", model) <= 19
        talk.end()


@pytest.mark.parametrize("steps_after", [0, 1])
def test_a_sequence_that_was_started_over_keeps_its_slot_when_slots_run_out(deployment, steps_after):
    model = models.counter(name=f"pool_over_{steps_after}", max_candidates=10, max_batch_size=2)
    model = deployment.serve(model.with_parameters(model.name, max_candidate_sequence_use_ratio=0.4))
    client = deployment.connect()
    talk = Conversation(client, model, np.random.default_rng(1))
    talk.start()
    talk.step()
    talk.start()
    for _ in range(steps_after):
        talk.step()
    # The incarnation before goes once core can have nothing more of it.
    eventually(lambda: deployment.metric("stateful_sequences_ended_total", model), lambda ended: ended == 1)
    others = start_sequences(client, model, 3)
    with pytest.raises(InferenceServerException, match="no free slot"):
        Conversation(client, model, np.random.default_rng(2)).start()
    talk.step()
    for each in (talk, *others):
        each.end()


def test_a_sequence_that_is_started_over_takes_no_place_of_another(deployment):
    model = models.counter(name="pool_over_beside", max_candidates=10, max_batch_size=2)
    model = deployment.serve(model.with_parameters(model.name, max_candidate_sequence_use_ratio=0.4))
    client = deployment.connect()
    talks = start_sequences(client, model, 3)
    # The incarnation before has a slot, too, for a quarter of a second at least.
    talks[0].start()
    talks += start_sequences(client, model, 1)
    for talk in talks:
        talk.step()
        talk.end()


@pytest.mark.skipif(TEST_DEVICE == "gpu", reason="the limit is one of the host's memory")
def test_slots_that_there_is_no_memory_for_are_missed_once_in_the_log_and_made_when_there_is(deploy):
    deployed = deploy()
    model = models.counter(name="pool_starved", width=250_000, max_batch_size=2, max_candidates=260)
    lazily = {**LAZY, "subsequent_buffer_size": 256, "buffer_alloc_threshold": 3, "buffer_dealloc_threshold": 260}
    model = model.with_parameters(model.name, max_candidate_sequence_use_ratio="1.0", **lazily)
    deployed.serve(model)
    with deployed.without_more_memory(than=100 * MB):
        talks = start_sequences(deployed.connect(), model, 3)
        for talk in talks:
            talk.step()
        # Afterwards the slots are made as soon as the clock looks.
        deployed.settles("stateful_slots_allocated", model, 4)

    def warnings() -> list[str]:
        return [text for text in messages(deployed.server.log_text(), "W") if "another buffer of state slots" in text]

    # another thread writes it
    eventually(warnings, lambda found: len(found) > 0)
    assert len(warnings()) == 1, warnings()
    assert "sequences start as long as slots are free" in warnings()[0]
    for talk in talks:
        talk.end()
    talks = start_sequences(deployed.connect(), model, 4)
    deployed.settles("stateful_slots_allocated", model, 260)
    for talk in talks:
        talk.end()

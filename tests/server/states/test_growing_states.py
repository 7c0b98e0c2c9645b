"""States with open dimensions beside the batch: they grow, shrink and are empty, each sequence's at its
own pace, within bounds."""

import dataclasses
import re

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import models
from harness.batches import TOGETHER, runs_of
from harness.clients import new_id
from harness.conversations import Conversation, interleave, outcome, script, some_at_once, together, windowed
from harness.deployment import eventually
from harness.graphs import BATCH, graph, node
from harness.model import Model, Tensor
from harness.models import implicit
from harness.refusals import refused, said
from harness.repetitions import every_type
from harness.sequence_oracle import SequenceOracle, assert_same
from harness.strategies import both_strategies, strategy
from harness.values import bits, random_bits
from support.paths import TEST_DEVICE

F32 = np.float32

pytestmark = pytest.mark.simulated_device

MIB = 1 << 20

on_the_host = pytest.mark.skipif(TEST_DEVICE != "cpu", reason="the server's memory shows states on the host only")


def chunk(length: int, seed: int = 0) -> dict[str, np.ndarray]:
    """A request for `append`: 8 bytes of state for each of `length`."""
    return {"INPUT": np.random.default_rng([length, seed]).standard_normal((1, length, 2)).astype(F32)}


def talk_in_turns(deployment, model: Model, seed: int, sequences: int = 5, rounds: int = 8) -> None:
    """Some of the sequences at once, one of them started over in between; then all end."""
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng([seed, i])) for i in range(sequences)]
    rng = np.random.default_rng(seed)
    together(talk.start for talk in talks)
    some_at_once(talks, rng, rounds)
    talks[0].start()
    some_at_once(talks, rng, rounds)
    # where a young sequence is started over, the old life is over a moment later; an END before that
    # leaves it to expiry
    deployment.settles("stateful_live_sequences", model, sequences)
    together(talk.end for talk in talks)
    deployment.settles("stateful_growing_state_bytes", model, 0)


def ragged(model: Model) -> Model:
    """So that core itself parts no requests by their shapes."""
    inputs = tuple(dataclasses.replace(tensor, ragged=True) for tensor in model.inputs)
    return dataclasses.replace(model, inputs=inputs)


def grown(deployment, model: Model) -> float:
    return deployment.metric("stateful_growing_state_bytes", model)


# ---- what grows


@every_type()
def test_a_state_of_every_type_keeps_all_that_came(deployment, type):
    model = deployment.serve(models.append(type, f"grows_{type}"))
    client = deployment.connect()
    rng = np.random.default_rng(1)
    kept = {new_id(): [] for _ in range(4)}
    for step in range(6):
        for sequence_id in rng.permutation(list(kept)).tolist():
            now = random_bits(type, (1, int(rng.integers(1, 6)), 2), rng)
            answer = client.step(model.name, sequence_id, {"INPUT": now}, start=step == 0, end=step == 5)
            kept[sequence_id].append(now)
            wanted, came = np.concatenate(kept[sequence_id], axis=1), answer["OUTPUT"]
            assert came.shape == wanted.shape
            assert bits(came) == bits(wanted), f"{came}, not {wanted}"
    deployment.settles("stateful_growing_state_bytes", model, 0)


@both_strategies
@pytest.mark.parametrize("layout", ["NTW", "NWT", "TNW", "TWN", "WNT", "WTN"])
def test_a_state_grows_along_any_axis_with_the_batch_along_any_other(deployment, layout, direct):
    name = f"grows_{layout}_{strategy(direct)}"
    model = deployment.serve(models.append(name=name, layout=layout, direct=direct))
    client = deployment.connect()
    interleave(client, model, np.random.default_rng(2), sequences=5)
    talk_in_turns(deployment, model, seed=3)


MODELS = [models.queue, models.caches, models.attention, models.looked_up]


@pytest.mark.parametrize("how", ["oldest", "direct", "two_instances"])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@pytest.mark.host_and_device
def test_sequences_of_any_length_and_pace_get_their_own_answers(deployment, make, how):
    changes = {"oldest": {}, "direct": {"direct": ""}, "two_instances": {"instances": 2}}[how]
    model = deployment.serve(make(name=f"grows_{make.__name__}_{how}", **changes))
    client = deployment.connect()
    interleave(client, model, np.random.default_rng(4), sequences=6)
    talk_in_turns(deployment, model, seed=5, sequences=7)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_states_of_triton_s_own_configuration_grow_too(deployment, make):
    made = make()
    ones = dict.fromkeys(made.lengths_at_start, 1)
    model = implicit(made, f"grows_{make.__name__}_implicit")
    model = deployment.serve(model.variant(model.name, lengths_at_start=ones))
    talk_in_turns(deployment, model, seed=6)


@pytest.mark.parametrize("protocol", ["unary", "stream", "http"])
def test_a_state_is_empty_at_start_and_at_each_restart(deployment, protocol):
    model = deployment.serve(models.append(name="grows_from_nothing"))
    talk = Conversation(deployment.connect(protocol), model, np.random.default_rng(7))
    for _ in range(3):
        assert talk.start(chunk(3))["OUTPUT"].shape == (1, 3, 2)
        assert talk.step(chunk(2))["OUTPUT"].shape == (1, 5, 2)
    talk.end(chunk(1))
    assert talk.start(chunk(1))["OUTPUT"].shape == (1, 1, 2)
    talk.end(chunk(1))


def test_a_state_shrinks_to_nothing_and_grows_again(deployment):
    model = deployment.serve(models.queue("grows_and_shrinks"))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(8))
    left, steps = 0, [(5, 1), (20, 2), (1, 15), (1, 50), (2, 2), (7, 3), (1, 4), (300, 1), (1, 299)]
    for step, (push, drop) in enumerate(steps):
        left = max(left + push - drop, 0)
        fed = {"PUSH": talk.rng.integers(0, 99, (1, push, 2)), "DROP": np.zeros((1, drop), np.uint8)}
        assert talk.step(fed, start=step == 0, end=step == 8)["OUTPUT"].shape == (1, left, 2)


def test_a_chunk_without_elements_leaves_the_state_as_it_is(deployment):
    model = deployment.serve(models.append(name="grows_by_nothing"))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(9))
    for step, length in enumerate([0, 0, 3, 0, 2, 0]):
        talk.step(chunk(length), start=step == 0, end=step == 5)


def test_a_state_may_have_several_open_dimensions(deployment):
    """`echo` answers what came before: nothing at first, then a matrix of any size."""
    open_ends = {
        "inputs": (Tensor("INPUT", "fp32", (-1, -1)),),
        "outputs": (Tensor("OUTPUT", "fp32", (-1, -1)),),
        "lengths_at_start": {"rows": 0, "columns": 0},
    }
    model = deployment.serve(models.echo(name="grows_both_ways", dims=("rows", "columns"), **open_ends))
    client = deployment.connect()
    talk = Conversation(client, model, np.random.default_rng(10))
    assert talk.start()["OUTPUT"].shape == (1, 0, 0)
    talk.step()
    talk.end()
    talk_in_turns(deployment, model, seed=11)


@both_strategies
def test_a_state_grows_in_a_model_with_one_row_and_no_batching(deployment, direct):
    model = models.append(
        name=f"grows_unbatched_{strategy(direct)}",
        max_batch_size=0,
        direct=direct,
        inputs=(Tensor("INPUT", "fp32", (1, -1, 2)),),
        outputs=(Tensor("OUTPUT", "fp32", (1, -1, 2)),),
    )
    deployment.serve(model)
    client = deployment.connect()
    together(lambda seed=seed: Conversation(client, model, np.random.default_rng(seed)).whole(6) for seed in range(4))


def without_batch(name: str, **changes) -> Model:
    """`append` of a model that has no batch dimension at all."""

    def build():
        return graph(
            [node("Concat", "CACHE_IN INPUT", "CACHE_OUT", axis=0), node("Identity", "CACHE_OUT", "OUTPUT")],
            [("INPUT", "fp32", ["chunk", 2]), ("CACHE_IN", "fp32", ["T", 2])],
            [("OUTPUT", "fp32", ["T_new", 2]), ("CACHE_OUT", "fp32", ["T_new", 2])],
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "fp32", (-1, 2)),),
        outputs=(Tensor("OUTPUT", "fp32", (-1, 2)),),
        states=(("CACHE_IN", "CACHE_OUT"),),
        max_batch_size=0,
        lengths_at_start={"T": 0},
    )
    return dataclasses.replace(model, **changes)


@pytest.mark.parametrize("implicitly", [False, True], ids=["state_pairs", "state"])
def test_a_state_grows_in_a_model_without_a_batch_dimension(deployment, implicitly):
    model = without_batch(f"grows_no_batch_{'state' if implicitly else 'pairs'}")
    if implicitly:
        model = implicit(model, model.name).variant(model.name, lengths_at_start={"T": 1})
    deployment.serve(model)
    client = deployment.connect()
    together(lambda seed=seed: Conversation(client, model, np.random.default_rng(seed)).whole(6) for seed in range(4))


def test_a_growing_state_that_is_listed_as_an_output_is_sent_whole(deployment):
    listed = (Tensor("OUTPUT", "fp32", (-1, 2)), Tensor("CACHE_OUT", "fp32", (-1, 2)))
    model = deployment.serve(models.append(name="grows_in_sight", outputs=listed))
    client = deployment.connect()
    talk_in_turns(deployment, model, seed=12)
    oracle, sequence_id = SequenceOracle(model), new_id()
    for step in range(4):
        fed, how = chunk(step + 1), {"start": step == 0, "end": step == 3}
        wanted = oracle.step(fed, **how)["CACHE_OUT"]
        answer = client.step(model.name, sequence_id, fed, outputs=["CACHE_OUT"], **how)
        assert_same(model, answer, {"CACHE_OUT": wanted})


def test_a_growing_state_that_is_not_listed_is_never_sent(deployment):
    model = deployment.serve(models.append(name="grows_out_of_sight"))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(13))
    assert set(talk.start(chunk(2))) == {"OUTPUT"}
    with pytest.raises(InferenceServerException, match="CACHE_OUT"):
        talk.client.step(model.name, talk.sequence_id, chunk(2), outputs=["CACHE_OUT"])
    talk.end(chunk(1))


def test_a_long_sequence_grows_step_by_step(deployment):
    model = deployment.serve(models.append(name="grows_long"))
    talks = [Conversation(deployment.connect(), model, np.random.default_rng(i)) for i in range(2)]
    for step in range(600):
        for number, talk in enumerate(talks):
            talk.step(chunk(1 + number), start=step == 0, end=step == 599)


# ---- how they are kept


@pytest.mark.parametrize("make", [models.append, models.caches, models.attention], ids=lambda make: make.__name__)
@pytest.mark.host_and_device
def test_growing_states_of_fp32_may_be_kept_as_fp16(deployment, make):
    """The oracle rounds what it keeps in the same way; attention is of fp32 sums in any order."""
    model = make(name=f"grows_halved_{make.__name__}")
    model = deployment.serve(model.with_parameters(model.name, store_states_as_fp16=1))
    client = deployment.connect()
    interleave(client, model, np.random.default_rng(14), sequences=5)
    talk_in_turns(deployment, model, seed=15)


def test_what_is_kept_as_fp16_is_rounded_and_what_came_now_is_not(deployment):
    model = models.append(name="grows_rounded")
    model = deployment.serve(model.with_parameters(model.name, store_states_as_fp16=1))
    client, sequence_id = deployment.connect(), new_id()
    first, second = (np.array([[[1 + 2**-11, 0.1], [65504, -1e-9]]], F32) * sign for sign in (1, -1))
    answer = client.step(model.name, sequence_id, {"INPUT": first}, start=True)["OUTPUT"]
    assert answer.tobytes() == first.tobytes()
    rounded = first.astype(np.float16).astype(F32)
    answer = client.step(model.name, sequence_id, {"INPUT": second}, end=True)["OUTPUT"]
    assert answer.tobytes() == np.concatenate([rounded, second], axis=1).tobytes()


@both_strategies
def test_rows_of_padding_disturb_no_growing_state(deployment, direct):
    model = models.caches(f"grows_padded_{strategy(direct)}", max_batch_size=4, direct=direct)
    model = deployment.serve(model.with_parameters(model.name, always_pad_to_max_batch=1))
    talk_in_turns(deployment, model, seed=16, sequences=4)


def test_a_warm_up_leaves_nothing_behind(deployment):
    model = models.append(
        name="grows_warmed_up",
        more="""model_warmup {
  name: "some" batch_size: 2 count: 3
  inputs { key: "INPUT" value: { data_type: TYPE_FP32 dims: [ 5, 2 ] random_data: true } }
}""",
    )
    model = deployment.serve(model.with_parameters(model.name, max_state_bytes=80))
    assert grown(deployment, model) == 0
    talk = Conversation(deployment.connect(), model, np.random.default_rng(17))
    talk.start(chunk(10))  # as much as there may be
    talk.end(chunk(0))


def test_an_end_that_is_not_inferred_frees_the_growing_state(deployment):
    model = deployment.serve(limited("grows_end_not_inferred", infer_end_requests=0))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(18))
    for _ in range(2):
        talk.start(chunk(3))
        talk.step(chunk(3))
        assert grown(deployment, model) > 0
        answer = talk.client.step(model.name, talk.sequence_id, chunk(1), end=True)
        assert answer["OUTPUT"].size == 0
        deployment.settles("stateful_growing_state_bytes", model, 0)


# ---- batches


def test_sequences_of_equal_lengths_share_a_run_and_others_do_not(deployment):
    model = deployment.serve(ragged(models.append(name="grows_in_groups", **TOGETHER)))
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng(i)) for i in range(4)]

    def all_by(*lengths, **how):
        return lambda: together(
            lambda talk=talk, i=i: talk.step(chunk(lengths[i], seed=i), **how) for i, talk in enumerate(talks)
        )

    assert runs_of(deployment, model, all_by(2, 2, 2, 2, start=True)) == {4: 1}
    assert runs_of(deployment, model, all_by(3, 3, 3, 3)) == {4: 1}
    # equal states, two lengths of chunks
    assert runs_of(deployment, model, all_by(1, 1, 5, 5)) == {2: 2}
    # equal chunks, two lengths of states
    assert runs_of(deployment, model, all_by(1, 1, 1, 1)) == {2: 2}
    # all differ: 8, 9, 12, 11 afterwards
    assert runs_of(deployment, model, all_by(1, 2, 1, 0)) == {1: 4}
    # states of 8, 9, 12, 11 come to one length; they ran alone, and share again
    assert runs_of(deployment, model, all_by(5, 4, 1, 2)) == {1: 4}
    assert runs_of(deployment, model, all_by(1, 1, 1, 1)) == {4: 1}
    # a restart is as short as a new one
    assert runs_of(deployment, model, all_by(1, 1, 1, 1, start=True)) == {4: 1}
    together(lambda talk=talk: talk.end(chunk(1)) for talk in talks)


@pytest.mark.host_and_device
def test_sequences_part_and_share_again_as_their_states_shrink(deployment):
    model = deployment.serve(ragged(models.queue("grows_in_groups_of_two", **TOGETHER)))
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng(i)) for i in range(4)]

    def fed(push, drop):
        return {"PUSH": np.ones((1, push, 2), np.int64), "DROP": np.zeros((1, drop), np.uint8)}

    def all_by(asked, **how):
        return lambda: together(
            lambda talk=talk, now=now: talk.step(fed(*now), **how) for talk, now in zip(talks, asked, strict=True)
        )

    assert runs_of(deployment, model, all_by([(9, 1)] * 4, start=True)) == {4: 1}
    assert runs_of(deployment, model, all_by([(9, 1)] * 2 + [(9, 5)] * 2)) == {2: 2}
    # two of 16, two of 12
    assert runs_of(deployment, model, all_by([(1, 30)] * 4)) == {2: 2}
    # all are empty
    assert runs_of(deployment, model, all_by([(4, 1)] * 4)) == {4: 1}
    together(lambda talk=talk: talk.end(fed(1, 1)) for talk in talks)


def test_starts_among_long_sequences_begin_empty(deployment):
    model = deployment.serve(ragged(models.caches("grows_among_others", **TOGETHER)))
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng(i)) for i in range(4)]
    together(talk.start for talk in talks)
    for _ in range(3):
        together(talk.step for talk in talks)
    together([talks[0].start, talks[1].end, talks[2].step, talks[3].step])
    talks[1] = Conversation(client, model, np.random.default_rng(9))
    together([talks[0].step, talks[1].start, talks[2].end, talks[3].step])
    talks[2] = Conversation(client, model, np.random.default_rng(10), talks[2].sequence_id)
    together([talks[0].step, talks[1].step, talks[2].start, talks[3].end])
    together(talk.end for talk in talks[:3])


@pytest.mark.parametrize("how", ["oldest", "direct", "two_instances"])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@pytest.mark.host_and_device
def test_many_sequences_at_random_on_one_stream_are_all_right(deployment, make, how):
    changes = {
        "oldest": {"oldest": "max_queue_delay_microseconds: 2000"},
        "direct": {"direct": "max_queue_delay_microseconds: 2000 minimum_slot_utilization: 0.5"},
        "two_instances": {"instances": 2},
    }[how]
    model = deployment.serve(make(name=f"grows_random_{make.__name__}_{how}", max_batch_size=12, **changes))
    rng = np.random.default_rng(19)
    for _ in range(2):
        scripts = [script(model, rng, new_id(), lives=4) for _ in range(12)]
        windowed(deployment.connect("stream"), model, rng, scripts, window=8)
    deployment.settles("stateful_growing_state_bytes", model, 0)
    deployment.settles("stateful_live_sequences", model, 0)


def test_many_clients_at_random_are_all_right(deployment):
    model = deployment.serve(models.caches("grows_crowded", max_batch_size=16))
    client = deployment.connect()

    def talk(seed):
        rng = np.random.default_rng(seed)
        for _ in range(6):
            Conversation(client, model, rng).whole(int(rng.integers(1, 14)))

    together(lambda seed=seed: talk(seed) for seed in range(10))
    deployment.settles("stateful_growing_state_bytes", model, 0)


# ---- runs that fail


BAD = {"INPUT": np.array([[0, 99]], np.int64)}


def test_a_failed_run_leaves_a_growing_state_as_it_was(deployment):
    model = deployment.serve(models.looked_up("grows_or_fails", **TOGETHER))
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng(i)) for i in range(4)]
    two = {"INPUT": np.array([[1, 2]], np.int64)}
    together(lambda talk=talk: talk.start(two) for talk in talks)
    before = grown(deployment, model)
    for _ in range(2):
        others = [lambda talk=talk: talk.step(two) for talk in talks[1:]]
        came = together([lambda: outcome(lambda: talks[0].step(BAD)), *others])
        assert isinstance(came[0], InferenceServerException)
        assert "out of data bounds" in came[0].message()
    assert before > 0
    together(lambda talk=talk: talk.step(two) for talk in talks)
    together(lambda talk=talk: talk.end(two) for talk in talks)
    deployment.settles("stateful_growing_state_bytes", model, 0)


@pytest.mark.host_and_device
def test_failing_runs_beside_good_sequences_give_no_wrong_answer(deployment):
    model = deployment.serve(models.looked_up("grows_and_fails_often"))
    client = deployment.connect()

    def talk(seed):
        rng = np.random.default_rng(seed)
        talk = Conversation(client, model, rng)
        for step in range(30):
            fed = BAD if step and rng.integers(5) == 0 else None
            came = outcome(lambda fed=fed, step=step: talk.step(fed, start=step == 0))
            assert isinstance(came, InferenceServerException) == (fed is BAD), came
        talk.end()

    together(lambda seed=seed: talk(seed) for seed in range(8))
    deployment.settles("stateful_growing_state_bytes", model, 0)


# ---- bounds: a row of `append` has 8 bytes


def limited(name: str, **parameters) -> Model:
    return models.append(name=name).with_parameters(name, **parameters)


def refuses(task, *words) -> None:
    """UNAVAILABLE, with all of the words."""
    with pytest.raises(InferenceServerException) as refused:
        task()
    assert refused.value.status() in ("StatusCode.UNAVAILABLE", "503"), refused.value
    missing = [word for word in words if not said(str(word), refused.value.message())]
    assert not missing, f"{missing} not in: {refused.value.message()}"


@pytest.mark.parametrize("protocol", ["unary", "http"])
@both_strategies
def test_a_step_over_a_sequences_bound_is_refused_and_the_sequence_goes_on(deployment, direct, protocol):
    model = limited(f"grows_to_80_bytes_{strategy(direct)}", max_state_bytes_per_sequence=80)
    model = deployment.serve(dataclasses.replace(model, direct=direct))
    client = deployment.connect(protocol)
    talk, other = (Conversation(client, model, np.random.default_rng(i)) for i in range(2))
    talk.start(chunk(4))
    other.start(chunk(1))
    for _ in range(3):
        refuses(lambda: talk.step(chunk(7)), "max_state_bytes_per_sequence", 88, 80)
        other.step(chunk(2))
    talk.step(chunk(5))
    refuses(lambda: talk.step(chunk(2)), 88, 80)
    talk.step(chunk(1))  # 80 are not more than 80
    refuses(lambda: talk.step(chunk(1)), 88, 80)
    talk.step(chunk(0))
    other.step(chunk(3))
    talk.end(chunk(0))
    talk.start(chunk(10))  # a new life has the whole of it
    refuses(lambda: talk.step(chunk(1)), 88, 80)
    talk.end(chunk(0))
    other.end(chunk(0))
    deployment.settles("stateful_growing_state_bytes", model, 0)


def test_a_start_over_a_sequences_bound_makes_no_sequence(deployment):
    model = deployment.serve(limited("grows_not_even_once", max_state_bytes_per_sequence=80))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(20))
    for _ in range(3):
        refuses(lambda: talk.start(chunk(11)), 88, 80)
        with pytest.raises(InferenceServerException) as unknown:
            talk.step(chunk(1))
        assert unknown.value.status() == "StatusCode.NOT_FOUND"
    deployment.settles("stateful_live_sequences", model, 0)
    deployment.settles("stateful_growing_state_bytes", model, 0)
    talk.start(chunk(10))
    talk.end(chunk(0))


@pytest.mark.parametrize("bound", ["max_state_bytes_per_sequence", "max_state_bytes"])
def test_an_end_is_answered_whatever_the_bound_since_nothing_is_kept(deployment, bound):
    model = deployment.serve(limited(f"grows_at_the_end_{bound}", **{bound: 80}))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(21))
    for _ in range(3):
        talk.start(chunk(8))
        talk.end(chunk(8))
        talk.step(chunk(18), start=True, end=True)
        deployment.settles("stateful_live_sequences", model, 0)
        deployment.settles("stateful_growing_state_bytes", model, 0)


def test_the_bound_counts_all_growing_states_of_a_sequence_and_no_other(deployment):
    """`attention`: two caches, 32 bytes each for every step."""
    model = models.attention("grows_two_of_640_bytes").with_parameters(
        "grows_two_of_640_bytes", max_state_bytes_per_sequence=640
    )
    model = deployment.serve(model)
    rng = np.random.default_rng(22)

    def fed(length):
        return {"INPUT": rng.standard_normal((1, length, 8)).astype(F32)}

    talk = Conversation(deployment.connect(), model, rng)
    talk.start(fed(6))
    refuses(lambda: talk.step(fed(5)), 704, 640)
    talk.step(fed(4))
    refuses(lambda: talk.step(fed(1)), 704, 640)
    talk.end(fed(0))

    # a state of one size has its place in the slot, which is not counted
    model = models.counter(name="grows_not_at_all", width=1000)
    model = model.with_parameters(model.name, max_state_bytes_per_sequence=8, max_state_bytes=8)
    Conversation(deployment.connect(), deployment.serve(model), np.random.default_rng(23)).whole(3)


def test_a_string_state_over_the_bound_is_refused_and_a_small_one_is_kept(deployment):
    model = models.append("string", "grows_by_words", width=1)
    model = deployment.serve(model.with_parameters(model.name, max_state_bytes_per_sequence=5000))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(24))

    def fed(size):
        return {"INPUT": np.array([[["x" * size]]], np.object_)}

    talk.start(fed(100))
    for _ in range(2):
        refuses(lambda: talk.step(fed(6000)), "max_state_bytes_per_sequence", 5000)
        talk.step(fed(50))
    talk.end(fed(1))
    deployment.settles("stateful_growing_state_bytes", model, 0)


def test_the_bound_of_all_sequences_holds_for_all_and_the_room_comes_back_with_end(deployment):
    model = deployment.serve(limited("grows_to_160_bytes", max_state_bytes=160))
    client = deployment.connect()
    left, right, late = (Conversation(client, model, np.random.default_rng(i)) for i in range(3))
    left.start(chunk(10))
    right.start(chunk(6))
    refuses(lambda: right.step(chunk(5)), "max_state_bytes", 160)
    right.step(chunk(4))
    # now it is full
    for talk in (left, right):
        refuses(lambda talk=talk: talk.step(chunk(1)), "max_state_bytes", 160)
        talk.step(chunk(0))
    refuses(lambda: late.start(chunk(1)), "max_state_bytes", 160)
    with pytest.raises(InferenceServerException) as unknown:
        late.step(chunk(1))
    assert unknown.value.status() == "StatusCode.NOT_FOUND"
    left.end(chunk(0))
    late.start(chunk(7))
    right.step(chunk(3))
    refuses(lambda: late.step(chunk(1)), "max_state_bytes", 160)
    late.end(chunk(0))
    right.step(chunk(7))
    right.end(chunk(0))
    deployment.settles("stateful_growing_state_bytes", model, 0)


def test_a_restart_gives_back_what_the_old_life_had(deployment):
    model = deployment.serve(limited("grows_anew_in_160_bytes", max_state_bytes=160))
    client = deployment.connect()
    one, other = (Conversation(client, model, np.random.default_rng(i)) for i in range(2))
    other.start(chunk(10))
    one.start(chunk(10))
    for length in (10, 3, 10):
        fed = chunk(length)
        # the old life has its state until core can have nothing left of it
        eventually(lambda fed=fed: outcome(lambda: one.start(fed)), lambda came: isinstance(came, dict))
    refuses(lambda: one.step(chunk(1)), 160)
    one.end(chunk(0))
    other.step(chunk(10))
    other.end(chunk(0))


def test_an_old_life_that_nobody_can_go_on_with_makes_room(deployment):
    """One that was started over when it was young, and the new life is over, too."""
    model = deployment.serve(limited("grows_young_in_160_bytes", max_state_bytes=160))
    client = deployment.connect()
    one = Conversation(client, model, np.random.default_rng(28))
    one.start(chunk(10))
    one.start(chunk(10))
    one.end(chunk(0))
    other = Conversation(client, model, np.random.default_rng(29))
    other.start(chunk(20))
    other.end(chunk(0))


def test_a_full_model_lets_states_shrink_and_keep_their_size(deployment):
    """A row of `queue` has 16 bytes."""
    model = models.queue("grows_to_ten_rows").with_parameters("grows_to_ten_rows", max_state_bytes=160)
    model = deployment.serve(model)
    client = deployment.connect()
    left, right = (Conversation(client, model, np.random.default_rng(i)) for i in range(2))

    def fed(push, drop):
        return {"PUSH": np.full((1, push, 2), push, np.int64), "DROP": np.zeros((1, drop), np.uint8)}

    left.start(fed(6, 1))
    right.start(fed(6, 1))
    refuses(lambda: left.step(fed(2, 1)), 160)
    for _ in range(3):
        left.step(fed(3, 3))
    left.step(fed(1, 4))
    right.step(fed(4, 1))
    refuses(lambda: left.step(fed(2, 1)), 160)
    left.end(fed(1, 9))
    right.end(fed(1, 9))


def test_of_a_batch_that_does_not_fit_whole_some_are_refused_and_keep_their_states(deployment):
    model = limited("grows_not_all_at_once", max_state_bytes=160)
    model = deployment.serve(dataclasses.replace(model, **TOGETHER))
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng(i)) for i in range(4)]
    together(lambda talk=talk: talk.start(chunk(4)) for talk in talks)
    # 128 of 160 are taken; each wants 16 more
    came = together(lambda talk=talk: outcome(lambda: talk.step(chunk(2))) for talk in talks)
    over = [isinstance(answer, InferenceServerException) for answer in came]
    assert sum(over) == 2, came
    for answer, refusal in zip(came, over, strict=True):
        if refusal:
            assert answer.status() == "StatusCode.UNAVAILABLE", answer
    together(lambda t=talk: t.end(chunk(0)) for talk, refusal in zip(talks, over, strict=True) if not refusal)
    others = [talk for talk, refusal in zip(talks, over, strict=True) if refusal]
    together(lambda talk=talk: talk.step(chunk(2)) for talk in others)
    together(lambda talk=talk: talk.end(chunk(0)) for talk in others)
    deployment.settles("stateful_growing_state_bytes", model, 0)


def test_the_room_comes_back_when_sequences_expire(deployment):
    model = limited("grows_and_idles", max_state_bytes=160, sequence_idle_margin_microseconds=200_000)
    model = deployment.serve(dataclasses.replace(model, idle_us=1_000_000))
    client = deployment.connect()
    for seed in range(2):
        Conversation(client, model, np.random.default_rng(seed)).start(chunk(10))
    deployment.settles("stateful_live_sequences", model, 0)
    deployment.settles("stateful_growing_state_bytes", model, 0)
    late = Conversation(client, model, np.random.default_rng(9))
    late.start(chunk(20))
    late.end(chunk(0))


def test_the_room_of_a_start_that_fails_comes_back(deployment):
    """An element of `looked_up` has 4 bytes."""
    model = models.looked_up("grows_and_fails_at_start")
    model = deployment.serve(model.with_parameters(model.name, max_state_bytes=40))
    client = deployment.connect()
    ten = {"INPUT": np.zeros((1, 10), np.int64)}
    for seed in range(2):
        failed = Conversation(client, model, np.random.default_rng(seed))
        with pytest.raises(InferenceServerException, match="out of data bounds"):
            failed.start(BAD)
        whole = Conversation(client, model, np.random.default_rng(seed))
        whole.start(ten)
        with pytest.raises(InferenceServerException, match="out of data bounds"):
            whole.start(BAD)  # a restart that fails ends the old life
        deployment.settles("stateful_growing_state_bytes", model, 0)
    whole.start(ten)
    whole.end({"INPUT": np.zeros((1, 0), np.int64)})


def test_the_gauge_says_what_the_live_sequences_have(deployment):
    model = deployment.serve(models.append(name="grows_in_the_gauge"))
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng(i)) for i in range(3)]
    assert grown(deployment, model) == 0
    for talk, length in zip(talks, (1, 100, 10_000), strict=True):
        talk.start(chunk(length))
    deployment.settles("stateful_growing_state_bytes", model, 8 * 10_101)
    talks[0].step(chunk(9))
    deployment.settles("stateful_growing_state_bytes", model, 8 * 10_110)
    talks[2].start(chunk(5))
    deployment.settles("stateful_growing_state_bytes", model, 8 * 115)
    for talk in talks:
        talk.end(chunk(1))
    deployment.settles("stateful_growing_state_bytes", model, 0)
    text = deployment.server.metrics()
    assert "# TYPE stateful_growing_state_bytes gauge" in text
    assert re.search(
        rf'^stateful_growing_state_bytes{{(gpu="0",)?model="{model.name}",version="1"}} 0$', text, re.MULTILINE
    )


def test_states_kept_as_fp16_count_half(deployment):
    model = deployment.serve(limited("grows_halved_to_80", store_states_as_fp16=1, max_state_bytes=80))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(30))
    talk.start(chunk(20))
    deployment.settles("stateful_growing_state_bytes", model, 80)
    refuses(lambda: talk.step(chunk(1)), 80)
    talk.end(chunk(0))


def test_unloading_forgets_growing_states(deployment):
    model = limited("grows_and_goes", max_state_bytes=160)
    client = deployment.connect()
    for seed in range(3):
        deployment.serve(model)
        talk = Conversation(client, model, np.random.default_rng(seed))
        talk.start(chunk(20))
        deployment.unload(model)


BOUNDS = {
    "negative": "-1",
    "none": "0",
    "not_a_number": "plenty",
    "fraction": "1.5",
    "with_unit": "64MB",
    "huge": "99999999999999999999999",
    "empty": "",
}


@pytest.mark.parametrize("name", ["max_state_bytes_per_sequence", "max_state_bytes"])
@pytest.mark.parametrize("case", BOUNDS)
def test_a_bad_bound_is_refused_by_name_and_value(deployment, name, case):
    model = limited(f"refused_{name}_{case}", **{name: BOUNDS[case]})
    refused(deployment, model, name, f"'{BOUNDS[case]}'")


def test_a_bound_of_one_sequence_above_that_of_all_is_refused(deployment):
    model = limited("refused_bounds", max_state_bytes_per_sequence=161, max_state_bytes=160)
    refused(deployment, model, "max_state_bytes_per_sequence", "161", "max_state_bytes", "160")


# ---- memory


def hoard(name: str, **changes) -> Model:
    """Keeps 4096 copies of each element that comes, 16 KiB, and answers with sums: large states of small
    requests, since Triton's front ends keep some of the memory of large ones."""

    def build():
        return graph(
            [
                node("Unsqueeze", "INPUT LAST", "COLUMN"),
                node("Expand", "COLUMN WIDE", "COPIES"),
                node("Concat", "CACHE_IN COPIES", "CACHE_OUT", axis=1),
                node("ReduceSum", "CACHE_OUT TIME", "OUTPUT", keepdims=0),
            ],
            [("INPUT", "fp32", [BATCH, "chunk"]), ("CACHE_IN", "fp32", [BATCH, "T", 4096])],
            [("OUTPUT", "fp32", [BATCH, 4096]), ("CACHE_OUT", "fp32", [BATCH, "T_new", 4096])],
            {
                "LAST": np.array([2], np.int64),
                "WIDE": np.array([1, 1, 4096], np.int64),
                "TIME": np.array([1], np.int64),
            },
        )

    model = Model(
        name,
        build,
        # whole numbers: their sums are exact in any order
        inputs=(Tensor("INPUT", "fp32", (-1,), between=(-2, 2)),),
        outputs=(Tensor("OUTPUT", "fp32", (4096,)),),
        states=(("CACHE_IN", "CACHE_OUT"),),
        lengths_at_start={"T": 0},
    )
    return dataclasses.replace(model, **changes)


STRINGS_MIB = 120  # what the process keeps of a run is in it, which would be 700 with a vector for each string

EIGHT_MIB = {"INPUT": np.ones((1, 512), F32)}

THIRTY_TWO_MIB = {"INPUT": np.ones((1, 2048), F32)}

TWO_MIB = {"INPUT": np.random.default_rng(25).integers(-2, 3, (1, 128)).astype(F32)}


def in_mib(own) -> float:
    return own.resident_bytes() / MIB


@on_the_host
@both_strategies
def test_states_take_as_much_memory_as_the_gauge_says_and_give_it_back_at_end(deploy, direct):
    own = deploy()
    model = own.serve(hoard("grows_large", direct=direct))
    client = own.connect()
    before = in_mib(own)
    for _ in range(3):
        ids = [new_id() for _ in range(4)]
        for step in range(4):
            for sequence_id in ids:
                client.step(model.name, sequence_id, EIGHT_MIB, start=step == 0)
        own.settles("stateful_growing_state_bytes", model, 4 * 32 * MIB)
        eventually(lambda: in_mib(own) - before, lambda more: 128 <= more < 128 + 48)
        for sequence_id in ids:
            client.step(model.name, sequence_id, TWO_MIB, end=True)
        own.settles("stateful_growing_state_bytes", model, 0)
        eventually(lambda: in_mib(own) - before, lambda more: more < 48)


@on_the_host
def test_states_of_a_batch_go_with_the_last_of_its_sequences_that_expires(deploy):
    own = deploy()
    model = own.serve(hoard("grows_and_expires", oldest="max_queue_delay_microseconds: 50000", idle_us=2_000_000))
    before = in_mib(own)
    client = own.connect()
    # One request each: a second one could come after the idle time on a slow machine.
    together(lambda: client.step(model.name, new_id(), THIRTY_TWO_MIB, start=True) for _ in range(4))
    own.settles("stateful_sequences_expired_total", model, 4)
    own.settles("stateful_growing_state_bytes", model, 0)
    eventually(lambda: in_mib(own) - before, lambda more: more < 48)


@on_the_host
def test_a_start_far_over_the_limit_leaves_no_memory_behind(deploy):
    own = deploy()
    model = own.serve(hoard("grows_too_large").with_parameters("grows_too_large", max_state_bytes_per_sequence=8 * MIB))
    client = own.connect()
    before = in_mib(own)
    for _ in range(3):
        with pytest.raises(InferenceServerException, match=f"{256 * MIB} bytes.*{8 * MIB}"):
            client.step(model.name, new_id(), {"INPUT": np.ones((1, 16 * 1024), F32)}, start=True)
    eventually(lambda: in_mib(own) - before, lambda more: more < 48)


def test_memory_that_cannot_be_had_fails_the_request_and_leaves_the_state(deployment):
    def build():
        return graph(
            [
                node("Expand", "ONE LENGTHS", "MORE"),
                node("Concat", "KEPT_IN MORE", "KEPT_OUT", axis=1),
                node("ReduceSum", "KEPT_OUT TIME", "OUTPUT", keepdims=1),
            ],
            [("LENGTHS", "int64", [2]), ("KEPT_IN", "fp32", [1, "T"])],
            [("OUTPUT", "fp32", [1, 1]), ("KEPT_OUT", "fp32", [1, "T_new"])],
            {"ONE": np.ones((1, 1), F32), "TIME": np.array([1], np.int64)},
        )

    lengths, output = Tensor("LENGTHS", "int64", (2,)), Tensor("OUTPUT", "fp32", (1, 1))
    states = (("KEPT_IN", "KEPT_OUT"),)
    model = Model("grows_beyond_memory", build, (lengths,), (output,), states, max_batch_size=0)
    model = deployment.serve(dataclasses.replace(model, lengths_at_start={"T": 0}))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(1))

    def more(length):
        return {"LENGTHS": np.array([1, length], np.int64)}

    talk.start(more(5))
    for length in (1 << 44, 1 << 52):
        with pytest.raises(InferenceServerException):
            talk.step(more(length))
        talk.step(more(100_000))
    talk.end(more(1))


@on_the_host
def test_short_strings_take_little_more_than_they_are_charged_for(deploy):
    own = deploy()
    limit = 16 * MIB

    def build():
        return graph(
            [
                node("Concat", "KEPT_IN KEPT_IN INPUT", "KEPT_OUT", axis=1),
                node("Slice", "KEPT_OUT FROM TO AXIS", "OUTPUT"),
            ],
            [("INPUT", "string", [BATCH, "chunk"]), ("KEPT_IN", "string", [BATCH, "T"])],
            [("OUTPUT", "string", [BATCH, None]), ("KEPT_OUT", "string", [BATCH, "T_new"])],
            {name: np.array([at], np.int64) for name, at in (("FROM", 0), ("TO", 2), ("AXIS", 1))},
        )

    strings = (Tensor("INPUT", "string", (-1,)),), (Tensor("OUTPUT", "string", (-1,)),)
    model = Model("grows_strings", build, *strings, states=(("KEPT_IN", "KEPT_OUT"),), lengths_at_start={"T": 0})
    model = own.serve(model.with_parameters(model.name, max_state_bytes_per_sequence=limit))
    client = own.connect()
    doubled = {"INPUT": np.full((1, 1), "x", np.object_)}
    before = in_mib(own)
    for _ in range(2):
        sequence_id = new_id()
        for step in range(21):
            client.step(model.name, sequence_id, doubled, start=step == 0)
        own.settles("stateful_growing_state_bytes", model, (2**21 - 1) * 5)
        with pytest.raises(InferenceServerException, match="max_state_bytes_per_sequence"):
            client.step(model.name, sequence_id, doubled)
        eventually(lambda: in_mib(own) - before, lambda more: more < STRINGS_MIB)
        client.step(model.name, sequence_id, doubled, end=True)
        own.settles("stateful_growing_state_bytes", model, 0)
    eventually(lambda: in_mib(own) - before, lambda more: more < STRINGS_MIB)


def test_a_sequence_that_starts_over_and_over_takes_no_more_memory(deploy):
    own = deploy()
    model = own.serve(hoard("grows_anew"))
    talk = Conversation(own.connect(), model, np.random.default_rng(26))

    def start_over(times):
        for _ in range(times):
            talk.start(TWO_MIB)
            talk.step(TWO_MIB)

    start_over(5)
    before = own.resident_bytes()
    start_over(25)  # 100 MiB, if each left its state behind
    own.settles("stateful_growing_state_bytes", model, 4 * MIB)
    eventually(lambda: (own.resident_bytes() - before) / MIB, lambda more: more < 48)
    talk.end(TWO_MIB)

"""`sequence_batching { state [...] }`: Triton's way to name states, served by the backend itself."""

import dataclasses

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import models
from harness.clients import new_id
from harness.conversations import Conversation, interleave, script, some_at_once, together, windowed
from harness.graphs import BATCH, graph, node
from harness.model import TYPES, Model, State, Tensor
from harness.models import implicit
from harness.refusals import refused
from harness.repetitions import every_type
from harness.sequence_oracle import SequenceOracle
from harness.strategies import both_strategies, strategy
from harness.values import bits, random_bits

pytestmark = pytest.mark.simulated_device


def talk_in_turns(client, model: Model, seed: int, sequences: int = 5, rounds: int = 8) -> None:
    """Some of the sequences at once, one of them started over in between; then all end."""
    talks = [Conversation(client, model, np.random.default_rng([seed, i])) for i in range(sequences)]
    rng = np.random.default_rng(seed)
    together(talk.start for talk in talks)
    some_at_once(talks, rng, rounds)
    talks[0].start()
    some_at_once(talks, rng, rounds)
    together(talk.end for talk in talks)


# ---- types, places, names


@every_type()
def test_a_state_of_every_type_is_what_the_request_before_left(deployment, type):
    model = deployment.serve(implicit(models.echo(type), f"implicit_{type}"))
    client = deployment.connect()
    rng = np.random.default_rng(1)
    nothing = np.full((1, 4), b"", np.object_) if type == "string" else np.zeros((1, 4), TYPES[type][0])
    before = {new_id(): nothing for _ in range(4)}
    for step in range(5):
        for sequence_id in rng.permutation(list(before)).tolist():
            now = random_bits(type, (1, 4), rng)
            answer = client.step(model.name, sequence_id, {"INPUT": now}, start=step == 0, end=step == 4)
            came = answer["OUTPUT"]
            assert bits(came) == bits(before[sequence_id]), f"{came}, not {before[sequence_id]}"
            before[sequence_id] = now


@both_strategies
@pytest.mark.parametrize("inside", [False, True], ids=["dims_without_batch", "batch_inside"])
@pytest.mark.parametrize("make", [models.counter, models.lstm, models.axes], ids=lambda make: make.__name__)
@pytest.mark.host_and_device
def test_the_batch_axis_is_where_the_model_has_it(deployment, make, inside, direct):
    name = f"implicit_{make.__name__}_{'inside' if inside else 'without'}_{strategy(direct)}"
    model = deployment.serve(implicit(make(direct=direct), name, inside=inside))
    client = deployment.connect()
    interleave(client, model, np.random.default_rng(2), sequences=6)
    talk_in_turns(client, model, seed=3)


def paced(name: str, pairs: list[tuple[str, str]]) -> Model:
    """States of one type and shape; each counts at a pace of its own, and the answer shows all."""

    def build():
        nodes, weights = [], {}
        for i, (source, target) in enumerate(pairs):
            weights[f"PACE__{i}"] = np.array(10**i, np.int64)
            nodes += [
                node("Mul", f"INPUT PACE__{i}", f"GROWTH__{i}"),
                node("Add", f"{source} GROWTH__{i}", target),
            ]
        nodes.append(node("Concat", " ".join(target for _, target in pairs), "OUTPUT", axis=1))
        return graph(
            nodes,
            [("INPUT", "int64", [BATCH, 1]), *((source, "int64", [BATCH, 1]) for source, _ in pairs)],
            [
                ("OUTPUT", "int64", [BATCH, len(pairs)]),
                *((target, "int64", [BATCH, 1]) for _, target in pairs),
            ],
            weights,
        )

    return Model(
        name,
        build,
        inputs=(Tensor("INPUT", "int64", (1,)),),
        outputs=(Tensor("OUTPUT", "int64", (len(pairs),)),),
        states=tuple(pairs),
    )


NAMES = {
    "crossed": [("A_IN", "Z_OUT"), ("B_IN", "Y_OUT")],
    "turned": [("A_IN", "Z_OUT"), ("B_IN", "X_OUT"), ("C_IN", "Y_OUT")],
    "numbered": [("past_2", "present_2"), ("past_10", "present_10"), ("past_1", "present_1")],
    "prefixes": [("past", "present_1"), ("past_1", "present_10"), ("past_10", "present"), ("past_", "new")],
    "cases": [("a", "B2"), ("B", "a2"), ("b", "A2"), ("A", "b2")],
}


@pytest.mark.parametrize("written", ["forwards", "backwards"])
@pytest.mark.parametrize("names", NAMES)
def test_states_are_paired_by_their_names_and_by_no_order(deployment, names, written):
    """Triton's core pairs the n-th input with the n-th output of the sorted names."""
    model = implicit(paced("paced", NAMES[names]), f"implicit_{names}_{written}")
    if written == "backwards":
        model = model.variant(model.name, implicit=model.implicit[::-1])
    interleave(deployment.connect(), deployment.serve(model), np.random.default_rng(4), sequences=6)


def test_many_states_of_different_sizes_are_kept_apart(deployment):
    model = deployment.serve(implicit(models.many_states(), "implicit_many"))
    talk_in_turns(deployment.connect(), model, seed=5)


# ---- what is sent


def test_a_state_that_is_listed_under_output_too_is_sent(deployment):
    model = deployment.serve(implicit(models.two_inputs(), "implicit_listed"))
    client = deployment.connect()
    talk_in_turns(client, model, seed=6)
    oracle, sequence_id, rng = SequenceOracle(model), new_id(), np.random.default_rng(7)
    for step in range(4):
        fed, how = model.draw(rng), {"start": step == 0, "end": step == 3}
        answer = client.step(model.name, sequence_id, fed, outputs=["TOTAL_OUT"], **how)
        assert set(answer) == {"TOTAL_OUT"}
        np.testing.assert_array_equal(answer["TOTAL_OUT"], oracle.step(fed, **how)["TOTAL_OUT"])


@pytest.mark.parametrize("asked", ["STATE_OUT", "STATE_IN"])
def test_a_state_that_is_not_listed_is_never_sent(deployment, asked):
    model = deployment.serve(implicit(models.counter(), "implicit_unlisted"))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(8))
    assert set(talk.start()) == {"OUTPUT"}
    with pytest.raises(InferenceServerException, match=asked) as refused:
        talk.client.step(model.name, talk.sequence_id, model.draw(talk.rng), outputs=[asked])
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
    talk.end()


def test_no_client_can_put_a_state_in(deployment):
    model = deployment.serve(implicit(models.counter(), "implicit_from_outside"))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(9))
    talk.start()
    with pytest.raises(InferenceServerException):
        forged = {**model.draw(talk.rng), "STATE_IN": np.full((1, 4), 7, np.float32)}
        talk.client.step(model.name, talk.sequence_id, forged)
    talk.step()
    talk.end()


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("same_buffer", "use_same_buffer_for_input_output: true"),
        ("growable", "use_same_buffer_for_input_output: true use_growable_memory: true"),
        ("growable_alone", "use_growable_memory: true"),  # which core itself cannot do
    ],
)
@pytest.mark.parametrize("make", [models.counter, models.append], ids=lambda make: make.__name__)
def test_how_core_would_keep_its_copy_changes_no_answer(deployment, make, name, fields):
    model = implicit(make(), f"implicit_{make.__name__}_{name}", more=fields)
    model = deployment.serve(model.variant(model.name, lengths_at_start={"T": 1}))
    talk_in_turns(deployment.connect(), model, seed=10, rounds=3)


# ---- together with state_pairs


def paired(name: str, entries: int, pairs: str | None) -> Model:
    """`crossed` with its first entries in `state[]`, and the given pairs."""
    model = implicit(models.crossed(), f"implicit_{name}")
    changed = model.variant(model.name, implicit=model.implicit[:entries])
    return changed if pairs is None else changed.with_parameters(changed.name, state_pairs=pairs)


@pytest.mark.parametrize(
    ("name", "entries", "pairs"),
    [
        ("one_each", 1, None),
        ("one_in_both", 1, "<<<A_IN, Z_OUT>>> <<<B_IN, Y_OUT>>>"),
        ("all_in_both", 2, "<<<B_IN, Y_OUT>>> <<<A_IN, Z_OUT>>>"),
        ("one_of_two_in_both", 2, "<<<B_IN, Y_OUT>>>"),
    ],
)
def test_the_states_are_those_of_both_and_the_same_pair_is_one_state(deployment, name, entries, pairs):
    model = deployment.serve(paired(name, entries, pairs))
    interleave(deployment.connect(), model, np.random.default_rng(11), sequences=5)


@pytest.mark.parametrize(
    ("name", "pairs", "words"),
    [
        ("input_twice", "<<<A_IN, Y_OUT>>>", ["A_IN", "Z_OUT", "Y_OUT"]),
        ("output_twice", "<<<B_IN, Z_OUT>>>", ["Z_OUT", "A_IN", "B_IN"]),
    ],
)
def test_a_name_in_two_different_pairs_is_refused(deployment, name, pairs, words):
    refused(deployment, paired(f"refused_{name}", 1, pairs), *words)


# ---- what is refused


def entry(**changes) -> tuple[State, ...]:
    return (dataclasses.replace(State("STATE_IN", "STATE_OUT", "fp32", (4,)), **changes),)


BAD = {
    "type": (entry(type="int32"), ["STATE_IN", "INT32", "FP32"]),
    "type_of_the_same_size": (entry(type="uint32"), ["STATE_IN", "UINT32", "FP32"]),
    "dims": (entry(dims=(5,)), ["STATE_IN", "5", "4"]),
    "too_many_dims": (entry(dims=(-1, 4, 1)), ["STATE_IN", "4, 1"]),
    "too_few_dims": (entry(dims=()), ["STATE_IN"]),
    "batch_where_it_is_not": (entry(dims=(4, -1)), ["STATE_IN", "4, -1"]),
    # such an entry is left out, and then nothing feeds the model's state
    "input_name": (entry(input="NOWHERE_IN"), ["STATE_IN"]),
    "ends_exchanged": (entry(input="STATE_OUT", output="STATE_IN"), ["STATE_IN"]),
    "output_name": (entry(output="NOWHERE_OUT"), ["NOWHERE_OUT"]),
    "empty_input_name": (entry(input=""), ["input_name"]),
    "empty_output_name": (entry(output=""), ["output_name"]),
    "request_input": (entry(input="INPUT"), ["INPUT"]),
    "one_input_for_two_outputs": (entry() + entry(output="OUTPUT"), ["STATE_IN", "STATE_OUT", "OUTPUT"]),
    "one_output_for_two_inputs": (entry() + entry(input="INPUT"), ["STATE_OUT", "STATE_IN", "INPUT"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_state_that_is_not_the_models_is_refused_by_name_and_rule(deployment, case):
    entries, words = BAD[case]
    model = models.counter(name=f"refused_implicit_{case}", implicit=entries, states=())
    refused(deployment, model, *words)


@pytest.mark.parametrize("output", ["GONE_OUT", "OUTPUT"])
def test_a_state_whose_input_the_model_does_not_have_is_left_out(deployment, output):
    """An exporter's optimiser drops inputs that are not used; the configuration still has them."""
    model = implicit(models.counter(), f"implicit_gone_{output}")
    gone = State("GONE_IN", output, "int32", (7, -1), initial_dims=(7, 3))
    model = deployment.serve(model.variant(model.name, implicit=(gone, *model.implicit)))
    talk_in_turns(deployment.connect(), model, seed=23, rounds=3)


def test_a_state_of_the_model_that_nobody_names_is_refused(deployment):
    model = implicit(models.crossed(), "refused_implicit_forgotten")
    forgotten = model.variant(model.name, implicit=model.implicit[:1], states=model.states[:1])
    refused(deployment, forgotten, "B_IN")


# ---- open dimensions


@pytest.mark.parametrize("inside", [False, True], ids=["dims_without_batch", "batch_inside"])
@pytest.mark.parametrize("layout", ["NTW", "TNW", "WNT"])
def test_an_open_dimension_without_an_initial_state_is_one_at_start(deployment, layout, inside):
    name = f"implicit_open_{layout}_{'inside' if inside else 'without'}"
    model = implicit(models.append(layout=layout), name, inside=inside)
    model = deployment.serve(model.variant(name, lengths_at_start={"T": 1}))
    client = deployment.connect()
    talk = Conversation(client, model, np.random.default_rng(12))
    first = talk.start({"INPUT": np.full((1, 3, 2), 5, np.float32)})["OUTPUT"]
    np.testing.assert_array_equal(first[0], [[0, 0], [5, 5], [5, 5], [5, 5]])
    talk.end()
    interleave(client, model, np.random.default_rng(13), sequences=6)


def broadcast(name: str, input_shape: list, state_shape: list, **changes) -> Model:
    """STATE_OUT = STATE_IN + INPUT: a state of one column takes on the width of what comes."""

    def build():
        return graph(
            [node("Add", "STATE_IN INPUT", "STATE_OUT"), node("Identity", "STATE_OUT", "OUTPUT")],
            [("INPUT", "fp32", input_shape), ("STATE_IN", "fp32", state_shape)],
            [("OUTPUT", "fp32", input_shape), ("STATE_OUT", "fp32", state_shape)],
        )

    model = Model(
        name,
        build,
        inputs=(Tensor("INPUT", "fp32", (-1,), between=(-9, 9)),),
        outputs=(Tensor("OUTPUT", "fp32", (-1,)),),
        states=(("STATE_IN", "STATE_OUT"),),
        implicit=(State("STATE_IN", "STATE_OUT", "fp32", (-1,)),),
    )
    return dataclasses.replace(model, **changes)


@pytest.mark.parametrize(
    ("name", "input_shape", "state_shape"),
    [("own_names", [BATCH, "columns"], [BATCH, "width"]), ("one_name", [BATCH, "x"], [BATCH, "x"])],
)
def test_the_first_step_may_give_a_state_its_width(deployment, name, input_shape, state_shape):
    """Two dims of one name in the model need not be equal in a run."""
    model = broadcast(
        f"implicit_broadcast_{name}",
        input_shape,
        state_shape,
        max_batch_size=4,
        oldest="preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 1000000",
    )
    client = deployment.connect()
    deployment.serve(model)

    def fed(seed, width):
        return {"INPUT": np.random.default_rng(seed).integers(-9, 9, (1, width)).astype(np.float32)}

    talks = [Conversation(client, model, np.random.default_rng(seed)) for seed in range(4)]
    together(lambda talk=talk, i=i: talk.start(fed(i, 2)) for i, talk in enumerate(talks))
    # the state's width stays, whatever one column comes
    together(lambda talk=talk, i=i: talk.step(fed(i, 1 + i % 2)) for i, talk in enumerate(talks))
    # two start over with another width, beside those that go on
    together(lambda talk=talk, i=i: talk.step(fed(i, 5 if i < 2 else 2), start=i < 2) for i, talk in enumerate(talks))
    together(lambda talk=talk, i=i: talk.end(fed(i, 5 if i < 2 else 2)) for i, talk in enumerate(talks))
    sizes = {batch.batch_size for batch in deployment.statistics(model).batch_stats}
    assert 4 in sizes, f"the first steps never came together: batches of {sizes}"


@both_strategies
def test_every_dimension_may_be_open_where_there_is_no_batch(deployment, direct):
    model = broadcast(
        f"implicit_all_open_{strategy(direct)}",
        ["x", "y"],
        ["x", "y"],
        inputs=(Tensor("INPUT", "fp32", (-1, -1)),),
        outputs=(Tensor("OUTPUT", "fp32", (-1, -1)),),
        implicit=(State("STATE_IN", "STATE_OUT", "fp32", (-1, -1)),),
        max_batch_size=0,
        direct=direct,
    )
    deployment.serve(model)
    for seed in range(3):
        talk = Conversation(deployment.connect(), model, np.random.default_rng(seed))
        for step, shape in enumerate([(4, 2), (4, 2), (1, 2), (4, 1), (4, 2)]):
            fed = {"INPUT": talk.rng.standard_normal(shape).astype(np.float32)}
            talk.step(fed, start=step == 0, end=step == 4)


# ---- without Triton's batch dimension


@both_strategies
@pytest.mark.parametrize("dims", [(1, 4), (-1, 4)], ids=["one", "open"])
def test_a_batch_axis_of_the_model_is_one_row_without_batching(deployment, dims, direct):
    model = models.counter(
        name=f"implicit_unbatched_{'one' if dims[0] == 1 else 'open'}_{strategy(direct)}",
        max_batch_size=0,
        direct=direct,
        inputs=(Tensor("INPUT", "fp32", (1, 4)),),
        outputs=(Tensor("OUTPUT", "fp32", (1, 4)),),
        implicit=(State("STATE_IN", "STATE_OUT", "fp32", dims),),
    )
    deployment.serve(model)
    client = deployment.connect()

    def talk(seed):
        rng = np.random.default_rng(seed)
        for _ in range(3):
            Conversation(client, model, rng).whole(4)

    together(lambda seed=seed: talk(seed) for seed in range(4))


@pytest.mark.parametrize("instances", [1, 2])
@both_strategies
def test_a_model_without_any_batch_axis_keeps_its_states(deployment, direct, instances):
    def build():
        return graph(
            [
                node("Add", "SUM_IN INPUT", "SUM_OUT"),
                node("Mul", "PRODUCT_IN HALF", "LESS"),
                node("Add", "LESS INPUT", "PRODUCT_OUT"),
                node("Concat", "SUM_OUT PRODUCT_OUT", "OUTPUT", axis=0),
            ],
            [("INPUT", "fp32", [1]), ("SUM_IN", "fp32", [1]), ("PRODUCT_IN", "fp32", [1])],
            [("OUTPUT", "fp32", [2]), ("SUM_OUT", "fp32", [1]), ("PRODUCT_OUT", "fp32", [1])],
            {"HALF": np.array(0.5, np.float32)},
        )

    model = Model(
        f"implicit_no_batch_{strategy(direct)}_{instances}",
        build,
        inputs=(Tensor("INPUT", "fp32", (1,)),),
        outputs=(Tensor("OUTPUT", "fp32", (2,)),),
        states=(("SUM_IN", "SUM_OUT"), ("PRODUCT_IN", "PRODUCT_OUT")),
        max_batch_size=0,
        direct=direct,
        instances=instances,
    )
    model = deployment.serve(implicit(model, model.name))
    client = deployment.connect()

    def talk(seed):
        rng = np.random.default_rng(seed)
        for _ in range(4):
            Conversation(client, model, rng).whole(int(rng.integers(1, 6)))

    together(lambda seed=seed: talk(seed) for seed in range(4))


# ---- scheduling


FULL = "max_queue_delay_microseconds: 3000 minimum_slot_utilization: 1.0"

SCHEDULING = {
    "oldest": {},
    "oldest_preferred": {"oldest": "preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 3000"},
    "oldest_of_two_instances": {"instances": 2},
    "direct": {"direct": ""},
    "direct_delayed": {"direct": FULL},
    "direct_half_full": {"direct": "max_queue_delay_microseconds: 3000 minimum_slot_utilization: 0.5"},
    "direct_of_two_instances": {"direct": "", "instances": 2, "max_batch_size": 4},
}


@pytest.mark.parametrize("how", SCHEDULING)
@pytest.mark.parametrize("make", [models.crossed, models.axes], ids=lambda make: make.__name__)
def test_sequences_that_pause_keep_their_states(deployment, make, how):
    """With `direct` each pause is a hole in the batch, which core fills with a request of nobody."""
    made = make(**{"max_batch_size": 8, **SCHEDULING[how]})
    model = deployment.serve(implicit(made, f"implicit_{make.__name__}_{how}"))
    talk_in_turns(deployment.connect(), model, seed=14, sequences=7, rounds=10)


@pytest.mark.parametrize("how", ["oldest", "direct"])
def test_waiting_sequences_share_a_run(deployment, how):
    delay = "max_queue_delay_microseconds: 1000000"
    said = {
        "oldest": f"preferred_batch_size: [ 4 ] {delay}",
        "direct": f"minimum_slot_utilization: 1.0 {delay}",
    }
    made = models.crossed(max_batch_size=4, **{how: said[how]})
    model = deployment.serve(implicit(made, f"implicit_shared_{how}"))
    client = deployment.connect()
    talks = [Conversation(client, model, np.random.default_rng(i)) for i in range(4)]
    together(talk.start for talk in talks)
    for _ in range(3):
        together(talk.step for talk in talks)
    together(talk.end for talk in talks)
    sizes = {batch.batch_size for batch in deployment.statistics(model).batch_stats}
    assert 4 in sizes, f"batches of {sizes}"


@both_strategies
def test_an_id_used_again_begins_with_a_fresh_state(deployment, direct):
    name = f"implicit_reused_{strategy(direct)}"
    model = deployment.serve(implicit(models.crossed(direct=direct), name))
    rng = np.random.default_rng(15)
    scripts = [script(model, rng, new_id(), lives=5) for _ in range(6)]
    windowed(deployment.connect("stream"), model, rng, scripts, window=8)


@both_strategies
def test_a_start_in_the_place_of_an_ended_sequence_finds_nothing_of_it(deployment, direct):
    """Core keeps its own copy for each place and clears it late; nobody may be fed it."""
    name = f"implicit_places_{strategy(direct)}"
    made = models.counter(direct=direct, max_batch_size=2, max_candidates=3)
    model = deployment.serve(implicit(made, name))
    client, rng = deployment.connect(), np.random.default_rng(16)
    for _ in range(6):
        Conversation(client, model, rng).whole(3)


@pytest.mark.parametrize("protocol", ["unary", "stream", "http"])
def test_every_protocol_serves_implicit_states(deployment, protocol):
    model = deployment.serve(implicit(models.crossed(), "implicit_protocols"))
    interleave(deployment.connect(protocol), model, np.random.default_rng(17), sequences=4)


@pytest.mark.parametrize("direct", [None, FULL], ids=["oldest", "direct"])
def test_all_four_controls_are_fed_beside_implicit_states(deployment, direct):
    made = models.controls(direct=direct, max_batch_size=4)
    model = deployment.serve(implicit(made, f"implicit_controls_{strategy(direct)}"))
    client = deployment.connect()
    talk_in_turns(client, model, seed=18, sequences=4)
    interleave(client, model, np.random.default_rng(19), sequences=4)


def test_the_models_own_reset_still_makes_the_beginning(deployment):
    """Models for Triton's implicit state mask with START, since core's first state is anything."""
    model = deployment.serve(implicit(models.accumulate(), "implicit_reset"))
    talk_in_turns(deployment.connect(), model, seed=20)


def test_half_precision_storage_rounds_implicit_states_too(deployment):
    model = implicit(models.counter(), "implicit_halved")
    model = deployment.serve(model.with_parameters(model.name, store_states_as_fp16=1))
    talk_in_turns(deployment.connect(), model, seed=21)


def test_a_failed_request_leaves_an_implicit_state_as_it_was(deployment):
    model = deployment.serve(implicit(models.fails(), "implicit_fails"))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(22))
    talk.start()
    for _ in range(3):
        with pytest.raises(InferenceServerException, match="out of data bounds"):
            talk.step({"INPUT": np.array([[99]], np.int64)})
        talk.step()
    talk.end()


def test_loading_again_forgets_the_states(deployment):
    model = implicit(models.counter(), "implicit_loaded_again")
    client = deployment.connect()
    for seed in range(3):
        deployment.serve(model)
        talk = Conversation(client, model, np.random.default_rng(seed))
        talk.start()
        talk.step()
        deployment.unload(model)

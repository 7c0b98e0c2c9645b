"""The State API of OpenVINO over the network: cases S01 to S38, by number.

A case that is shown elsewhere:

| case | | test |
|---|---|---|
| S35 | a pair with an unknown name, used twice, or with a type or shape that does not fit | `configuration/test_signature_errors.py` |
"""

import json

import numpy as np
import pytest

from harness import models, raw
from harness.conversations import together
from harness.deployment import eventually
from harness.graphs import BATCH, graph, node
from harness.models import booked, ledger
from harness.own import FAILS, fed
from harness.repetitions import every_type
from harness.state_api import (
    OWN,
    StateSequence,
    both_schedulers,
    every_scheduler,
    refused,
)
from harness.values import bits, random_bits

F32 = np.float32

pytestmark = pytest.mark.simulated_device

every_protocol = pytest.mark.parametrize("protocol", ["unary", "stream", "http"])


def row(*values, dtype=F32) -> np.ndarray:
    """One row of a tensor."""
    return np.array([values], dtype)


@pytest.fixture
def sequence(serve, connect):
    """A sequence of `ledger`, whose states are SUM, BOTH and LOG, or of another model."""

    def made(by: str, protocol: str = "unary", make=ledger, **how) -> StateSequence:
        return StateSequence(connect(protocol), serve(make, by, **how), np.random.default_rng(3))

    return made


def core_or_own(by: str, own_word: str) -> str:
    """What a request for a sequence that isn't live is refused with: core's sequence batcher has words of its own."""
    return own_word if by == OWN else "must specify the START flag"


@every_protocol
@every_scheduler
def test_s01_query_tells_names_types_and_shapes_in_the_order_of_the_model(sequence, by, protocol):
    talk = sequence(by, protocol)
    talk.start(query_state=True)
    for _ in range(2):
        info = json.loads(talk.ask(query_state=True).outputs["state_info"].item())
        assert [state["name"] for state in info["states"]] == ["SUM", "BOTH", "LOG"]
        assert info["states"][1] == {"name": "BOTH", "datatype": "INT64", "shape": [1, 2, 1], "byte_size": 16}
        talk.step()


@every_scheduler
def test_s02_no_sequence_no_state(sequence, by):
    with refused(core_or_own(by, "SEQUENCE_MISSING")):
        sequence(by).ask(get_state=True)


@every_protocol
@every_scheduler
def test_s03_get_state_is_the_state_after_the_last_step(sequence, by, protocol):
    talk = sequence(by, protocol)
    talk.start()
    talk.ask(get_state=True)
    talk.step()
    talk.ask(get_state=True)


@every_protocol
@every_scheduler
def test_s04_with_an_inference_get_state_is_the_state_after_it(sequence, by, protocol):
    talk = sequence(by, protocol)
    talk.start(get_state=True)
    talk.step(get_state="LOG")
    talk.step(get_state="LOG,SUM")
    talk.step(get_state="state.SUM, BOTH")


@every_scheduler
def test_s05_states_are_not_sent_unless_asked_for(sequence, by):
    talk = sequence(by)
    talk.start()
    # names of outputs alone ask for nothing: clients name all outputs, or none
    answer = talk.client.ask(
        talk.model.name, booked(1), {"sequence_id": talk.sequence_id}, outputs=["OUTPUT", "state.SUM", "state_info"]
    )
    assert set(answer.outputs) == {"OUTPUT"}
    talk.oracle.step(booked(1))
    talk.step(get_state=False, query_state="false", snapshot=0)


@both_schedulers
def test_s06_an_unknown_state_is_refused_by_name_and_nothing_runs(sequence, by):
    talk = sequence(by)
    talk.start()
    for parameter in ("get_state", "reset_state"):
        with talk.refuses("STATE_UNKNOWN", parameter, "'TOTAL'", "SUM, BOTH, LOG"):
            talk.step(**{parameter: "SUM,TOTAL"})
    talk.step()


@both_schedulers
def test_s07_setting_one_state_keeps_the_others(sequence, by):
    talk = sequence(by)
    talk.start()
    talk.step(set={"SUM": row(1000, dtype=np.int64)}, get_state=True)
    talk.ask(set={"BOTH": np.array([[[5], [6]]], np.int64)}, get_state=True)
    talk.step(get_state=True)


@both_schedulers
def test_s08_start_with_one_state_takes_the_others_from_their_initial_values(sequence, by):
    talk = sequence(by)
    for _ in range(2):
        talk.start(set={"LOG": row(7, 8, 9, dtype=np.int64)}, get_state=True)
        talk.end()


@both_schedulers
def test_s09_start_with_all_states_asks_no_initial_value(sequence, by):
    talk = sequence(by, make=models.axes)
    rng = np.random.default_rng(9)
    shapes = {"FIRST_IN": (1, 2), "MIDDLE_IN": (1, 3, 2), "LAST_IN": (1, 2, 3)}
    talk.start(set={name: rng.standard_normal(shape).astype(F32) for name, shape in shapes.items()}, get_state=True)
    talk.step(get_state=True)


@both_schedulers
def test_s10_a_wrong_dim_is_refused(sequence, by):
    talk = sequence(by, make=models.counter)
    talk.start()
    with talk.refuses("unexpected shape for input 'state.STATE_IN'"):
        talk.step(set={"STATE_IN": row(1, 2, 3)})


@both_schedulers
def test_s11_a_wrong_type_is_refused(sequence, by):
    talk = sequence(by, make=models.counter)
    talk.start()
    with talk.refuses("data-type"):
        talk.step(set={"STATE_IN": row(1, 2, 3, 4, dtype=np.int32)})


@both_schedulers
def test_s12_two_rows_are_refused(sequence, by):
    talk = sequence(by, make=models.counter)
    talk.start()
    with talk.refuses("state.STATE_IN" if by == OWN else "batch"):
        talk.ask(set={"STATE_IN": np.zeros((2, 4), F32)})


@every_protocol
@both_schedulers
def test_s13_reset_of_all_begins_anew_in_the_same_sequence(sequence, by, protocol):
    talk = sequence(by, protocol)
    talk.start()
    talk.step()
    talk.step(reset_state=True, get_state=True)
    talk.step(get_state=True)


@both_schedulers
def test_s14_reset_of_one_state_keeps_the_others(sequence, by):
    talk = sequence(by)
    talk.start()
    talk.step(reset_state="SUM", get_state=True)
    talk.ask(reset_state="LOG, state.BOTH", get_state=True)
    talk.step(get_state=True)


@both_schedulers
def test_s15_set_and_reset_of_the_same_state_are_refused(sequence, by):
    talk = sequence(by)
    talk.start()
    for reset in (True, "SUM", "BOTH,SUM"):
        with talk.refuses("STATE_CONFLICT", "reset_state", "state.SUM"):
            talk.step(set={"SUM": row(1, dtype=np.int64)}, reset_state=reset)
    talk.step(set={"SUM": row(1, dtype=np.int64)}, reset_state="BOTH", get_state=True)


@both_schedulers
def test_s16_start_and_reset_give_a_learned_initial_value(sequence, by):
    value = row(1.5, -2, 3, 0.25)
    how = {"parameters": {"initial_states": "STATE_IN=file:row.bin"}, "initial": {"STATE_IN": value}}
    talk = sequence(by, make=models.counter, files={"initial_state/row.bin": value.tobytes()}, **how)
    talk.start(get_state=True)
    talk.step(reset_state=True, get_state=True)
    talk.ask(reset_state=True, get_state=True)
    talk.other().ask(start=True, get_state=True)
    talk.other().step(start=True, commit=False, get_state=True)


@pytest.fixture
def doubled(sequence):
    """A sequence whose state begins with twice the INPUT of its START."""

    def made(by: str, protocol: str = "unary") -> StateSequence:
        row = [BATCH, 4]
        maker = graph([node("Add", "INPUT INPUT", "STATE_IN")], [("INPUT", "fp32", row)], [("STATE_IN", "fp32", row)])
        how = {
            "files": {"1/initial.onnx": maker.SerializeToString()},
            "parameters": {"initial_state_model": "initial.onnx"},
            "initial": {"STATE_IN": lambda fed: fed["INPUT"] * 2},
        }
        return sequence(by, protocol, make=models.counter, **how)

    return made


@both_schedulers
def test_s17_s19_an_initial_value_of_the_inputs_is_that_of_start(doubled, by):
    talk = doubled(by)
    talk.start(get_state=True)
    # later inputs make no initial value, unless there is a reset
    talk.step(get_state=True)
    talk.step(reset_state=True, get_state=True)
    talk.other().start(commit=False, get_state=True)
    talk.other().start(set={"STATE_IN": row(1, 2, 3, 4)}, get_state=True)
    talk.restored(talk.save(), talk.model.draw(talk.rng), get_state=True)


@both_schedulers
def test_s18_without_these_inputs_there_is_no_initial_value(doubled, by):
    talk = doubled(by)
    with refused("STATE_CONFLICT", "initial_state_model"):
        talk.ask(start=True, get_state=True)
    talk.start()
    with talk.refuses("STATE_CONFLICT", "initial_state_model"):
        talk.ask(reset_state=True)
    # with all states, no initial value is needed
    other = talk.other()
    other.ask(start=True, set={"STATE_IN": row(1, 2, 3, 4)}, get_state=True)
    other.step(get_state=True)
    talk.clone(get_state=True).step(get_state=True)


@both_schedulers
def test_s21_reset_of_a_growing_state_makes_it_empty(sequence, by):
    talk = sequence(by, make=models.append)
    talk.start()
    talk.step()
    assert talk.ask(reset_state=True, get_state=True).outputs["state.CACHE_IN"].shape == (1, 0, 2)
    talk.step(get_state=True)


@both_schedulers
def test_s20_a_growing_state_has_the_length_that_it_has(sequence, by):
    talk = sequence(by, make=models.append)
    lengths = []
    for at, length in enumerate((1, 3, 2)):
        chunk = {"INPUT": np.full((1, length, 2), length, F32)}
        answer = talk.step(chunk, start=at == 0, get_state=True)
        lengths.append(answer.outputs["state.CACHE_IN"].shape[1])
    assert lengths == [1, 4, 6]
    talk.step(set={"CACHE_IN": np.ones((1, 5, 2), F32)}, get_state=True)
    with talk.refuses("unexpected shape"):
        talk.step(set={"CACHE_IN": np.ones((1, 5, 3), F32)})


@both_schedulers
def test_s22_sequences_with_states_of_different_lengths(sequence, by):
    talks = [sequence(by, make=models.append)]
    talks += [talks[0].other() for _ in range(3)]
    for length, talk in enumerate(talks):
        talk.rng = np.random.default_rng(length)
        talk.start(set={"CACHE_IN": np.full((1, length, 2), length, F32)})
    for _ in range(5):
        together(lambda talk=talk: talk.step(get_state=True) for talk in talks)


@both_schedulers
def test_s23_an_int64_state_is_exact_beyond_32_bits(sequence, by):
    talk = sequence(by)
    talk.start(booked(1), set={"SUM": row(2**62, dtype=np.int64)}, get_state=True)
    answer = talk.step(booked(3), get_state="SUM")
    assert answer.outputs["state.SUM"].item() == 2**62 + 4


@every_type(but=("bf16",))  # tritonclient has no BF16
@both_schedulers
def test_s24_every_type_is_read_and_written_bit_by_bit(sequence, by, type):
    talk = sequence(by, make=lambda name: models.echo(type, name))
    rng = np.random.default_rng(24)
    values = [random_bits(type, (1, 4), rng) for _ in range(3)]
    if type == "string":
        values = [np.array([[b"", b"a", "ü€".encode(), b"x" * 300]], np.object_), np.full((1, 4), b"", np.object_)]
    client, name, at = talk.client, talk.model.name, {"sequence_id": talk.sequence_id}
    client.ask(name, {"INPUT": values[0]}, {**at, "sequence_start": True})
    assert bits(client.ask(name, {}, {**at, "get_state": True}).outputs["state.STATE_IN"]) == bits(values[0])
    for value in values:
        came = client.ask(name, {"state.STATE_IN": value}, {**at, "get_state": True}).outputs["state.STATE_IN"]
        assert bits(came) == bits(value)
        came = client.ask(name, {"INPUT": values[0]}, {**at, "commit": False}).outputs["OUTPUT"]
        assert bits(came) == bits(value)


@both_schedulers
def test_s25_a_failed_inference_leaves_the_state(sequence, by):
    talk = sequence(by)
    talk.start()
    for how in ({}, {"reset_state": True}, {"set": {"SUM": row(5, dtype=np.int64)}}, {"commit": False}):
        with talk.refuses("ONNX Runtime"):
            talk.step(booked(FAILS), **how)
    talk.step(get_state=True)


def test_s26_a_request_that_is_cancelled_in_the_queue_changes_no_state(deployment, serve, connect):
    model = serve(models.work)
    talk = StateSequence(connect(), model)
    talk.start(fed(1))
    busy = connect("stream")
    busy.send(model.name, fed(0, work=10000), {"sequence_id": talk.sequence_id})
    # the sequence has a request running, so this one is queued when its client leaves
    raw.take_back(deployment, model.name, {"state.SUM_IN": row(77, dtype=np.int64)}, {"sequence_id": talk.sequence_id})
    busy.reply()
    talk.oracle.step(fed(0))
    talk.states()


@both_schedulers
def test_s27_s28_values_are_copies(sequence, by):
    """A tensor that was sent, and one that came, share nothing with the state."""
    talk = sequence(by)
    value = row(5, dtype=np.int64)
    talk.start(booked(1), set={"SUM": value})
    value[:] = 99
    came = talk.ask(get_state="SUM").outputs["state.SUM"]
    assert came.item() == 6
    talk.step(booked(1))
    assert came.item() == 6


@both_schedulers
def test_s29_setting_a_state_leaves_other_sequences(sequence, by):
    one = sequence(by)
    other = one.other()
    one.start()
    other.start()
    one.step(set={"SUM": row(10**9, dtype=np.int64)})
    other.states()
    one.ask(reset_state=True)
    other.step(get_state=True)


@every_protocol
@every_scheduler
@pytest.mark.host_and_device
def test_s30_a_snapshot_becomes_a_sequence(sequence, by, protocol):
    talk = sequence(by, protocol)
    talk.start()
    saved = talk.save()
    talk.step()
    other = talk.restored(saved)
    other.step(get_state=True)
    talk.step(get_state=True)
    talk.ask(restore=saved, get_state=True)
    talk.step(get_state=True, query_state=True)


@every_protocol
@every_scheduler
def test_s31_end_gives_the_last_state_and_frees_the_id(sequence, by, protocol):
    talk = sequence(by, protocol)
    talk.start()
    talk.end(get_state=True, query_state=True, snapshot=True)
    with refused(core_or_own(by, "SEQUENCE_MISSING")):
        talk.step()
    talk.start(get_state=True)
    talk.ask(end=True, get_state=True)
    with refused(core_or_own(by, "SEQUENCE_MISSING")):
        talk.ask(get_state=True)


@every_scheduler
def test_s32_calls_are_in_order_with_running_requests(deployment, serve, connect, by):
    model = serve(models.work, by)
    stream = connect("stream")
    sums = {"sequence_id": 32, "get_state": True}
    asked = [
        (fed(1), {"sequence_id": 32, "sequence_start": True}, None),
        (fed(2, work=100), {"sequence_id": 32}, None),
        ({}, sums, 3),
        (fed(4, work=20), {"sequence_id": 32}, None),
        ({"state.SUM_IN": row(100, dtype=np.int64)}, sums, 100),
        (fed(8), sums, 108),
        (fed(16), {**sums, "commit": False}, 108),
        ({}, {**sums, "reset_state": True}, 0),
        (fed(32), sums, 32),
    ]
    for inputs, parameters, _ in asked:
        stream.send(model.name, inputs, parameters)
    replies = stream.all_replies(len(asked))
    for number, (_, _, sum) in enumerate(asked):
        assert isinstance(replies[number], raw.Answer), replies[number]
        if sum is not None:
            assert replies[number].outputs["state.SUM_IN"].item() == sum


@both_schedulers
def test_s33_after_a_reset_a_state_has_its_initial_value(sequence, by):
    talk = sequence(by)
    talk.start()
    answer = talk.ask(reset_state=True, get_state=True, query_state=True)
    assert not answer.outputs["state.SUM"].any() and answer.outputs["state.LOG"].size == 0


@both_schedulers
def test_s34_an_input_that_is_no_state_has_no_state_tensor(deployment, serve, connect, by):
    pairs = (("A_IN", "Z_OUT"),)
    b = models.counter().inputs[0]
    inputs = tuple(type(b)(name, "fp32", (3,)) for name in ("INPUT", "B_IN"))
    model = serve(models.crossed, by, states=pairs, inputs=inputs)
    talk = StateSequence(connect(), model)
    talk.start(get_state=True)
    with talk.refuses("STATE_UNKNOWN", "'B_IN'", "A_IN"):
        talk.step(get_state="B_IN")
    with talk.refuses("'B_IN' is missing"):
        talk.ask({"INPUT": np.ones((1, 3), F32)})


@both_schedulers
def test_s36_a_state_beyond_the_limit_is_refused(sequence, by):
    talk = sequence(by, make=models.append, parameters={"max_state_bytes_per_sequence": 80})
    ten, eleven = np.ones((1, 10, 2), F32), np.ones((1, 11, 2), F32)
    other = talk.other()
    with refused("max_state_bytes_per_sequence"):
        other.ask(start=True, set={"CACHE_IN": eleven})
    talk.ask(start=True, set={"CACHE_IN": ten}, get_state=True)
    with talk.refuses("max_state_bytes_per_sequence"):
        talk.ask(set={"CACHE_IN": eleven})
    with talk.refuses("max_state_bytes_per_sequence"):
        talk.step({"INPUT": eleven}, reset_state=True)
    talk.step({"INPUT": ten}, reset_state=True, get_state=True)


@both_schedulers
def test_s37_nan_and_infinity_are_carried_as_they_are(sequence, by):
    talk = sequence(by, make=models.counter)
    odd = np.array([[0x7FC12345, 0xFF800000, 0x7F800000, 0x80000000]], np.uint32).view(F32)
    talk.start(set={"STATE_IN": odd}, commit=False)
    assert bits(talk.ask(get_state=True).outputs["state.STATE_IN"]) == bits(odd)


@both_schedulers
def test_s38_a_call_without_inputs_runs_nothing(deployment, sequence, by):
    talk = sequence(by)

    def counted() -> tuple[int, int]:
        found = deployment.statistics(talk.model)
        return found.inference_stats.success.count, found.execution_count

    talk.start()
    eventually(counted, lambda count: count == (1, 1))
    saved = talk.save()
    talk.ask(get_state=True, query_state=True)
    talk.ask(reset_state=True)
    talk.ask(set={"SUM": row(4, dtype=np.int64)})
    talk.ask(restore=saved)
    eventually(counted, lambda count: count == (6, 1))
    talk.step(get_state=True)
    eventually(counted, lambda count: count == (7, 2))

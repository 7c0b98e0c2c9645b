"""What a request does with the state of its sequence: `commit`, set and reset, `delete`, `sequence_step`; and that a request
that fails does nothing."""

import numpy as np
import pytest

from harness import models
from harness.conversations import together
from harness.graphs import BATCH
from harness.models import booked, ledger
from harness.models.exports import Export
from harness.own import FAILS, special
from harness.raw import Refused
from harness.state_api import DIRECT, OLDEST, OWN, StateSequence, both_schedulers, every_scheduler, refused
from support import paths
from triton_stateful import Sequence, StatefulError

F32 = np.float32

pytestmark = pytest.mark.simulated_device


def sums(*values) -> np.ndarray:
    return np.array([values], np.int64)


def framed(name: str, **changes):
    return models.framed(name, [BATCH, "T"], (3, 1), (-1,), **changes)


@pytest.fixture
def talk(serve, connect, request):
    """A sequence of `ledger` that has made a step."""

    def made(by: str = OWN, make=ledger, **how) -> StateSequence:
        begun = StateSequence(connect(), serve(make, by, **how), np.random.default_rng(5))
        begun.start()
        return begun

    return made


@pytest.mark.skipif(
    paths.TEST_DEVICE == "gpu", reason="ONNX Runtime's ReduceSum for GPUs takes no tensor without elements"
)
def test_a_state_without_elements_is_read_and_set(deployment):
    export = Export(
        {"x": (1, 4), "memory_in": (1, 4), "empty_in": (0,)},
        {"y": (1, 4), "memory_out": (1, 4), "empty_out": (0,)},
        {"memory_in": "memory_out", "empty_in": "empty_out"},
        batch=None,
    )
    written = 'backend: "stateful"\nparameters { key: "state_api" value { string_value: "true" } }'
    model = deployment.serve(export.served("model", "without_elements", file_name="model.onnx", written=written))
    with Sequence(deployment.server.grpc_url, model.name, states={"empty_in": np.zeros(0, F32)}) as one:
        one.step(np.zeros((1, 4), F32))
        assert one.state("empty_in")["empty_in"].shape == (0,)
        with pytest.raises(StatefulError, match=r"'state.empty_in'.*\[3\].*\[0\]"):
            one.set_state(empty_in=np.zeros(3, F32))
        one.set_state(empty_in=np.zeros(0, F32))
        assert one.info().steps == 1


# ---- commit


@every_scheduler
def test_without_commit_an_inference_answers_and_leaves_the_state(talk, by):
    one = talk(by)
    for _ in range(3):
        one.step(commit=False, get_state=True, query_state=True)
        one.step(commit="false")
        one.step(commit=True)
    one.end(commit=False, get_state=True)


@every_scheduler
def test_a_start_without_commit_begins_with_what_it_reads(talk, by):
    one = talk(by)
    other = one.other()
    other.start(commit=False, get_state=True, query_state=True)
    other.step(get_state=True)
    saved = one.save()
    fresh = one.other()
    fresh.ask(booked(3), start=True, restore=saved, commit=False, get_state=True, query_state=True)
    fresh.step(get_state=True)
    clone = one.clone(booked(4), commit=False, get_state=True)
    clone.step(get_state=True)


@pytest.mark.parametrize("by", [OLDEST, DIRECT])
def test_a_model_that_is_told_of_start_begins_with_an_inference(serve, connect, by):
    """It clears its state itself, so a first or reset state that it has not seen would be wrong."""
    model, client = serve(models.accumulate, by, parameters={"initial_states": "SUM_IN=1000"}), connect()
    one, state = {"INPUT": np.array([[5]], F32)}, {"state.SUM_IN": np.array([[70]], F32)}

    def ask(inputs, **parameters):
        return client.ask(model.name, inputs, {"sequence_id": 1, **parameters})

    for inputs, parameters in (
        (one, {"sequence_start": True, "commit": False}),
        ({}, {"sequence_start": True, "query_state": True}),
        ({}, {"sequence_start": True, "reset_state": True}),
    ):
        with pytest.raises(Refused, match="STATE_CONFLICT.*takes START as an input"):
            ask(inputs, **parameters)
    assert ask(one | state, sequence_start=True).outputs["OUTPUT"].item() == 75, "all states were sent"
    assert ask(one).outputs["OUTPUT"].item() == 80
    for inputs, parameters in (({}, {"reset_state": True}), ({}, {"reset_state": "SUM_IN"})):
        with pytest.raises(Refused, match="STATE_CONFLICT.*takes START as an input"):
            ask(inputs, **parameters)
    assert ask(one, reset_state=True, commit=False).outputs["OUTPUT"].item() == 5, "as its START"
    assert ask(one).outputs["OUTPUT"].item() == 85
    assert ask(one, reset_state=True).outputs["OUTPUT"].item() == 5
    assert ask(one).outputs["OUTPUT"].item() == 10
    again = {"sequence_id": 3, "sequence_start": True, "clone_of": 1, "reset_state": True}
    assert client.ask(model.name, one, again).outputs["OUTPUT"].item() == 5, "a clone that is reset starts"
    answer = client.ask(model.name, state, {"sequence_id": 2, "sequence_start": True, "get_state": True})
    assert answer.outputs["state.SUM_IN"].item() == 70
    assert client.ask(model.name, one, {"sequence_id": 2}).outputs["OUTPUT"].item() == 75


@both_schedulers
@pytest.mark.parametrize("make", [ledger, models.counter, models.append, models.caches, models.axes])
@pytest.mark.host_and_device
def test_rows_without_commit_beside_rows_with(serve, connect, by, make):
    """They share runs, and growing states share the tensors of the runs."""
    model = serve(make, by, max_batch_size=4, oldest="max_queue_delay_microseconds: 20000")
    client = connect()
    talks = [StateSequence(client, model, np.random.default_rng(7)) for _ in range(4)]
    # the same generator: the same lengths, so that all rows fit one run
    together(lambda one=one, at=at: one.start(commit=at % 2 == 0) for at, one in enumerate(talks))
    for turn in range(6):
        together(lambda one=one, at=at: one.step(commit=(at + turn) % 3 != 0) for at, one in enumerate(talks))
    together(one.states for one in talks)
    together(lambda one=one, at=at: one.end(commit=at != 1, get_state=True) for at, one in enumerate(talks))


@both_schedulers
def test_a_copy_that_is_reset_has_no_context(serve, connect, by):
    one = StateSequence(connect(), serve(framed, by))
    one.start()
    one.step()
    one.clone(reset_state=True).step()
    fresh = one.other()
    fresh.ask(start=True, restore=one.save(), reset_state=True)
    fresh.step()


@both_schedulers
def test_a_context_is_left_too_without_commit(serve, connect, by):
    one = StateSequence(connect(), serve(framed, by))
    one.start()
    one.step(commit=False)
    one.step()
    one.ask(reset_state="COUNT_IN")
    one.step()
    one.ask(reset_state=True)
    one.step()
    one.step(reset_state=True)
    one.step(commit=False, reset_state=False)
    one.step()


# ---- set and reset


@every_scheduler
def test_set_and_reset_with_and_without_an_inference(talk, by):
    one = talk(by)
    for inputs in (None, booked(3)):
        one.ask(inputs, set={"SUM": sums(10), "LOG": sums(1, 2)}, get_state=True)
        one.ask(inputs, set={"LOG": np.zeros((1, 0), np.int64)}, get_state=True)
        one.ask(inputs, reset_state="SUM", set={"BOTH": np.array([[[1], [2]]], np.int64)}, get_state=True)
        one.ask(inputs, reset_state="true", get_state="true", query_state="true")
    one.step(get_state=True)


@both_schedulers
def test_a_value_that_is_not_committed_is_forgotten(talk, by):
    one = talk(by)
    before = one.oracle.copy()
    answer = one.client.ask(
        one.model.name,
        {**booked(1), "state.SUM": sums(500)},
        {"sequence_id": one.sequence_id, "commit": False},
    )
    assert answer.outputs["OUTPUT"][0, 0] == 501
    one.oracle = before
    one.states()
    one.client.ask(one.model.name, booked(1), {"sequence_id": one.sequence_id, "commit": False, "reset_state": True})
    one.states()


@both_schedulers
def test_states_stored_as_fp16_are_rounded_when_they_are_set(serve, connect, by):
    one = StateSequence(connect(), serve(models.counter, by, parameters={"store_states_as_fp16": "1"}))
    one.start()
    one.ask(set={"STATE_IN": np.array([[1 / 3, 65504, 1e-7, -np.inf]], F32)}, get_state=True)
    one.step()
    with refused("state 'STATE_IN' has numbers above 65504"):
        one.ask(set={"STATE_IN": np.array([[1, 2, 3, -1e9]], F32)})
    one.step()


@both_schedulers
def test_a_start_that_only_sets_needs_no_inference(talk, by):
    one = talk(by)
    other = one.other()
    other.ask(start=True, set={"SUM": sums(9)}, get_state=True, query_state=True)
    other.step(get_state=True, query_state=True)
    third = one.other()
    third.ask(start=True, query_state=True)
    third.step()


# ---- failures


@both_schedulers
def test_a_start_that_fails_leaves_no_sequence(talk, by):
    one = talk(by)
    saved = one.save()
    for how in ({}, {"set": {"SUM": sums(4)}}, {"restore": saved}, {"clone_of": one}, {"commit": False}):
        other = one.other()
        with refused("ONNX Runtime"):
            other.ask(booked(FAILS), start=True, **how)
        with refused("SEQUENCE_MISSING") if by == OWN else pytest.raises(Refused):
            other.step()
    one.states()


@pytest.mark.skipif(
    not (paths.TEST_BACKENDS / "stateful" / "libtriton_stateful.so").exists(),
    reason="no library with injected faults; scripts/test builds it",
)
def test_whatever_stage_fails_the_state_is_as_it_was(deploy, serve, connect):
    """With values and snapshots in the request that fails, and without."""
    own = deploy(backends=paths.TEST_BACKENDS)
    client = connect(to=own)
    for by in (OWN, OLDEST):
        model = own.serve(serve(lambda name: ledger(f"ledger_{by}"), by, on=own))
        one = StateSequence(client, model)
        one.start()
        saved = one.save()
        one.step()
        for stage in ("decode", "gather", "run", "respond"):
            for how in ({}, {"set": {"SUM": sums(5)}}, {"reset_state": True}, {"restore": saved}, {"commit": False}):
                with one.refuses(f"panicked: injected at {stage}"):
                    one.step(booked(2), inject_panic=stage, get_state=True, **how)
                if stage in ("gather", "run", "respond"):
                    continue
                with one.refuses(f"panicked: injected at {stage}"):
                    one.ask(inject_panic=stage, query_state=True, **how)
        for stage in ("gather", "run", "respond"):
            for how in ({"restore": saved}, {"clone_of": one}, {"set": {"SUM": sums(5)}}, {"commit": False}):
                other = one.other()
                with refused(f"panicked: injected at {stage}"):
                    other.ask(booked(2), start=True, inject_panic=stage, **how)
                with pytest.raises(Refused):
                    other.ask(query_state=True)
        one.step(get_state=True)
        one.end()


# ---- delete, and END


@every_scheduler
def test_delete_ends_without_an_inference(deployment, talk, by):
    one = talk(by)
    end = by != OWN
    one.ask(delete=True, end=end, get_state=True, query_state=True, snapshot=True)
    with refused("SEQUENCE_MISSING") if by == OWN else pytest.raises(Refused):
        one.step()
    one.start()
    one.ask(delete="true", end=end)
    deployment.settles("stateful_live_sequences", one.model, 0)


def test_core_has_to_hear_of_the_end(talk):
    one = talk(OLDEST)
    with one.refuses("STATE_CONFLICT", "'delete'", "sequence_end"):
        one.ask(delete=True)
    one.end()


@both_schedulers
def test_delete_does_not_run_what_the_request_carries(deployment, talk, by):
    one = talk(by)
    for how in ({"set": {"SUM": sums(5)}}, {"reset_state": True}, {"commit": False}, {"restore": one.save()}):
        with one.refuses("STATE_CONFLICT", "'delete'"):
            one.ask(delete=True, **how)
    one.ask(delete=True, end=True)


@both_schedulers
def test_end_requests_that_are_not_inferred_still_read_the_state(talk, by):
    one = talk(by, parameters={"infer_end_requests": "0"})
    one.step()
    answer = one.client.ask(
        one.model.name, booked(4), {"sequence_id": one.sequence_id, "sequence_end": True, "get_state": True}
    )
    for name in one.oracle.names:
        assert answer.outputs[f"state.{name}"].tolist() == one.oracle.state(name).tolist()


@both_schedulers
def test_a_sequence_of_one_request_reads_its_state(talk, by):
    one = talk(by).other()
    one.step(start=True, end=True, get_state=True, query_state=True, snapshot=True)
    with pytest.raises(Refused):
        one.step()
    one.ask(start=True, end=True, set={"SUM": sums(3)}, get_state=True)


# ---- sequence_step


@both_schedulers
def test_a_step_runs_once(talk, by):
    one = talk(by)
    one.step(sequence_step=1, query_state=True)
    for wrong in (0, 1, 3, 2**62):
        with one.refuses("SEQUENCE_STEP_CONFLICT", f"step {wrong} ", "has made 2"):
            one.step(sequence_step=wrong)
        with one.refuses("SEQUENCE_STEP_CONFLICT"):
            one.ask(sequence_step=wrong, reset_state=True)
    one.step(sequence_step="2")
    # neither of these is a step
    one.step(commit=False, sequence_step=3)
    one.ask(reset_state=True, sequence_step=3)
    one.ask(set={"SUM": sums(3)}, sequence_step=3, query_state=True)
    with one.refuses("ONNX Runtime"):
        one.step(booked(FAILS), sequence_step=3)
    one.step(sequence_step=3)
    one.end(sequence_step=4)


@both_schedulers
def test_an_end_that_is_refused_ends_the_sequence_all_the_same(talk, by):
    """Like every END that fails."""
    one = talk(by)
    with refused("SEQUENCE_STEP_CONFLICT"):
        one.end(sequence_step=3)
    with pytest.raises(Refused):
        one.step()


@both_schedulers
def test_of_many_requests_for_a_step_one_runs(talk, by):
    one = talk(by)

    def try_it() -> bool:
        try:
            one.client.ask(one.model.name, booked(5), {"sequence_id": one.sequence_id, "sequence_step": 1})
        except Refused as error:
            assert error.text.startswith("SEQUENCE_STEP_CONFLICT"), error
            return False
        return True

    assert sum(together([try_it] * 8)) == 1
    one.oracle.step(booked(5))
    one.states()


@both_schedulers
def test_a_start_is_step_0_and_a_copy_counts_on(talk, by):
    one = talk(by)
    other = one.other()
    with refused("SEQUENCE_STEP_CONFLICT"):
        other.start(sequence_step=1)
    with pytest.raises(Refused):
        other.step()
    other.start(sequence_step=0)
    clone = one.clone(booked(1))
    clone.step(sequence_step=2)
    resumed = one.restored(clone.save())
    resumed.step(sequence_step=3)


def test_the_calls_go_with_the_inputs_of_openvino_model_server(serve, connect):
    """The id and START or END as inputs, the calls as parameters."""
    model, client = serve(ledger), connect()
    one = StateSequence(client, model, sequence_id=77)
    at = special(model, 77)

    def ask(inputs, control, **parameters):
        return client.ask(model.name, {**inputs, **at, **special(model, None, control)}, parameters)

    ask(booked(4), 1)
    one.oracle.begin({})
    one.oracle.step(booked(4))
    one.states()
    came = ask({}, None, get_state="SUM", reset_state="LOG")
    assert came.outputs["state.SUM"].item() == 4
    one.oracle.reset(["LOG"])
    one.states()
    came = ask({}, 2, get_state=True)
    assert came.outputs["state.LOG"].size == 0
    with refused("SEQUENCE_MISSING"):
        one.states()


@pytest.mark.parametrize("held", [None, "SCALE"])
def test_an_end_as_an_input_counts_when_the_id_is_a_parameter(serve, connect, held):
    """Also if the request has fewer inputs than the model."""
    model, client = serve(ledger, parameters={"held_inputs": held} if held else {}), connect()
    at = {"sequence_id": 78}
    client.ask(model.name, {**booked(1), **special(model, None, 1)}, at)
    if held:
        client.ask(model.name, {**booked(1, None), **special(model, None, 2)}, at)
    else:
        client.ask(model.name, special(model, None, 2), {**at, "get_state": True})
    with refused("SEQUENCE_MISSING"):
        client.ask(model.name, {}, {**at, "query_state": True})

"""Every method of a sequence, over every protocol, beside ONNX Runtime."""

from __future__ import annotations

import asyncio
import contextlib
import copy

import numpy as np
import pytest

from harness import models
from harness.model import Tensor
from harness.own import fed
from harness.sequence_oracle import SequenceOracle, assert_same
from harness.values import bits, random_bits
from triton_stateful import (
    AnswerLost,
    AsyncSequence,
    Sequence,
    SequenceAlreadyExists,
    SequenceMissing,
    SequenceNotParked,
    SnapshotInvalid,
    StateApiOff,
    StateConflict,
    StatefulError,
    StateUnknown,
    StepConflict,
)


class Pair:
    """A sequence and the oracle's; each step of both is compared."""

    def __init__(self, model, sequence, seed=1):
        self.model, self.sequence = model, sequence
        self.oracle = SequenceOracle(model, sequence.id)
        self.rng = np.random.default_rng(seed)
        self.begun = False

    def step(self, commit=True, **how):
        inputs = self.model.draw(self.rng)
        came = self.sequence.step(inputs, commit=commit, **how)
        before = copy.copy(self.oracle.sequence.state), self.oracle.is_fresh
        expected = self.oracle.step(inputs, start=not self.begun)
        self.begun = True
        if not commit:
            self.oracle.sequence.state = before[0]
        assert_same(self.model, came, expected)

    def check_state(self):
        state = self.sequence.state()
        expected = self.oracle.sequence.state
        assert set(state) == set(expected)
        for name, value in expected.items():
            assert bits(state[name]) == bits(value), name
            assert state[name].size == value.size and state[name].shape[0] == 1

    def goes_on(self, sequence, seed):
        """Another sequence with the same state."""
        other = Pair(self.model, sequence, seed)
        other.oracle.sequence.state, other.begun, other.oracle.is_fresh = self.oracle.sequence.state, True, False
        return other


def attached(sequence):
    """As if this client had begun the sequence of another one."""
    getattr(sequence, "inner", sequence)._flow.started = True
    return sequence


def test_a_sequence_lives(serve, begin, scheduling):
    """Steps, steps without effect, states, values that are set and reset, END."""
    model = serve(scheduling=scheduling)
    with begin(model.name) as sequence:
        pair = Pair(model, sequence)
        pair.step()
        pair.step()
        pair.step(commit=False)
        pair.check_state()
        pair.step()
        info = sequence.info()
        assert (info.sequence_id, info.steps, sequence.steps) == (sequence.id, 3, 3)
        [state] = info.states
        assert (state.name, state.datatype, state.shape, state.byte_size) == ("STATE_IN", "FP32", (1, 4), 16)

        value = np.array([[1, 2, 3, 4]], np.float32)
        sequence.set_state(STATE_IN=value)
        pair.oracle.sequence.state = {"STATE_IN": value}
        pair.step()
        sequence.reset("STATE_IN")
        pair.oracle.sequence.state = {"STATE_IN": np.zeros((1, 4), np.float32)}
        pair.check_state()
        pair.step()
        sequence.reset()
        pair.oracle.sequence.state = {"STATE_IN": np.zeros((1, 4), np.float32)}
        pair.step(end=True)
        with pytest.raises(SequenceMissing, match="has ended"):
            pair.step()


def test_leaving_ends_the_sequence_also_after_an_error(serve, begin, scheduling):
    model = serve(scheduling=scheduling)
    with pytest.raises(KeyError, match="mine"), begin(model.name, 77) as sequence:
        sequence.step(np.ones((1, 4), np.float32))
        raise KeyError("mine")
    with begin(model.name, 77) as sequence:
        assert sequence.step(np.ones((1, 4), np.float32))["OUTPUT"].tolist() == [[1, 1, 1, 1]]
        sequence.end()
        sequence.end()
    with begin(model.name, 78) as sequence, begin(model.name, clone_of=77) as late:
        sequence.step(np.ones((1, 4), np.float32))
        with pytest.raises(StatefulError, match="77"):
            late.step(np.ones((1, 4), np.float32))


@pytest.mark.parametrize("first", ["state", "info", "snapshot", "reset", "set_state", "restore", "uncommitted"])
def test_any_call_may_be_the_first(serve, begin, first):
    model = serve()
    given = np.array([[1, 2, 3, 4]], np.float32)
    with begin(model.name, states={"STATE_IN": given}) as sequence:
        if first == "set_state":
            given = given * 2
            sequence.set_state({"STATE_IN": given})
        elif first == "restore":
            with begin(model.name, states={"STATE_IN": given * 3}) as other:
                sequence.restore(other.snapshot())
            given = given * 3
        elif first == "uncommitted":
            assert bits(sequence.step(given, commit=False)["OUTPUT"]) == bits(given * 2)
        elif first == "reset":
            sequence.reset()
            given = given * 0
        elif first == "state":
            assert bits(sequence.state("STATE_IN")["STATE_IN"]) == bits(given)
        elif first == "info":
            assert sequence.info().steps == 0
        else:
            assert sequence.snapshot().startswith(b"TRTSTATE")
        assert bits(sequence.step(given)["OUTPUT"]) == bits(given * 2)
        assert sequence.info().steps == sequence.steps == 1


@pytest.mark.parametrize("first", ["state", "snapshot", "reset"])
def test_a_call_on_a_clone_may_be_the_first(serve, begin, first):
    model = serve()
    ones = np.ones((1, 4), np.float32)
    with begin(model.name) as sequence:
        sequence.step(ones)
        with begin(model.name, clone_of=sequence.id) as copied:
            getattr(copied, first)()
            copied.step(ones)
            assert copied.steps == copied.info().steps == 2


@pytest.mark.parametrize("make", [models.counter, models.append, models.caches, models.lstm], ids=lambda f: f.__name__)
def test_clones_and_snapshots_go_on_from_the_state(serve, begin, scheduling, make):
    model = serve(make, scheduling)
    with begin(model.name) as sequence:
        pair = Pair(model, sequence)
        for _ in range(3):
            pair.step()
        taken = sequence.snapshot()
        with sequence.clone() as copied, begin(model.name, snapshot=taken) as resumed:
            assert (copied.steps, copied.id != sequence.id) == (3, True)
            others = [pair.goes_on(copied, seed=2), pair.goes_on(resumed, seed=3)]
            back = copy.deepcopy(pair.oracle.sequence.state)
            for each in [pair, *others, pair, *others]:
                each.step()
            assert resumed.steps == 5
            for each in [pair, *others]:
                each.check_state()
            sequence.restore(taken)
            pair.oracle.sequence.state = back
            assert sequence.steps == sequence.info().steps == 3
            pair.step()


def test_strings_are_object_arrays_to_the_last_zero_byte(serve, begin):
    model = serve(models.echo, type="string")
    rng = np.random.default_rng(3)
    with begin(model.name) as sequence:
        text = np.array([["a", "ü", "", "d"]])
        assert sequence.step(text)["OUTPUT"].tolist() == [[b"", b"", b"", b""]]
        assert sequence.state()["STATE_IN"].tolist() == [[b"a", "ü".encode(), b"", b"d"]]
        value = random_bits("string", (1, 4), rng)
        value[0, 1] = b"zeros\0\0"
        sequence.set_state(STATE_IN=value)
        state = sequence.state()["STATE_IN"]
        assert state.dtype == np.object_ and bits(state) == bits(value)
        with begin(model.name, snapshot=sequence.snapshot()) as resumed:
            assert bits(resumed.step(text)["OUTPUT"]) == bits(value)


def test_a_model_without_a_batch_dimension(serve, begin):
    """Shapes are those of the configuration alone, also of the snapshot's tensor."""
    whole = {"inputs": (Tensor("INPUT", "fp32", (1, 4)),), "outputs": (Tensor("OUTPUT", "fp32", (1, 4)),)}
    model = serve(models.counter, max_batch_size=0, **whole)
    ones = np.ones((1, 4), np.float32)
    with begin(model.name) as sequence:
        sequence.step(ones)
        with begin(model.name, snapshot=sequence.snapshot()) as resumed:
            assert resumed.step(ones)["OUTPUT"].tolist() == [[2, 2, 2, 2]]
        assert sequence.state()["STATE_IN"].tolist() == [[1, 1, 1, 1]]


def test_requested_outputs_and_names_of_inputs(serve, begin):
    model = serve(models.two_inputs)
    names = [tensor.name for tensor in model.outputs]
    inputs = model.draw(np.random.default_rng(1))
    with begin(model.name) as sequence:
        assert list(sequence.step(inputs, outputs=[names[1]])) == [names[1]]
        first, second = inputs
        with pytest.raises(ValueError, match=f"2 inputs, so name them: {first}, {second}"):
            sequence.step(inputs[first])
        with pytest.raises(ValueError, match=f"no input 'OTHER': it has {first}, {second}"):
            sequence.step({"OTHER": inputs[first]})
        with pytest.raises(TypeError, match=f"input '{second}' .* int8, but float32 \\(FP32\\)"):
            sequence.step({**inputs, second: inputs[second].astype(np.int8)})
        with pytest.raises(ValueError, match="none is given"):
            sequence.step({})
        assert sequence.info().steps == 1


def test_errors_have_types_and_change_nothing(serve, begin, protocol, scheduling):
    model = serve(scheduling=scheduling)
    ones = np.ones((1, 4), np.float32)
    with begin(model.name) as sequence:
        sequence.step(ones)
        taken = bytearray(sequence.snapshot())
        with pytest.raises(StateUnknown, match="STATE_IN"):
            sequence.state("OTHER")
        with pytest.raises(StateUnknown, match="'OTHER': it has STATE_IN"):
            sequence.set_state(OTHER=ones)
        with pytest.raises(TypeError, match=r"'state\.STATE_IN' .* float64"):
            sequence.set_state(STATE_IN=ones.astype(np.float64))
        with pytest.raises(StatefulError, match="STATE_IN"):
            sequence.set_state(STATE_IN=np.ones((1, 5), np.float32))
        taken[-1] ^= 1
        with pytest.raises(SnapshotInvalid, match="checksum") as caught:
            sequence.restore(bytes(taken))
        assert type(caught.value.__cause__).__name__ == "InferenceServerException"
        with pytest.raises(SnapshotInvalid):
            begin(model.name, snapshot=b"").step(ones)
        with pytest.raises(StatefulError, match="INPUT"):
            sequence.step(np.ones((1, 5), np.float32))
        assert sequence.step(ones)["OUTPUT"].tolist() == [[2, 2, 2, 2]]
        if scheduling == "own":
            with pytest.raises(SequenceAlreadyExists):
                begin(model.name, sequence.id).step(ones)
            with pytest.raises(SequenceNotParked):
                begin(model.name, 5555, resume=True).step(ones)
            with pytest.raises(SequenceMissing):
                begin(model.name, clone_of=4444).step(ones)
        else:
            with pytest.raises(StateConflict):
                begin(model.name, 5555, resume=True).step(ones)
        # another client goes on with it
        other = attached(begin(model.name, sequence.id))
        with pytest.raises(StepConflict) as conflict:
            other.step(ones)
        assert conflict.value.made == 2
        assert other.info().steps == 2
        assert other.step(ones)["OUTPUT"].tolist() == [[3, 3, 3, 3]]
        other.step(ones)
        with pytest.raises(StepConflict):
            sequence.step(ones)
        sequence.info()
        sequence.step(ones)


def test_a_model_without_the_state_api_has_steps_only(serve, begin, scheduling):
    model = serve(scheduling=scheduling, state_api="false")
    with begin(model.name) as sequence:
        pair = Pair(model, sequence)
        pair.step()
        pair.step()
        for call in (sequence.state, sequence.info, sequence.end, lambda: pair.step(commit=False)):
            with pytest.raises(StateApiOff, match=model.name):
                call()
        pair.step(end=True)
    with pytest.raises(StateApiOff):
        begin(model.name, snapshot=b"").step(np.ones((1, 4), np.float32))


def test_parked_sequences_are_resumed(serve, begin):
    model = serve(parameters={"park_ms": "60000", "sequence_idle_timeout_ms": "100"})
    begin(model.name, 99).step(np.ones((1, 4), np.float32))
    while True:
        with contextlib.suppress(SequenceAlreadyExists), begin(model.name, 99, resume=True) as sequence:
            assert sequence.info().steps == 1
            return


@pytest.mark.parametrize("scheme", ["", "grpc://", "http://"])
def test_an_address_in_place_of_a_client(serve, deployment, scheme):
    model, server = serve(), deployment.server
    address = scheme + (server.http_url if scheme == "http://" else server.grpc_url)
    ones = np.ones((1, 4), np.float32)
    with Sequence(address, model.name, "a name", version="1") as sequence:
        assert sequence.step(ones)["OUTPUT"].tolist() == [[1, 1, 1, 1]]
        assert sequence.info().sequence_id == sequence.id == "a name"

    async def ask():
        async with AsyncSequence(address, model.name) as other, await other.clone("another") as copied:
            return (await copied.step(ones))["OUTPUT"].tolist()

    assert asyncio.run(ask()) == [[1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("arguments", "named", "error", "text"),
    [
        (("ftp://localhost", "m"), {}, ValueError, "'ftp'"),
        ((None, "m"), {}, TypeError, "tritonclient"),
        (("localhost:1", "m", 0), {}, ValueError, "sequence id 0"),
        (("localhost:1", "m"), {"resume": True}, ValueError, "needs its id"),
        (("localhost:1", "m"), {"snapshot": b"", "clone_of": 1}, ValueError, "begins with one"),
    ],
)
@pytest.mark.parametrize("kind", [Sequence, AsyncSequence])
def test_wrong_arguments(kind, arguments, named, error, text):
    with pytest.raises(error, match=text):
        kind(*arguments, **named)


def test_http_has_one_timeout_for_all_requests(serve, begin, protocol):
    with begin(serve().name) as sequence:
        ones = np.ones((1, 4), np.float32)
        if protocol.startswith("http"):
            with pytest.raises(ValueError, match="one timeout for all requests"):
                sequence.step(ones, timeout=60)
            sequence.step(ones)
        else:
            sequence.step(ones, timeout=60)


def test_held_inputs_are_left_out_after_the_start(serve, begin):
    model = serve(models.work, parameters={"held_inputs": "WORK"})
    added, work = np.array([[5]]), np.array([[0]])
    with begin(model.name) as sequence:
        sequence.step({"INPUT": added, "WORK": work})
        assert sequence.step({"INPUT": added})["OUTPUT"].item() == 10
        with sequence.clone() as copied:
            assert copied.step({"INPUT": added})["OUTPUT"].item() == 15


def test_a_step_that_is_cancelled_is_made_once_or_not_at_all(serve, deployment):
    model = serve(models.work)

    async def ask():
        async with AsyncSequence(f"http://{deployment.server.http_url}", model.name) as sequence:
            await sequence.step(fed(1))
            for _ in range(5):
                task = asyncio.create_task(sequence.step(fed(1, work=20)))
                await asyncio.sleep(0.005)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, AnswerLost):
                    await task
            made = (await sequence.info()).steps
            with contextlib.suppress(AnswerLost):
                await sequence.step(fed(1))
            info = await sequence.info()
            assert made <= info.steps <= made + 1
            assert (await sequence.state())["SUM_IN"].item() == info.steps

    asyncio.run(ask())


@pytest.mark.parametrize(("corrid", "kind"), [("string", str), ("uint64", int)])
def test_the_id_has_the_type_of_the_control_input_for_it(serve, begin, corrid, kind):
    """Triton 25.01 and newer refuse another one."""
    model = serve(models.controls, scheduling="core", state_api="false", corrid=corrid, counts=False)
    with begin(model.name) as sequence:
        seen = sequence.step(np.array([[1]], np.int64), end=True)["CORRID_SEEN"].item()
        assert isinstance(sequence.id, kind)
        assert seen == (sequence.id.encode() if kind is str else sequence.id)


def test_an_id_that_is_given_stays_as_it_is(serve, begin):
    model = serve(models.controls, scheduling="core", state_api="false", corrid="string", counts=False)
    with begin(model.name, "given") as sequence:
        assert sequence.step(np.array([[1]], np.int64), end=True)["CORRID_SEEN"].item() == b"given"
        assert sequence.id == "given"

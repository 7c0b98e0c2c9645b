"""`clone_of`: which state a clone begins with, if requests of the other sequence are queued, and when there is no clone."""

import numpy as np
import pytest

from harness import models
from harness.conversations import together
from harness.models import booked, ledger
from harness.own import FAILS, fed
from harness.raw import Answer, Refused
from harness.repetitions import repeated
from harness.state_api import OLDEST, StateSequence, both_schedulers, refused

pytestmark = pytest.mark.simulated_device

START = {"sequence_start": True}
END = {"sequence_end": True}


def at(sequence_id, **more):
    return {"sequence_id": sequence_id, **more}


def replies(stream, model, asked) -> list[Answer | Refused]:
    """Sends all at once. The answers in the order of the requests."""
    for inputs, parameters in asked:
        stream.send(model.name, inputs, parameters)
    came = stream.all_replies(len(asked))
    return [came[number] for number in sorted(came)]


def sum_of(answer: Answer | Refused) -> int | str | None:
    """The sum that a `work` model answers, or the code word of an error; None for an END that was not run."""
    if isinstance(answer, Refused):
        return answer.text.partition(":")[0]
    value = next(iter(answer.outputs.values()))
    return value.item() if value.size else None


@pytest.mark.parametrize("workers", [1, 2, *repeated(4)])
@pytest.mark.host_and_device
def test_each_clone_has_the_state_at_its_place_in_the_order(serve, connect, workers):
    """With 50 requests in flight, every one of which is slow enough to have the others queued."""
    model, stream = serve(models.work, parameters={"worker_count": workers}), connect("stream")
    asked, expected, sum = [(fed(1), at(1, **START))], [1], 1
    for clone in range(2, 27):
        sum += clone
        asked += [(fed(clone, work=4), at(1)), (fed(0), at(clone, **START, clone_of=1))]
        expected += [sum, sum]
    # clones of clones; the last ones are sent before their sources have begun
    for clone in (100, 101, 102):
        asked.append(({}, at(clone, **START, clone_of=clone - 1 if clone > 100 else 26, get_state=True)))
        expected.append(sum)
    # all go on
    asked += [(fed(clone), at(clone)) for clone in (1, 2, 26, 102)]
    expected += [sum + 1, 3 + 2, sum + 26, sum + 102]
    assert [sum_of(answer) for answer in replies(stream, model, asked)] == expected


@pytest.mark.parametrize("infer_end_requests", [0, 1])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("work", [0, 40])
def test_a_clone_that_came_before_the_end_begins(serve, connect, work, workers, infer_end_requests):
    parameters = {"worker_count": workers, "infer_end_requests": infer_end_requests}
    model, stream = serve(models.work, parameters=parameters), connect("stream")
    end = fed(5)
    asked = [
        (fed(1), at(1, **START)),
        (fed(0), at(2, **START)),
        # the workers are busy, so what follows comes together
        (fed(0, work=40), at(2)),
        (fed(2, work=work), at(1)),
        (fed(10), at(11, **START, clone_of=1)),
        (end, at(1, **END)),
        (fed(20), at(12, **START, clone_of=1)),
        (fed(0), at(11)),
    ]
    came = [sum_of(answer) for answer in replies(stream, model, asked)]
    assert [came[4], came[6], came[7]] == [13, "SEQUENCE_MISSING", 13]


@pytest.mark.parametrize("infer_end_requests", [0, 1])
@pytest.mark.parametrize("what", ["end", "delete", "restart", "end_and_start"])
def test_a_clone_of_an_idle_sequence_that_then_ends_begins(serve, connect, what, infer_end_requests):
    """The worker is busy when the clone and the end of the other sequence come."""
    parameters = {"infer_end_requests": infer_end_requests}
    if what == "restart":
        parameters["on_duplicate_start"] = "restart"
    model, stream = serve(models.work, parameters=parameters), connect("stream")
    ends = {
        "end": [(fed(5), at(1, **END))],
        "delete": [({}, at(1, delete=True))],
        "restart": [(fed(100), at(1, **START))],
        "end_and_start": [(fed(5), at(1, **END)), (fed(100), at(1, **START))],
    }[what]
    assert [sum_of(answer) for answer in replies(stream, model, [(fed(1), at(1, **START))])] == [1]
    for round in range(5):
        asked = [
            (fed(0, work=60), at(1000 + round, **START)),
            (fed(10), at(11 + round, **START, clone_of=1)),
            *ends,
            (fed(0), at(11 + round)),
        ]
        came = replies(stream, model, asked)
        found = [came[1], came[-1]]
        if what in ("restart", "end_and_start") and round:
            assert [sum_of(answer) for answer in found] == [110, 110]
            continue
        assert [sum_of(answer) for answer in found] == [11, 11], found
        if what in ("end", "delete"):
            replies(stream, model, [(fed(1), at(1, **START))])


@pytest.mark.parametrize("work", [0, 40])
def test_a_clone_of_a_sequence_that_is_restarted_has_its_old_state(serve, connect, work):
    model, stream = serve(models.work, parameters={"on_duplicate_start": "restart"}), connect("stream")
    asked = [
        (fed(1), at(1, **START)),
        (fed(2, work=40), at(1)),
        (fed(10, work=work), at(11, **START, clone_of=1)),
        (fed(100), at(1, **START)),
        (fed(1000 - 1), at(1)),
        (fed(20), at(12, **START, clone_of=1)),
        (fed(0), at(11)),
    ]
    assert [sum_of(answer) for answer in replies(stream, model, asked)] == [1, 3, 13, 100, 1099, 1119, 13]


def test_a_clone_of_a_sequence_whose_start_fails_does_not_begin(serve, connect):
    model, stream = serve(models.work), connect("stream")
    asked = [
        (fed(FAILS, work=40), at(1, **START)),
        (fed(1), at(2, **START, clone_of=1)),
        (fed(1), at(3, **START, clone_of=2)),
        (fed(1), at(2)),
        (fed(1), at(3)),
    ]
    came = [sum_of(answer) for answer in replies(stream, model, asked)]
    assert came[1:] == ["SEQUENCE_MISSING"] * 4
    assert [sum_of(answer) for answer in replies(stream, model, [(fed(1), at(2, **START))])] == [1]


def test_a_request_that_fails_before_the_clone_leaves_the_state_for_it(serve, connect):
    model, stream = serve(models.work), connect("stream")
    asked = [
        (fed(1), at(1, **START)),
        (fed(FAILS, work=40), at(1)),
        (fed(0), at(2, **START, clone_of=1)),
        (fed(2), at(1)),
        (fed(FAILS), at(3, **START, clone_of=1)),
        (fed(4), at(1)),
        (fed(0), at(3)),
    ]
    came = [sum_of(answer) for answer in replies(stream, model, asked)]
    assert [came[0], came[2], came[3], came[5], came[6]] == [1, 1, 3, 7, "SEQUENCE_MISSING"]


@pytest.mark.parametrize("max_queue_size", [0, 5])
def test_without_a_place_there_is_no_clone(serve, connect, max_queue_size):
    """A clone is refused even if other STARTs may wait, because its source would go on meanwhile."""
    model, client = serve(ledger, parameters={"max_sequence_number": 2, "max_queue_size": max_queue_size}), connect()
    one = StateSequence(client, model)
    one.start()
    two = one.clone()
    with one.refuses("MAX_SEQUENCE_NUMBER_REACHED"):
        one.clone()
    two.end()
    one.clone(booked(1)).step()


def test_a_clone_of_a_sequence_that_waits_for_a_place_is_refused(serve, connect):
    model, stream = serve(models.work, parameters={"max_sequence_number": 1, "max_queue_size": 5}), connect("stream")
    asked = [
        (fed(1), at(1, **START)),
        (fed(1, work=40), at(1)),
        (fed(2), at(2, **START)),
        (fed(3), at(3, **START, clone_of=2)),
        (fed(0), at(1, **END)),
        (fed(0), at(2)),
    ]
    assert [sum_of(answer) for answer in replies(stream, model, asked)] == [1, 2, 2, "SEQUENCE_MISSING", 2, 2]


@both_schedulers
def test_a_sequence_is_no_clone_of_itself(serve, connect, by):
    one = StateSequence(
        connect(), serve(ledger, by, parameters={"on_duplicate_start": "restart"} if by != OLDEST else {})
    )
    one.start()
    if by == OLDEST:
        # for core it is a restart, which it does not forget
        with refused("SEQUENCE_MISSING"):
            one.start(clone_of=one)
        return
    with one.refuses("STATE_CONFLICT", "'clone_of'"):
        one.start(clone_of=one)
    one.step()


@both_schedulers
def test_what_cannot_be_cloned(serve, connect, by):
    one = StateSequence(connect(), serve(ledger, by))
    one.start()
    other = one.other()
    with refused("SEQUENCE_MISSING", "987654321"):
        other.ask(booked(1), start=True, clone_of=StateSequence(one.client, one.model, sequence_id=987654321))
    with one.refuses("STATE_CONFLICT", "sequence_start"):
        one.step(clone_of=one)
    saved = one.save()
    for how in ({"restore": saved}, {"resume": True}):
        with refused("STATE_CONFLICT"):
            other.ask(booked(1), start=True, clone_of=one, **how)
    ended = one.clone()
    ended.end()
    with refused("SEQUENCE_MISSING"):
        ended.clone()
    one.states()
    one.clone(booked(5), set={"SUM": np.array([[7]], np.int64)}, reset_state="LOG", get_state=True).states()
    one.step(get_state=True)


@both_schedulers
def test_names_and_large_numbers_are_ids_of_clones(serve, connect, by):
    model, client = serve(ledger, by), connect()
    for sequence_id in ("beam ü", 2**63 + 5):
        one = StateSequence(client, model, sequence_id=sequence_id)
        one.start()
        signed = sequence_id - 2**64 if isinstance(sequence_id, int) else sequence_id
        came = client.ask(model.name, {}, at(f"clone of {sequence_id}", **START, clone_of=signed, get_state="SUM"))
        assert came.outputs["state.SUM"].tolist() == one.oracle.state("SUM").tolist()


def test_with_two_instances_a_clone_is_right_or_refused(serve, connect):
    """Core gives each sequence to one of the instances, and knows nothing of clones."""
    one = StateSequence(connect(), serve(ledger, OLDEST, instances=2))
    one.start()
    clones, refusals = [], 0
    for _ in range(20):
        try:
            clones.append(one.clone(booked(1)))
        except Refused as error:
            assert error.text.startswith("SEQUENCE_MISSING: ") and "sequence_batching" in error.text, error
            refusals += 1
    assert clones and refusals
    for talk in (one, *clones):
        talk.step(get_state=True)


@pytest.mark.host_and_device
def test_beams(serve, connect):
    """A search that keeps the best of each round, by clones of clones."""
    model, client = serve(ledger, parameters={"worker_count": 2}), connect()
    beams = [StateSequence(client, model, np.random.default_rng(1))]
    beams[0].start()
    for _ in range(6):
        wider = [*beams, *(beam.clone() for beam in beams)]
        for seed, beam in enumerate(wider):
            beam.rng = np.random.default_rng([seed, 6])
        together(lambda beam=beam: beam.step(get_state="SUM") for beam in wider)
        wider.sort(key=lambda beam: beam.oracle.state("SUM").item())
        for beam in wider[4:]:
            beam.ask(delete=True, end=True)
        beams = wider[:4]
    together(lambda beam=beam: beam.end(get_state=True) for beam in beams)


def test_a_refused_start_has_no_state_to_clone(serve, connect):
    """Its slot has the bytes of the sequence that had it before."""
    limits = "max_queue_delay_microseconds: 50000"
    model, stream = serve(ledger, OLDEST, max_batch_size=4, oldest=limits), connect("stream")
    before = StateSequence(connect(), model)
    before.start()
    before.end()
    for first, clone in ((500 + 2 * number, 501 + 2 * number) for number in range(5)):
        refused_start = (booked(1), at(first, **START, get_state="NOTHING"))
        came = replies(stream, model, [refused_start, (booked(1), at(clone, **START, clone_of=first))])
        assert [sum_of(answer) for answer in came] == ["STATE_UNKNOWN", "SEQUENCE_MISSING"]
        for sequence_id in (first, clone):
            stream.send(model.name, booked(1), at(sequence_id, **END))
        stream.all_replies(2)

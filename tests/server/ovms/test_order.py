"""Requests of one sequence run in the order in which they come, and other sequences don't wait for them: cases O34 to
O39 of OpenVINO Model Server."""

import numpy as np
import pytest

from harness import models
from harness.batches import batch_sizes
from harness.conversations import together
from harness.own import Talk, answered_id, check_error, fails_with, fed, total, while_they_run
from harness.raw import Refused
from harness.repetitions import repeated
from harness.ways import through_gateway

every_count = pytest.mark.parametrize("workers", [1, 2, *repeated(3, 4)])


def start(sequence_id) -> dict:
    return {"sequence_id": sequence_id, "sequence_start": True}


def step(sequence_id) -> dict:
    return {"sequence_id": sequence_id}


def end(sequence_id) -> dict:
    return {"sequence_id": sequence_id, "sequence_end": True}


def sums(stream, model, asked) -> list:
    """Sends all of them on the stream at once; what came for each: the sum, or the error."""
    for inputs, parameters in asked:
        stream.send(model.name, inputs, parameters)
    replies = stream.all_replies(len(asked))
    came = [replies[number] for number in range(stream.count - len(asked), stream.count)]
    return [one if isinstance(one, Refused) else total(one) for one in came]


# ---- a request that comes while another of its sequence is queued or runs


@every_count
def test_o34_a_start_behind_an_end_begins_a_new_sequence(serve, connect, workers):
    model = serve(parameters={"worker_count": workers})
    asked = [(fed(1), start(42)), (fed(2, work=200), end(42)), (fed(10), start(42)), (fed(20), end(42))]
    assert sums(connect("stream"), model, asked * 3) == [1, 3, 10, 30] * 3


def test_o35_a_request_behind_an_end_is_not_found_at_once(serve, connect):
    """Not if 42 is the only live sequence: its END then runs on the thread that takes requests."""
    model, client, other = serve(), connect(), connect()
    Talk(client, model, 43).start()

    def begin(work):
        client.ask(model.name, fed(1), start(42))
        return [client.send(model.name, fed(2, work), end(42))]

    def task():
        with fails_with("SEQUENCE_MISSING", 42):
            other.ask(model.name, fed(4), step(42))
        with fails_with("SEQUENCE_MISSING", 42):
            other.ask(model.name, fed(4), end(42))

    while_they_run(begin, task)


def test_o35_a_request_behind_an_end_on_one_stream_is_not_found(serve, connect):
    model, stream = serve(), connect("stream")
    *came, late, later = sums(
        stream, model, [(fed(1), start(42)), (fed(2, work=200), end(42)), (fed(4), step(42)), (fed(8), end(42))]
    )
    assert came == [1, 3]
    check_error(late, "SEQUENCE_MISSING", 42)
    check_error(later, "SEQUENCE_MISSING", 42)


@every_count
def test_o36_requests_of_a_sequence_run_in_order_and_never_two_in_one_run(deployment, serve, connect, workers):
    model = serve(parameters={"worker_count": workers})
    asked = [(fed(1), start(42)), *((fed(2**i, work=20), step(42)) for i in range(1, 9)), (fed(2**9), end(42))]
    assert sums(connect("stream"), model, asked) == [2 ** (i + 1) - 1 for i in range(10)]
    assert batch_sizes(deployment, model) == {1: 10}


def test_o37_a_start_runs_beside_a_busy_sequence_on_another_worker(serve, connect):
    model, client, other = serve(parameters={"worker_count": 2, "on_duplicate_start": "restart"}), connect(), connect()

    def begin(work):
        client.ask(model.name, fed(1), start(42))
        return [client.send(model.name, fed(2, work), step(42)), client.send(model.name, fed(4, work), step(42))]

    def task():
        Talk(other, model, 43).one_shot()

    while_they_run(begin, task)
    assert total(client.ask(model.name, fed(0), end(42))) == 7


def test_o37_a_start_does_not_wait_for_the_queue_of_a_busy_sequence(serve, connect):
    """One worker: the START runs beside the second request of the busy sequence, not behind its last."""
    model, client, other = serve(parameters={"on_duplicate_start": "restart"}), connect(), connect()

    def begin(work):
        client.ask(model.name, fed(1), start(42))
        return [client.send(model.name, fed(1, work // 5), step(42)) for _ in range(10)]

    def task():
        Talk(other, model, 43).one_shot()

    while_they_run(begin, task)
    assert total(client.ask(model.name, fed(0), end(42))) == 11


@pytest.mark.parametrize("fault", ["no_place", "two_rows", "state_parameter"])
def test_what_follows_a_restart_that_is_refused_does_not_get_the_old_state(serve, connect, fault):
    parameters = {"on_duplicate_start": "restart", "max_sequence_number": 1, "worker_count": 2, "state_api": "true"}
    model = serve(parameters=parameters)
    rows = 2 if fault == "two_rows" else 1
    again = {name: np.repeat(value, rows, axis=0) for name, value in fed(4).items()}
    wrong = {"get_state": "NOTHING"} if fault == "state_parameter" else {}
    first, second, refused, late = sums(
        connect("stream"),
        model,
        [(fed(1, work=2000), start(42)), (fed(2), step(42)), (again, start(42) | wrong), (fed(8), step(42))],
    )
    assert (first, second) == (1, 3)
    assert isinstance(refused, Refused)
    check_error(late, "SEQUENCE_MISSING", 42)


def test_a_start_that_waits_gets_the_place_of_a_sequence_whose_restart_is_refused(serve, connect):
    parameters = {"on_duplicate_start": "restart", "max_sequence_number": 1, "max_queue_size": 2, "state_api": "true"}
    model, client, stream = serve(parameters=parameters), connect(), connect("stream")
    client.ask(model.name, fed(1), start(1))
    stream.send(model.name, fed(5), start(2))
    with pytest.raises(Refused, match="STATE_UNKNOWN"):
        client.ask(model.name, fed(1), start(1) | {"get_state": "NOTHING"})
    _, came = stream.reply()
    assert total(came) == 5


def test_o38_an_end_behind_a_request_is_computed_after_it(serve, connect):
    model, stream = serve(), connect("stream")
    *came, late = sums(
        stream, model, [(fed(1), start(42)), (fed(2, work=200), step(42)), (fed(4), end(42)), (fed(8), step(42))]
    )
    assert came == [1, 3, 7]
    check_error(late, "SEQUENCE_MISSING", 42)


# ---- many at once


@through_gateway
@pytest.mark.parametrize("size", [(6, 8), *repeated((30, 25))], ids=["small", "large"])
@every_count
def test_o39_sequences_of_many_clients_answer_as_if_each_were_alone(deployment, serve, connect, workers, size):
    sequences, steps = size
    model = serve(models.lstm, parameters={"worker_count": workers})
    client = connect()

    def talk(thread):
        talks = [Talk(client, model, 1000 * thread + i + 1) for i in range(sequences)]
        for each in talks:
            each.start()
        for _ in range(steps - 2):
            for each in talks:
                each.step()
        for each in talks:
            each.end()

    together(lambda thread=thread: talk(thread) for thread in range(8))
    deployment.settles("stateful_live_sequences", model, 0)


@pytest.mark.parametrize("requests", [200, *repeated(2000)])
@every_count
def test_a_stream_may_have_50_requests_of_a_sequence_in_flight(deployment, serve, connect, workers, requests):
    """Each answer is the sum of all requests before it, so a change of their order shows. The sequences of a stream
    keep 50 requests each in flight; several streams do so at once."""
    model = serve(parameters={"worker_count": workers}, max_batch_size=4)

    def flood(thread):
        rng = np.random.default_rng(thread)
        stream, ids = connect("stream"), [100 * thread + i for i in range(1, 4)]
        expected: dict[int, int] = {}
        running, in_flight = dict.fromkeys(ids, 0), dict.fromkeys(ids, 0)
        of = {}
        left = [sequence_id for sequence_id in ids for _ in range(requests)]
        rng.shuffle(left)
        sent = dict.fromkeys(ids, 0)

        def take():
            number, answer = stream.reply()
            assert not isinstance(answer, Refused), answer
            assert total(answer) == expected.pop(number), f"request {number} of sequence {of[number]}"
            assert answered_id(answer) == of[number]
            in_flight[of[number]] -= 1

        for sequence_id in left:
            while in_flight[sequence_id] == 50:
                take()
            value = int(rng.integers(-99, 100))
            running[sequence_id] += value
            flags = {"sequence_start": sent[sequence_id] == 0, "sequence_end": sent[sequence_id] == requests - 1}
            number = stream.send(model.name, fed(value), {"sequence_id": sequence_id, **flags})
            expected[number], of[number] = running[sequence_id], sequence_id
            sent[sequence_id] += 1
            in_flight[sequence_id] += 1
        while expected:
            take()

    together(lambda thread=thread: flood(thread) for thread in range(4))
    deployment.settles("stateful_live_sequences", model, 0)


@through_gateway
@every_count
def test_of_several_starts_of_one_id_at_once_one_makes_the_sequence(serve, connect, workers):
    model, client = serve(parameters={"worker_count": workers}), connect()

    def race(value):
        try:
            return total(client.ask(model.name, fed(value), start(42)))
        except Refused as error:
            check_error(error, "SEQUENCE_ALREADY_EXISTS", 42)
            return None

    for _ in range(20):
        came = together(lambda value=value: race(value) for value in range(1, 9))
        [winner] = [value for value in came if value is not None]
        assert total(client.ask(model.name, fed(100), end(42))) == winner + 100


@through_gateway
def test_made_ids_are_unique_among_many_clients(serve, connect):
    model, client = serve(parameters={"worker_count": 2}), connect()

    def begin():
        made = []
        for _ in range(20):
            talk = Talk(client, model, None)
            talk.start()
            made.append(talk)
        return made

    talks = [talk for made in together([begin] * 8) for talk in made]
    assert {talk.sequence_id for talk in talks} == set(range(1, 161))
    for talk in talks:
        talk.end()


@through_gateway
def test_batches_form_across_sequences(deployment, serve, connect):
    """While one run is at work, the requests of other sequences collect, and then share a run."""
    model, client = serve(), connect()
    talks = [Talk(client, model, sequence_id) for sequence_id in range(1, 6)]
    for talk in talks:
        talk.start()

    def largest_batch():
        long, *others = (client.send(model.name, fed(1, 200 * (of == 1)), step(of)) for of in range(1, 6))
        for call in (long, *others):
            call.answer()
        return max(batch_sizes(deployment, model))

    while largest_batch() < 4:
        pass

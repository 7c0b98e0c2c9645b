"""How many sequences there may be: cases O30 to O33 of OpenVINO Model Server, and the queue of STARTs."""

import contextlib
import re

import pytest

from harness.conversations import together
from harness.deployment import eventually
from harness.own import Talk, check_error, fails_with, fed, special, total, while_they_run
from harness.raw import Refused, take_back
from harness.ways import every_client, every_way, through_gateway


def full(serve, connect, way=None, **parameters):
    """A model that may have five sequences, and has the sequences 1 to 5."""
    model, client = serve(parameters={"max_sequence_number": 5, **parameters}), connect()
    talks = [Talk(client, model, sequence_id, *([way] if way else [])) for sequence_id in range(1, 6)]
    for talk in talks:
        talk.start(fed(talk.sequence_id))
    return model, client, talks


@every_client
def test_o30_a_start_beyond_the_maximum_is_refused_at_once(serve, connect, way, protocol):
    model, _, talks = full(serve, connect, way)
    with fails_with("MAX_SEQUENCE_NUMBER_REACHED", 6):
        Talk(connect(protocol), model, 6, way).start()
    with fails_with("SEQUENCE_MISSING", 6):
        Talk(connect(protocol), model, 6, way).step()
    for talk in talks:
        assert total(talk.end(fed(0))) == talk.sequence_id


@every_way
def test_o31_a_start_without_an_id_is_refused_too(serve, connect, way):
    model, client, _ = full(serve, connect, way)
    with fails_with("MAX_SEQUENCE_NUMBER_REACHED"):
        Talk(client, model, None, way).start()


@every_way
def test_o32_a_start_of_a_live_id_says_so_at_the_maximum_too(serve, connect, way):
    """OpenVINO Model Server says that the maximum is reached."""
    _, _, talks = full(serve, connect, way)
    with fails_with("SEQUENCE_ALREADY_EXISTS", 3):
        talks[2].start()


@every_way
def test_o33_a_sequence_that_ends_makes_room(serve, connect, way):
    model, client, talks = full(serve, connect, way)
    talks[0].end()
    talk = Talk(client, model, 6, way)
    talk.start()
    with fails_with("MAX_SEQUENCE_NUMBER_REACHED", 7):
        Talk(client, model, 7, way).start()


def test_a_start_that_is_refused_is_counted(deployment, serve, connect):
    model, client, _ = full(serve, connect)
    with fails_with("MAX_SEQUENCE_NUMBER_REACHED", 6):
        Talk(client, model, 6).start()
    deployment.settles("stateful_sequences_rejected_total", model, 1)


def test_a_sequence_of_one_request_needs_a_place_too(serve, connect):
    model, client, talks = full(serve, connect)
    with fails_with("MAX_SEQUENCE_NUMBER_REACHED", 6):
        Talk(client, model, 6).one_shot()
    talks[0].end()
    Talk(client, model, 6).one_shot()
    Talk(client, model, 7).one_shot()


@through_gateway
def test_a_start_that_failed_takes_no_place(serve, connect):
    model, client, talks = full(serve, connect)
    talks[0].end()
    for _ in range(3):
        with pytest.raises(Refused, match="ONNX Runtime"):
            Talk(client, model, 6).start(fed(1000))
    Talk(client, model, 6).start()


@through_gateway
def test_restarting_a_sequence_needs_no_place(serve, connect):
    _, _, talks = full(serve, connect, on_duplicate_start="restart")
    assert total(talks[2].start(fed(50))) == 50


@through_gateway
def test_many_starts_at_once_get_exactly_the_places_that_there_are(deployment, serve, connect):
    model, client = serve(parameters={"max_sequence_number": 10}), connect()

    def start(sequence_id):
        try:
            Talk(client, model, sequence_id).start()
        except Refused as error:
            check_error(error, "MAX_SEQUENCE_NUMBER_REACHED", sequence_id)
            return False
        return True

    came = together(lambda of=of: start(of) for of in range(1, 31))
    assert came.count(True) == 10
    deployment.settles("stateful_live_sequences", model, 10)


def test_the_default_maximum_is_500(serve, connect):
    model, stream = serve(), connect("stream")
    for sequence_id in range(1, 502):
        stream.send(model.name, fed(1), {"sequence_id": sequence_id, "sequence_start": True})
    replies = stream.all_replies(501)
    assert all(total(replies[number]) == 1 for number in range(500))
    check_error(replies[500], "MAX_SEQUENCE_NUMBER_REACHED", 501)


# ---- the queue


def start_of(sequence_id, timeout_us=None) -> dict:
    timeout = {} if timeout_us is None else {"timeout": timeout_us}
    return {"sequence_id": sequence_id, "sequence_start": True, **timeout}


def test_a_start_may_wait_for_a_place_and_the_next_requests_behind_it(deployment, serve, connect):
    model, client, talks = full(serve, connect, max_queue_size=2)
    stream = connect("stream")
    for value, parameters in [(1, start_of(6)), (2, {"sequence_id": 6}), (4, {"sequence_id": 6, "sequence_end": True})]:
        stream.send(model.name, fed(value), parameters)
    deployment.settles("stateful_waiting_starts", model, 1)
    talks[0].end()
    replies = stream.all_replies(3)
    assert [total(replies[number]) for number in range(3)] == [1, 3, 7]
    deployment.settles("stateful_waiting_starts", model, 0)
    # that END made a place, too
    Talk(client, model, 8).start()


def test_starts_get_their_places_in_the_order_in_which_they_came(deployment, serve, connect):
    """The first that waits is there before the second: both come on one stream."""
    model, client, talks = full(serve, connect, max_queue_size=2)
    stream = connect("stream")
    for sequence_id in (6, 7):
        stream.send(model.name, fed(1), start_of(sequence_id))
    deployment.settles("stateful_waiting_starts", model, 2)
    talks[0].end()
    number, answer = stream.reply()
    assert (number, total(answer)) == (0, 1)
    # 7 still waits, so its id is taken and its request is not answered
    with fails_with("SEQUENCE_ALREADY_EXISTS", 7):
        Talk(client, model, 7).start()
    talks[1].end()
    number, answer = stream.reply()
    assert (number, total(answer)) == (1, 1)


def test_a_start_that_finds_the_queue_full_is_refused(serve, connect):
    model, client, talks = full(serve, connect, max_queue_size=2)
    calls = [client.send(model.name, fed(1), start_of(sequence_id)) for sequence_id in (6, 7, 8)]
    # two of the three wait, in whatever order they arrived
    eventually(lambda: sum(call.future.done() for call in calls), lambda done: done == 1)
    [refused] = [call for call in calls if call.future.done()]
    with fails_with("SEQUENCE_QUEUE_FULL", 6 + calls.index(refused)):
        refused.answer()
    for talk in talks[:2]:
        talk.end()
    assert [total(call.answer()) for call in calls if call is not refused] == [1, 1]


def test_a_start_waits_no_longer_than_its_timeout(serve, connect):
    model, client, talks = full(serve, connect, max_queue_size=1)
    for _ in range(3):
        with fails_with("SEQUENCE_QUEUE_TIMEOUT", 6):
            client.ask(model.name, fed(1), start_of(6, timeout_us=50_000))
    # its place in the queue is free again, and its id is not taken
    call = client.send(model.name, fed(1), start_of(6))
    talks[0].end()
    assert total(call.answer()) == 1


def test_requests_behind_a_start_that_waited_too_long_find_no_sequence(serve, connect):
    model, _, _ = full(serve, connect, max_queue_size=1)
    stream = connect("stream")
    stream.send(model.name, fed(1), start_of(6, timeout_us=300_000))
    stream.send(model.name, fed(1), {"sequence_id": 6})
    replies = stream.all_replies(2)
    check_error(replies[0], "SEQUENCE_QUEUE_TIMEOUT", 6)
    check_error(replies[1], "SEQUENCE_MISSING", 6)


def test_a_cancelled_start_gives_its_place_in_the_queue_back(deployment, serve, connect):
    model, client, talks = full(serve, connect, max_queue_size=1)
    for _ in range(5):
        take_back(deployment, model.name, fed(1), start_of(6), after_s=0.01)
    talks[0].end()
    # a START whose cancelling came too late has run
    with contextlib.suppress(Refused):
        client.ask(model.name, fed(1), {"sequence_id": 6, "sequence_end": True})
    assert total(client.ask(model.name, fed(1), start_of(7, timeout_us=60_000_000))) == 1
    deployment.settles("stateful_live_sequences", model, 5)


def test_a_request_that_waited_longer_than_its_timeout_is_not_run(serve, connect):
    """Whatever it waited for. The sequence goes on from the state before it, and an END ends it. (The requests of the only
    live sequence may be run at once, without a wait.)"""
    model, stream = serve(), connect("stream")
    Talk(connect(), model, 43).start()
    late = {"sequence_id": 42, "timeout": 1}
    for value, work, parameters in [
        (1, 0, start_of(42)),
        (2, 200, {"sequence_id": 42}),
        (100, 0, late),
        (4, 0, {"sequence_id": 42}),
        (8, 200, {"sequence_id": 42}),
        (100, 0, {**late, "sequence_end": True}),
        (16, 0, {"sequence_id": 42}),
    ]:
        stream.send(model.name, fed(value, work), parameters)
    replies = stream.all_replies(7)
    assert [total(replies[number]) for number in (0, 1, 3, 4)] == [1, 3, 7, 15]
    check_error(replies[2], "SEQUENCE_QUEUE_TIMEOUT", 42)
    check_error(replies[5], "SEQUENCE_QUEUE_TIMEOUT", 42)
    check_error(replies[6], "SEQUENCE_MISSING", 42)
    Talk(connect(), model, 42).one_shot()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_start_waits_no_longer_than_its_timeout_while_a_run_takes_long(serve, connect, workers):
    parameters = {"worker_count": workers, "max_sequence_number": 2, "max_queue_size": 1}
    model, client, other = serve(parameters=parameters), connect(), connect()
    for sequence_id in (1, 2):
        Talk(client, model, sequence_id).start(fed(0))

    def begin(work):
        return [client.send(model.name, fed(0, work), {"sequence_id": 1})]

    def task():
        # the second one would still wait when the answer to the run has arrived
        for _ in range(2):
            with fails_with("SEQUENCE_QUEUE_TIMEOUT", 3):
                other.ask(model.name, fed(1), start_of(3, timeout_us=20_000))

    while_they_run(begin, task)


# ---- requests of one sequence that wait


def refused_by_reason(deployment, model) -> dict[str, float]:
    """Failed requests of the model, by the metric's reasons that have any."""
    lines = re.findall(r"^stateful_requests_failed_total{(.*)} (\S+)$", deployment.server.metrics(), re.MULTILINE)
    of_model = [(labels, float(count)) for labels, count in lines if f'model="{model.name}"' in labels]
    return {re.findall(r'reason="(\w+)"', labels)[0]: count for labels, count in of_model if count}


def step_of(sequence_id, **flags) -> dict:
    return {"sequence_id": sequence_id, **flags}


def test_only_so_many_requests_wait_behind_a_start_that_waits(deployment, serve, connect):
    """One more is refused, also an END, and changes nothing: the sequence goes on."""
    model, client, talks = full(serve, connect, max_queue_size=1, max_queued_requests_per_sequence=3)
    stream = connect("stream")
    end = {"sequence_end": True}
    for value, flags in [(1, {"sequence_start": True}), (2, {}), (4, {}), (8, {}), (16, end)]:
        stream.send(model.name, fed(value), step_of(6, **flags))
    eventually(lambda: refused_by_reason(deployment, model), lambda refused: refused == {"queue_full": 2})
    deployment.settles("stateful_queued_requests", model, 3)
    talks[0].end()
    replies = stream.all_replies(5)
    assert [total(replies[number]) for number in range(3)] == [1, 3, 7]
    for number in (3, 4):
        check_error(replies[number], "MAX_QUEUED_REQUESTS_REACHED", 6)
        assert "max_queued_requests_per_sequence" in replies[number].text
    assert total(client.ask(model.name, fed(32), step_of(6, **end))) == 39
    deployment.settles("stateful_queued_requests", model, 0)


def test_only_so_many_requests_wait_behind_one_that_runs(deployment, serve, connect):
    """Each sum is that of the requests before that were not refused."""
    model, stream = serve(parameters={"max_queued_requests_per_sequence": 3}), connect("stream")
    Talk(connect(), model, 1).start()
    Talk(connect(), model, 42).start(fed(0))
    expected = 0
    for work in (200, 1000, 5000, 25000):
        first = stream.count
        for i in range(12):
            stream.send(model.name, fed(i + 1, work if i == 0 else 0), step_of(42))
        replies = stream.all_replies(12)
        came = [replies[first + i] for i in range(12)]
        for i, reply in enumerate(came):
            if isinstance(reply, Refused):
                check_error(reply, "MAX_QUEUED_REQUESTS_REACHED", 42)
            else:
                expected += i + 1
                assert total(reply) == expected
        # three wait behind the first, or two with it, unless it was answered before all were there
        answered = [not isinstance(reply, Refused) for reply in came]
        if sum(answered) <= 4:
            assert answered[:3] == [True] * 3 and sum(answered) in (3, 4)
            break
    else:
        pytest.fail("the first request was always answered before the last was sent")
    assert total(connect().ask(model.name, fed(0), step_of(42, sequence_end=True))) == expected
    # another sequence is not concerned
    assert refused_by_reason(deployment, model).keys() == {"queue_full"}


def test_no_row_of_a_request_runs_if_too_many_of_a_sequence_would_wait(serve, connect):
    model, client = serve(parameters={"max_queued_requests_per_sequence": 3}, max_batch_size=8), connect()
    Talk(client, model, 42).start(fed(1))

    def rows(count):
        inputs = {name: value.repeat(count, axis=0) for name, value in fed(2).items()}
        ids = {name: value.repeat(count, axis=0) for name, value in special(model, 42).items()}
        return client.ask(model.name, {**inputs, **ids}, {})

    with fails_with("MAX_QUEUED_REQUESTS_REACHED", 42):
        rows(4)
    assert rows(3).outputs["OUTPUT"].ravel().tolist() == [3, 5, 7]


def test_by_default_a_hundred_requests_of_a_sequence_may_wait(deployment, serve, connect):
    model, client, talks = full(serve, connect, max_queue_size=1)
    stream = connect("stream")
    for count in range(101):
        stream.send(model.name, fed(1), start_of(6) if count == 0 else step_of(6))
    eventually(lambda: refused_by_reason(deployment, model), lambda refused: refused == {"queue_full": 1})
    talks[0].end()
    replies = stream.all_replies(101)
    assert [total(replies[number]) for number in range(100)] == list(range(1, 101))
    check_error(replies[100], "MAX_QUEUED_REQUESTS_REACHED", 6)


# ---- what the errors say of clients that are gone


@through_gateway
@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({}, ["60s", "sequence_idle_timeout_ms"]),
        ({"sequence_idle_timeout_ms": 90_000}, ["90s", "sequence_idle_timeout_ms"]),
        ({"stateful": "true"}, ["300s to 600s", "sequence_cleaner_poll_wait_minutes"]),
        ({"sequence_cleaner_poll_wait_minutes": 2}, ["120s to 240s", "sequence_cleaner_poll_wait_minutes"]),
        ({"idle_sequence_cleanup": "false"}, ["idle_sequence_cleanup"]),
    ],
    ids=["default", "precise", "of_ovms", "scans", "never"],
)
def test_an_error_says_when_the_sequence_of_a_dead_client_ends(serve, connect, parameters, words):
    """Without an option of OpenVINO Model Server, its rule doesn't apply."""
    model, client = serve(parameters=parameters), connect()
    Talk(client, model, 1).start()
    with fails_with("SEQUENCE_ALREADY_EXISTS", 1) as caught:
        Talk(client, model, 1).start()
    assert all(word in caught.value.text for word in words), caught.value


@pytest.mark.parametrize(("waiting", "word"), [(0, "MAX_SEQUENCE_NUMBER_REACHED"), (1, "SEQUENCE_QUEUE_FULL")])
def test_an_error_says_when_the_places_of_dead_clients_are_free(serve, connect, waiting, word):
    parameters = {"max_sequence_number": 1, "max_queue_size": waiting, "sequence_idle_timeout_ms": 90_000}
    model, stream = serve(parameters=parameters), connect("stream")
    for sequence_id in range(1, waiting + 3):
        # the one that waits is answered at its time; the last one has to come before
        stream.send(model.name, fed(1), start_of(sequence_id, timeout_us=3_000_000 * waiting))
    last = stream.all_replies(waiting + 2)[waiting + 1]
    check_error(last, word)
    assert "90s" in last.text and "sequence_idle_timeout_ms" in last.text

"""Requests of one sequence keep their order, wait in a queue that is bounded, and can be taken back there; deadlines."""

import json
import socket
import threading
from collections.abc import Callable

import grpc
import numpy as np
import pytest

from harness import models
from harness.conversations import together
from harness.deployment import eventually
from harness.own import FAILS, fed, own, total, while_they_run
from harness.raw import Refused
from harness.tensorflow_serving import Pipelined, Predict, of_ovms, predict_request

Flags = dict[str, bool]
START: Flags = {"sequence_start": True}
STEP: Flags = {}
END: Flags = {"sequence_end": True}


def of(sequence_id: int, flags=STEP) -> dict:
    return {"sequence_id": sequence_id, **flags}


@pytest.fixture
def pipelined(gateway):
    client = Pipelined(gateway)
    yield client
    client.close()


@pytest.mark.parametrize("sequences", [1, 5])
def test_requests_on_one_connection_run_in_the_order_in_which_they_were_sent(serve, pipelined, sequences):
    """Sent without a wait: a sum tells which requests ran before it."""
    model, length = serve(), 60
    for round in range(5):
        ids = range(100 * round + 1, 100 * round + 1 + sequences)
        sent = [(at, sequence_id) for at in range(length) for sequence_id in ids]
        for at, sequence_id in sent:
            flags = START if at == 0 else END if at == length - 1 else STEP
            pipelined.send(model.name, fed(at), of(sequence_id, flags))
        came = [pipelined.reply()[1] for _ in sent]
        assert [total(answer) for answer in came] == [at * (at + 1) // 2 for at, _ in sent]


def test_a_start_after_an_end_begins_a_new_sequence(serve, pipelined):
    """O34, O35 and O38, all sent at once. Requests after the END wait for it; OpenVINO Model Server refuses them."""
    model = serve()
    asked = [(1, START), (2, STEP), (4, END), (8, STEP), (10, START), (20, END), (16, END)]
    for value, flags in asked * 10:
        pipelined.send(model.name, fed(value), of(42, flags))
    assert outcomes(pipelined, 7 * 10) == [1, 3, 7, "NOT_FOUND", 10, 30, "NOT_FOUND"] * 10


def outcomes(pipelined, count: int) -> list[int | str]:
    came = [pipelined.reply()[1] for _ in range(count)]
    return [answer.code if isinstance(answer, Refused) else total(answer) for answer in came]


def busy_with(gateway, connect, model, work: int, sequence_id: int = 42):
    """A request of a sequence that runs for a while; it has reached the gateway."""
    client = connect("predict")
    client.ask(model.name, fed(0), of(sequence_id, START))
    before = under_way(gateway)
    call = client.send(model.name, fed(1, work), of(sequence_id))
    eventually(lambda: under_way(gateway), lambda count: count == before + 1 or call.future.done())
    return call


def under_way(gateway) -> float:
    """Requests that the gateway has not answered yet. A request of /metrics is not among them."""
    return gateway.metric(UNDER_WAY)


UNDER_WAY = "stateful_ovms_requests_running"


def test_requests_of_several_connections_run_in_the_order_in_which_they_arrived(gateway, serve, connect):
    """Each is sent when the one before it has arrived, while a first one runs."""
    model = serve()
    for work in (400, 2000, 10000):
        first = busy_with(gateway, connect, model, work)
        calls = []
        for at in range(1, 9):
            before = under_way(gateway)
            calls.append(connect("predict").send(model.name, fed(2**at), of(42)))
            eventually(lambda: under_way(gateway), lambda count: count == before + 1 or first.future.done())
        in_time = not first.future.done()
        assert total(first.answer()) == 1
        assert [total(call.answer()) for call in calls] == [2 ** (at + 1) - 1 for at in range(1, 9)]
        assert total(connect("predict").ask(model.name, fed(0), of(42, END))) == 511
        if in_time:
            return
    pytest.fail("the first request was answered before the last was sent")


def test_other_sequences_do_not_wait(gateway, serve, connect):
    model, other = serve(parameters={"worker_count": 2}), connect("predict")

    def begin(work):
        client = connect("predict")
        client.ask(model.name, fed(0), of(42, START))
        calls = [client.send(model.name, fed(1, work), of(42)) for _ in range(3)]
        return [*calls, client.send(model.name, fed(1), of(42, END))]

    def task():
        for sequence_id in (43, 0):
            made = other.ask(model.name, fed(5), of(sequence_id, START)).parameters["stateful_sequence_id"]
            assert total(other.ask(model.name, fed(7), of(made, END))) == 12

    while_they_run(begin, task)


def test_a_sequence_of_the_same_id_of_another_model_does_not_wait(serve, deployment, connect):
    model, other = serve(), connect("predict")
    beside = deployment.serve(own(models.work(f"{model.name}_beside")))

    def begin(work):
        client = connect("predict")
        client.ask(model.name, fed(0), of(42, START))
        return [client.send(model.name, fed(1, work), of(42, END))]

    def task():
        other.ask(beside.name, fed(5), of(42, START))
        assert total(other.ask(beside.name, fed(7), of(42, END))) == 12

    while_they_run(begin, task)


@pytest.mark.parametrize("protocol", ["predict", "rest"])
def test_a_hundred_requests_of_a_sequence_may_wait(gateway, serve, connect, pipelined, protocol):
    """One more is refused, and changes nothing."""
    model = serve()
    for work in (1000, 5000, 25000):
        first = busy_with(gateway, connect, model, work)
        before = under_way(gateway)
        for _ in range(100):
            pipelined.send(model.name, fed(1), of(42))
        eventually(lambda: under_way(gateway), lambda count: count == before + 100 or first.future.done())
        try:
            connect(protocol).ask(model.name, fed(1000), of(42))
            refused = None
        except Refused as error:
            refused = error
        in_time = not first.future.done()
        assert total(first.answer()) == 1
        assert outcomes(pipelined, 100) == list(range(2, 102))
        if in_time:
            assert refused is not None and refused.code in ("UNAVAILABLE", "503")
            assert "100" in refused.text and "42" in refused.text
        came = total(connect("predict").ask(model.name, fed(0), of(42, END)))
        if in_time:
            assert came == 101
            return
    pytest.fail("the first request was answered before the last was sent")


def leaving(how: str, gateway, connect, model, inputs) -> Callable[[], object]:
    """Sends a request of sequence 42, and gives what makes its client give up."""
    if how == "hung up":
        given = {name: value.tolist() for name, value in of_ovms(inputs, of(42)).items()}
        body = json.dumps({"inputs": given})
        host, port = gateway.rest_url.split(":")
        connection = socket.create_connection((host, int(port)), timeout=60)
        head = f"POST /v1/models/{model.name}:predict HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        return connection.close
    request = predict_request(model.name, of_ovms(inputs, of(42)))
    call = connect("predict").connected().call(request, **({"timeout_s": 1.0} if how == "deadline" else {}))
    return call.future.exception if how == "deadline" else call.future.cancel


@pytest.mark.parametrize("how", ["cancelled", "hung up", "deadline"])
def test_a_request_that_runs_is_finished_without_its_client(gateway, serve, connect, how):
    """The next request of the sequence waits for it, and has the state after it."""
    model, client = serve(), connect("predict")
    for work in (4000, 20000):
        client.ask(model.name, fed(1), of(42, START))
        before = under_way(gateway)
        give_up = leaving(how, gateway, connect, model, fed(10, work))
        # it is sent to Triton in the same step in which it is counted
        eventually(lambda: under_way(gateway), lambda count: count == before + 1)
        give_up()
        eventually(lambda: under_way(gateway), lambda count: count == before)
        following = client.send(model.name, fed(100), of(42))
        eventually(lambda: under_way(gateway) == before + 1 or following.future.done(), bool)
        in_time = not following.future.done()
        assert total(following.answer()) == 111
        assert total(client.ask(model.name, fed(0), of(42, END))) == 111
        if in_time:
            return
    pytest.fail("the request was always answered before its client gave up")


@pytest.mark.parametrize("how", ["cancelled", "hung up"])
def test_a_request_that_waits_is_not_run_without_its_client(gateway, serve, connect, how):
    model, client = serve(), connect("predict")
    for work in (400, 2000, 10000):
        first = busy_with(gateway, connect, model, work)
        before = under_way(gateway)
        give_up = leaving(how, gateway, connect, model, fed(10))
        eventually(lambda: under_way(gateway) == before + 1 or first.future.done(), bool)
        give_up()
        eventually(lambda: under_way(gateway) == before or first.future.done(), bool)
        in_time = not first.future.done()
        assert total(first.answer()) == 1
        came = total(client.ask(model.name, fed(100), of(42, END)))
        if in_time:
            assert came == 101
            return
    pytest.fail("the first request was answered before the other was taken back")


def test_a_request_between_others_that_is_taken_back_is_not_run(gateway, serve, connect):
    model = serve()
    for work in (400, 2000, 10000):
        first = busy_with(gateway, connect, model, work)
        client, before = connect("predict").connected(), under_way(gateway)
        calls = [client.send(model.name, fed(value), of(42)) for value in (10, 100, 1000 - 1)]
        eventually(lambda: under_way(gateway), lambda count: count == before + 3 or first.future.done())
        calls[1].future.cancel()
        eventually(lambda: under_way(gateway), lambda count: count == before + 2 or first.future.done())
        in_time = not first.future.done()
        assert total(first.answer()) == 1
        sums = [total(calls[at].answer()) for at in (0, 2)]
        client.ask(model.name, fed(0), of(42, END))
        if in_time:
            assert sums == [11, 1010]
            return
    pytest.fail("the first request was answered before the others had arrived")


def test_the_requests_of_a_client_that_is_gone_are_not_run(gateway, serve, connect):
    model = serve()
    for work in (400, 2000, 10000):
        first = busy_with(gateway, connect, model, work)
        leaving, before = Predict(gateway), under_way(gateway)
        calls = [leaving.send(model.name, fed(100), of(42)) for _ in range(5)]
        eventually(lambda: under_way(gateway), lambda count: count == before + 5 or first.future.done())
        leaving.close()
        eventually(lambda: under_way(gateway), lambda count: count == before or first.future.done())
        in_time = not first.future.done()
        assert total(first.answer()) == 1 and all(call.future.done() for call in calls)
        came = total(connect("predict").ask(model.name, fed(0), of(42, END)))
        if in_time:
            assert came == 1
            return
    pytest.fail("the first request was answered before the others were taken back")


def test_a_request_that_waits_has_a_deadline(gateway, serve, connect):
    """A request whose deadline passes in the queue never reaches Triton, and the next one need not wait for it."""
    model = serve()
    for work in (2000, 10000, 40000):
        first = busy_with(gateway, connect, model, work)
        client = connect("predict")
        late = client.call(predict_request(model.name, of_ovms(fed(100), of(42))), timeout_s=0.2)
        with pytest.raises(Refused) as caught:
            late.answer()
        assert caught.value.code == "DEADLINE_EXCEEDED"
        in_time = not first.future.done()
        assert total(first.answer()) == 1
        came = total(client.ask(model.name, fed(2), of(42, END)))
        if in_time:
            assert came == 3
            return
    pytest.fail("the first request was always answered before the deadline")


@pytest.mark.parametrize("how", ["deadline", "cancelled"])
def test_requests_that_are_taken_back_cost_no_other_client_an_answer(gateway, serve, connect, how):
    """They share one connection to Triton. It runs a request when its client stops waiting."""
    model = serve(parameters={"max_sequence_number": 1000})
    done = threading.Event()

    def steady(sequence_id: int) -> int:
        client, count = connect("predict"), 0
        client.ask(model.name, fed(0), of(sequence_id, START))
        while not done.is_set():
            count += 1
            assert total(client.ask(model.name, fed(1), of(sequence_id))) == count
        return count

    def take_back(first_id: int) -> int:
        """How many requests were taken back before their answer. One that is answered first is followed by longer ones."""
        client, taken_back, work = connect("predict"), 0, 150
        for sequence_id in range(first_id, first_id + 15):
            request = predict_request(model.name, of_ovms(fed(1, work), of(sequence_id, START)))
            call = client.call(request, timeout_s=0.06 if how == "deadline" else 60)
            if how == "cancelled":
                done.wait(0.03)
                call.future.cancel()
            try:
                call.answer()
                work *= 2
            except (Refused, grpc.FutureCancelledError):
                taken_back += 1
        return taken_back

    def leave() -> None:
        try:
            assert all(together(lambda at=at: take_back(100 * at) for at in range(1, 4)))
        finally:
            done.set()

    together([leave, *(lambda at=at: steady(at) for at in (1, 2))])


def test_a_failing_request_lets_the_next_one_go(serve, pipelined):
    model = serve()
    pipelined.send(model.name, fed(1), of(42, START))
    for value in (FAILS, 2, FAILS, 4):
        pipelined.send(model.name, fed(value, work=20), of(42))
    assert outcomes(pipelined, 5) == [1, "INTERNAL", 3, "INTERNAL", 7]


def test_a_request_that_is_refused_lets_the_next_one_go(serve, pipelined):
    model = serve()
    pipelined.send(model.name, fed(1), of(42, START))
    wrong = {"INPUT": np.zeros((1, 7), np.int64), "WORK": fed(0)["WORK"]}
    for inputs in (fed(2), wrong, fed(4), {}, fed(8)):
        pipelined.send(model.name, inputs, of(42))
    assert outcomes(pipelined, 6) == [1, 3, "INVALID_ARGUMENT", 7, "INVALID_ARGUMENT", 15]


def test_many_clients_of_one_sequence(gateway, serve, connect):
    """Each request is run once; the sums that the clients get are all different."""
    model = serve()
    connect("predict").ask(model.name, fed(0), of(42, START))

    def client(protocol):
        one = connect(protocol)
        return [total(one.ask(model.name, fed(1), of(42))) for _ in range(20)]

    came = together(lambda protocol=protocol: client(protocol) for protocol in ("predict", "rest") * 4)
    assert sorted(value for values in came for value in values) == list(range(1, 161))
    assert all(values == sorted(values) for values in came)

"""How a gateway starts and ends, and what it does while its tritonserver is down."""

import os
import signal
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest
import requests

from harness import models
from harness.conversations import together
from harness.deployment import eventually
from harness.gateway import MANAGED, Gateway, run
from harness.ovms_config import Config
from harness.own import ByInputs, Talk, fed, own, total
from harness.raw import Refused
from harness.repetitions import repeated
from harness.tensorflow_serving import Predict, Rest
from support import paths
from support.server import HOST, TritonServer, free_port

NEVER = "--file_system_poll_wait_seconds=0"


@pytest.fixture
def managed(tmp_path, start):
    """A gateway with a model `m`, whose temporary folders are in tmp_path."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    arguments = ["--model_name=m", "--model_path", Config(tmp_path / "models").model(models.work("m")), "--stateful"]
    return start(*arguments, NEVER, env={"TMPDIR": str(folder)})


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def left_over(tmp_path) -> list[str]:
    return [entry.name for entry in (tmp_path / "temporary").iterdir() if entry.name.startswith("stateful-ovms-")]


# ---- the end


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_gateway_ends_with_its_tritonserver_and_leaves_nothing(managed, tmp_path, by):
    Talk(Predict(managed), own(models.work("m")), 42, ByInputs).start()
    server = managed.tritonserver()
    assert len(left_over(tmp_path)) == 1
    managed.ask_to_stop(by)
    assert managed.ends() == 0
    assert not is_running(server) and left_over(tmp_path) == []


def test_a_gateway_ends_in_order_after_a_request_to_tritons_http(managed):
    """tritonserver ends when the connections to it have."""
    assert managed.get("/v2/health/ready").status_code == 200
    managed.ask_to_stop()
    assert managed.ends() == 0
    assert "it is killed" not in managed.log_text()


def test_the_folder_is_of_this_user_only(managed, tmp_path):
    [name] = left_over(tmp_path)
    assert (tmp_path / "temporary" / name).stat().st_mode & 0o777 == 0o700


HALF_A_REQUEST = b"POST /v1/models/m:predict HTTP/1.1\r\nContent-Length: 100\r\n\r\n{"


# half a request may hold it up for 20 seconds
@pytest.mark.parametrize("sent", [b"", *repeated(HALF_A_REQUEST[:20], HALF_A_REQUEST)], ids=["nothing", "head", "body"])
def test_open_requests_are_finished_at_the_end(managed, sent):
    """Another connection, idle or with a part of a request, doesn't change that."""
    predict, rest = Predict(managed), Rest(managed)
    predict.ask("m", fed(1), {"sequence_id": 42, "sequence_start": True})
    rest.ask("m", fed(1), {"sequence_id": 43, "sequence_start": True})
    host, port = managed.rest_url.split(":")
    with socket.create_connection((host, int(port))) as other:
        other.sendall(sent)
        # a request counts when its head is there
        before = eventually(lambda: under_way(managed), lambda count: count == (sent == HALF_A_REQUEST))
        over_grpc = predict.send("m", fed(2, work=1500), {"sequence_id": 42})
        over_http: list = []

        def ask():
            over_http.append(rest.ask("m", fed(4, work=1500), {"sequence_id": 43}))

        thread = threading.Thread(target=ask)
        thread.start()
        eventually(lambda: under_way(managed), lambda count: count >= before + 2)
        managed.ask_to_stop()
        assert total(over_grpc.answer()) == 3
        thread.join()
        assert total(over_http[0]) == 5
        assert managed.ends(60) == 0
    predict.close()
    rest.close()


def test_a_tritonserver_that_hangs_does_not_hold_up_the_end(managed):
    """Kubernetes waits 30 seconds, and then leaves no time to remove anything."""
    client, server = Predict(managed), managed.tritonserver()
    client.ask("m", fed(1), {"sequence_id": 42, "sequence_start": True})
    os.kill(server, signal.SIGSTOP)
    eventually(lambda: is_stopped(server), bool)
    hangs = client.send("m", fed(1), {"sequence_id": 42})
    eventually(lambda: under_way(managed), lambda count: count == 1)
    asked = time.monotonic()
    managed.ask_to_stop()
    assert managed.ends(60) == 0 and not is_running(server)
    assert time.monotonic() < asked + 28
    with pytest.raises(Refused):
        hangs.answer()
    client.close()


def is_stopped(pid: int) -> bool:
    """All of its threads: they stop one after the other."""
    states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").iterdir()]
    return set(states) == {"T"}


def under_way(gateway) -> float:
    return gateway.metric("stateful_ovms_requests_running")


def test_a_second_signal_ends_at_once(managed, tmp_path):
    predict = Predict(managed)
    predict.ask("m", fed(1), {"sequence_id": 42, "sequence_start": True})
    call = predict.send("m", fed(2, work=60000), {"sequence_id": 42})
    eventually(lambda: under_way(managed), lambda count: count >= 1)
    server = managed.tritonserver()
    managed.ask_to_stop()
    with pytest.raises(requests.RequestException):
        # it takes no more
        for _ in range(500):
            managed.get("/v1/config", timeout=1)
            time.sleep(0.02)
    managed.ask_to_stop()
    managed.ends(15)
    with pytest.raises(Refused):
        call.answer()
    eventually(lambda: is_running(server), lambda running: not running)
    predict.close()


def test_a_gateway_ends_with_an_error_when_its_tritonserver_does(managed, tmp_path):
    """Under load, every request is answered or refused, or its connection ends with the gateway."""
    done = threading.Event()

    def client(sequence_id: int, made) -> None:
        one = made(managed)
        while not done.is_set():
            try:
                Talk(one, own(models.work("m")), sequence_id, ByInputs).whole(5)
            except Refused as error:
                assert error.code in ("UNAVAILABLE", "503", "NOT_FOUND", "404", "ALREADY_EXISTS", "409"), error
            except requests.RequestException:
                assert managed.ends() == 128 + signal.SIGKILL
        one.close()

    def kill() -> None:
        eventually(lambda: managed.metric("stateful_ovms_requests_total"), lambda count: count > 100)
        os.kill(managed.tritonserver(), signal.SIGKILL)
        try:
            assert managed.ends() == 128 + signal.SIGKILL
        finally:
            done.set()

    together([kill, *(lambda of=of: client(of, Predict if of % 2 else Rest) for of in range(1, 7))])
    assert "tritonserver ended" in managed.log_text() and left_over(tmp_path) == []


def test_a_tritonserver_does_not_outlive_a_gateway_that_is_killed(managed):
    server = managed.tritonserver()
    managed.process.kill()
    managed.ends()
    eventually(lambda: is_running(server), lambda running: not running)


# ---- a tritonserver that comes and goes


@pytest.fixture
def repository(tmp_path):
    own(models.work("m")).write(tmp_path / "repository")
    return tmp_path / "repository"


def server_at(repository, ports) -> TritonServer:
    grpc_port, http_port, metrics_port = ports
    return TritonServer(
        repository,
        backends=paths.TESTED_BACKENDS,
        grpc_port=grpc_port,
        http_port=http_port,
        metrics_port=metrics_port,
        extra_args=["--exit-timeout-secs=1"],
    )


def test_a_tritonserver_that_is_killed_under_load_is_found_again(repository):
    """Over each protocol, requests are refused as unavailable until a new tritonserver listens at the address."""
    ports = [free_port(HOST, ()) for _ in range(3)]
    first = server_at(repository, ports)
    first.start()
    first.wait_ready()
    with Gateway(f"--triton={first.grpc_url}", f"--triton_http={first.http_url}") as gateway:
        done = threading.Event()
        unavailable, answered = set(), set()

        def client(at: int, made) -> None:
            one = made(gateway)
            sequence_id = 100 * at
            while not done.is_set():
                sequence_id += 1
                try:
                    Talk(one, own(models.work("m")), sequence_id, ByInputs).whole(5)
                    answered.add((at, second is not None))
                except Refused as error:
                    assert error.code in ("UNAVAILABLE", "503", "NOT_FOUND", "404"), error
                    unavailable.add(at)
            one.close()

        second: TritonServer | None = None

        def kill() -> None:
            nonlocal second
            try:
                eventually(lambda: {(at, False) for at in range(1, 7)} <= answered, bool)
                os.kill(first.pid, signal.SIGKILL)
                eventually(lambda: len(unavailable), lambda count: count == 6)
                # while it is away
                assert gateway.get("/v2/health/ready").status_code == 503
                for path in ("/v1/models/m", "/v1/models/m/metadata", "/v1/config"):
                    response = gateway.get(path)
                    assert response.status_code == 503 and set(response.json()) == {"error"}, response.text
                assert gateway.get("/metrics").status_code == 200
                made = server_at(repository, ports)
                made.start()
                made.wait_ready()
                second = made
                eventually(lambda: {(at, True) for at in range(1, 7)} <= answered, bool)
            finally:
                done.set()

        try:
            together([kill, *(lambda at=at: client(at, Predict if at % 2 else Rest) for at in range(1, 7))])
        finally:
            first.stop()
            if second is not None:
                second.stop()
        gateway.assert_running()


def test_a_gateway_may_start_before_its_tritonserver():
    nowhere = free_port(HOST, ())
    with Gateway(f"--triton={HOST}:{nowhere}", f"--triton_http={HOST}:{nowhere}") as gateway:
        predict, rest = Predict(gateway), Rest(gateway)
        for client, code in ((predict, "UNAVAILABLE"), (rest, "503")):
            with pytest.raises(Refused, match=f"^{code}: .*tritonserver"):
                client.ask("m", fed(1), {"sequence_id": 42, "sequence_start": True})
            client.close()


# ---- ports


@pytest.mark.parametrize("protocol", ["grpc", "rest"])
def test_a_port_that_is_taken_is_named_and_nothing_is_started(tmp_path, protocol):
    with socket.socket() as taken, socket.socket() as free:
        for one in (taken, free):
            one.bind((HOST, 0))
        taken.listen()
        free.close()
        port = taken.getsockname()[1]
        other = {"grpc": "--rest_port", "rest": "--port"}[protocol]
        arguments = [f"--{'port' if protocol == 'grpc' else 'rest_port'}={port}", f"{other}=0"]
        addresses = [f"--grpc_bind_address={HOST}", f"--rest_bind_address={HOST}"]
        model = ["--model_name=m", f"--model_path={Config(tmp_path).model(models.work('m'))}", "--stateful"]
        ended = run(*arguments, *addresses, *MANAGED, *model)
        assert ended.returncode == 1 and str(port) in ended.stderr, ended.stderr
        assert "Started GRPCInferenceService" not in ended.stdout + ended.stderr
        ended = run(*arguments, *addresses, f"--triton={HOST}:1")
        assert ended.returncode == 1 and str(port) in ended.stderr, ended.stderr


def test_one_protocol_may_be_left_out(deployment):
    """As in OpenVINO Model Server, port 0 means no port."""
    port = free_port(HOST, ())
    with Gateway(f"--triton={deployment.server.grpc_url}", ports=(port, 0), ready=False) as gateway:
        predict = Predict(gateway)

        def answers() -> bool:
            try:
                predict.ask("no_such_model", fed(1), {"sequence_id": 42})
            except Refused as error:
                return error.code == "NOT_FOUND"
            return False

        eventually(answers, bool)
        predict.close()
        connections = psutil.Process(gateway.pid).net_connections("tcp")
        assert [at.laddr.port for at in connections if at.status == psutil.CONN_LISTEN] == [port]


def test_several_addresses(deployment):
    with Gateway(
        f"--triton={deployment.server.grpc_url}",
        "--rest_bind_address=127.0.0.1,127.0.0.2",
        "--grpc_bind_address=localhost",
    ) as gateway:
        port = gateway.rest_url.split(":")[1]
        for address in ("127.0.0.1", "127.0.0.2"):
            assert requests.get(f"http://{address}:{port}/metrics", timeout=10).status_code == 200

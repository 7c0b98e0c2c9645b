"""The sockets of scripts/live: a client without a browser, and what ONNX Runtime says of its sound."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from aiohttp import ClientWebSocketResponse, WSCloseCode, WSMsgType, WSServerHandshakeError
from aiohttp.test_utils import TestClient, TestServer

from harness.logs import log_of_shipped
from support import paths
from support.live import app
from support.live.app import MESSAGE_BYTES_MAX, application
from support.server import TritonServer, free_port
from support.speech import inputs_of, read_recording, silero_oracle

Talk = Callable[[TestClient], Awaitable[None]]


@pytest.fixture
def triton(deployment) -> TritonServer:
    log_of_shipped(deployment, "silero_vad")
    return deployment.server


@pytest.fixture(autouse=True)
def without_heartbeat(monkeypatch):
    """aiohttp's client answers a ping only while it receives."""
    monkeypatch.setattr(app, "HEARTBEAT_S", None)


def talk_to(grpc_url: str, talk: Talk) -> None:
    """Runs the page's server, and a client of it."""

    async def run() -> None:
        async with TestClient(TestServer(application(grpc_url))) as client:
            await talk(client)

    asyncio.run(run())


def rated(samples: np.ndarray) -> list[float]:
    """What ONNX Runtime says."""
    sequence = silero_oracle().new_sequence()
    return [sequence.step({"input": chunk[None]})["output"].item() for chunk in inputs_of(samples)]


async def ask(socket: ClientWebSocketResponse, samples: np.ndarray) -> list[float]:
    await socket.send_bytes(samples.astype("<f4").tobytes())
    return (await socket.receive_json())["probabilities"]


async def ask_all(socket: ClientWebSocketResponse, samples: np.ndarray, lengths: list[int]) -> list[float]:
    """The answers to frames of these lengths, one after another."""
    came, at = [], 0
    for length in lengths:
        came += await ask(socket, samples[at : at + length])
        at += length
    return came


def live_sequences(server: TritonServer) -> int:
    found = re.findall(
        r'^stateful_live_sequences\{[^}]*model="silero_vad"[^}]*\} (\d+)', server.metrics(), re.MULTILINE
    )
    return sum(map(int, found))


async def until_live(server: TritonServer, count: int) -> None:
    """A test that waits in vain fails at its time limit."""
    while await asyncio.to_thread(live_sequences, server) != count:
        await asyncio.sleep(0.05)


def test_frames_of_any_length_are_rated_as_onnx_runtime_does(triton):
    samples, lengths = read_recording(), [0, 1, 128, 441, 4096, 0, 511, 20000, 320]

    async def talk(client):
        async with client.ws_connect("/socket") as socket:
            came = await ask_all(socket, samples, lengths)
        assert came == pytest.approx(rated(samples[: sum(lengths)]), abs=1e-5)

    talk_to(triton.grpc_url, talk)


def test_tabs_at_the_same_time_have_sequences_of_their_own(triton):
    samples = read_recording()

    async def tab(client, number):
        lengths = np.random.default_rng(number).integers(0, 2000, 20).tolist()
        sound = samples[number * 16000 :]
        async with client.ws_connect("/socket") as socket:
            came = await ask_all(socket, sound, lengths)
        assert came == pytest.approx(rated(sound[: sum(lengths)]), abs=1e-5)

    async def talk(client):
        await asyncio.gather(*(tab(client, number) for number in range(40)))
        await until_live(triton, 0)

    talk_to(triton.grpc_url, talk)


NAN = np.array([0.5, np.nan], "<f4").tobytes()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("start", ["a text came", "binary"]),
        (b"12345", ["5 bytes", "multiple of 4"]),
        (NAN, ["sample 1", "nan", "finite"]),
    ],
)
def test_a_wrong_message_gets_an_error_and_the_sequence_goes_on(triton, wrong, words):
    samples = read_recording()[:4096]

    async def talk(client):
        async with client.ws_connect("/socket") as socket:
            came = await ask(socket, samples[:1000])
            await (socket.send_str(wrong) if isinstance(wrong, str) else socket.send_bytes(wrong))
            error = (await socket.receive_json())["error"]
            assert all(word in error for word in words)
            came += await ask(socket, samples[1000:])
        assert came == pytest.approx(rated(samples), abs=1e-5)

    talk_to(triton.grpc_url, talk)


def test_a_message_that_is_too_long_closes_its_socket_only(triton):
    async def talk(client):
        async with client.ws_connect("/socket") as other, client.ws_connect("/socket") as socket:
            await socket.send_bytes(bytes(MESSAGE_BYTES_MAX + 4))
            closed = await socket.receive()
            assert (closed.type, closed.data) == (WSMsgType.CLOSE, WSCloseCode.MESSAGE_TOO_BIG)
            assert len(await ask(other, np.zeros(512))) == 1

    talk_to(triton.grpc_url, talk)


def test_a_closed_socket_ends_its_sequence(triton):
    async def talk(client):
        await until_live(triton, 0)
        first, second = await client.ws_connect("/socket"), await client.ws_connect("/socket")
        await ask(first, np.zeros(10))
        await ask(second, np.zeros(10))
        assert live_sequences(triton) == 2
        await first.close()
        await until_live(triton, 1)
        # without a closing message, as when a browser is killed
        second._writer.transport.abort()
        await until_live(triton, 0)

    talk_to(triton.grpc_url, talk)


def test_the_figures_count_tabs_and_runs(triton):
    async def talk(client):
        async with client.ws_connect("/socket") as other, client.ws_connect("/socket") as socket:
            await ask(other, np.zeros(10))
            steps, answer = 0, {}
            while "batches" not in answer:
                await socket.send_bytes(bytes(512 * 4))
                answer = await socket.receive_json()
                steps += len(answer["probabilities"])
            assert answer["tabs"] == 2
            assert set(answer["batches"]) == {"1"} and 0 < answer["batches"]["1"] <= steps

    talk_to(triton.grpc_url, talk)


def test_a_page_of_another_site_gets_no_socket(triton):
    async def talk(client):
        with pytest.raises(WSServerHandshakeError) as error:
            await client.ws_connect("/socket", origin="http://elsewhere.example")
        assert error.value.status == 403
        own = f"http://{client.host}:{client.port}"
        async with client.ws_connect("/socket", origin=own) as socket:
            assert len(await ask(socket, np.zeros(512))) == 1

    talk_to(triton.grpc_url, talk)


def test_a_socket_reports_a_server_that_is_gone_and_uses_one_that_is_back(tmp_path):
    port = free_port("127.0.0.1", ())
    options = {"model_control": "explicit", "load_models": ["silero_vad"], "grpc_port": port}

    def started(name: str) -> TritonServer:
        return TritonServer(paths.MODELS, backends=paths.TESTED_BACKENDS, log_path=tmp_path / name, **options)

    async def talk(client):
        with started("first"):
            socket = await client.ws_connect("/socket")
            assert len(await ask(socket, np.zeros(512))) == 1
        await socket.send_bytes(bytes(4))
        assert "silero_vad" in (await socket.receive_json())["error"]
        assert (await socket.receive()).data == WSCloseCode.INTERNAL_ERROR
        with started("second"):
            while True:  # gRPC waits a little before it connects again
                async with client.ws_connect("/socket") as socket:
                    await socket.send_bytes(bytes(512 * 4))
                    answer = await socket.receive_json()
                    if "error" not in answer:
                        break
            assert answer["probabilities"] == pytest.approx(rated(np.zeros(512, np.float32)), abs=1e-5)

    talk_to(f"127.0.0.1:{port}", talk)


def test_a_socket_reports_the_end_of_the_pages_server(triton):
    async def run():
        server = TestServer(application(triton.grpc_url))
        client = TestClient(server)
        await client.start_server()
        socket = await client.ws_connect("/socket")
        await ask(socket, np.zeros(10))
        ending = asyncio.create_task(server.close())
        closed = await socket.receive()
        assert (closed.data, closed.extra) == (WSCloseCode.GOING_AWAY, "the server was ended")
        await ending
        await client.close()
        await until_live(triton, 0)

    asyncio.run(run())

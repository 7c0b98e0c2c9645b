"""The page of scripts/live in Chromium, with a microphone that plays the recording."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from harness.logs import log_of_shipped
from support import paths
from support.browser import CHROMIUM, LIBRARIES
from support.server import TritonServer
from support.speech import inputs_of, read_recording, silero_oracle

pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason="no Chromium: scripts/test installs it with npm")

WAIT_MS = 60_000
#: A microphone, which the user lets the page have.
MICROPHONE = [
    "--use-fake-device-for-media-stream",
    f"--use-file-for-fake-audio-capture={paths.RECORDING}",
    "--use-fake-ui-for-media-stream",
]


ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{paths.ROOT}/scripts:{paths.ROOT}/clients/python/src"}


class Live:
    """scripts/live for a server that runs."""

    def __init__(self, grpc_url: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.live", "--port", "0", "--url", grpc_url],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        found = re.match(r"live: page +(http://\S+)", self.process.stdout.readline())
        assert found
        self.url = found[1]

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait() == 0
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def triton(deployment) -> TritonServer:
    log_of_shipped(deployment, "silero_vad")
    return deployment.server


@pytest.fixture
def live(triton) -> Iterator[Live]:
    with Live(triton.grpc_url) as running:
        yield running


def chromium(*arguments: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", *arguments],
            env={**os.environ, "LD_LIBRARY_PATH": str(LIBRARIES)},
        )


@pytest.fixture
def browser() -> Iterator[Browser]:
    yield from chromium(*MICROPHONE)


@pytest.fixture
def browser_without_microphone() -> Iterator[Browser]:
    yield from chromium()


class Tab:
    """A page, with what it has sent and got."""

    def __init__(self, browser: Browser, url: str) -> None:
        self.page: Page = browser.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.faults: list[str] = []
        self.sent: list[bytes] = []
        self.answers: list[dict] = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("websocket", self._listen)
        self.page.goto(url)

    def _listen(self, socket) -> None:
        socket.on("framesent", lambda samples: self.sent.append(samples))
        socket.on("framereceived", lambda text: self.answers.append(json.loads(text)))

    @property
    def probabilities(self) -> list[float]:
        return [value for answer in self.answers for value in answer["probabilities"]]

    @property
    def samples(self) -> np.ndarray:
        """What was sent and has been answered."""
        return np.frombuffer(b"".join(self.sent[: len(self.answers)]), "<f4")

    def wait_for(self, done) -> None:
        """Lets the page run until then. A test that waits in vain fails at its time limit."""
        while not done():
            self.page.wait_for_timeout(100)

    def shows(self, name: str, text: str | re.Pattern[str]) -> None:
        expect(self.page.locator(f"#{name}")).to_have_text(text, timeout=WAIT_MS)

    def click(self, name: str) -> None:
        self.page.click(f"#{name}")


def rated(samples: np.ndarray) -> list[float]:
    """What ONNX Runtime says."""
    sequence = silero_oracle().new_sequence()
    return [sequence.step({"input": chunk[None]})["output"].item() for chunk in inputs_of(samples)]


#: How many pixels of the picture are opaque, and how many of these are blue.
PIXELS = """canvas => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let painted = 0, blue = 0;
    for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 200) {
        painted += 1;
        if (data[at + 2] > data[at] + 60) blue += 1;
    }
    return [painted, blue];
}"""


def test_the_microphone_is_rated_as_onnx_runtime_does(live, browser):
    tab = Tab(browser, live.url)
    tab.click("microphone")
    tab.shows("state", "microphone")
    tab.wait_for(lambda: max(tab.probabilities, default=0) > 0.9 and len(tab.probabilities) > 100)
    tab.shows("now", re.compile(r"(speech|silence) \([01]\.\d\d\)"))
    tab.shows("sent", re.compile(r"\d+\.\d s in [\d,]+ messages; the last has \d+ samples"))
    tab.shows("latency", re.compile(r"\d+\.\d ms \(median of 5 s\), at most \d+\.\d ms"))
    tab.shows("batches", re.compile(r"\d+ × 1"))
    tab.shows("tabs", "1")
    painted, blue = tab.page.locator("#picture").evaluate(PIXELS)
    assert 0 < blue < painted
    tab.click("stop")
    tab.shows("state", "stopped")
    assert tab.probabilities == pytest.approx(rated(tab.samples), abs=1e-5)
    assert not tab.faults


def test_the_recording_is_played_where_there_is_no_microphone(live, browser_without_microphone):
    tab = Tab(browser_without_microphone, live.url)
    tab.click("microphone")
    tab.shows("state", re.compile(r"recording, because there is no microphone \(.+\)"))
    tab.wait_for(lambda: len(tab.probabilities) > 60)
    tab.click("stop")
    assert tab.probabilities == pytest.approx(rated(tab.samples), abs=1e-5)
    # A block or two of zeros may come before it.
    played = tab.samples[np.flatnonzero(tab.samples)[0] :]
    assert played == pytest.approx(read_recording()[: len(played)], abs=1e-4)
    # and again, by itself
    tab.click("recording")
    tab.shows("state", "recording")
    assert not tab.faults


def test_a_tab_that_is_stopped_while_it_starts_leaves_nothing(live, browser):
    tab = Tab(browser, live.url)
    # Within one task of the page, so that the microphone is not there yet.
    tab.page.evaluate("document.getElementById('microphone').click(); document.getElementById('stop').click()")
    tab.shows("state", "stopped")
    tab.click("recording")
    tab.wait_for(lambda: len(tab.probabilities) > 10)
    tab.shows("tabs", "1")
    tab.click("stop")
    assert tab.probabilities == pytest.approx(rated(tab.samples), abs=1e-5)
    assert not tab.faults


def test_each_tab_is_a_sequence(live, browser):
    first, second = Tab(browser, live.url), Tab(browser, live.url)
    first.click("microphone")
    second.click("recording")
    first.shows("tabs", "2")
    second.wait_for(lambda: len(second.probabilities) > 30)
    second.page.close()
    first.shows("tabs", "1")
    first.click("stop")
    for tab in (first, second):
        assert tab.probabilities == pytest.approx(rated(tab.samples), abs=1e-5)


def test_the_page_shows_that_the_model_is_gone(browser, tmp_path):
    options = {"model_control": "explicit", "load_models": ["silero_vad"], "log_path": tmp_path / "server.log"}
    with TritonServer(paths.MODELS, backends=paths.TESTED_BACKENDS, **options) as server, Live(server.grpc_url) as live:
        tab = Tab(browser, live.url)
        tab.click("microphone")
        tab.wait_for(lambda: len(tab.probabilities) > 3)
        server.stop()
        tab.shows("error", re.compile(rf"model 'silero_vad' at {server.grpc_url} does not answer: .+"))
        tab.shows("state", "stopped")


def test_a_port_that_is_taken_is_named(live):
    port = live.url.rpartition(":")[2]
    command = [sys.executable, "-m", "support.live", "--port", port, "--url", "localhost:1"]
    second = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert second.returncode == 1 and re.match(rf"live: .*{port}.*in use", second.stderr)


def test_the_page_shows_that_its_server_has_ended(triton, browser):
    with Live(triton.grpc_url) as live:
        tab = Tab(browser, live.url)
        tab.click("microphone")
        tab.wait_for(lambda: len(tab.probabilities) > 3)
    tab.shows("error", "The connection to the page's server is over: the server was ended.")
    tab.click("microphone")
    tab.shows("error", re.compile("Error|The connection to the page's server is over: it broke"))

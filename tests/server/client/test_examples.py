"""The examples, run as their pages say, on the models of this repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from support import paths
from support.oracle import Oracle
from support.server import TritonServer
from support.speech import CHUNK_SAMPLES, inputs_of, read_recording, silero_oracle

CLIENT = paths.ROOT / "clients" / "python"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("examples") / "server.log"
    with TritonServer(paths.MODELS, backends=paths.TESTED_BACKENDS, log_path=log) as running:
        yield running


def run(example: str, *arguments: str) -> list[str]:
    """The lines that the example prints."""
    return run_python(str(CLIENT / "examples" / f"{example}.py"), *arguments)


def run_python(*arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(CLIENT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def speech(first: int, count: int) -> list[float]:
    """What ONNX Runtime says of so many chunks."""
    samples = read_recording()[first : first + count * CHUNK_SAMPLES]
    sequence = silero_oracle().new_sequence()
    return [sequence.step({"input": chunk[None]})["output"].item() for chunk in inputs_of(samples)]


def test_the_first_example_of_the_page(server):
    page = (CLIENT / "README.md").read_text()
    [code, *_] = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = run_python("-c", code.replace("localhost:8001", server.grpc_url))
    assert len(lines) == 160 and sum(line != "[]" for line in lines) == 100


def test_microphone(server):
    *changes, last = run(
        "microphone", "--url", server.grpc_url, "--file", str(paths.RECORDING), "--packets", "320", "--pace", "0.1"
    )
    speaks = [probability > 0.5 for probability in speech(0, 200)]
    expected = [n for n, now in enumerate(speaks) if now != (speaks[n - 1] if n else False)]
    assert [float(line.split()[0]) for line in changes] == pytest.approx([n * 0.032 for n in expected], abs=0.006)
    assert expected and last == "320 requests, 200 steps"


def test_many_streams(server):
    lines = run(
        "many_streams", "--url", server.grpc_url, "--file", str(paths.RECORDING), "--streams", "20", "--packets", "96"
    )
    length = 60 * CHUNK_SAMPLES
    starts = np.linspace(0, len(read_recording()) - length, 20).astype(int)
    shares = [np.mean([p > 0.5 for p in speech(start, 60)]) for start in starts[:5]]
    assert lines[:5] == [f"stream {number}: {share:.0%} speech" for number, share in enumerate(shares)]
    assert lines[5].startswith("20 streams, 1200 steps, ")


def spelled(text: str) -> np.ndarray:
    """What ONNX Runtime says of the letter after each."""
    oracle = Oracle(paths.MODELS / "speller" / "1" / "model.onnx", {"BEFORE": "BEFORE_NEXT"})
    sequence = oracle.new_sequence()
    numbers = [" abcdefghijklmnopqrstuvwxyz".index(letter) for letter in text]
    return np.array([sequence.step({"LETTER": np.array([[n]])})["LOG_PROBABILITIES"][0] for n in numbers])


def probability(word: str, known: int) -> float:
    """That of the letters behind the first few, and of the end of the word."""
    text = f" {word} "
    numbers = [" abcdefghijklmnopqrstuvwxyz".index(letter) for letter in text]
    each = spelled(text)[np.arange(len(text) - 1), numbers[1:]]
    return float(np.exp(each[known:].sum()))


def test_beam_search(server):
    """The state of each beam is that of its own letters, so each word has the probability that it has alone."""
    lines = run("beam_search", "--url", server.grpc_url, "--begin", "st", "--width", "8")
    words = [line.split()[1] for line in lines]
    came = [float(line.split()[0]) for line in lines]
    assert len(set(words)) == 8 and all(word.startswith("st") for word in words)
    assert came == pytest.approx([probability(word, known=2) for word in words], abs=6e-5)
    assert came == sorted(came, reverse=True)


def test_hand_over(server, tmp_path):
    with TritonServer(paths.MODELS, backends=paths.TESTED_BACKENDS, log_path=tmp_path / "second.log") as second:
        lines = run("hand_over", "--first", server.grpc_url, "--second", second.grpc_url, "--text", " streaming ")
    assert lines[0].startswith(f"{server.grpc_url}: 5 steps, a snapshot of ")
    assert lines[1] == f"{second.grpc_url}: 10 steps"
    assert lines[-1] == "both go on alike"
    each = spelled(" streaming ")
    numbers = [" abcdefghijklmnopqrstuvwxyz".index(letter) for letter in " streaming "]
    expected = np.exp(each[np.arange(10), numbers[1:]])
    assert [float(line.split()[-1]) for line in lines[2:-1]] == pytest.approx(expected.tolist(), abs=6e-4)

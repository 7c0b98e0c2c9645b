"""The cookbook's commands that convert a model: they run, and what they wrote is served."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx

from cookbook.pages import PAGES, pieces
from harness.conversations import together
from harness.deployment import Deployment
from harness.graphs import graph, node
from support.oracle import Oracle
from support.paths import CONVERT, ROOT, SILERO_VAD


def converted(page: str, file: str, model: bytes, folder: Path, replaced: Mapping[str, str] | None = None) -> Path:
    """Runs the page's commands in a folder that has the model in this file; the repository that they make."""
    [commands] = re.findall(r"^```\n(build/bin/stateful-convert .*?)^```$", PAGES[page].text, re.MULTILINE | re.DOTALL)
    for written, other in {"build/bin/stateful-convert": str(CONVERT), **(replaced or {})}.items():
        assert written in commands
        commands = commands.replace(written, other)
    (folder / file).write_bytes(model)
    subprocess.run(["bash", "-ec", commands], cwd=folder, check=True)
    return folder / "models"


def serve(deployment: Deployment, repository: Path, model: str, name: str, more: str = "") -> None:
    """Serves a converted model under another name, with these lines added to the configuration that was written."""
    shutil.copytree(repository / model, deployment.repository / name)
    with (deployment.repository / name / "config.pbtxt").open("a") as config:
        config.write(more)
    deployment.admin.load_model(name)
    assert deployment.admin.get_model_config(name).config.max_batch_size == 64


def policy() -> onnx.ModelProto:
    """What the exporter of rsl_rl makes of an LSTM and a layer: all dims are fixed."""
    rng = np.random.default_rng(3)
    shapes = {"W": (1, 1024, 48), "R": (1, 1024, 256), "B": (1, 2048), "A": (256, 12)}
    weights = {name: rng.normal(scale=0.1, size=shape).astype(np.float32) for name, shape in shapes.items()}
    nodes = [
        node("Unsqueeze", "obs zero", "steps"),
        node("LSTM", "steps W R B - h_in c_in", "all h_out c_out", hidden_size=256),
        node("Squeeze", "all front", "features"),
        node("MatMul", "features A", "actions"),
    ]
    states = [("h", "fp32", (1, 1, 256)), ("c", "fp32", (1, 1, 256))]
    sides = (
        [("obs", "fp32", (1, 48)), *((f"{name}_in", kind, dims) for name, kind, dims in states)],
        [("actions", "fp32", (1, 12)), *((f"{name}_out", kind, dims) for name, kind, dims in states)],
    )
    return graph(nodes, *sides, {**weights, "zero": np.array([0]), "front": np.array([0, 1])})


def test_the_batch_of_a_policy_is_opened(cookbook_deployment, tmp_path):
    model = policy().SerializeToString()
    serve(cookbook_deployment, converted("batch-1.md", "policy.onnx", model, tmp_path), "policy", "opened_policy")
    address = cookbook_deployment.server.grpc_url
    act = PAGES["robot-policy.md"].client("act", address, instead_of={"policy.stateful": "opened_policy"})
    each = [
        np.random.default_rng(seed).normal(size=(count, 1, 48)).astype(np.float32) for seed, count in ((1, 9), (2, 12))
    ]
    for observations, actions in zip(each, together(lambda part=part: act(part) for part in each), strict=True):
        sequence = Oracle(model, {"h_in": "h_out", "c_in": "c_out"}).new_sequence()
        expected = [sequence.step({"obs": observation})["actions"] for observation in observations]
        np.testing.assert_allclose(np.array(actions), np.array(expected), rtol=0, atol=1e-5)


def test_the_batch_of_the_published_silero_vad_is_opened(cookbook_deployment, tmp_path):
    """With the command of the page, and then the lines for its input."""
    model = SILERO_VAD.with_name("silero_vad_openvino_16k.onnx").read_bytes()
    pairs = {"'<<<h_in, h_out>>> <<<c_in, c_out>>>'": "'<<<state, stateN>>>'"}
    repository = converted("batch-1.md", "policy.onnx", model, tmp_path, pairs)
    _, config = PAGES["vad.md"].models["silero_vad"]
    more = "".join(line + "\n" for line in config.splitlines() if "input_context" in line or "input_windows" in line)
    serve(cookbook_deployment, repository, "policy", "opened_silero_vad", more)
    address = cookbook_deployment.server.grpc_url
    speech = PAGES["vad.md"].client("speech", address, instead_of={"silero_vad": "opened_silero_vad"})
    samples = [np.random.default_rng(seed).normal(size=20 * 512).astype(np.float32) for seed in (1, 2)]
    answers = together(lambda part=part: speech(pieces(part)) for part in samples)
    for chunks, found in zip((part.reshape(20, 1, 512) for part in samples), answers, strict=True):
        sequence = Oracle(model, {"state": "stateN"}).new_sequence()
        before, expected = np.zeros((1, 64), np.float32), []
        for chunk in chunks:
            expected.append(sequence.step({"input": np.concatenate([before, chunk], 1)})["output"].item())
            before = chunk[:, -64:]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_a_model_without_state_inputs_is_converted(cookbook_deployment, tmp_path):
    model = (ROOT / "crates" / "convert" / "tests" / "exports" / "torch_lstm2.onnx").read_bytes()
    repository = converted("time-series.md", "lstm.onnx", model, tmp_path)
    serve(cookbook_deployment, repository, "series", "converted_series")

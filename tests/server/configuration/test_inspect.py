"""`stateful-inspect` with a config.pbtxt, or dims, beside the model: it shows what the server shows."""

import dataclasses
import subprocess

import numpy as np
import pytest

from harness import models
from harness.graphs import BATCH
from harness.logs import log_of_load, messages
from harness.model import Model, State, Tensor
from harness.models import families
from harness.state_api import with_state_api
from support.paths import INSPECT


def inspect(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([INSPECT, *map(str, arguments)], capture_output=True, text=True)


def framed(name: str) -> Model:
    return models.framed(name, [BATCH, 45, 3], (13, 1), (-1, 3), "FRAMES=13@1:whole", first="whole", window=45)


def declared(name: str) -> Model:
    model = models.accumulate(name)
    [(source, target)] = model.states
    state = State(source, target, "fp32", (1,), initial_dims=(1,), initial_file="start.bin")
    value = np.array([7], np.float32)
    return dataclasses.replace(
        model, implicit=(state,), files={"initial_state/start.bin": value.tobytes()}, initial={source: value[None]}
    )


MODELS = {
    "accumulate": models.accumulate,
    "context": framed,
    "padded": lambda name: models.masked(name, context=2).with_parameters(name, input_context="X=2"),
    "declared": declared,
    "state_api": lambda name: with_state_api(framed(name)),
    "windows": lambda name: models.cut(name, 5, 3),
    "one_line": lambda name: families.zipformer().served("model", name, written='backend: "stateful"'),
}


@pytest.mark.parametrize("case", MODELS)
def test_it_shows_what_the_server_shows(deployment, case):
    model = MODELS[case](f"inspect_{case}")
    prefix = f"model {model.name} version 1: "
    logged = [text.removeprefix(prefix).rstrip() for text in messages(log_of_load(deployment, model)) if prefix in text]
    folder = deployment.repository / model.name
    ran = inspect(folder / "1" / model.file_name, "--config", folder / "config.pbtxt")
    assert ran.returncode == 0, ran.stderr
    table = [line for line in ran.stderr.splitlines() if line and not line.startswith(("note: ", "warning: "))]
    assert len(table) > 3
    at = logged.index(table[0])
    assert logged[at : at + len(table)] == table


def test_windows_are_proposed_where_requests_carry_a_chunk_of_fixed_length(tmp_path):
    model = models.framed("inspect_chunks", [BATCH, 96], (16, 1), (80,))
    folder = model.write(tmp_path)
    file = folder / "1" / model.file_name
    ran = inspect(file, "--config", folder / "config.pbtxt")
    assert "requests carry 80 elements of 'FRAMES'" in ran.stderr, ran.stderr
    assert "'FRAMES=80@1'" in ran.stderr
    # the line is one that works
    ran = inspect(file, "-p", "input_context=FRAMES=16", "-p", "input_windows=FRAMES=80@1")
    assert ran.returncode == 0 and "cut into windows of 80 along axis 1" in ran.stderr, ran.stderr
    assert "requests carry" not in ran.stderr
    assert 'name: "WINDOW" data_type: TYPE_FP32 dims: [ -1, 96 ]' in ran.stdout, ran.stdout


def test_one_line_proposes_the_windows_of_all_inputs(tmp_path):
    model = models.echo_canceller("inspect_echo")
    file = model.write(tmp_path) / "1" / model.file_name
    ran = inspect(file)
    assert "may be states that were not found" in ran.stderr and "<<<NEAR, CLEAN>>>" in ran.stderr, ran.stderr
    assert "160 elements of 'NEAR' and 80 elements of 'FAR'" in ran.stderr, ran.stderr
    assert ran.stderr.count("'NEAR=160@1 FAR=80@1'") == 1, ran.stderr
    ran = inspect(file, "-p", "input_windows=NEAR=160@1 FAR=80@1")
    assert ran.returncode == 0 and "cut into windows of 80 along axis 1" in ran.stderr, ran.stderr
    # What requests bring in windows is no state.
    assert "may be states" not in ran.stderr, ran.stderr


def test_what_it_prints_of_a_configuration_is_one_that_shows_the_same(deployment, tmp_path):
    model = framed("inspect_again")
    folder = model.write(tmp_path)
    file = folder / "1" / model.file_name
    first = inspect(file, "--config", folder / "config.pbtxt")
    (folder / "config.pbtxt").write_text(first.stdout)
    second = inspect(file, "--config", folder / "config.pbtxt")
    assert (second.returncode, second.stdout) == (0, first.stdout), second.stderr
    assert second.stderr == first.stderr


def test_dims_and_parameters_come_before_the_file(tmp_path):
    model = models.framed("inspect_dims", ["T", 9], (4, 1), (1, 5), "FRAMES=4", max_batch_size=0)
    answers = (Tensor("WINDOW", "fp32", (-1, 9)), Tensor("COUNT", "int64", (-1, 1)))
    folder = dataclasses.replace(model, outputs=answers).write(tmp_path)
    file = folder / "1" / model.file_name
    ran = inspect(file, "-p", "input_context=FRAMES=4")
    assert ran.returncode and "'FRAMES=4@0'" in ran.stderr and "'FRAMES=4@1'" in ran.stderr, ran.stderr
    ran = inspect(file, "-p", "input_context=FRAMES=4", "--dims", "FRAMES=1,5")
    assert "4 of the last in front of 5 along axis 1" in ran.stderr, ran.stderr
    assert 'input { name: "FRAMES" data_type: TYPE_FP32 dims: [ 1, 5 ] }' in ran.stdout
    config = folder / "config.pbtxt"
    ran = inspect(file, "--config", config, "-p", "input_context=FRAMES=3", "--dims", "FRAMES=2,6")
    assert "3 of the last in front of 6 along axis 1" in ran.stderr and "dims: [ 2, 6 ]" in ran.stdout, ran.stderr
    for arguments, words in (
        (["--dims", "NOISE=1"], ["no input 'NOISE'", "FRAMES"]),
        (["--dims", "FRAMES=x"], ["input=1,512"]),
        (["--config", folder / "nothing"], ["nothing", "cannot be read"]),
        (["--config", file], ["model.onnx", "cannot be read"]),
        (["--config", "/dev/zero"], ["/dev/zero cannot be read: it is no file"]),
    ):
        ran = inspect(file, *arguments)
        assert ran.returncode and all(word in ran.stderr for word in words), ran.stderr
    with_mark = folder / "marked.pbtxt"
    with_mark.write_text(config.read_text(), "utf-8-sig")
    assert inspect(file, "--config", with_mark).stdout == inspect(file, "--config", config).stdout != ""
    config.write_text(config.read_text() + "max_batchsize: 3\n")
    ran = inspect(file, "--config", config)
    line = len(config.read_text().splitlines())
    assert ran.returncode and f"line {line}: " in ran.stderr and "max_batchsize" in ran.stderr, ran.stderr

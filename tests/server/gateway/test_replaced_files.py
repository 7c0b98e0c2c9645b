"""Files and entries of models that change while they are served."""

import os
import shutil
import time
from pathlib import Path

import pytest
import requests

from harness import models
from harness.deployment import eventually
from harness.gateway import Gateway
from harness.ovms_config import Config, place
from harness.own import ByInputs, Talk, fails_with, own
from harness.tensorflow_serving import Predict

NEVER = "--file_system_poll_wait_seconds=0"
DAY = 24 * 3600


@pytest.fixture
def config(tmp_path):
    return Config(tmp_path / "models")


def width(gateway: Gateway, name: str = "m") -> int:
    """Of the input of the model that Triton serves."""
    metadata = gateway.get(f"/v2/models/{name}").json()
    [shape] = [of["shape"] for of in metadata["inputs"] if of["name"] == "INPUT"]
    return shape[-1]


def reload(gateway: Gateway, status: int) -> str:
    response = gateway.post("/v1/config/reload", timeout=60)
    assert response.status_code == status, response.text
    return response.text


def test_an_older_file_takes_the_place_of_a_newer_one(config, start):
    """Triton itself compares the newest times, and would keep what it has."""
    bases = []
    for wide, days in ((1, -3), (2, -2), (3, 1)):
        base = config.model(models.counter("fp32", f"of_{wide}", width=wide))
        seconds = time.time() + days * DAY
        os.utime(base / "1" / "model.onnx", (seconds, seconds))
        bases.append(str(base))

    def write(wide: int | None, **options) -> None:
        entries = [{"name": "m", "base_path": bases[wide - 1], "stateful": True, **options}] if wide else []
        config.write(*entries)

    write(2)
    gateway = start("--config_path", config.path, NEVER)
    assert width(gateway) == 2
    for wide in (1, 3, 2, 1, 2, 3, None, 1):
        write(wide)
        reload(gateway, 201)
        if wide:
            assert width(gateway) == wide
    # a backup is moved over the file
    os.rename(config.folder / "of_2" / "1" / "model.onnx", config.folder / "of_1" / "1" / "model.onnx")
    os.utime(config.folder / "of_1" / "1" / "model.onnx", (10**9, 10**9))
    reload(gateway, 201)
    assert width(gateway) == 2


def test_a_version_with_an_old_file_comes_after_a_newer_one(config, start):
    entry = config.entry(models.work("m"), model_version_policy={"all": {}})
    future = time.time() + DAY
    os.utime(config.folder / "m" / "1" / "model.onnx", (future, future))
    gateway = start("--config_path", config.write(entry), NEVER)
    client = Predict(gateway)
    kept = Talk(client, own(models.work("m")), 42, ByInputs, "1")
    kept.start()
    for version in (2, 3):
        config.model(models.work("m"), versions=(version,))
        os.utime(config.folder / "m" / str(version) / "model.onnx", (10**9, 10**9))
        reload(gateway, 201)
        Talk(client, own(models.work("m")), 42, ByInputs, str(version)).whole(2)
        kept.step()
    kept.end()
    client.close()


def test_a_pipe_in_a_file_s_place_holds_nothing_up(config, start):
    """Whoever reads a pipe waits for its other end."""
    m, other = config.entry(models.work("m")), config.entry(models.work("other"))
    file = config.folder / "other" / "1" / "model.onnx"
    gateway = start("--config_path", config.write(m))
    content = file.read_bytes()
    file.unlink()
    os.mkfifo(file)
    config.write(m, other)
    assert "other/1/model.onnx: not a regular file" in reload(gateway, 500)
    written = config.path.read_bytes()
    config.path.unlink()
    os.mkfifo(config.path)
    assert "config.json: not a regular file" in reload(gateway, 412)
    place(config.path, written)
    file.unlink()
    place(file, content)

    def served() -> bool:
        try:
            return gateway.get("/v2/models/other/ready", timeout=5).status_code == 200
        except requests.RequestException:
            return False

    eventually(served, bool)


def repository_of(gateway: Gateway) -> Path:
    arguments = Path(f"/proc/{gateway.tritonserver()}/cmdline").read_text().split("\0")
    [path] = [argument.split("=", 1)[1] for argument in arguments if argument.startswith("--model-repository=")]
    return Path(path)


def test_a_folder_that_can_not_be_written_is_tried_again(config, start):
    """The disk was full, for example. The model has no part in that."""
    entry = config.entry(models.work("m"))
    gateway = start("--config_path", config.write(entry))
    client = Predict(gateway)
    folder = repository_of(gateway) / "m"
    shutil.rmtree(folder)
    folder.write_bytes(b"")
    config.write({**entry, "max_sequence_number": 1})
    problem = f"cannot write {folder}: "
    eventually(lambda: problem in gateway.log_text(), bool)
    Talk(client, own(models.work("m")), 1, ByInputs).whole(2)
    # nothing has asked for it
    folder.unlink()
    eventually(lambda: gateway.log_text().count("serving version 1"), lambda count: count == 2)
    assert gateway.log_text().count(f"model 'm': {problem}") == 1
    Talk(client, own(models.work("m")), 1, ByInputs).start()
    with fails_with("MAX_SEQUENCE_NUMBER_REACHED"):
        Talk(client, own(models.work("m")), 2, ByInputs).start()
    client.close()


def test_a_status_names_the_user_s_files(config, start):
    entry = config.entry(models.work("m"))
    place(config.folder / "m" / "2" / "model.onnx", b"no model")
    gateway = start("--config_path", config.write(entry), NEVER)
    versions = gateway.get("/v1/models/m").json()["model_version_status"]
    [message] = [of["status"]["error_message"] for of in versions if of["version"] == "2"]
    assert str(config.folder / "m" / "2") in message and str(repository_of(gateway)) not in message

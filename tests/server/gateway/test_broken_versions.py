"""A version that can't be loaded counts as one that isn't there, as in OpenVINO Model Server."""

import pytest

from harness import models
from harness.gateway import Gateway
from harness.ovms_config import Config, place
from harness.own import ByInputs, Talk, own
from harness.tensorflow_serving import Predict

NEVER = "--file_system_poll_wait_seconds=0"


@pytest.fixture
def config(tmp_path):
    return Config(tmp_path / "models")


def reload(gateway: Gateway) -> tuple[int, str]:
    response = gateway.post("/v1/config/reload", timeout=120)
    return response.status_code, response.text


def served(gateway: Gateway) -> set[str]:
    versions = gateway.get("/v1/models/m").json()["model_version_status"]
    return {version["version"] for version in versions if version["state"] == "AVAILABLE"}


def break_version(config, version: int, content: bytes = b"no model") -> None:
    place(config.folder / "m" / str(version) / "model.onnx", content)


def test_the_version_before_a_broken_one_is_served(config, start):
    """At the start, and when it comes later: its sequences live on."""
    entry = config.entry(models.work("m"), versions=(1, 2))
    break_version(config, 3)
    gateway = start("--config_path", config.write(entry), NEVER)
    assert served(gateway) == {"2"}
    predict = Predict(gateway)
    talk = Talk(predict, own(models.work("m")), 42, ByInputs)
    talk.start()
    break_version(config, 4)
    for content in (b"no model", b"no model again"):
        break_version(config, 4, content)
        status, text = reload(gateway)
        assert status == 500 and "4/model.onnx" in text and str(config.folder) in text, text
        assert served(gateway) == {"2"}
        talk.step()
    # version 3 is older than the one that is right now, so it isn't tried
    config.model(models.work("m"), versions=(4,))
    assert reload(gateway)[0] == 201
    assert served(gateway) == {"4"}
    predict.close()


def test_a_broken_version_leaves_the_others_alone(config, start):
    entry = config.entry(models.work("m"), model_version_policy={"all": {}})
    gateway = start("--config_path", config.write(entry), NEVER)
    predict = Predict(gateway)
    talk = Talk(predict, own(models.work("m")), 42, ByInputs, "1")
    talk.start()
    break_version(config, 2)
    assert reload(gateway)[0] == reload(gateway)[0] == 500
    talk.step()
    config.model(models.work("m"), versions=(2,))
    assert reload(gateway)[0] == 201
    assert served(gateway) == {"1", "2"}
    predict.close()


def test_a_model_whose_files_all_broke_is_served_as_it_was(config, start):
    entry = config.entry(models.work("m"))
    gateway = start("--config_path", config.write(entry), NEVER)
    predict = Predict(gateway)
    talk = Talk(predict, own(models.work("m")), 42, ByInputs)
    talk.start()
    break_version(config, 1)
    assert reload(gateway)[0] == 500
    talk.step()
    assert served(gateway) == {"1"}
    talk.end()
    predict.close()


def test_versions_that_are_gone_are_unloaded(config, start):
    entry = config.entry(models.work("m"))
    gateway = start("--config_path", config.write(entry), NEVER)
    (config.folder / "m" / "1" / "model.onnx").unlink()
    place(config.folder / "m" / "1" / "model.xml", b"<net/>")
    status, text = reload(gateway)
    assert status == 500 and "OpenVINO IR" in text
    assert served(gateway) == set()

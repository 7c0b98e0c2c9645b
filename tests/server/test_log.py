"""What an operator finds in the log when a model loads."""

import re

import onnxruntime

import models


def test_the_resolved_configuration_is_logged_with_the_pool_in_numbers(deployment):
    # 1024 floats a sequence are 4096 bytes; 50 candidates give 45 slots
    model = models.counter(name="logged_in_full", width=1024, max_candidates=50)
    model = model.with_parameters(model.name, sequence_idle_margin_microseconds=7654321)
    deployment.serve(model)
    text = deployment.server.log_text().rpartition(f"loading: {model.name}")[2]
    assert re.search(r"\b45\b", text), text
    assert re.search(r"\b4096\b", text), text
    assert re.search(rf"\b{45 * 4096}\b", text), text
    assert "67.654321" in text, "a minute, and the margin"
    for name in ("STATE_IN", "STATE_OUT"):
        assert name in text


def test_the_onnx_runtime_in_use_is_logged_with_its_path_and_version(deployment):
    version = re.compile(rf"\b{re.escape(onnxruntime.__version__)}\b")
    log = deployment.server.log_text().splitlines()
    assert any(version.search(line) and re.search(r"/libonnxruntime\.so", line) for line in log)

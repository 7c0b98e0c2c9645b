"""ONNX Runtime: which library it is, beside which others, and how sessions run in it."""

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import models
from harness.conversations import Conversation, interleave, together
from support import paths

LIBRARY = paths.TESTED_BACKENDS / "stateful" / "libtriton_stateful.so"
OURS = LIBRARY.parent / "libonnxruntime.so"


@functools.cache
def other(version: str) -> Path:
    """libonnxruntime of this version."""
    found = subprocess.run(
        [paths.ROOT / "scripts" / "onnxruntime", version],
        capture_output=True,
        text=True,
    )
    if found.returncode:
        pytest.skip(f"onnxruntime {version} could not be got: {found.stderr.splitlines()[-1:]}")
    return Path(found.stdout.strip())


def layout(folder: Path, **libraries: Path) -> Path:
    """A backends folder: ours without a library beside it, and these in their folders."""
    stateful = folder / "stateful"
    stateful.mkdir(parents=True)
    shutil.copy(LIBRARY, stateful)
    for backend, library in libraries.items():
        (folder / backend).mkdir(exist_ok=True)
        (folder / backend / library.name).symlink_to(library)
    return folder


def in_use(own) -> tuple[str, str]:
    """Version and path of the library, from the log."""
    found = re.search(r"stateful backend \S+: ONNX Runtime (\S+) from (\S+)", own.server.log_text())
    assert found, own.server.log_text()[-3000:]
    return found[1], found[2]


def talk_to_some_models(own) -> None:
    """A bit of everything that touches ONNX Runtime."""
    client = own.connect()
    for model in (
        models.lstm(),
        models.accumulate(),
        models.axes(),
        models.counter("fp16"),
        models.controls(),
        models.speech_like(),
        models.mixed_io_int32_fp16(),
    ):
        own.serve(model)
        interleave(client, model, np.random.default_rng(1), sequences=4, longest=5)
        together(
            lambda seed=seed, model=model: Conversation(client, model, np.random.default_rng(seed)).whole(5)
            for seed in range(4)
        )
    fails = own.serve(models.fails())
    talk = Conversation(client, fails, np.random.default_rng(2))
    talk.start()
    with pytest.raises(InferenceServerException, match="out of data bounds"):
        talk.step({"INPUT": np.array([[99]], np.int64)})
    talk.end()


# ---- versions


@pytest.mark.parametrize("version", ["1.19.2", "1.23.2"])
def test_another_version_serves_the_same_answers(deploy, version):
    own = deploy(backend_config={"ort-library-path": str(other(version))})
    assert in_use(own) == (version, str(other(version)))
    talk_to_some_models(own)


@pytest.mark.parametrize("version", ["1.19.2", "1.23.2"])
def test_a_second_version_in_the_process_is_left_alone(deploy, version):
    """As beside another backend that brings its own: it was loaded first, with all its symbols."""
    own = deploy(env={"LD_PRELOAD": str(other(version))})
    mapped = Path(f"/proc/{own.server.pid}/maps").read_text()
    assert str(other(version)) in mapped
    path = in_use(own)[1]
    assert path == str(OURS) and path in mapped
    talk_to_some_models(own)


# ---- the search


def test_the_library_of_the_command_line_comes_first(deploy, tmp_path):
    backends = layout(tmp_path / "backends", stateful=OURS, onnxruntime=OURS)
    named = other("1.19.2")
    own = deploy(backends=backends, backend_config={"ort-library-path": str(named)}, env={"ORT_DYLIB_PATH": str(OURS)})
    assert in_use(own)[1] == str(named)


def test_then_the_one_beside_the_backend(deploy, tmp_path):
    backends = layout(tmp_path / "backends", stateful=OURS, onnxruntime=OURS)
    own = deploy(backends=backends, env={"ORT_DYLIB_PATH": str(other("1.19.2"))})
    assert in_use(own)[1] == str(backends / "stateful" / "libonnxruntime.so")


def test_then_the_one_of_the_environment(deploy, tmp_path):
    backends = layout(tmp_path / "backends", onnxruntime=OURS)
    own = deploy(backends=backends, env={"ORT_DYLIB_PATH": str(other("1.19.2"))})
    assert in_use(own) == ("1.19.2", str(other("1.19.2")))


def test_then_the_one_of_the_onnxruntime_backend(deploy, tmp_path):
    """There, with its version in its name."""
    backends = layout(tmp_path / "backends", onnxruntime=other("1.19.2"))
    own = deploy(backends=backends, env={"ORT_DYLIB_PATH": ""})
    assert in_use(own)[1] == str(backends / "onnxruntime" / "libonnxruntime.so.1.19.2")


def test_without_any_the_error_says_where_it_was_looked_for(deploy, tmp_path):
    backends = layout(tmp_path / "backends")
    own = deploy(backends=backends, control_model=False, env={"ORT_DYLIB_PATH": ""})
    text = own.load_error(models.counter(name="without_any_library"))
    for place in (
        str(backends / "stateful" / "libonnxruntime.so"),
        "ORT_DYLIB_PATH",
        str(backends / "onnxruntime" / "libonnxruntime.so"),
        "ort-library-path",
    ):
        assert place in text
    assert own.server.is_alive()


@pytest.mark.parametrize("what", ["text", "another_library"])
def test_a_file_that_is_no_onnx_runtime_is_refused_by_its_path(deploy, tmp_path, what):
    path = tmp_path / "libonnxruntime.so"
    if what == "text":
        path.write_text("no library")
    else:
        path.symlink_to(next(paths.TRITON_LIBRARIES.glob("libb64*")))
    own = deploy(control_model=False, backend_config={"ort-library-path": str(path)})
    assert str(path) in own.load_error(models.counter(name="with_no_library"))
    assert own.server.is_alive()


def test_an_unknown_setting_is_refused_with_the_known_ones(deploy):
    own = deploy(control_model=False, backend_config={"ort-libary-path": "/x"})
    text = own.load_error(models.counter(name="misspelt_setting"))
    assert "ort-libary-path" in text and "ort-library-path" in text
    assert own.server.is_alive()


# ---- sessions


MANY = 16


def added_threads(own, model) -> int:
    """How many threads the server has more with this model. Give or take a few of its own."""
    before = len(os.listdir(f"/proc/{own.server.pid}/task"))
    own.serve(model)
    added = len(os.listdir(f"/proc/{own.server.pid}/task")) - before
    Conversation(own.connect(), model, np.random.default_rng(1)).whole(4)
    return added


def lstm_with(name: str, **parameters):
    return models.lstm(name).with_parameters(name, **parameters)


def test_intra_op_threads_are_a_session_s_own(deploy):
    own = deploy()
    one, unset, many = (
        added_threads(own, lstm_with("lstm_one_thread", intra_op_thread_count=1)),
        added_threads(own, lstm_with("lstm_unset_threads")),
        added_threads(own, lstm_with("lstm_many_threads", intra_op_thread_count=MANY)),
    )
    assert max(one, unset) < MANY - 5 < many, (one, unset, many)


def test_inter_op_threads_come_with_parallel_execution(deploy):
    own = deploy()
    serial, parallel = (
        added_threads(own, lstm_with(f"lstm_mode_{mode}", execution_mode=mode, inter_op_thread_count=MANY))
        for mode in (0, 1)
    )
    assert serial < MANY - 5 < parallel, (serial, parallel)


def test_a_global_pool_serves_all_models(deploy):
    own = deploy(backend_config={"enable-global-threadpool": "1", "intra_op_thread_count": str(MANY)})
    added = [added_threads(own, lstm_with(f"lstm_shares_{number}", intra_op_thread_count=MANY)) for number in range(3)]
    assert max(added) < MANY - 5, f"{added} although the pool was there with the first model"
    alone = deploy()
    assert len(os.listdir(f"/proc/{own.server.pid}/task")) > len(os.listdir(f"/proc/{alone.server.pid}/task")) + 5


@pytest.mark.parametrize(
    ("setting", "value", "rule"),
    [
        ("enable-global-threadpool", "2", "from 0 to 1"),
        ("enable-global-threadpool", "yes", "from 0 to 1"),
        ("intra_op_thread_count", "-1", "from 0 to"),
        ("inter_op_thread_count", "many", "from 0 to"),
    ],
)
def test_a_bad_setting_is_refused_and_the_server_lives(deploy, setting, value, rule):
    own = deploy(control_model=False, backend_config={setting: value})
    text = own.load_error(models.counter(name="with_a_bad_setting"))
    assert f"{setting}={value}" in text and rule in text
    assert own.server.is_alive()


def test_the_graph_is_optimised_as_far_as_the_configuration_says(deploy):
    own = deploy(backend_config={"ort-logging-level": "0"}, log_verbose=1)
    applied = {}
    for level in (None, 0, 1, -1, 2):
        more = "" if level is None else f"optimization {{ graph {{ level: {level} }} }}"
        model = models.lstm(f"lstm_level_{level}".replace("-", "minus_"), more=more)
        before = len(own.server.log_text())
        own.serve(model)
        found = re.findall(r"graph_optimization_level:(\d+)", own.server.log_text()[before:])
        applied[level] = int(found[0])
        Conversation(own.connect(), model, np.random.default_rng(3)).whole(3)
    # ONNX Runtime's own numbers: everything, extended, basic, nothing
    assert applied[2] == 0 and applied[-1] == 1 and applied[1] == 2, applied
    assert applied[0] == applied[None] >= 3, applied


def test_arena_and_memory_pattern_follow_their_parameters(deploy):
    own = deploy(backend_config={"ort-logging-level": "0"}, log_verbose=1)
    seen = {}
    for value in (0, 1):
        model = models.lstm(f"lstm_memory_{value}")
        before = len(own.server.log_text())
        own.serve(model.with_parameters(model.name, enable_mem_arena=value, enable_mem_pattern=value))
        text = own.server.log_text()[before:]
        seen[value] = (f"enable_mem_pattern:{value}" in text, f"enable_cpu_mem_arena:{value}" in text)
        Conversation(own.connect(), model, np.random.default_rng(4)).whole(4)
    assert seen == {0: (True, True), 1: (True, True)}


def test_an_arena_may_shrink_after_each_run(deployment):
    model = models.lstm("lstm_shrinks")
    parameters = {"memory.enable_memory_arena_shrinkage": "cpu:0"}
    model = deployment.serve(model.variant(model.name, parameters=parameters))
    interleave(deployment.connect(), model, np.random.default_rng(5), sequences=4)


def test_entries_of_the_session_s_configuration_are_handed_on(deploy):
    own = deploy(backend_config={"ort-logging-level": "0"}, log_verbose=1)
    model = models.lstm("lstm_entry")
    own.serve(model.variant(model.name, parameters={"session.set_denormal_as_zero": "1"}))
    text = own.server.log_text().rpartition(f"loading: {model.name}")[2]
    assert re.search(r"config_options: \{[^}]*session.set_denormal_as_zero: 1", text), text
    Conversation(own.connect(), model, np.random.default_rng(6)).whole(3)


# ---- versions of a model


def test_several_versions_of_a_model_serve_at_once(deployment):
    model = models.counter(name="counter_of_three", versions=(1, 2, 3), more="version_policy { all { } }")
    deployment.serve(model)
    client = deployment.connect()
    talks = [
        Conversation(client, model, np.random.default_rng(version), 77, version=str(version)) for version in (1, 2, 3)
    ]
    for talk in talks:
        talk.start()
    for talk in (*talks, *talks):
        talk.step()
    for talk in talks:
        talk.end()


def test_the_backend_goes_and_comes_with_its_last_model(deploy):
    """The original could not be loaded twice in a process."""
    own = deploy(control_model=False)
    for round in range(4):
        for make in (models.accumulate_fp32, models.lstm):
            model = own.serve(make())
            Conversation(own.connect(), model, np.random.default_rng(round)).whole(4)
        for make in (models.accumulate_fp32, models.lstm):
            own.unload(make())

"""A server that gets no more threads, file descriptors, memory or disk: a clear error, and what is loaded goes on."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import models
from harness.conversations import Conversation
from harness.deployment import Deployment
from harness.refusals import refused, said
from harness.whole_sequences import EXPORTS, assert_steps_are_the_whole

NO_STACK = 1 << 47
"""A thread of ours whose stack must have so many bytes cannot be made: a process has no such address space."""
MB = 1 << 20


@contextlib.contextmanager
def without_more_files(deployed: Deployment) -> Iterator[None]:
    """The server can open no file and no socket."""
    pid = deployed.server.pid
    unlimited = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # The limit is one of the largest number. A number below it that is free could still be given.
    opened = {int(number) for number in os.listdir(f"/proc/{pid}/fd")}
    lowest_free = next(number for number in range(len(opened) + 1) if number not in opened)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, unlimited[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, unlimited)


@contextlib.contextmanager
def with_a_full_disk(deployed: Deployment) -> Iterator[None]:
    """The server can make files. Every write to a file fails (RLIMIT_FSIZE 0), as on a full disk, but with EFBIG. The
    server inherits from Python that SIGXFSZ is ignored."""
    pid = deployed.server.pid
    unlimited = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, unlimited[1]))
    log_text = deployed.server.log_text()
    try:
        yield
        assert deployed.server.log_text() == log_text
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)


@pytest.mark.parametrize("scheduling", ["", None, "sequence_batching { direct { } }"], ids=["own", "oldest", "direct"])
def test_a_model_whose_threads_cannot_be_made_does_not_load(deploy, scheduling):
    own = deploy(control_model=False, env={"RUST_MIN_STACK": str(NO_STACK)})
    refused(own, models.counter(name="without_threads", scheduling=scheduling), "thread", "temporarily unavailable")
    assert own.server.is_alive()


def test_without_file_descriptors_sequences_go_on_and_no_model_loads(deploy):
    own = deploy()
    served, other = own.serve(models.counter()), models.lstm()
    talk = Conversation(own.connect(), served, np.random.default_rng(1))
    talk.start()
    other.write(own.repository)
    with without_more_files(own):
        with pytest.raises(InferenceServerException, match="failed to load 'lstm'"):
            own.admin.load_model(other.name)
        talk.step()
    assert "Too many open files" in own.server.log_text()
    talk.end()
    Conversation(own.connect(), own.serve(other), np.random.default_rng(2)).whole(3)


def test_on_a_full_disk_models_load_and_convert_and_sequences_go_on(deploy):
    own = deploy()
    served, other, converted = own.serve(models.append()), models.lstm(), own.repository / "converted"
    talk = Conversation(own.connect(), served, np.random.default_rng(1))
    talk.start()
    other.write(own.repository)
    (converted / "1").mkdir(parents=True)
    shutil.copy(EXPORTS / "torch_gru.onnx", converted / "1" / "model.onnx")
    parameter = 'parameters { key: "low_latency_transformation" value { string_value: "true" } }'
    (converted / "config.pbtxt").write_text(f'backend: "stateful" {parameter}')
    with with_a_full_disk(own):
        own.admin.load_model(other.name)
        own.admin.load_model(converted.name)
        talk.step()
        Conversation(own.connect(), other, np.random.default_rng(2)).whole(3)
        assert_steps_are_the_whole(own.connect(), converted.name, "torch_gru")
        own.unload(served)
        own.admin.load_model(served.name)
        talk = Conversation(own.connect(), served, np.random.default_rng(3))
        talk.start()
    talk.end()


def test_a_model_that_there_is_no_memory_for_does_not_load_and_others_go_on(deploy):
    own = deploy()
    served = own.serve(models.counter())
    talk = Conversation(own.connect(), served, np.random.default_rng(1))
    talk.start()
    # 64 slots of 4 MiB
    large = models.counter(name="too_large_for_the_server", width=MB)
    with own.without_more_memory(than=128 * MB):
        text = own.load_error(large)
        talk.step()
    assert said("bytes", text) and said("memory", text), text
    talk.end()
    Conversation(own.connect(), own.serve(large), np.random.default_rng(2)).whole(3)

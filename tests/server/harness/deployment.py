"""One running server with its own model repository, and what can be seen of it from outside."""

from __future__ import annotations

import contextlib
import re
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from harness import models
from harness.clients import PROTOCOLS, Client, new_id
from harness.gateway import Gateway
from harness.model import Model
from support.paths import TEST_DEVICE, TESTED_BACKENDS
from support.server import TritonServer, has_option, resident_bytes

CONTROL = models.accumulate("control_model")

Value = TypeVar("Value")


def eventually(
    read: Callable[[], Value], accept: Callable[[Value], bool], seconds: float = 30.0, pause: float = 0.02
) -> Value:
    """Reads until the value is accepted; answers it. Fails with the last value at the deadline."""
    deadline = time.monotonic() + seconds
    while not accept(value := read()):
        if time.monotonic() > deadline:
            pytest.fail(f"still {value!r} after {seconds:g} s")
        time.sleep(pause)
    return value


class Deployment:
    """Starts with one model, the control model; others are loaded when a test asks for them."""

    def __init__(self, root: Path, *, control_model: bool = True, backends: Path = TESTED_BACKENDS, **options):
        # a server that ends waits for open sequences, and tests leave some
        extra_args = ["--exit-timeout-secs=3", *options.pop("extra_args", ())]
        if has_option("--allow-client-shm"):  # since 26.04
            extra_args.append("--allow-client-shm=true")
        # a model without instance_group would go to a GPU that is here, and the tested folder be without its provider
        hidden = {} if TEST_DEVICE == "gpu" else {"CUDA_VISIBLE_DEVICES": ""}
        env = hidden | options.pop("env", {})
        self.control_model = control_model
        self.repository = root / "repository"
        self.repository.mkdir(parents=True)
        self.loaded: dict[str, str] = {}
        if control_model:
            CONTROL.write(self.repository)
        self.server = TritonServer(
            self.repository,
            backends=backends,
            model_control="explicit",
            load_models=[CONTROL.name] if control_model else [],
            log_path=root / "server.log",
            extra_args=extra_args,
            env=env,
            **options,
        )
        try:
            self.server.start()
            self.server.wait_ready()
        except BaseException:
            self.server.stop()
            raise
        self.admin = grpc_client.InferenceServerClient(self.server.grpc_url)
        self.stopped = False
        self._open: list[Client] = []
        self._gateway: Gateway | None = None

    # ---- models

    def serve(self, model: Model) -> Model:
        """The model, loaded. One name means one configuration for as long as the server lives."""
        config = model.config()
        if self.loaded.get(model.name) != config:
            assert model.name not in self.loaded, f"{model.name} is there with another configuration"
            model.write(self.repository)
            self.admin.load_model(model.name)
            self.loaded[model.name] = config
        return model

    def unload(self, model: Model) -> None:
        """Unloads and waits until the server says that it is gone."""
        self.admin.unload_model(model.name)
        self.loaded.pop(model.name, None)
        self.wait_until_unloaded(model)

    def unload_all(self) -> None:
        """All but the control model."""
        names = [name for name in self.loaded if name != CONTROL.name]
        for name in names:
            self.admin.unload_model(name)
            self.loaded.pop(name)
        for name in names:
            eventually(lambda name=name: self.server.is_model_ready(name), lambda ready: not ready)

    def wait_until_unloaded(self, model: Model) -> None:
        """An unload goes on after its answer."""
        eventually(lambda: self.server.is_model_ready(model.name), lambda ready: not ready)

    def load_error(self, model: Model, prepare: Callable[[Path], object] = lambda folder: None) -> str:
        """The text that a client gets who loads this model, which must not load.

        Without what Triton puts in front, which has the model's name. `prepare` may change
        the model's folder first.
        """
        folder = model.write(self.repository)
        prepare(folder)
        try:
            with pytest.raises(InferenceServerException) as refused:
                self.admin.load_model(model.name)
            assert not self.server.is_model_ready(model.name)
        finally:
            shutil.rmtree(folder)
        return re.sub(r"^load failed .* UNAVAILABLE state: ", "", refused.value.message())

    # ---- clients

    def connect(self, protocol: str = "unary"):
        client = PROTOCOLS[protocol](self)
        self._open.append(client)
        return client

    def disconnect(self) -> None:
        while self._open:
            self._open.pop().close()

    @property
    def gateway(self) -> Gateway:
        """A gateway in front of this server."""
        if self._gateway is None:
            self._gateway = Gateway(f"--triton={self.server.grpc_url}", f"--triton_http={self.server.http_url}")
        return self._gateway

    # ---- what can be seen

    def metric(self, name: str, model: Model) -> float:
        """A metric of ours, summed over the model's versions; zero where it isn't there."""
        text = self.server.metrics()
        pattern = re.compile(rf"^{name}{{([^}}]*)}} (\S+)$", re.MULTILINE)
        return sum(
            float(value) for labels, value in pattern.findall(text) if f'model="{model.name}"' in labels.split(",")
        )

    def settles(self, name: str, model: Model, value: float) -> None:
        """Waits until the metric has this value: an answer may be on its way before it is counted."""
        eventually(lambda: self.metric(name, model), lambda found: found == value)

    def failures(self, model: Model) -> dict[str, float]:
        """How many requests have failed, by the reason that the metric has."""
        labels = rf'{{.*model="{model.name}".*reason="(\w+)".*}}'
        pattern = re.compile(rf"^stateful_requests_failed_total{labels} (\S+)$", re.MULTILINE)
        return {reason: float(count) for reason, count in pattern.findall(self.server.metrics())}

    def statistics(self, model: Model):
        return self.admin.get_inference_statistics(model.name).model_stats[0]

    @contextlib.contextmanager
    def without_more_memory(self, than: int):
        """The server cannot have more than so many bytes on top of what it has."""
        pid = self.server.pid
        size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        unlimited = resource.prlimit(pid, resource.RLIMIT_AS, (size + than, resource.RLIM_INFINITY))
        try:
            yield
        finally:
            resource.prlimit(pid, resource.RLIMIT_AS, unlimited)

    def resident_bytes(self) -> int:
        return resident_bytes(self.server.pid)

    # ---- health and the end

    def assert_running(self) -> None:
        if not self.server.is_alive():
            pytest.fail(f"the server ended with {self.server.exit_code}:\n{self.server.log_text()[-4000:]}")

    def assert_healthy(self) -> None:
        """The server lives and the control model still gives right answers."""
        self.assert_running()
        if self._gateway is not None:
            self._gateway.assert_running()
        if not self.control_model:
            return
        client = PROTOCOLS["unary"](self)
        sequence_id, total = new_id(), 0.0
        try:
            for value, start, end in ((5, True, False), (7, False, False), (-2, False, True)):
                total += value
                fed = {"INPUT": np.array([[value]], np.float32)}
                answer = client.step(CONTROL.name, sequence_id, fed, start=start, end=end)
                assert answer["OUTPUT"].item() == total, "the control model answers wrongly"
        finally:
            client.close()

    def stop(self) -> None:
        self._close()
        self.server.stop()

    def kill(self) -> None:
        """Kills the server. Clients of it get errors."""
        self.stopped = True
        self.server.kill()
        self.admin.close()

    def ask_to_stop(self) -> None:
        """As `stop`, without waiting for the process."""
        self._close()
        self.server.ask_to_stop()

    def _close(self) -> None:
        if self.stopped:
            return
        self.stopped = True
        self.disconnect()
        self.admin.close()
        if self._gateway is not None:
            self._gateway.stop()

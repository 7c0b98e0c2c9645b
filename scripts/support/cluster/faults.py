"""What happens to the servers and the store while the streams live: on a timeline, or at random."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import tritonclient.grpc.aio as grpc_client
from tritonclient.utils import InferenceServerException

from support.cluster.servers import Servers
from support.cluster.streams import MODEL, Clock, Speakers
from support.valkey import Valkey

#: From when a fault begins, the requests of the sequences that it moves are watched for so long.
WATCHED_S = 4.0
_STORE_STOPS_S = 5.0


@dataclass
class Event:
    """A fault, or the end of one. `moved` has the sequences that the proxy then sends to another server."""

    at_s: float
    what: str
    moved: list[int] = field(default_factory=list)

    @property
    def of_server(self) -> bool:
        """Whether the proxy sends sequences elsewhere because of it."""
        return self.what.startswith("server")


@dataclass
class Faults:
    """Causes faults, one at a time, and notes them."""

    servers: Servers
    store: Valkey
    speakers: Speakers
    clock: Clock
    tell: Callable[[str], None]
    events: list[Event] = field(default_factory=list)
    #: When each server, and the store, was not there: the number of the server or "store", and two times.
    away: list[tuple[int | str, float, float]] = field(default_factory=list)
    #: How often a server ended that no fault had killed.
    crashes: int = 0
    #: Each finds out which sequences an event moves. asyncio itself keeps no task alive.
    _comparing: list[asyncio.Task[None]] = field(default_factory=list, init=False)

    async def timeline(self, seconds: float) -> None:
        """A server dies and comes back, another one joins, one is drained and stopped, and the store is stopped."""
        last = len(self.servers) - 1
        await self._until(seconds * 0.12)
        async with self._noted("server 1 is killed"):
            self.servers[0].kill()
        self._leaves(0)
        await self._until(seconds * 0.3)
        async with self._noted("server 1 is back"):
            await self._start(0)
        await self._until(seconds * 0.48)
        async with self._noted(f"server {last + 1} joins"):
            await self._start(last)
        await self._until(seconds * 0.57)
        async with self._noted("server 2 is drained and stopped"):
            await self._drain(1)
            self.servers[1].ask_to_stop()
        self._leaves(1)
        await self._until(seconds * 0.7)
        async with self._noted("the store stops"):
            self.store.stop()
        self._leaves("store")
        await asyncio.sleep(min(_STORE_STOPS_S, seconds * 0.15))
        async with self._noted("the store is back"):
            self.store.start()
        self._comes("store")

    async def chaos(self, seconds: float, seed: int) -> None:
        """All at random, one fault at a time: servers and the store are killed and paused, servers are drained and stopped,
        and single sequences move."""
        rng = random.Random(seed)
        last = len(self.servers) - 1
        async with self._noted(f"server {last + 1} joins"):
            await self._start(last)
        faults = [self._kill_for_a_while, self._pause_for_a_while, self._drain_and_start, self._move, self._store_fails]
        while self.clock() < seconds:
            await rng.choice(faults)(rng)
            for other in self.count_ended():
                self._leaves(other)
                await self._start(other)

    async def _kill_for_a_while(self, rng: random.Random) -> None:
        number = rng.randrange(len(self.servers))
        async with self._noted(f"server {number + 1} is killed"):
            self.servers[number].kill()
        self._leaves(number)
        await asyncio.sleep(rng.uniform(0, 2))
        await self._start(number)
        await asyncio.sleep(rng.uniform(0.2, 2))

    async def _pause_for_a_while(self, rng: random.Random) -> None:
        number = rng.randrange(len(self.servers))
        async with self._noted(f"server {number + 1} is paused"):
            self.servers.pause(number)
        self._leaves(number)
        try:
            await asyncio.sleep(rng.uniform(0.2, 5))
        finally:
            self.servers.resume(number)
        self._comes(number)
        await asyncio.sleep(rng.uniform(0.2, 2))

    async def _drain_and_start(self, rng: random.Random) -> None:
        number = rng.randrange(len(self.servers))
        async with self._noted(f"server {number + 1} is drained and stopped"):
            await self._drain(number)
            self.servers[number].ask_to_stop()
        self._leaves(number)
        # It takes up to 3 s to end.
        await asyncio.to_thread(self.servers[number].stop)
        await self._start(number)
        await asyncio.sleep(rng.uniform(0.2, 2))

    async def _move(self, rng: random.Random) -> None:
        """Half of the sequences."""
        headers = list(self.speakers.live.values())
        moved = rng.sample(headers, len(headers) // 2)
        for header in moved:
            header["sequence-id"] = str(rng.getrandbits(60))
        self.events += [Event(self.clock(), "a sequence moves") for _ in moved]
        await asyncio.sleep(rng.uniform(0.1, 1))

    async def _store_fails(self, rng: random.Random) -> None:
        """It moves no sequence, so `_noted`, which finds those that move, is not needed."""
        is_killed = rng.random() < 0.5
        self.events.append(Event(self.clock(), f"the store is {'killed' if is_killed else 'paused'}"))
        self.tell(f"{self.clock():6.1f} s  {self.events[-1].what}")
        self._leaves("store")
        if is_killed:
            self.store.kill()
        else:
            os.kill(self.store.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(rng.uniform(0.1, 3))
        finally:
            if is_killed:
                self.store.start()
            else:
                os.kill(self.store.pid, signal.SIGCONT)
        self._comes("store")
        await asyncio.sleep(rng.uniform(0.2, 2))

    def count_ended(self) -> list[int]:
        """Counts the servers that have ended, although no fault keeps them away."""
        away = {which for which, _, until in self.away if until == float("inf")}
        ended = [
            number for number, server in enumerate(self.servers.servers) if number not in away and not server.is_alive()
        ]
        for number in ended:
            self.tell(f"server {number + 1} has ended by itself, with {self.servers[number].exit_code}")
        self.crashes += len(ended)
        return ended

    async def compared(self) -> None:
        """Waits until `moved` of the last events is known."""
        await asyncio.gather(*self._comparing)

    async def _until(self, at_s: float) -> None:
        await asyncio.sleep(max(0, at_s - self.clock()))

    async def _start(self, number: int) -> None:
        # The server would end with the thread that starts it.
        self.servers[number].start()
        await asyncio.to_thread(self.servers[number].wait_ready)
        self._comes(number)

    async def _drain(self, number: int) -> None:
        """As stateful-drain does it."""
        async with grpc_client.InferenceServerClient(self.servers[number].grpc_url) as client:
            left = 1
            while left:
                answer = await client.infer(MODEL, [], parameters={"drain": True})
                left = answer.get_response().parameters["stateful_sequences_left"].int64_param
                await asyncio.sleep(0.02)

    def _leaves(self, which: int | str) -> None:
        self.away.append((which, self.clock(), float("inf")))

    def _comes(self, which: int | str) -> None:
        self.away = [
            (one, since, self.clock() if one == which and until == float("inf") else until)
            for one, since, until in self.away
        ]

    @asynccontextmanager
    async def _noted(self, what: str) -> AsyncIterator[None]:
        """Notes what the block does. The sequences that it moves are those whose header then leads to another server."""
        live = {number: dict(headers) for number, headers in self.speakers.live.items()}
        before = await self._places(live)
        yield
        event = Event(self.clock(), what)
        self.events.append(event)
        self.tell(f"{event.at_s:6.1f} s  {what}")
        self._comparing.append(asyncio.create_task(self._compare(event, live, before)))

    async def _compare(self, event: Event, live: dict[int, dict[str, str]], before: dict[int, int | None]) -> None:
        """Once the proxy has noticed it."""
        await asyncio.sleep(WATCHED_S * 0.75)
        after = await self._places(live)
        event.moved = [
            number for number, place in before.items() if place is not None and after[number] not in (None, place)
        ]

    async def _places(self, live: dict[int, dict[str, str]]) -> dict[int, int | None]:
        """The number of the server that each sequence's header leads to."""
        numbers = {server.name: number for number, server in enumerate(self.servers.servers)}
        places: dict[int, int | None] = {}
        async with grpc_client.InferenceServerClient(self.speakers.proxy.grpc_url) as client:
            for number, headers in live.items():
                try:
                    metadata = await client.get_server_metadata(headers=dict(headers), client_timeout=1)
                    places[number] = numbers.get(metadata.name)
                except InferenceServerException:
                    places[number] = None
        return places

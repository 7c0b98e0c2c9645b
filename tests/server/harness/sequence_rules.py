"""What the backend's own scheduling promises, as a model in plain Python: which outcomes a request may have.

A client can't know whether a request that it took back has run, so there are several *worlds*: what the sequence of an
id may be. `SequenceRules.hears` takes a request and what came of it, and keeps the worlds in which that may happen. If
none is left, the server was wrong.

Serves sequences of `models.work`, whose state is a sum.
"""

from __future__ import annotations

import dataclasses
import itertools

START, STEP, END, ONE_SHOT = "START", "STEP", "END", "ONE_SHOT"

#: The client took the request back, or died: nothing came.
UNKNOWN = "nothing"
#: The run failed.
FAILED = "INTERNAL"
MISSING = "SEQUENCE_MISSING"
EXISTS = "SEQUENCE_ALREADY_EXISTS"
TOO_MANY = "MAX_SEQUENCE_NUMBER_REACHED"

#: A sum, or a code word.
Outcome = int | str


@dataclasses.dataclass(frozen=True)
class Operation:
    """A request as the client means it."""

    kind: str
    value: int
    fails: bool = False


@dataclasses.dataclass(frozen=True)
class World:
    """What the sequence of an id may be: its sum, or None if it isn't live."""

    sum: int | None = None
    # requests that were taken back, and may yet run
    due: tuple[Operation, ...] = ()
    # the START was taken back, and waits: it is found out when its turn comes
    may_vanish: bool = False

    def after(self, operation: Operation) -> tuple[Outcome, World]:
        """What happens if the operation is carried out."""
        is_start = operation.kind in (START, ONE_SHOT)
        if is_start and self.sum is not None:
            return EXISTS, self
        if not is_start and self.sum is None:
            return MISSING, self
        if operation.fails:
            return FAILED, self if operation.kind == STEP else self._with(None)
        total = (self.sum or 0) + operation.value
        return total, self._with(None if operation.kind in (END, ONE_SHOT) else total)

    def _with(self, total: int | None) -> World:
        return dataclasses.replace(self, sum=total, may_vanish=False)

    def taken_back(self, operation: Operation) -> World:
        return dataclasses.replace(self, due=(*self.due, operation))

    def later(self) -> set[World]:
        """The worlds after one request that was taken back had its effect. An END that is not run ends the sequence, too,
        and a START that is not run leaves none in the end."""
        worlds = {self._with(None)} if self.may_vanish else set()
        for at, operation in enumerate(self.due):
            rest = dataclasses.replace(self, due=self.due[:at] + self.due[at + 1 :])
            after = rest.after(operation)[1]
            if operation.kind in (START, ONE_SHOT) and rest.sum is None:
                after = World(operation.value, rest.due, may_vanish=True)
            worlds |= {rest, after}
            if operation.kind == END:
                worlds.add(rest._with(None))
        return worlds


class SequenceRules:
    """All that may be so with one id. `limited`: a START may find no place."""

    def __init__(self, limited: bool = False):
        self.limited = limited
        self.worlds = {World()}
        self.heard: list[tuple[Operation, Outcome]] = []

    def hears(self, operation: Operation, came: Outcome) -> None:
        self.heard.append((operation, came))
        before = self._closure()
        if came == UNKNOWN:
            self.worlds = {world.taken_back(operation) for world in before}
            return
        self.worlds = set(itertools.chain.from_iterable(self._after(world, operation, came) for world in before))
        assert self.worlds, f"{came} can't come of {operation} in {before}, after {self._last(12)}"

    def _last(self, count: int) -> str:
        return ", ".join(f"{of.kind} {'fails' if of.fails else of.value}: {came}" for of, came in self.heard[-count:])

    def _after(self, world: World, operation: Operation, came: Outcome) -> list[World]:
        is_start = operation.kind in (START, ONE_SHOT)
        if came == TOO_MANY and self.limited and is_start and world.sum is None:
            return [world]
        if came == MISSING and world.may_vanish and not is_start:
            # it waited behind the START; only an END frees the id before the START's turn
            return [world._with(None)] if operation.kind == END else [world]
        outcome, after = world.after(operation)
        return [after] if outcome == came else []

    def _closure(self) -> set[World]:
        """With every request that was taken back carried out now, later or never."""
        worlds, new = set(self.worlds), set(self.worlds)
        while new:
            new = {later for world in new for later in world.later()} - worlds
            worlds |= new
        return worlds

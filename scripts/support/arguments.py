"""Values on command lines."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection


def positive(text: str) -> int:
    """For argparse: a whole number, 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


def names(kind: str, known: Collection[str]) -> Callable[[str], list[str]]:
    """For argparse: names of this kind, divided by commas."""

    def read(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"there is no {kind} '{name}'; there are {', '.join(known)}")
        return found

    return read

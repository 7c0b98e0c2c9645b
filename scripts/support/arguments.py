"""Values on command lines."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """For argparse: a whole number, 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value

"""Repetitions: values of a parameter that `scripts/test --all` runs, and `scripts/test` does not."""

from __future__ import annotations

import pytest

from harness.model import TYPES

#: Types that are stored, converted or parsed in ways of their own; the others are like one of these.
_DISTINCT_TYPES = ("bool", "fp16", "bf16", "fp32", "int64", "uint8", "string")


def repeated(*values) -> list:
    """These values of a parameter as repetitions: `parametrize("seed", [0, *repeated(1, 2)])`."""
    return [pytest.param(value, marks=pytest.mark.repetition) for value in values]


def every_type(*, but: tuple[str, ...] = ()):
    """Runs a test with each data type as `type`; those that are like another one are repetitions."""
    types = [type for type in TYPES if type not in but]
    distinct = [type for type in types if type in _DISTINCT_TYPES]
    others = [type for type in types if type not in _DISTINCT_TYPES]
    return pytest.mark.parametrize("type", [*distinct, *repeated(*others)])

"""The two strategies of the sequence batcher, for tests that run with each."""

from __future__ import annotations

import pytest

#: Runs a test twice, with `direct` for `Model.direct`: None is the strategy `oldest`.
both_strategies = pytest.mark.parametrize("direct", [None, ""], ids=["oldest", "direct"])


def strategy(direct: str | None) -> str:
    """The strategy's name."""
    return "oldest" if direct is None else "direct"

"""Loads that must fail, and what their error has to say: names and values, not sentences."""

from __future__ import annotations

import re

from harness.deployment import Deployment
from harness.model import Model


def refused(deployment: Deployment, model: Model, *words: str, **how) -> None:
    """The model does not load, and the error that the client gets has all these words."""
    text = deployment.load_error(model, **how)
    missing = [word for word in words if not said(word, text)]
    assert not missing, f"{missing} not in: {text}"


def said(word: str, text: str) -> bool:
    """Whether the text has the word, in whatever case; a number not as a part of another."""
    pattern = re.escape(word)
    if word.lstrip("-").replace(".", "").isdigit():
        pattern = rf"(?<![\w.-]){pattern}(?![\w])"
    return re.search(pattern, text, re.IGNORECASE) is not None

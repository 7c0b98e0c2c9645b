"""scripts/cluster: nothing is lost while servers are killed, join and leave, and while the store is away."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from support.paths import ROOT, TESTED_BACKENDS
from support.proxies import KINDS


def run(folder, *arguments: str) -> str:
    # The logs go to a folder with its name.
    picture = folder / f"{folder.name}.png"
    done = subprocess.run(
        [sys.executable, "-m", "support.cluster", f"--backends={TESTED_BACKENDS}", f"--out={picture}", *arguments],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT / 'clients/python/src'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert 1000 < picture.stat().st_size < 150_000
    for name in ("lost sequences", "lost steps", "repeated steps", "wrong answers"):
        assert re.search(rf"{name} +│ +0 │", done.stdout), done.stdout
    return done.stdout


def test_nothing_is_lost_on_the_timeline(tmp_path):
    said = run(tmp_path, "--servers=2", "--streams=6", "--seconds=11")
    for event in (
        "server 1 is killed",
        "server 1 is back",
        "server 3 joins",
        "server 2 is drained and stopped",
        "the store stops",
        "the store is back",
    ):
        assert f"s  {event}\n" in said
    [equal, compared] = re.findall(r"last bit +│ +([\d,]+) of ([\d,]+) │", said)[0]
    assert equal == compared


@pytest.mark.repetition
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("proxy", KINDS)
def test_nothing_is_lost_at_random(tmp_path, proxy, seed):
    run(tmp_path, f"--proxy={proxy}", "--streams=12", "--chaos=2", f"--seed={seed}")

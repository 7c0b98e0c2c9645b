"""A server that has Triton's Python backend, too."""

from __future__ import annotations

import functools
import os
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.deployment import Deployment
from support import paths


@functools.cache
def _python_backend() -> Path:
    """What scripts/python-backend makes: a folder with backends/python and venv."""
    made = subprocess.run([paths.ROOT / "scripts" / "python-backend"], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"Triton's Python backend could not be prepared: {made.stderr.splitlines()[-1:]}")
    return Path(made.stdout.strip())


def with_python_backend(deploy: Callable[..., Deployment], folder: Path) -> Deployment:
    """A server of the test's own with both backends."""
    tool = _python_backend()
    backends = folder / "backends"
    backends.mkdir()
    (backends / "stateful").symlink_to(paths.TESTED_BACKENDS / "stateful")
    (backends / "python").symlink_to(tool / "backends" / "python")
    libraries = [str(paths.TRITON_LIBRARIES), sysconfig.get_config_var("LIBDIR")]
    return deploy(
        backends=backends,
        env={
            "PATH": f"{tool / 'venv' / 'bin'}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": ":".join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(":"),
        },
    )

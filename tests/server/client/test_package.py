"""What pip installs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from support import paths

SOURCE = paths.ROOT / "clients" / "python"
[VERSION] = re.findall(r'^version = "(.*)"$', (SOURCE / "pyproject.toml").read_text(), re.MULTILINE)


def test_the_package_is_installed_with_its_types(tmp_path):
    # a build leaves folders beside the sources
    shutil.copytree(SOURCE, tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    where = ["--target", str(tmp_path / "installed"), str(tmp_path / "source")]
    done = subprocess.run([*pip, *where], capture_output=True, text=True, timeout=120)
    if "No matching distribution found for setuptools" in done.stderr:
        pytest.skip("pip cannot get setuptools, which builds the package: there is no package index")
    assert done.returncode == 0, done.stderr
    installed = {path.name for path in (tmp_path / "installed" / "triton_stateful").glob("*.*")}
    assert installed == {path.name for path in (SOURCE / "src" / "triton_stateful").glob("*.*")}
    assert "py.typed" in installed
    [metadata] = (tmp_path / "installed").glob("triton_stateful-*.dist-info/METADATA")
    text = metadata.read_text()
    for line in (
        f"Version: {VERSION}",
        "Requires-Python: >=3.9",
        "Classifier: License :: OSI Approved :: Apache Software License",
        "Requires-Dist: tritonclient[grpc,http]",
        "Requires-Dist: numpy",
    ):
        assert line in text
    code = "import triton_stateful; print(triton_stateful.__file__)"
    run = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path / "installed")}, capture_output=True, text=True
    )
    assert run.stdout.startswith(str(tmp_path / "installed")), run.stderr

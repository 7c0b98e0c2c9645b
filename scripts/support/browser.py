"""Chromium, for the tests of scripts/live. A package of npm has it with the libraries that it needs, and needs no root.

python -m support.browser        # installs it into build/chromium/ unless it is there
"""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import brotli

from support import paths

PACKAGE = "@sparticuz/chromium@153.0.0"
SHA256 = "20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0"
FOLDER = paths.BUILD / "chromium"
#: An executable, and the folder of its libraries.
CHROMIUM = FOLDER / "chromium"
LIBRARIES = FOLDER / "libraries" / "lib"


def install() -> None:
    stamp = FOLDER / "package"
    if stamp.exists() and stamp.read_text() == SHA256:
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True, stdout=sys.stderr)
        [archive] = Path(folder).glob("*.tgz")
        content = archive.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise RuntimeError(f"{PACKAGE} has the SHA-256 {found}, not {SHA256}")
    with tarfile.open(fileobj=io.BytesIO(content)) as package:
        FOLDER.mkdir(parents=True)
        CHROMIUM.write_bytes(_unpacked(package, "chromium.br"))
        CHROMIUM.chmod(0o755)
        with tarfile.open(fileobj=io.BytesIO(_unpacked(package, "al2023.tar.br"))) as libraries:
            libraries.extractall(FOLDER / "libraries", filter="data")
    stamp.write_text(SHA256)


def _unpacked(package: tarfile.TarFile, name: str) -> bytes:
    file = package.extractfile(f"package/bin/{name}")
    assert file is not None
    return brotli.decompress(file.read())


if __name__ == "__main__":
    install()

"""Parts cut into numbered pieces with a manifest, and joined again.

001-tree.tar            a part that fits is a piece as it is
003-wheels.tar.1of4     one that does not is cut
manifest.json           parts, and their pieces: name, bytes, sha256
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

MANIFEST = "manifest.json"
#: No piece is larger.
PIECE_BYTES = 52_000_000
_BLOCK = 1 << 20


class PartsError(RuntimeError):
    """Pieces are missing or damaged, or there is no manifest; the text names them."""


@dataclass(frozen=True)
class Piece:
    name: str
    bytes: int
    sha256: str

    def fault(self, folder: Path) -> str | None:
        """What is wrong with it in this folder."""
        file = folder / self.name
        if not file.exists():
            return "missing"
        if (found := file.stat().st_size) != self.bytes:
            return f"damaged: {found} bytes of {self.bytes}"
        return None if sha256(file) == self.sha256 else "damaged: another sha256"


@dataclass(frozen=True)
class Part:
    name: str
    sha256: str
    pieces: tuple[Piece, ...]

    def join(self, folder: Path, into: Path) -> None:
        """Writes the whole. Its pieces are there and right, as `faults` says."""
        with into.open("wb") as whole:
            for piece in self.pieces:
                with (folder / piece.name).open("rb") as file:
                    shutil.copyfileobj(file, whole, _BLOCK)


@dataclass(frozen=True)
class Manifest:
    """What was packed. `about`: the commit, versions and the Python that the wheels are for."""

    about: dict
    parts: tuple[Part, ...]

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        file = folder / MANIFEST
        if not file.exists():
            raise PartsError(f"there is no {file}: copy all that 'scripts/gpu-check pack' wrote")
        try:
            return cls._parsed(json.loads(file.read_text()))
        except (ValueError, KeyError, TypeError) as error:
            raise PartsError(f"{file} is damaged: {error!r}") from error

    @classmethod
    def _parsed(cls, written: dict) -> Manifest:
        parts = (
            Part(part["name"], part["sha256"], tuple(Piece(**piece) for piece in part["pieces"]))
            for part in written["parts"]
        )
        return cls(written["about"], tuple(parts))

    def write(self, folder: Path) -> None:
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @property
    def pieces(self) -> Iterator[Piece]:
        return (piece for part in self.parts for piece in part.pieces)


def cut(files: Iterable[Path], folder: Path, about: dict, piece_bytes: int = PIECE_BYTES) -> Manifest:
    """Moves whole parts into the folder as pieces, numbered in the order of the parts, and writes the manifest."""
    parts = []
    for number, file in enumerate(files, 1):
        parts.append(_cut(file, folder, f"{number:03}-{file.name}", piece_bytes))
        file.unlink()
    manifest = Manifest(about, tuple(parts))
    manifest.write(folder)
    return manifest


def _cut(file: Path, folder: Path, name: str, piece_bytes: int) -> Part:
    count = max(1, -(-file.stat().st_size // piece_bytes))
    pieces, whole = [], hashlib.sha256()
    with file.open("rb") as source:
        for number in range(1, count + 1):
            content = source.read(piece_bytes)
            whole.update(content)
            piece = name if count == 1 else f"{name}.{number}of{count}"
            (folder / piece).write_bytes(content)
            pieces.append(Piece(piece, len(content), hashlib.sha256(content).hexdigest()))
    return Part(file.name, whole.hexdigest(), tuple(pieces))


def faults(part: Part, folder: Path) -> list[str]:
    """What is wrong with a part's pieces, a line each."""
    found = ((piece.name, piece.fault(folder)) for piece in part.pieces)
    return [f"{name}: {fault}" for name, fault in found if fault]


def sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()

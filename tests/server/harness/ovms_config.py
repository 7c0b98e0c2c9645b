"""What users of OpenVINO Model Server have: folders with versions of a model, and a `config.json`."""

from __future__ import annotations

import json
from pathlib import Path

from harness.model import Model


class Config:
    """A `config.json` in a folder with its models."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.path = folder / "config.json"
        folder.mkdir(parents=True, exist_ok=True)

    def model(self, model: Model, versions=(1,), name: str | None = None) -> Path:
        """Writes the model's file for these versions, and no entry. Returns its base path."""
        folder = self.folder / (name or model.name)
        for version in versions:
            place(folder / str(version) / "model.onnx", model.build().SerializeToString())
        return folder

    def entry(self, model: Model, versions=(1,), **options) -> dict:
        """An entry for a model whose files are written."""
        return {"name": model.name, "base_path": str(self.model(model, versions)), "stateful": True, **options}

    def write(self, *entries: dict, **more) -> Path:
        """Replaces the file as a whole, so that no reader sees a part of it."""
        return self.write_text(json.dumps({"model_config_list": [{"config": entry} for entry in entries], **more}))

    def write_text(self, text: str) -> Path:
        place(self.path, text.encode())
        return self.path


def place(path: Path, content: bytes) -> None:
    """Writes a file and moves it to its path, so that no reader sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(content)
    new.rename(path)

"""The pages of the cookbook: the models that their blocks describe, and the clients that they show."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from harness.models.exports import EXPORTS, Export
from harness.models.families import FAMILIES
from support.paths import ROOT
from triton_stateful import Sequence

FOLDER = ROOT / "docs" / "cookbook"

_MODEL = re.compile(r"^<!-- fixture: (\w+) -->\n```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CLIENT = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def export(name: str) -> Export:
    """The signature of this name."""
    return FAMILIES[name]() if name in FAMILIES else EXPORTS[name]


class Page:
    """One page. Its models are blocks below a comment with the fixture's name, and begin with a path."""

    def __init__(self, name: str):
        self.name = name
        self.text = (FOLDER / name).read_text()
        self.clients = _CLIENT.findall(self.text)
        # model -> fixture, and its block
        self.models = {
            re.sub(r"^# |/.*", "", block, flags=re.DOTALL): (fixture, block)
            for fixture, block in _MODEL.findall(self.text)
        }

    def file(self, path: str) -> str:
        """The content of the block that begins with this path."""
        [content] = re.findall(rf"^```\n# {re.escape(path)}\n(.*?)^```$", self.text, re.MULTILINE | re.DOTALL)
        return content

    def fixture(self, model: str) -> str:
        return self.models[model][0]

    def write(self, model: str, graph: bytes, repository: Path) -> None:
        """Lays out the model as its block says. An ensemble has no graph."""
        _, block = self.models[model]
        path, _, config = block.partition("\n")
        if path.startswith("# "):
            file = repository / model / "1" / "model.onnx"
        else:
            assert not config, f"{self.name}: {config}"
            file = repository / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(graph)
        if config:
            (repository / path.removeprefix("# ")).write_text(config)

    def steps(self, model: str) -> list[str]:
        """The models that an ensemble consists of."""
        return re.findall(r'model_name: "(\w+)"', self.models[model][1])

    def client(
        self, function: str, address: str, sequence: Callable = Sequence, instead_of: Mapping[str, str] | None = None
    ) -> Callable:
        """This function of the page's clients, for a server's address, with other models, or with another Sequence."""
        [code] = [code for code in self.clients if f"def {function}(" in code]
        for model, other in (instead_of or {}).items():
            assert f'"{model}"' in code
            code = code.replace(f'"{model}"', f'"{other}"')
        names: dict = {}
        exec(compile(code.replace("localhost:8001", address), self.name, "exec"), names)
        names["Sequence"] = sequence
        return names[function]


PAGES = {file.name: Page(file.name) for file in sorted(FOLDER.glob("*.md"))}


def pieces(data: np.ndarray, axis: int = 0) -> list[np.ndarray]:
    """The data as a client may have it: long pieces, short ones, and one without an element."""
    length = data.shape[axis]
    return np.split(data, [length // 9, length // 2, length // 2, length // 2 + 3], axis)

"""What an operator finds in the log when a model loads."""

from __future__ import annotations

import json
import re
import shutil

from harness.deployment import Deployment
from harness.model import Model
from support.paths import MODELS


def log_of_load(deployment: Deployment, model: Model) -> str:
    deployment.serve(model)
    return log_since(deployment, model.name)


def warnings_of_load(deployment: Deployment, model: Model) -> list[str]:
    """Those of the backend; ONNX Runtime has its own."""
    return [text for text in messages(log_of_load(deployment, model), "W") if text.startswith("model ")]


def log_of_shipped(deployment: Deployment, name: str) -> str:
    """The same of a model in `models/`, with the configuration that is shipped."""
    if name not in deployment.loaded:
        shutil.copytree(MODELS / name, deployment.repository / name)
        deployment.admin.load_model(name)
        deployment.loaded[name] = "as shipped"
    return log_since(deployment, name)


def messages(log: str, levels: str = "IWE") -> list[str]:
    """The log's lines of these levels, without time and source line."""
    return [json.loads(text) for text in re.findall(rf"^[{levels}]\d+ .*?\] (\".*\")$", log, re.MULTILINE)]


def log_since(deployment: Deployment, name: str) -> str:
    """The log since the last load of a model of this name began."""
    return deployment.server.log_text().rpartition(f"loading: {name}:")[2]

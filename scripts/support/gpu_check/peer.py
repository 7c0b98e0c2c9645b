"""The step of Triton's onnxruntime backend on the GPU, where its library is to be had, for the rows of the stage `step`.

Its folder: TRITON_ONNXRUNTIME_BACKEND, or backends/onnxruntime of the server or of /opt/tritonserver.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support import paths
from support.bench import step as bench
from support.bench.models import MODELS
from support.bench.peers import WAYS, Peer, backends_of
from support.gpu_check.serving import KIND, Findings

VARIABLE = "TRITON_ONNXRUNTIME_BACKEND"
LIBRARY = "libtriton_onnxruntime.so"
_SHOWN = ("model", "batch", "composition", "ours_us", "trivial_us", "infer_us")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batches", type=int, nargs="+")
    options = parser.parse_args()
    findings = Findings()
    folder = find()
    if folder is None:
        findings.left_out("Triton's onnxruntime backend", f"no {LIBRARY} here: {VARIABLE} names its folder")
        return findings.code
    for row in measured(folder, options.batches):
        print(json.dumps(row), flush=True)
    return findings.code


def find() -> Path | None:
    named = os.environ.get(VARIABLE)
    folders = [
        *([Path(named)] if named else []),
        paths.TRITONSERVER.parents[1] / "backends" / "onnxruntime",
        Path("/opt/tritonserver/backends/onnxruntime"),
    ]
    return next((folder for folder in folders if (folder / LIBRARY).exists()), None)


def measured(folder: Path, batches: list[int]) -> Iterator[dict]:
    """Rows as those of the stage `step`, with the backend's implicit states: only the way of the batch that stays."""
    way = WAYS["onnxruntime"]
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as temporary:
        repository = Path(temporary) / "repository"
        backends = backends_of(Path(temporary), [Peer.parse(f"onnxruntime={folder}")])
        for name in ("accumulate", "lstm", "cache"):
            model = way.variant(MODELS[name])
            for batch in batches:
                waits: dict[str, Any] = {"preferred": batch, "delay_us": bench.DELAY_US} if batch > 1 else {}
                common: dict[str, Any] = {"candidates": 4 * batch + 8, **waits}
                served, trivial = f"{name}_{batch}_peer", f"{name}_{batch}_trivial"
                config = model.config("onnxruntime", batch, kind=KIND, declared=way.declared(model), **common)
                model.write(repository, served, config)
                model.write(repository, trivial, model.config("trivial", batch, **common))
                arguments: dict[str, Any] = {"blocks": 7, "seconds": 0.05, "batch": batch, "composition": "same"}
                found = bench.drive(repository, "step", model, backends, 60, model=served, trivial=trivial, **arguments)
                row = {"kind": "onnxruntime backend", "model": name, "batch": batch, "composition": "same"} | found
                row["whole_us"] = row["ours_us"] - row["trivial_us"]
                yield {key: row[key] for key in ("kind", *_SHOWN, "whole_us")}


if __name__ == "__main__":
    sys.exit(main())

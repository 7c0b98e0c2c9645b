"""Requests of sequences for perf_analyzer, for models that the backend schedules.

perf_analyzer sends the parameters of sequences only to models with `sequence_batching`. Other models take the special
inputs `sequence_id` and `sequence_control_input`, and perf_analyzer reads inputs from a file. With as many threads as
sequences, each thread sends one request at a time: thread n sends the requests n, n + threads, n + 2 threads, …
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

START, END = 1, 2
SPECIAL = ("sequence_id", "sequence_control_input")


def requests(inputs: Mapping[str, np.ndarray], sequences: int, length: int) -> dict:
    """What perf_analyzer's `--input-data` reads: one request of each sequence, then the next of each. All carry the same
    inputs. The last ones end the sequences, and the first ones begin them again. The ids are others each time, because
    sequences of an earlier file may still be live."""
    first = random.randrange(1, 2**48)
    content = {
        name: {"content": {"b64": b64encode(value.tobytes()).decode()}, "shape": list(value.shape)}
        for name, value in inputs.items()
    }

    def request(step: int, sequence: int) -> dict:
        control = START if step == 0 else END if step == length - 1 else 0
        return content | {"sequence_id": [first + sequence], "sequence_control_input": [control]}

    return {"data": [request(step, sequence) for step in range(length) for sequence in range(sequences)]}


def arguments(file: Path, sequences: int) -> list[str]:
    """perf_analyzer's arguments for such a file."""
    return ["--input-data", str(file), "--max-threads", str(sequences), "--concurrency-range", str(sequences)]


def random_inputs(config: Mapping[str, Any], dims: Mapping[str, list[int]]) -> dict[str, np.ndarray]:
    """Random values for the inputs that a model's configuration (in JSON) requires. `dims`: of inputs whose dims are
    open, without the batch."""
    values, found = np.random.default_rng(1), {}
    for tensor in config["input"]:
        name, kind = tensor["name"], tensor["data_type"].removeprefix("TYPE_")
        if tensor.get("optional") or name in SPECIAL:
            continue
        shape = dims.get(name, [int(dim) for dim in tensor["dims"]])
        if any(dim < 0 for dim in shape):
            raise ValueError(f"the dims of input '{name}' are {shape}: say which to send, as in --shape {name}:1,80")
        dtype = triton_to_np_dtype(kind)
        if dtype is None or dtype == np.object_:
            raise ValueError(f"input '{name}' is {kind}, for which there are no random values: use --input-data")
        found[name] = (values.random(shape) * (1 if np.issubdtype(dtype, np.floating) else 2)).astype(dtype)
    return found


def main() -> int:
    """Runs perf_analyzer, whose path is the first argument, with requests for `--sequences`."""
    program, *given = sys.argv[1:]
    parser = argparse.ArgumentParser(prog="scripts/perf-analyzer", allow_abbrev=False)
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--sequence-length", type=int, default=50)
    parser.add_argument("-m", required=True)
    parser.add_argument("-u", default="localhost:8001")
    parser.add_argument("--shape", action="append", default=[])
    of, others = parser.parse_known_args(given)
    if of.sequences < 1 or of.sequence_length < 2:
        parser.error("--sequences has to be at least 1, and --sequence-length at least 2")
    try:
        config = grpcclient.InferenceServerClient(of.u).get_model_config(of.m, as_json=True)["config"]
        if "sequence_batching" in config:
            raise ValueError(f"Triton schedules the sequences of '{of.m}', so --sequences is not needed")
        if not any(tensor["name"] == "sequence_id" for tensor in config["input"]):
            raise ValueError(f"model '{of.m}' has no input 'sequence_id', so this backend does not schedule it")
        dims = {name: [int(dim) for dim in text.split(",")] for name, _, text in (of.partition(":") for of in of.shape)}
        inputs = random_inputs(config, dims)
    except (ValueError, InferenceServerException) as error:
        print(f"perf-analyzer: {error}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="perf-analyzer-") as folder:
        file = Path(folder) / "requests.json"
        file.write_text(json.dumps(requests(inputs, of.sequences, of.sequence_length)))
        command = [program, "-m", of.m, "-u", of.u, "-i", "grpc", "--streaming", *arguments(file, of.sequences)]
        return subprocess.call([*command, *others])


if __name__ == "__main__":
    sys.exit(main())

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


def requests(inputs: Mapping[str, np.ndarray], sequences: int, length: int, first_id: int = 1) -> dict:
    """The content of a file for `--input-data`: first one request of each sequence, then the next of each. All carry the
    same inputs. The last ones end the sequences, and the first ones begin them again. perf_analyzer breaks them off when
    it is done, so they stay live: another file needs other ids, or a model with `on_duplicate_start` `restart`."""
    content = {
        name: {"content": {"b64": b64encode(value.tobytes()).decode()}, "shape": list(value.shape)}
        for name, value in inputs.items()
    }

    def request(step: int, sequence: int) -> dict:
        control = START if step == 0 else END if step == length - 1 else 0
        return content | {"sequence_id": [first_id + sequence], "sequence_control_input": [control]}

    return {"data": [request(step, sequence) for step in range(length) for sequence in range(sequences)]}


def arguments(file: Path, sequences: int) -> list[str]:
    """perf_analyzer's arguments for such a file: a thread for each sequence."""
    return ["--input-data", str(file), "--max-threads", str(sequences)]


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
        is_float = np.issubdtype(dtype, np.floating)
        found[name] = (values.random(shape) if is_float else values.integers(0, 2, shape)).astype(dtype)
    return found


def main() -> int:
    """Runs perf_analyzer, whose path is the first argument, with requests for `--sequences`."""
    program, *given = sys.argv[1:]
    parser = argparse.ArgumentParser(prog="scripts/perf-analyzer", allow_abbrev=False)
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--sequence-length", type=int, default=50)
    parser.add_argument("-m", "--model-name", dest="m", required=True)
    parser.add_argument("-u", default="localhost:8001")
    parser.add_argument("--shape", action="append", default=[])
    options, others = parser.parse_known_args(given)
    if options.sequences < 1 or options.sequence_length < 2:
        parser.error("--sequences has to be at least 1, and --sequence-length at least 2")
    try:
        config = grpcclient.InferenceServerClient(options.u).get_model_config(options.m, as_json=True)["config"]
        if "sequence_batching" in config:
            raise ValueError(f"Triton schedules the sequences of '{options.m}', so --sequences is not needed")
        if not any(tensor["name"] == "sequence_id" for tensor in config["input"]):
            raise ValueError(f"model '{options.m}' has no input 'sequence_id', so this backend does not schedule it")
        shapes = (text.rpartition(":") for text in options.shape)
        dims = {name: [int(dim) for dim in of_input.split(",")] for name, _, of_input in shapes}
        inputs = random_inputs(config, dims)
    except (ValueError, InferenceServerException) as error:
        print(f"perf-analyzer: {error}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="perf-analyzer-") as folder:
        file = Path(folder) / "requests.json"
        file.write_text(
            json.dumps(requests(inputs, options.sequences, options.sequence_length, random.randrange(1, 2**48)))
        )
        load = [] if "--request-rate-range" in others else ["--concurrency-range", str(options.sequences)]
        command = [
            program,
            "-m",
            options.m,
            "-u",
            options.u,
            "-i",
            "grpc",
            "--streaming",
            *arguments(file, options.sequences),
        ]
        return subprocess.call([*command, *load, *others])


if __name__ == "__main__":
    sys.exit(main())

"""Tokens a second of a decoder whose sequences have different lengths, with and without `growing_padding`.

The model is an export of Optimum (see export_decoder.py). Each sequence is a greedy loop: it sends the token that it
got. One client sends all of them over one stream, so what counts is ratios within one run.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import psutil
import tritonclient.grpc as grpc

from support.paths import ROOT
from support.server import TritonServer

SMALL = ROOT / "assets" / "decoder.onnx"
GENERATED = "attention_mask=mask(past_key_values.0.key, input_ids) position_ids=positions(input_ids)"
VARIANTS = {"apart": {}, "left": {"growing_padding": "left"}, "right": {"growing_padding": "right"}}
PROMPTS = (16, 129)
"""The lengths of prompts, from which each sequence has its own."""
VOCABULARY = 64
TOKENS = 400
"""A sequence that has so many ends, and another one begins."""


def config(parameters: dict[str, str], most: int) -> str:
    lines = ['backend: "stateful"', f"max_batch_size: {most}", "instance_group { kind: KIND_CPU }"]
    for key, value in ({"generated_inputs": GENERATED} | parameters).items():
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
    return "\n".join(lines) + "\n"


IDS = itertools.count(1)


@dataclass
class Loop:
    """A sequence, and how many tokens it has; then another one."""

    number: int
    id: int = 0
    tokens: int = 0


class Loops:
    """Greedy loops of a model over one stream."""

    def __init__(self, client: grpc.InferenceServerClient, model: str, count: int, seed: int) -> None:
        self._client, self._model, self._rng = client, model, np.random.default_rng(seed)
        self._answers: queue.Queue = queue.Queue()
        self._loops = {str(number): Loop(number) for number in range(count)}
        client.start_stream(lambda result, error: self._answers.put((result, error)))
        for loop in self._loops.values():
            self._start(loop)

    def _start(self, loop: Loop) -> None:
        loop.id, loop.tokens = next(IDS), int(self._rng.integers(*PROMPTS))
        self._send(loop, self._rng.integers(0, VOCABULARY, loop.tokens), start=True)

    def _send(self, loop: Loop, ids: np.ndarray, start: bool = False) -> None:
        fed = grpc.InferInput("input_ids", [1, len(ids)], "INT64")
        fed.set_data_from_numpy(ids.astype(np.int64)[None])
        end = loop.tokens >= TOKENS
        self._client.async_stream_infer(
            self._model, [fed], request_id=str(loop.number), sequence_id=loop.id, sequence_start=start, sequence_end=end
        )

    def run(self, seconds: float) -> float:
        """Tokens a second."""
        before, tokens = perf_counter(), 0
        while perf_counter() < before + seconds:
            self._answer()
            tokens += 1
        return tokens / (perf_counter() - before)

    def settle(self, answers: int) -> None:
        for _ in range(answers):
            self._answer()

    def _answer(self) -> None:
        result, error = self._answers.get(timeout=60)
        if error is not None:
            raise RuntimeError(str(error))
        loop = self._loops[result.get_response().id]
        if loop.tokens >= TOKENS:
            self._start(loop)
            return
        token = result.as_numpy("logits")[0, -1].argmax()
        loop.tokens += 1
        self._send(loop, np.array([token]))

    def stop(self) -> None:
        self._client.stop_stream(cancel_requests=True)


def tokens(folder: Path, model: Path, sequences: list[int], seconds: float, blocks: int) -> Iterator[dict]:
    """The variants in turn, each with as many sequences."""
    repository = folder / "repository"
    for count in sequences:
        for name, parameters in VARIANTS.items():
            version = repository / f"{name}_{count}" / "1"
            version.mkdir(parents=True)
            (version / "model.onnx").symlink_to(model.resolve())
            (version.parent / "config.pbtxt").write_text(config(parameters, max(count, 2)))
    with TritonServer(repository, log_path=folder / "server.log") as server:
        for count in sequences:
            found: dict[str, list[dict]] = {name: [] for name in VARIANTS}
            for block in range(blocks):
                for name in list(VARIANTS)[:: 1 if block % 2 == 0 else -1]:
                    found[name].append(_measure(server, f"{name}_{count}", count, seconds, block))
            rates = {name: median(row["tokens_per_s"] for row in rows) for name, rows in found.items()}
            for name, rows in found.items():
                of_rows = {key: median(row[key] for row in rows) for key in ("batch", "server_cpu_us_per_token")}
                yield {
                    "model": model.stem,
                    "sequences": count,
                    "padding": "none" if name == "apart" else name,
                    "tokens_per_s": rates[name],
                    **of_rows,
                    "over_apart": rates[name] / rates["apart"],
                }


def _measure(server: TritonServer, model: str, sequences: int, seconds: float, seed: int) -> dict:
    with grpc.InferenceServerClient(server.grpc_url) as client:
        loops = Loops(client, model, sequences, seed)
        loops.settle(3 * sequences)
        process = psutil.Process(server.pid)
        before, cpu_before = _counts(client, model), process.cpu_times()
        rate = loops.run(seconds)
        after, cpu_after = _counts(client, model), process.cpu_times()
        loops.stop()
    requests, runs = (after[key] - before[key] for key in range(2))
    cpu_s = cpu_after.user + cpu_after.system - cpu_before.user - cpu_before.system
    return {"tokens_per_s": rate, "batch": requests / runs, "server_cpu_us_per_token": 1e6 * cpu_s / requests}


def _counts(client: grpc.InferenceServerClient, model: str) -> tuple[int, int]:
    of = client.get_inference_statistics(model).model_stats[0]
    return of.inference_count, of.execution_count

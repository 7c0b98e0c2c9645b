"""Tokens a second of a decoder that goes on by itself (`repeat`), compared with a client that sends back each token.

One client has all sequences on one stream. It sends a request for each token; or a request for 64 tokens, with one answer; or
a request for 64 tokens, with an answer for each step. It asks for `next_token` only. Compare ratios within one run.
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
import onnx
import psutil
import tritonclient.grpc as grpc

from support.bench.padding import VOCABULARY, config
from support.next_token import with_next_token
from support.server import TritonServer

PROMPT, TOKENS = 16, 272
"""Tokens of a prompt, and of a sequence."""
AT_ONCE = 64
"""Tokens of a request, where the server goes on by itself."""
REPEAT = {"repeat": "<<<next_token, input_ids>>>"}
EACH = "model_transaction_policy { decoupled: true }\n"
WAYS = {"client": ({}, ""), "repeat": (REPEAT, ""), "repeat, each step": (REPEAT, EACH)}

IDS = itertools.count(1)


@dataclass
class Talk:
    """A sequence, and how many tokens it has. When it is full, another one takes its place."""

    id: int = 0
    tokens: int = TOKENS
    last: int = 0


class Talks:
    """Sequences of a model over one stream."""

    def __init__(self, client: grpc.InferenceServerClient, model: str, count: int, at_once: int, seed: int) -> None:
        self._client, self._model, self._at_once = client, model, at_once
        self._rng = np.random.default_rng(seed)
        self._answers: queue.Queue = queue.Queue()
        self._talks = {str(number): Talk() for number in range(count)}
        client.start_stream(lambda result, error: self._answers.put((result, error)))
        for name in self._talks:
            self._send(name)

    def _send(self, name: str) -> None:
        talk = self._talks[name]
        start = talk.tokens >= TOKENS
        if start:
            talk.id, talk.tokens = next(IDS), PROMPT
        ids = self._rng.integers(0, VOCABULARY, PROMPT) if start else np.array([talk.last])
        fed = grpc.InferInput("input_ids", [1, len(ids)], "INT64")
        fed.set_data_from_numpy(ids.astype(np.int64)[None])
        self._client.async_stream_infer(
            self._model,
            [fed],
            outputs=[grpc.InferRequestedOutput("next_token")],
            request_id=name,
            sequence_id=talk.id,
            sequence_start=start,
            sequence_end=talk.tokens + self._at_once >= TOKENS,
            parameters={"max_steps": self._at_once} if self._at_once > 1 else None,
        )

    def answer(self) -> int:
        """Takes an answer. Returns its tokens."""
        result, error = self._answers.get(timeout=60)
        if error is not None:
            raise RuntimeError(str(error))
        response = result.get_response()
        talk = self._talks[response.id]
        tokens = result.as_numpy("next_token").ravel()
        talk.tokens += len(tokens)
        talk.last = int(tokens[-1])
        if response.parameters["triton_final_response"].bool_param:
            self._send(response.id)
        return len(tokens)

    def run(self, seconds: float) -> tuple[int, float]:
        """Tokens, and in how many seconds."""
        before, tokens = perf_counter(), 0
        while perf_counter() < before + seconds:
            tokens += self.answer()
        return tokens, perf_counter() - before

    def stop(self) -> None:
        self._client.stop_stream(cancel_requests=True)


def tokens(folder: Path, decoder: Path, sequences: list[int], seconds: float, blocks: int) -> Iterator[dict]:
    """A row for each way and number of sequences. The ways take turns."""
    repository, graph = folder / "repository", with_next_token(onnx.load(decoder)).SerializeToString()
    for number, (parameters, more) in enumerate(WAYS.values()):
        version = repository / f"way_{number}" / "1"
        version.mkdir(parents=True)
        (version / "model.onnx").write_bytes(graph)
        written = config({"growing_padding": "left"} | parameters, max(sequences)) + more
        (version.parent / "config.pbtxt").write_text(written)
    with TritonServer(repository, log_path=folder / "server.log") as server:
        for count in sequences:
            found: dict[str, list[dict]] = {name: [] for name in WAYS}
            for block in range(blocks):
                for number, name in list(enumerate(WAYS))[:: 1 if block % 2 == 0 else -1]:
                    at_once = 1 if name == "client" else AT_ONCE
                    found[name].append(_measure(server, f"way_{number}", count, at_once, seconds, block))
            rates = {name: median(row["tokens_per_s"] for row in rows) for name, rows in found.items()}
            for name, rows in found.items():
                yield {
                    "model": decoder.stem,
                    "sequences": count,
                    "loop": name,
                    "tokens_per_s": rates[name],
                    "server_cpu_us_per_token": median(row["server_cpu_us_per_token"] for row in rows),
                    "over_client": rates[name] / rates["client"],
                }


def _measure(server: TritonServer, model: str, sequences: int, at_once: int, seconds: float, seed: int) -> dict:
    with grpc.InferenceServerClient(server.grpc_url) as client:
        talks = Talks(client, model, sequences, at_once, seed)
        for _ in range(3 * sequences):
            talks.answer()
        process = psutil.Process(server.pid)
        before = process.cpu_times()
        made, taken_s = talks.run(seconds)
        after = process.cpu_times()
        talks.stop()
    cpu_s = after.user + after.system - before.user - before.system
    return {"tokens_per_s": made / taken_s, "server_cpu_us_per_token": 1e6 * cpu_s / made}

"""The soak: hours of sequences that start, step, end or vanish at random, every answer checked."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from support.bench.models import MODELS
from support.bench.step import BACKENDS
from support.server import TritonServer

THREADS = 8
SEQUENCES = 64
REPORT_S = 10


class Soak:
    """Sums of whole numbers, which floats hold exactly."""

    def __init__(self, minutes: float) -> None:
        self.until = time.monotonic() + 60 * minutes
        self.answers = 0
        self.wrong: list[str] = []

    def run(self) -> bool:
        """Prints a line every ten seconds. Whether every answer was right."""
        model = MODELS["accumulate"]
        with tempfile.TemporaryDirectory() as folder:
            repository = Path(folder) / "repository"
            for name in ("steady", "comes_and_goes"):
                parameters = {"resident_batches": "2"}
                model.write(repository, name, model.config("stateful", 16, candidates=4096, parameters=parameters))
            options = {"model_control": "explicit", "load_models": ["steady", "comes_and_goes"]}
            with TritonServer(repository, backends=BACKENDS, **options) as server:
                threads = [threading.Thread(target=self.client, args=(server, n)) for n in range(THREADS)]
                threads.append(threading.Thread(target=self.reload, args=(server,)))
                for thread in threads:
                    thread.start()
                process = psutil.Process(server.pid)
                while any(thread.is_alive() for thread in threads):
                    rss = process.memory_info().rss / 2**20
                    left = max(0, self.until - time.monotonic())
                    print(f"{left:7.0f} s left: {self.answers} answers, {len(self.wrong)} wrong, server {rss:.0f} MiB")
                    time.sleep(min(REPORT_S, left + 0.5))
        for what in self.wrong[:10]:
            print(what)
        return not self.wrong and self.answers > 0

    def client(self, server: TritonServer, number: int) -> None:
        """Steps its own sequences, sometimes with a new connection, leaving what was live behind."""
        random = np.random.default_rng(number)
        sums: dict[int, float] = {}
        connection = grpc.InferenceServerClient(server.grpc_url)
        while time.monotonic() < self.until:
            if random.random() < 0.0005:
                connection.close()
                connection, sums = grpc.InferenceServerClient(server.grpc_url), {}
            sequence = 1 + number * SEQUENCES + int(random.integers(SEQUENCES))
            start, end = sequence not in sums, bool(random.random() < 0.05)
            value = float(random.integers(100))
            tensor = grpc.InferInput("X", [1, 1], "FP32")
            tensor.set_data_from_numpy(np.array([[value]], np.float32))
            flags = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end}
            try:
                answer = connection.infer("steady", [tensor], **flags).as_numpy("Y").item()
            except InferenceServerException as error:
                self.wrong.append(f"sequence {sequence}: {error}")
                sums.pop(sequence, None)
                continue
            expected = (0.0 if start else sums[sequence]) + value
            if answer != expected:
                self.wrong.append(f"sequence {sequence}: {answer} instead of {expected}")
            self.answers += 1
            sums[sequence] = expected
            if end:
                del sums[sequence]

    def reload(self, server: TritonServer) -> None:
        """Loads and unloads the other model."""
        connection = grpc.InferenceServerClient(server.grpc_url)
        while time.monotonic() < self.until:
            connection.unload_model("comes_and_goes")
            time.sleep(0.5)
            connection.load_model("comes_and_goes")
            time.sleep(0.5)

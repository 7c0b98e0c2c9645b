"""Inputs and outputs in CUDA shared memory, from a client in a process of its own."""

from __future__ import annotations

import base64
import ctypes
import sys

import numpy as np
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from support.bench.models import Tensor
from support.gpu_check.cuda import CudaError, Gpu
from support.gpu_check.models import CHECKED
from support.gpu_check.serving import SIMULATED, Alone, Findings, Served, Step, random_values, serving

STEPS = 20
TITLE = "CUDA shared memory"


def main() -> int:
    findings = Findings()
    if SIMULATED:
        findings.left_out(TITLE, "the simulated device has no memory that another process can open")
        return findings.code
    with findings.guard(TITLE):
        check(findings)
    return findings.code


class Region:
    """Memory of the GPU for one tensor, which the server opens by its handle, and pinned memory to fill and read it."""

    def __init__(self, gpu: Gpu, stream: int, of: Tensor) -> None:
        self.name, self.shape = of.name, (1, *of.dims)
        self.bytes = 4 * int(np.prod(self.shape))
        self._gpu, self._stream = gpu, stream
        self.address, self._pinned = gpu.allocate(self.bytes), gpu.pin(self.bytes)
        pointer = ctypes.cast(self._pinned, ctypes.POINTER(ctypes.c_float))
        self._values = np.ctypeslib.as_array(pointer, self.shape)

    @property
    def handle(self) -> bytes:
        """As the client's library passes it on."""
        return base64.b64encode(self._gpu.share(self.address))

    def write(self, values: np.ndarray) -> None:
        self._values[:] = values
        self._gpu.upload(self._pinned, self.address, self.bytes, self._stream)
        self._gpu.wait(self._stream)

    def read(self) -> np.ndarray:
        self._gpu.download(self.address, self._pinned, self.bytes, self._stream)
        self._gpu.wait(self._stream)
        return self._values.copy()


def check(findings: Findings) -> None:
    served = Served(CHECKED["lstm"])
    gpu = Gpu()
    stream = gpu.stream()
    regions = {of.name: Region(gpu, stream, of) for of in (*served.model.inputs, *served.model.outputs)}
    with serving(served) as server, grpc_client.InferenceServerClient(server.grpc_url) as client:
        try:
            for region in regions.values():
                client.register_cuda_shared_memory(region.name, region.handle, 0, region.bytes)
        except (InferenceServerException, CudaError) as error:
            if _is_impossible(error):
                findings.left_out(
                    TITLE,
                    f"not possible with this server or machine: {error}; STATEFUL_TEST_SERVER "
                    "names the folder of another server",
                )
                return
            raise
        for inputs_shared, outputs_shared in ((True, False), (False, True), (True, True)):
            worst = _worst(client, served, regions, inputs_shared, outputs_shared)
            what = " and ".join(name for name, on in (("inputs", inputs_shared), ("outputs", outputs_shared)) if on)
            findings.most(f"{TITLE} for {what}: largest difference", worst, 1e-4)
        client.unregister_cuda_shared_memory()


def _is_impossible(error: Exception) -> bool:
    if isinstance(error, CudaError):
        not_supported, not_permitted = 801, 800
        return error.code in (not_supported, not_permitted)
    return any(words in str(error).lower() for words in ("not supported", "unimplemented", "built without gpu"))


def _worst(
    client: grpc_client.InferenceServerClient,
    served: Served,
    regions: dict[str, Region],
    inputs_shared: bool,
    outputs_shared: bool,
) -> float:
    alone, random, worst = Alone(served.model), np.random.default_rng(5), 0.0
    for number in range(STEPS):
        step = Step(7, random_values(served.model, random), number == 0, number == STEPS - 1)
        asked, wanted = [], []
        for name, values in step.fed.items():
            asked.append(grpc_client.InferInput(name, list(values.shape), "FP32"))
            if inputs_shared:
                regions[name].write(values)
                asked[-1].set_shared_memory(name, regions[name].bytes)
            else:
                asked[-1].set_data_from_numpy(values)
        for of in served.model.outputs:
            wanted.append(grpc_client.InferRequestedOutput(of.name))
            if outputs_shared:
                regions[of.name].write(np.full(regions[of.name].shape, np.inf, np.float32))
                wanted[-1].set_shared_memory(of.name, regions[of.name].bytes)
        answer = client.infer(
            served.name,
            asked,
            outputs=wanted,
            sequence_id=step.sequence,
            sequence_start=step.start,
            sequence_end=step.end,
        )
        for name, right in alone.step(step).items():
            came = regions[name].read() if outputs_shared else answer.as_numpy(name)
            worst = max(worst, float(np.abs(came - right).max()))
    return worst


if __name__ == "__main__":
    sys.exit(main())

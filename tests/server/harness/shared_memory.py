"""Requests whose inputs and outputs lie in shared memory of the system."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

import grpc
import numpy as np
import tritonclient.utils.shared_memory as shared_memory
from tritonclient.grpc import service_pb2
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

from harness.deployment import eventually
from harness.model import Model
from harness.raw import Answer, Inputs, Parameters, Refused, Unary, request_of

#: Bytes of each input and output.
PART = 1 << 20


class SharedMemory:
    """gRPC, one call a request. Each request overwrites the tensors of the last one. For one thread, and one model."""

    by_ovms = False

    def __init__(self, deployment, model: Model):
        self.unary = Unary(deployment)
        names = [tensor.name for tensor in (*model.inputs, *model.outputs)]
        self.places = {name: PART * at for at, name in enumerate(names)}
        self.outputs = [tensor.name for tensor in model.outputs]
        self.key = f"stateful-test-{uuid.uuid4().hex[:12]}"
        self.region = shared_memory.create_shared_memory_region(self.key, self.key, PART * len(names))
        what = service_pb2.SystemSharedMemoryRegisterRequest(
            name=self.key, key=self.key, byte_size=PART * len(names), offset=0
        )
        self.unary.stub.SystemSharedMemoryRegister(what)

    def ask(self, model: str, inputs: Inputs, parameters: Parameters, **how) -> Answer:
        request = request_of(model, {}, parameters, outputs=self.outputs, **how)
        for name, value in inputs.items():
            shared_memory.set_shared_memory_region(self.region, [np.ascontiguousarray(value)], self.places[name])
            made = request.inputs.add(name=name, shape=value.shape, datatype=np_to_triton_dtype(value.dtype))
            self._place(made.parameters, name, value.nbytes)
        for output in request.outputs:
            self._place(output.parameters, output.name, PART)
        try:
            response = self.unary.stub.ModelInfer(request)
        except grpc.RpcError as error:
            raise Refused(error.code().name, error.details()) from None
        values = {
            name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in response.parameters.items()
        }
        return Answer({tensor.name: self._found(tensor) for tensor in response.outputs}, values)

    def _unregistered(self) -> bool:
        try:
            self.unary.stub.SystemSharedMemoryUnregister(service_pb2.SystemSharedMemoryUnregisterRequest(name=self.key))
        except grpc.RpcError:
            return False
        return True

    def _place(self, parameters: Mapping, name: str, size: int) -> None:
        parameters["shared_memory_region"].string_param = self.key
        parameters["shared_memory_byte_size"].int64_param = size
        parameters["shared_memory_offset"].int64_param = self.places[name]

    def _found(self, tensor) -> np.ndarray:
        """A copy, because the next request overwrites it."""
        dtype, shape = triton_to_np_dtype(tensor.datatype), list(tensor.shape)
        found = shared_memory.get_contents_as_numpy(self.region, dtype, shape, self.places[tensor.name])
        return found.copy()

    def close(self) -> None:
        """The server has the region in use until it has released the last request, a moment after its answer."""
        eventually(self._unregistered, bool)
        self.unary.close()
        shared_memory.destroy_shared_memory_region(self.region)

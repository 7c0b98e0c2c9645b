"""NVIDIA's driver through ctypes: what a process beside the server needs of it. Needs nothing beside Python itself."""

from __future__ import annotations

import ctypes
from pathlib import Path

LIBRARY = "libcuda.so.1"
STUB = 34
_SIZE, _ADDRESS = ctypes.c_size_t, ctypes.c_uint64


class CudaError(RuntimeError):
    """A function of the driver failed; `code` is the driver's number."""

    def __init__(self, call: str, code: int, name: str = "") -> None:
        super().__init__(f"{call} failed with {code}{f' ({name})' if name else ''}")
        self.code = code


class Driver:
    """The driver's library. OSError if there is none."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)

    def initialise(self) -> None:
        self._call("cuInit", 0)

    def version(self) -> tuple[int, int]:
        """The newest CUDA that the driver knows, as in (13, 0). It can be asked without a GPU."""
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        return version.value // 1000, version.value % 1000 // 10

    @staticmethod
    def path() -> str:
        """The file that was loaded."""
        files = (line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines())
        return next((file for file in files if "/libcuda.so" in file), "unknown")

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise CudaError(name, code, self._name(code))

    def _name(self, code: int) -> str:
        text = ctypes.c_char_p()
        if self._library.cuGetErrorName(code, ctypes.byref(text)) != 0 or text.value is None:
            return ""
        return text.value.decode(errors="replace")


class Gpu(Driver):
    """A GPU, current in the thread that makes this. Memory is named by its address."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.initialise()
        device = ctypes.c_int()
        self._context = ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), number)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.make_current()

    def make_current(self) -> None:
        """Each thread that calls the rest has to do this first."""
        self._call("cuCtxSetCurrent", self._context)

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and all bytes."""
        free, total = _SIZE(), _SIZE()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, size: int) -> int:
        address = _ADDRESS()
        self._call("cuMemAlloc_v2", ctypes.byref(address), _SIZE(size))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", _ADDRESS(address))

    def pin(self, size: int) -> int:
        """Pinned host memory."""
        address = ctypes.c_void_p()
        portable = 1
        self._call("cuMemHostAlloc", ctypes.byref(address), _SIZE(size), portable)
        return address.value or 0

    def stream(self) -> int:
        stream = ctypes.c_void_p()
        non_blocking = 1
        self._call("cuStreamCreate", ctypes.byref(stream), non_blocking)
        return stream.value or 0

    def upload(self, pinned: int, address: int, size: int, stream: int) -> None:
        """Enqueues a copy to the GPU."""
        to, from_ = _ADDRESS(address), ctypes.c_void_p(pinned)
        self._call("cuMemcpyHtoDAsync_v2", to, from_, _SIZE(size), ctypes.c_void_p(stream))

    def download(self, address: int, pinned: int, size: int, stream: int) -> None:
        """Enqueues a copy to the host."""
        to, from_ = ctypes.c_void_p(pinned), _ADDRESS(address)
        self._call("cuMemcpyDtoHAsync_v2", to, from_, _SIZE(size), ctypes.c_void_p(stream))

    def wait(self, stream: int) -> None:
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def share(self, address: int) -> bytes:
        """A handle with which another process opens the memory."""
        handle = (ctypes.c_char * 64)()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), _ADDRESS(address))
        return handle.raw

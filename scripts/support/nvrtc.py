"""NVIDIA's run-time compiler, from its wheel: CUDA C to PTX or to machine code, without a GPU."""

from __future__ import annotations

import ctypes
from pathlib import Path


class Nvrtc:
    """The compiler in `library` (libnvrtc.so.12)."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def ptx(self, source: Path, architecture: str) -> bytes:
        """PTX for a virtual architecture such as `compute_70`."""
        return self._compiled(source, architecture, "PTX").rstrip(b"\0")

    def cubin(self, source: Path, architecture: str) -> bytes:
        """Machine code for an architecture such as `sm_90`."""
        return self._compiled(source, architecture, "CUBIN")

    def _compiled(self, source: Path, architecture: str, kind: str) -> bytes:
        program = ctypes.c_void_p()
        text, name = source.read_bytes(), source.name.encode()
        self._check("nvrtcCreateProgram", ctypes.byref(program), text, name, 0, None, None)
        try:
            options = [f"--gpu-architecture={architecture}".encode()]
            given = (ctypes.c_char_p * len(options))(*options)
            try:
                self._check("nvrtcCompileProgram", program, len(options), given)
            except RuntimeError as error:
                log = self._read(program, "nvrtcGetProgramLog").rstrip(b"\0").decode()
                raise RuntimeError(f"{source.name} for {architecture}: {error}\n{log}") from None
            return self._read(program, f"nvrtcGet{kind}")
        finally:
            self._check("nvrtcDestroyProgram", ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, getter: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(f"{getter}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._check(getter, program, text)
        return text.raw

    def _check(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != 0:
            raise RuntimeError(f"{function}: {self._library.nvrtcGetErrorString(status).decode()}")

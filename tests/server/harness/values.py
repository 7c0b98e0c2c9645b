"""Values of tensors, made and compared bit by bit."""

from __future__ import annotations

import numpy as np

from harness.model import TYPES


def bits(value: np.ndarray) -> bytes | list[bytes]:
    """All of a tensor, to be compared: equal numbers may have other bits, and a NaN equals nothing."""
    if value.dtype != np.object_:
        return value.tobytes()
    return words(value)


def words(value: np.ndarray) -> list[bytes]:
    """The strings of a tensor."""
    return [text.encode() if isinstance(text, str) else text for text in value.ravel()]


def random_bits(type: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Any bit patterns of a type, NaNs of all kinds among them; for strings, any bytes."""
    if type == "string":
        # tritonclient takes zero bytes at the end of an element away before it sends them
        words = [rng.bytes(int(rng.integers(0, 400))) + b"." for _ in range(int(np.prod(shape)))]
        return np.array(words, np.object_).reshape(shape)
    if type == "bool":
        return rng.integers(0, 2, shape).astype(np.bool_)
    dtype = np.dtype(TYPES[type][0])
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)

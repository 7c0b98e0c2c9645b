"""A model and clients for tests of sequences that the backend schedules."""

from harness.ways import connect, serve

__all__ = ["connect", "serve"]

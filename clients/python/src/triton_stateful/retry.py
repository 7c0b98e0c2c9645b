"""How often a request is sent again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Retry:
    """Sends a request again if the server could not be reached or gave no answer (`Unavailable`).

    No step is made twice: each request says how many steps the sequence has made before, and how many elements are left over
    from windows. The server refuses a request with a wrong number. The model needs `state_api`.

    attempts: how often a request is sent at most, 1 or more.
    backoff: seconds before the second attempt. Each later pause is twice as long, up to `longest` seconds.
    keep_bytes: how many bytes of inputs the client keeps of steps that its server has answered and not saved, if the model has
        a store with a `durability` below `step`. If the server dies, the next one gets them again.
    """

    attempts: int = 5
    backoff: float = 0.1
    longest: float = 5.0
    keep_bytes: int = 16 * 2**20

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}, but 1 or more is expected")
        if self.backoff < 0 or self.longest < 0:
            raise ValueError(f"backoff {self.backoff} and longest {self.longest} must be seconds, 0 or more")
        if self.keep_bytes < 0:
            raise ValueError(f"keep_bytes is {self.keep_bytes}, but 0 or more is expected")

    def pause(self, failed: int) -> float:
        """Seconds to wait after so many failed attempts."""
        return min(self.longest, self.backoff * 2.0 ** min(failed - 1, 60))

"""What requests cost: processor time of their handlers, waits left out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["MessageSpans"]


class MessageSpans:
    """Processor seconds of all requests. One clock for all of them: between `go` and `stop` nothing is awaited, so no
    other request runs on the event loop's thread."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.num_requests, self.num_errors, self.cpu_s, self._since = 0, 0, 0.0, 0.0

    def go(self) -> None:
        self._since = time.thread_time()

    def stop(self) -> None:
        self.cpu_s += time.thread_time() - self._since

    @contextmanager
    def away(self) -> Iterator[None]:
        """Around everything that a handler awaits."""
        self.stop()
        try:
            yield
        finally:
            self.go()

    def ended(self, status: int) -> None:
        self.stop()
        self.num_requests += 1
        self.num_errors += status >= 400

    def as_dict(self) -> dict[str, float]:
        mean_ms = 1000 * self.cpu_s / self.num_requests if self.num_requests else 0.0
        counts = {"num_requests": self.num_requests, "num_errors": self.num_errors}
        return counts | {"cpu_s": self.cpu_s, "cpu_mean_ms": mean_ms}

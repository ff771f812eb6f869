"""A router that also knows how long requests were with each replica."""

from __future__ import annotations

import time
from collections.abc import Callable

from torchtitan_rl.dispatch.router import Router

__all__ = ["TimedRouter"]


class TimedRouter(Router):
    """Routes as `Router` does. The times it sums up decide nothing."""

    def __init__(self, num_replicas: int, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(num_replicas)
        self._clock, self._since = clock, [clock()] * num_replicas
        """`_since`: per replica, the time of the last change of its requests."""
        self._in_flight_s = [0.0] * num_replicas
        self._answered = [0] * num_replicas

    def finished(self, index: int, num_requests: int, version: int | None) -> None:
        self._answered[index] += num_requests
        super().finished(index, num_requests, version)

    def times(self) -> list[tuple[float, int]]:
        """Per replica, the requests in flight summed over the seconds so far, and how many have been answered or given
        up. May be called from any thread."""
        now, last = self._clock(), zip(self._in_flight_s, self.loads, self._since, strict=True)
        sums = [spent + load * (now - since) for spent, load, since in last]
        return list(zip(sums, self._answered, strict=True))

    def _count(self, index: int, number: int) -> None:
        now = self._clock()
        self._in_flight_s[index] += self.loads[index] * (now - self._since[index])
        self._since[index] = now
        super()._count(index, number)

"""How many unanswered requests each replica has, and which replica has the fewest."""

from __future__ import annotations

from collections.abc import Sequence, Set
from heapq import heappop, heappush

__all__ = ["Loads"]

_FEW = 8  # replicas that are sooner looked at one by one


class Loads:
    """Numbers of requests by the index of a replica. `least` takes time logarithmic in the number of replicas, and
    linear in that of the less loaded replicas that may not be chosen."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)
        self.total = sum(numbers)
        self._begin()

    def add(self, index: int, number: int) -> None:
        """`number` more requests, or fewer where negative."""
        self.numbers[index] += number
        self.total += number
        heappush(self._heap, (self.numbers[index], index))
        if len(self._heap) > 8 * len(self.numbers):  # most entries are out of date
            self._begin()

    def least(self, among: Set[int]) -> int:
        """The replica of `among`, which is not empty, with the fewest requests; of equals, the lowest index."""
        if len(among) <= _FEW:
            return min(among, key=lambda index: (self.numbers[index], index))
        heap, others = self._heap, []
        while heap[0][1] not in among or heap[0][0] != self.numbers[heap[0][1]]:
            number, index = heappop(heap)
            if number == self.numbers[index]:
                others.append((number, index))
        chosen = heap[0][1]
        for entry in others:
            heappush(heap, entry)
        return chosen

    def _begin(self) -> None:
        self._heap = sorted((number, index) for index, number in enumerate(self.numbers))
        """Has each replica's number, and numbers that are out of date: `least` drops the ones that it meets."""

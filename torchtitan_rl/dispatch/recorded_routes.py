"""Which engines served which request of a recorded attempt, for its replay: replica i of the replay follows engine i of
the record, also one that was lost or that took a lost one's place."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from torchtitan_rl.record.schedule import ScheduleEntry, request_key
from torchtitan_rl.types import Request

__all__ = ["RecordedRoutes"]


class RecordedRoutes:
    """Routes of requests by what they ask. Of equal requests, the one that is made first has the first one's route."""

    def __init__(self, engines: Sequence[Sequence[ScheduleEntry]]) -> None:
        """`engines` has the commands of each engine."""
        admissions = sorted(
            (entry.at, index, number, key)
            for index, entries in enumerate(engines)
            for entry in entries
            for number, key in entry.requests
        )
        indices_by_request: dict[tuple[int, str], list[int]] = defaultdict(list)
        for _, index, number, key in admissions:
            indices_by_request[number, key].append(index)
        self._routes: dict[str, deque[list[int]]] = defaultdict(deque)
        for (_, key), indices in sorted(indices_by_request.items()):
            self._routes[key].append(indices)

    def route(self, request: Request) -> list[int]:
        """The engines that the request was in, in order: only the last one can have answered it. A request that is not
        in the record goes to the first engine."""
        routes = self._routes[request_key(request)]
        return routes.popleft() if routes else [0]

"""A recorded schedule that an engine follows: commands are executed after as many steps as the record says, in its
order, however early they come.

Where the record begins in the middle, at a load with requests under way, a company takes the place of these requests
after that load.

Requests are recognised by `record.schedule.request_key`. Of equal requests the first to come is the first in the
record. What the record does not have, such as requests that came to the recorded engine after its last step, or loads
that came to the others after it was killed, waits until the engine is idle at the end of the record.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from torchtitan_rl.engine.commands import AddRequests, CancelRequests, Command, JoinCompany, Load, LoadAdapters
from torchtitan_rl.record.schedule import Companion, ScheduleEntry, request_key
from torchtitan_rl.types import Request

__all__ = ["FollowedSchedule", "companion_number"]

logger = logging.getLogger(__name__)

_Received = tuple[Command, list[Future]]


class FollowedSchedule:
    """Holds the commands that have come until they are due."""

    def __init__(self, entries: Iterable[ScheduleEntry], company: Sequence[Companion] = ()) -> None:
        """`company`: of the requests that were under way at the first of the entries, a load."""
        self._entries = deque(entries)
        self._company = list(company)
        """Until it has joined."""
        if self._company:
            self._entries[0] = replace(self._entries[0], unfinished=0)
        self._due_requests = Counter(key for entry in self._entries for _, key in entry.requests)
        self._due_loads = Counter(entry.version for entry in self._entries if entry.version is not None)
        self._first_load = min(self._due_loads, default=None)
        self._has_loaded = self._has_ended = False
        self._numbers = {companion.number: companion_number(companion) for companion in self._company}
        """The number of a request in the record -> its number here."""
        self._requests: dict[str, deque[tuple[str, Request, Future]]] = defaultdict(deque)
        """By key, the requests that have come and are not admitted yet."""
        self._loads: dict[int, deque[_Received]] = defaultdict(deque)
        self._unrecorded: list[tuple[str, Request, Future]] = []
        self._at_once: deque[_Received] = deque()
        """Commands that no record has the moment of: sleep, wake, loads before the record's first, and all that come
        after its end."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to follow: the engine has been idle since the last command of the record."""
        return self._has_ended and not self._at_once

    def futures(self) -> list[Future]:
        """Of all commands that are held back."""
        loads = [futures for waiting in self._loads.values() for _, futures in waiting]
        command_futures = sum(loads + [futures for _, futures in self._at_once], [])
        return [future for *_, future in self._early_requests()] + command_futures

    def receive(self, command: Command, futures: list[Future]) -> None:
        """Takes a command that has come."""
        if self._has_ended:  # nothing else would give it: the last commands of the record are not executed yet
            self._at_once.append((command, futures))
        elif isinstance(command, AddRequests):
            for (request_id, request), future in zip(command.requests, futures, strict=True):
                key = request_key(request)
                is_due = self._due_requests[key] > 0
                self._due_requests[key] -= is_due
                (self._requests[key] if is_due else self._unrecorded).append((request_id, request, future))
        elif isinstance(command, Load | LoadAdapters) and self._waits(command):
            self._due_loads[command.version] -= 1
            self._loads[command.version].append((command, futures))
        else:
            self._at_once.append((command, futures))

    def _waits(self, load: Load | LoadAdapters) -> bool:
        """Whether a load is in the record, or would come after it. Adapters that the record does not have are loaded at
        once: they change no others."""
        is_later = isinstance(load, Load) and self._first_load is not None and load.version > self._first_load
        return is_later or self._due_loads[load.version] > 0

    def next(self, iteration: int, unfinished: int, *, has_work: bool) -> _Received | None:
        """The command to execute now, an empty one where a step is due first; None: the command that is due has not
        come. The arguments say where the engine is: where that is not what the record says, nothing is followed any
        further."""
        if self._at_once:
            return self._at_once.popleft()
        if self._company and self._has_loaded:
            company, self._company = self._company, []
            return JoinCompany(company, holds_step=True), []
        if not self._entries:  # what comes now would share steps with requests of the record
            return (AddRequests(), []) if has_work else self._released()
        entry = self._entries[0]
        if entry.iteration > iteration and has_work:
            return AddRequests(), []
        if (entry.iteration, entry.unfinished) != (iteration, unfinished):
            return self.part(
                f"at iteration {iteration} it has {unfinished} requests; the record has {entry.unfinished} at "
                f"iteration {entry.iteration}"
            )
        if self.awaited():
            return None
        self._entries.popleft()
        if entry.cancelled:
            numbers = [self._numbers[number] for number in entry.cancelled if number in self._numbers]
            return CancelRequests(numbers, holds_step=True), []
        if entry.version is not None:
            self._has_loaded = True
            command, futures = self._loads[entry.version].popleft()
            if entry.slot is not None:
                command = LoadAdapters(entry.version, entry.slot)
            return replace(command, holds_step=True), futures
        admitted = [self._requests[key].popleft() for _, key in entry.requests]
        self._numbers |= {number: request.number for (number, _), (_, request, _) in zip(entry.requests, admitted)}
        for (_, request, _), version in zip(admitted, entry.adapters):
            request.adapter = version  # the one that was served when it came: here it may have come earlier or later
        return _admission(admitted)

    def awaited(self) -> str:
        """What the next command of the record waits for; empty: nothing."""
        entry = self._entries[0]
        if entry.version is not None:
            return "" if self._loads[entry.version] else f"the load of version {entry.version}"
        needed = Counter(key for _, key in entry.requests)
        missing = sum(max(0, number - len(self._requests[key])) for key, number in needed.items())
        return f"{missing} of {len(entry.requests)} requests" if missing else ""

    def part(self, why: str) -> _Received:
        """Follows no further, and gives the requests that were held back."""
        logger.warning("replay: the record is followed no further: %s", why, extra={"event": "replay_parted"})
        self._entries.clear()
        return self._released()

    def _released(self) -> _Received:
        self._has_ended, early = True, self._early_requests()
        self._at_once += [
            (replace(command, holds_step=True), futures)
            for _, waiting in sorted(self._loads.items())
            for command, futures in waiting
        ]
        for waiting_for_record in (self._requests, self._loads, self._unrecorded):
            waiting_for_record.clear()
        return _admission(sorted(early, key=lambda request: int(request[0])))

    def _early_requests(self) -> list[tuple[str, Request, Future]]:
        """The requests that have come and are not admitted yet."""
        return [request for waiting in self._requests.values() for request in waiting] + self._unrecorded


def companion_number(companion: Companion) -> int:
    """`Request.number` of a companion: negative, so that no request has it."""
    return -1 - companion.number


def _admission(requests: list[tuple[str, Request, Future]]) -> _Received:
    futures = [future for *_, future in requests]
    return AddRequests([(request_id, request) for request_id, request, _ in requests], holds_step=True), futures

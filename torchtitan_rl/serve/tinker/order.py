"""The requests of one model, in the order of their numbers, whatever order they arrive in; the room for what waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from torchtitan_rl.serve.errors import Refused
from torchtitan_rl.serve.tinker.faults import Fault, user
from torchtitan_rl.serve.tinker.futures import Futures, ReadyBody

__all__ = ["InOrder", "QueueRoom"]

Start = Callable[[], Awaitable[Awaitable[ReadyBody]]]
"""Submits a request to the trainer, then gives what waits for its answer."""

_FAR = 100_000  # numbers ahead of the next


@dataclass(kw_only=True, slots=True)
class QueueRoom:
    """How many requests, and bytes of them, may be held; `whole` is the room of all models, of which this one is a
    part."""

    max_requests: int
    max_bytes: int
    whole: QueueRoom | None = None
    requests: int = field(default=0, init=False)
    nbytes: int = field(default=0, init=False)

    def lacks(self, nbytes: int) -> str:
        """Why a request of so many bytes does not fit; empty where it does."""
        if self.requests + 1 > self.max_requests or self.nbytes + nbytes > self.max_bytes:
            may = f"{self.max_requests} of {self.max_bytes} may be"
            return f"{self.requests} requests of {self.nbytes} bytes are held, and {may}"
        return "" if self.whole is None else self.whole.lacks(nbytes)

    def take(self, nbytes: int) -> None:
        self.requests, self.nbytes = self.requests + 1, self.nbytes + nbytes
        if self.whole is not None:
            self.whole.take(nbytes)

    def give(self, nbytes: int) -> None:
        self.requests, self.nbytes = self.requests - 1, self.nbytes - nbytes
        if self.whole is not None:
            self.whole.give(nbytes)


@dataclass(slots=True)
class _Waiting:
    request_id: str
    start: Start
    nbytes: int


class InOrder:
    """Starts each request once those before it were submitted; does not wait for their answers.

    A number that stays away holds those behind it back for `gap_s` seconds. Then they fail, and the next number counts
    on from them. A request that is refused takes no number.
    """

    def __init__(self, futures: Futures, *, ahead: QueueRoom, started: QueueRoom, gap_s: float = 360.0) -> None:
        """`ahead`: the room for requests whose turn has not come; `started`: for those that are not answered yet."""
        self._futures, self._gap_s = futures, gap_s
        self._next = 1
        """The number that is awaited; all before it have begun."""
        self._ahead, self._started = ahead, started
        self._waiting: dict[int, _Waiting] = {}
        self._given_up: set[int] = set()
        """The numbers that stayed away for too long."""
        self._changed = asyncio.Event()
        self._task: asyncio.Task | None = None
        self.closed = ""
        """Why no request is taken any more; empty while some are."""

    def submit(self, seq_id: int, request_id: str, start: Start, *, nbytes: int = 0) -> str:
        """Takes a request of `nbytes` in memory. Returns the id of its future: `request_id`, or another one for a
        request that is refused. One whose number has been is the same request again: nothing runs. Raises Refused (429)
        where there is no room for the request now."""
        if request_id in self._futures:
            return request_id
        if fault := self._fault(seq_id):
            return self._futures.refuse(fault)
        number = seq_id or self._unnumbered()
        room = self._started if number == self._next else self._ahead
        if (lack := room.lacks(nbytes)) and (number > self._next or room.requests):
            why = "wait for answers" if number == self._next else f"send seq_id={self._next} first"
            raise Refused(429, f"seq_id={number}: {lack}; {why}", code="rate_limit_exceeded")
        self._futures.reserve(request_id)
        self._waiting[number] = _Waiting(request_id, start, nbytes)
        self._ahead.take(nbytes)
        self._changed.set()
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())
        return request_id

    def _fault(self, seq_id: int) -> Fault | None:
        """Why a number is not taken."""
        if self.closed:
            return user(self.closed)
        if seq_id in self._given_up:
            return user(
                f"seq_id={seq_id}: did not come for {self._gap_s:g} s, and those behind it failed; nothing was done "
                f"for it; send the next, {self._next}"
            )
        if seq_id and seq_id < self._next:
            return user(f"seq_id={seq_id}: has been answered, and its answer expired; send the next, {self._next}")
        if seq_id - self._next > _FAR:
            return user(f"seq_id={seq_id}: is far ahead of the next, {self._next}; count on")
        if seq_id in self._waiting:
            return user(f"seq_id={seq_id}: a request without a number has taken it; number all requests of a model")
        return None

    def _unnumbered(self) -> int:
        """The number for a request without one: the first that is free."""
        number = self._next
        while number in self._waiting:
            number += 1
        return number

    async def _run(self) -> None:
        while True:
            gap_began: float | None = None
            while self._next not in self._waiting:
                self._changed.clear()
                if gap_began is None and self._waiting:
                    gap_began = asyncio.get_running_loop().time()
                try:
                    async with asyncio.timeout_at(None if gap_began is None else gap_began + self._gap_s):
                        await self._changed.wait()
                except TimeoutError:
                    self._give_up()
                    gap_began = None
            request = self._taken(self._next)
            self._next += 1
            self._started.take(request.nbytes)
            try:
                answering = await request.start()
            except Exception as error:
                self._started.give(request.nbytes)
                self._futures.fail(request.request_id, error)
            except asyncio.CancelledError:  # the model is closed
                self._started.give(request.nbytes)
                self._futures.fail(request.request_id, user(self.closed))
                raise
            else:
                self._futures.start(request.request_id, self._answered(answering, request.nbytes))

    async def _answered(self, answering: Awaitable[ReadyBody], nbytes: int) -> ReadyBody:
        try:
            return await answering
        finally:
            self._started.give(nbytes)

    def _taken(self, number: int) -> _Waiting:
        """A request that no longer waits."""
        request = self._waiting.pop(number)
        self._ahead.give(request.nbytes)
        return request

    def _give_up(self) -> None:
        missing, waiting = self._next, sorted(self._waiting)
        self._given_up |= set(range(missing, waiting[-1])) - set(waiting)
        for seq_id in waiting:
            self._futures.fail(
                self._taken(seq_id).request_id,
                user(f"seq_id={seq_id}: waited {self._gap_s:g} s for seq_id={missing}, which never came; send all"),
            )
        self._next = waiting[-1] + 1

    def close(self, why: str) -> None:
        """Fails what waits; later requests fail with the same sentence."""
        self.closed = why
        for number in list(self._waiting):
            self._futures.fail(self._taken(number).request_id, user(why))
        if self._task is not None:
            self._task.cancel()

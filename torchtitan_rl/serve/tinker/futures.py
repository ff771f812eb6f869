"""Answers that are fetched later: a request gets an id at once, its answer is asked for until it is there.

An id is made from the kind of the request, who asks and the request's number, so a request that is sent again is the
same future: it runs once. A request that is refused gets an id that no other request has.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from torchtitan_rl.serve.tinker.faults import Fault, fault_of, server, user

__all__ = ["ReadyBody", "Futures", "Shelf"]

_LOOK_S = 1.0  # between two looks for answers that have expired
_MAX_KEPT, _MAX_KEPT_BYTES = 2**16, 2**30  # answers of a server; beyond them the oldest are dropped


@dataclass(kw_only=True, slots=True)
class ReadyBody:
    """A body that is ready."""

    content: bytes
    kind: str = "json"
    """`"json"`, or a protobuf message: `"outputs"` of a forward pass, or `"sample"`."""


@dataclass(slots=True)
class _Future:
    answer: asyncio.Future[ReadyBody | Fault]
    expires: float = float("inf")


class Shelf:
    """The answers that all owners of a server keep. Where there are too many, the owner with the most loses the oldest:
    nobody loses an answer because another owner asks for much."""

    def __init__(self) -> None:
        self._owners: list[Futures] = []

    def share(self, futures: Futures) -> None:
        self._owners.append(futures)

    def bound(self) -> None:
        """Drops answers until no more are kept than may be. The last one stays, however long it is."""
        while (number := sum(owner.num_kept for owner in self._owners)) > 1:
            if number > _MAX_KEPT:
                most = max(self._owners, key=lambda owner: owner.num_kept)
            elif sum(owner.kept_bytes for owner in self._owners) > _MAX_KEPT_BYTES:
                most = max(self._owners, key=lambda owner: owner.kept_bytes)
            else:
                return
            most.drop_oldest()


class Futures:
    """The futures of an owner, by id."""

    def __init__(
        self,
        shelf: Shelf | None = None,
        *,
        kept_s: float = 3600.0,
        kept_fetched_s: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """An answer is kept for `kept_s` seconds, one that was fetched for `kept_fetched_s`: an answer may be lost on
        its way. `shelf`: shared with the other owners; None: there are none."""
        self._shelf = shelf or Shelf()
        self._shelf.share(self)
        self._kept_s, self._kept_fetched_s, self._clock = kept_s, kept_fetched_s, clock
        self._futures: dict[str, _Future] = {}
        self._looked = clock()
        self._ended: dict[str, int] = {}
        """Bytes of the answers that are kept, oldest first."""
        self.kept_bytes = 0
        self._tasks: set[asyncio.Task] = set()
        self.on_server_fault: Callable[[Exception], None] = lambda error: None
        """Told of every failure that is not a request's."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._futures

    def __len__(self) -> int:
        return len(self._futures)

    def reserve(self, request_id: str) -> None:
        """Makes a future that `start` or `fail` ends."""
        self._futures[request_id] = _Future(asyncio.get_running_loop().create_future())

    def refuse(self, fault: Fault) -> str:
        """The id of a future of its own, which has ended with a fault."""
        request_id = f"refused/{secrets.token_hex(8)}"
        self.reserve(request_id)
        self.fail(request_id, fault)
        return request_id

    def start(self, request_id: str, answering: Awaitable[ReadyBody]) -> None:
        """Ends a future, which may be reserved already, with what an awaitable gives or raises."""
        if request_id not in self._futures:
            self.reserve(request_id)
        task = asyncio.ensure_future(self._run(request_id, answering))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, request_id: str, answering: Awaitable[ReadyBody]) -> None:
        try:
            self._end(request_id, await answering)
        except asyncio.CancelledError:
            self._end(request_id, server("the server stopped before the request was done; send it again"))
            raise
        except Exception as error:
            self.fail(request_id, error)

    def fail(self, request_id: str, error: Exception) -> None:
        """Ends a future with the fault that an exception stands for."""
        fault = fault_of(error)
        if fault.category == "server":
            self.on_server_fault(error)
        self._end(request_id, fault)

    def _end(self, request_id: str, answer: ReadyBody | Fault) -> None:
        future = self._futures.get(request_id)
        if future is not None and not future.answer.done():
            future.answer.set_result(answer)
            future.expires = self._clock() + self._kept_s
            self._keep(request_id, len(answer.content) if isinstance(answer, ReadyBody) else len(answer.message))

    def _keep(self, request_id: str, nbytes: int) -> None:
        """Counts an answer, and drops old ones where there are too many."""
        self._ended[request_id] = nbytes
        self.kept_bytes += nbytes
        self._shelf.bound()

    @property
    def num_kept(self) -> int:
        """Answers that are kept."""
        return len(self._ended)

    def drop_oldest(self) -> None:
        """Forgets the answer that is kept longest."""
        self._drop(next(iter(self._ended)))

    def _drop(self, request_id: str) -> None:
        del self._futures[request_id]
        self.kept_bytes -= self._ended.pop(request_id)

    async def fetch(self, request_id: str, timeout_s: float) -> ReadyBody | Fault | None:
        """The answer; None: it was not there within `timeout_s`. Raises Fault (user) for an id without a future."""
        self._expire()
        if (future := self._futures.get(request_id)) is None:
            raise user(
                f"request_id={request_id[:120]!r}: is not known: its answer has expired, or the server was started "
                "again since; load the last state that was saved, and send the request again"
            )
        if not future.answer.done():
            await asyncio.wait([future.answer], timeout=timeout_s)
            if not future.answer.done():
                return None
        future.expires = min(future.expires, self._clock() + self._kept_fetched_s)
        return future.answer.result()

    def _expire(self) -> None:
        if (now := self._clock()) - self._looked < _LOOK_S:
            return
        self._looked = now
        for request_id in [name for name, future in self._futures.items() if future.expires <= now]:
            self._drop(request_id)

    async def close(self) -> None:
        """Cancels what is not done; its futures fail as the server's."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

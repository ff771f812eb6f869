"""A worker in this process, called the way `RoleMesh` calls workers in processes of their own."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Awaitable, Sequence
from contextlib import nullcontext
from typing import Any

from torchtitan_rl.actors.operations import Operation
from torchtitan_rl.dispatch.role_mesh import WorkerLost, describe, late
from torchtitan_rl.record.tracing import span

__all__ = ["LocalMesh"]

_TICK_S = 1.0


class LocalMesh:
    """One rank without an actor. The methods of `worker` do the operations, and run on the event loop's thread.

    `in_order`: calls run one at a time, in the order they were made, as a trainer's calls do. Calls of a generator
    overlap. Answers are copies, as answers of another process would be. A method that is no coroutine runs to its end:
    no deadline ends the call, only the user's Ctrl-C.
    """

    num_ranks = data_parallel_size = 1

    def __init__(self, role: str, worker: Any, *, timeout_s: float, in_order: bool):
        self.role, self.timeout_s = role, timeout_s
        self._worker = worker
        self._turn = asyncio.Lock() if in_order else nullcontext()

    def call_split(self, operation: Operation, shards: Sequence[Any], *args) -> asyncio.Future:
        """Calls the one data-parallel rank with the one shard; the answer in a list. Raises ValueError for another
        number of shards."""
        if len(shards) != 1:
            raise ValueError(f"{self.role}.{operation.__name__}: {len(shards)} shards for 1 data-parallel ranks")
        return self.call_each(operation, shards[0], *args)

    def call_each(self, operation: Operation, *args, timeout_s: float | None = None) -> asyncio.Future[list]:
        """Calls the one rank; the answer in a list."""
        call = self.call_all(operation, *args, timeout_s=timeout_s)

        async def listed() -> list:
            return [await call]

        return asyncio.ensure_future(listed())

    def call_all(self, operation: Operation, *args, timeout_s: float | None = None) -> asyncio.Future:
        """Calls the one rank; the answer. The call takes its place in the order of calls before `call_all` returns."""
        return asyncio.ensure_future(self._call(operation, args, timeout_s or self.timeout_s))

    def call_rank(self, rank: int, operation: Operation, *args, timeout_s: float | None = None) -> asyncio.Future:
        """The same as `call_all`: rank 0 is the one rank."""
        assert rank == 0, f"a local mesh has one rank, not {rank}"
        return self.call_all(operation, *args, timeout_s=timeout_s)

    def call_leader(self, operation: Operation, *args, timeout_s: float | None = None) -> asyncio.Future:
        """The same as `call_all`: the one rank leads."""
        return self.call_all(operation, *args, timeout_s=timeout_s)

    async def _call(self, operation: Operation, args: tuple, timeout_s: float) -> Any:
        name = f"{self.role}-0.{operation.__name__}"
        try:
            with span(f"wait for {self.role}.{operation.__name__}", ranks=1):
                return await self._answer(operation, args, timeout_s, name)
        except WorkerLost:
            raise
        except Exception as error:
            raise RuntimeError(f"{name}: {describe(error)}") from error

    async def _answer(self, operation: Operation, args: tuple, timeout_s: float, name: str) -> Any:
        async with self._turn:
            answer = getattr(self._worker, operation.__name__)(*args)
            if inspect.isawaitable(answer):
                answer = await _within(answer, timeout_s, name)
            return copy.deepcopy(answer)  # before the next call, which may change the worker's tensors


async def _within(call: Awaitable, timeout_s: float, call_name: str) -> Any:
    """The result of a call. Raises NoAnswer once `timeout_s` have passed; a breakpoint stops this clock. The call is
    not cancelled: the engine's thread would answer all the same."""
    task, left = asyncio.ensure_future(call), timeout_s
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # read, so that asyncio does not warn
    while left > 0:
        done, _ = await asyncio.wait([task], timeout=min(_TICK_S, left))
        if done:
            return task.result()
        left -= _TICK_S
    raise late(call_name, timeout_s)

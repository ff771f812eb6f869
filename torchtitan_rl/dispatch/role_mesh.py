"""A mesh of workers of one role. A call gives every data-parallel rank a shard of its own, or every rank the same."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torchtitan_rl.actors.operations import GeneratorOperations, Operation, WorkerProcess
from torchtitan_rl.record.tracing import span

__all__ = ["RoleMesh", "WorkerLost", "NoAnswer", "ProcessDied", "deadline", "describe", "late"]

_WATCH_EVERY_S = 1.0
"""Seconds between two messages to each rank behind rank 0 while rank 0 answers for the mesh."""
_LOOK_EVERY_S = 0.5
"""Seconds between two looks at the processes of the ranks that a call waits for; a look reads /proc."""
_BLAME_S = 3.0
"""Seconds that the ranks get to answer once a call has failed. When a rank dies, collectives fail on the others, and
their errors may arrive before Monarch notices the death, which takes a second."""
_DEADLINES = "controller.*_timeout_s"
"""The settings that have the deadlines of calls."""


class WorkerLost(RuntimeError):
    """A call will get no answer: `NoAnswer` or `ProcessDied`."""


class NoAnswer(WorkerLost):
    """The deadline passed, or the worker cannot be reached; nobody knows whether its process lives."""


class ProcessDied(WorkerLost):
    """The worker's process died before the call was answered."""


def late(call_name: str, timeout_s: float, setting: str = _DEADLINES) -> NoAnswer:
    """The error of a call whose deadline, which `setting` has, has passed."""
    return NoAnswer(
        f"{call_name}: no answer within {timeout_s:g} s; look at its log, or raise the deadline in {setting}"
    )


async def deadline(call, timeout_s: float, call_name: str, setting: str = _DEADLINES) -> Any:
    """The result of an awaitable call. Raises RuntimeError naming `call_name` when the call fails, NoAnswer when no
    answer comes within `timeout_s`, which `setting` has, ProcessDied when the worker's process has died."""
    try:
        return await asyncio.wait_for(_awaited(call), timeout_s)
    except TimeoutError:
        raise late(call_name, timeout_s, setting) from None
    except Exception as error:
        # Monarch's errors by their names: a run in one process does without Monarch.
        if type(error).__name__ == "ActorError":
            raise RuntimeError(f"{call_name}: {describe(getattr(error, 'exception', None) or error)}") from error
        if type(error).__name__ == "SupervisionError":
            raise ProcessDied(f"{call_name}: its process died ({_reason(error)}); see its log") from error
        raise


async def _awaited(call):
    return await call


def describe(error: BaseException) -> str:
    """A worker's exception in one line. The traceback stays in the `__cause__` of the error that quotes the line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:500] if text else type(error).__name__}"


def _has_ended(pid: int) -> bool:
    """Whether a process of this machine is gone, or is a zombie that its parent has not collected. False where that
    cannot be read, as where this process may open no further file."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False


def _reason(error: BaseException) -> str:
    """The last line of Monarch's report. The lines before it name actors by their addresses."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:500] if lines else type(error).__name__


def _call(worker: Any, operation: Operation, *args) -> Any:
    """Sends a call to one rank. An actor's endpoints have the names of the operations."""
    return getattr(worker, operation.__name__).call_one(*args)


class RoleMesh:
    """Workers of one role (`policy`, `reference`, `critic`, `teacher`, `reward_model` or one generator replica), ranks
    ordered data-parallel major. A call of an operation goes to the actors' endpoint of the operation's name.

    On several hosts, `hosts` holds the address of each rank's host, for errors, and `lost_hosts` returns the hosts that
    do not answer. `stopped` names the processes of the run on this machine that somebody has stopped (SIGSTOP).
    """

    def __init__(
        self,
        role: str,
        actors: Any,
        *,
        num_ranks: int,
        tensor_parallel_size: int,
        timeout_s: float,
        hosts: Sequence[str] = (),
        lost_hosts: Callable[[], Awaitable[list[str]]] | None = None,
        stopped: Callable[[], list[str]] = list,
    ):
        self.role, self.timeout_s = role, timeout_s
        self.hosts, self._lost_hosts, self._stopped = hosts, lost_hosts, stopped
        self.num_ranks, self._tp = num_ranks, tensor_parallel_size
        self.pids: Sequence[int] = ()
        """The processes of the ranks, where they are on this machine: their end is seen here. Monarch mostly notices it
        within a second too, but where it depends on silence only after 8 s."""
        self.data_parallel_size = num_ranks // tensor_parallel_size
        self._workers = [actors.flatten("rank").slice(rank=rank) for rank in range(num_ranks)]

    def call_split(self, operation: Operation, shards: Sequence[Any], *args) -> asyncio.Future:
        """Each data-parallel rank gets its shard, and so does every tensor-parallel rank in it. Answers are in shard
        order.

        `call_split` sends the messages before it returns, so calls reach the workers in the order they are made.
        Raises ValueError when the number of shards is not `data_parallel_size`.
        """
        if len(shards) != self.data_parallel_size:
            raise ValueError(
                f"{self.role}.{operation.__name__}: {len(shards)} shards for {self.data_parallel_size} data-parallel "
                "ranks"
            )
        with span(f"send {self.role}.{operation.__name__}"):
            calls = [
                _call(worker, operation, shards[rank // self._tp], *args) for rank, worker in enumerate(self._workers)
            ]
        waiting = self._waiting(operation, self.num_ranks)

        async def gather() -> list:
            answers = await self._all(operation, range(self.num_ranks), calls, waiting)
            return answers[:: self._tp]

        return asyncio.ensure_future(gather())

    def call_each(self, operation: Operation, *args, timeout_s: float | None = None) -> asyncio.Future[list]:
        """Every rank gets the same arguments. Returns all answers, in rank order."""
        with span(f"send {self.role}.{operation.__name__}"):
            calls = [_call(worker, operation, *args) for worker in self._workers]
        waiting = self._waiting(operation, self.num_ranks)
        return asyncio.ensure_future(self._all(operation, range(self.num_ranks), calls, waiting, timeout_s))

    def call_all(self, operation: Operation, *args, timeout_s: float | None = None) -> asyncio.Future:
        """Every rank gets the same arguments. Returns the one answer; raises RuntimeError when ranks disagree."""
        each = self.call_each(operation, *args, timeout_s=timeout_s)

        async def gather():
            answers = await each
            if any(repr(answer) != repr(answers[0]) for answer in answers[1:]):
                raise RuntimeError(f"{self.role}.{operation.__name__}: ranks disagree: {answers}")
            return answers[0]

        return asyncio.ensure_future(gather())

    def call_rank(self, rank: int, operation: Operation, *args, timeout_s: float | None = None):
        """Calls one rank. Returns its answer as an awaitable."""
        with span(f"send {self.role}.{operation.__name__}"):
            call = _call(self._workers[rank], operation, *args)
        waiting = self._waiting(operation, 1)

        async def one():
            return (await self._all(operation, [rank], [call], waiting, timeout_s))[0]

        return one()

    async def call_leader(self, operation: Operation, *args, timeout_s: float | None = None):
        """Calls rank 0, which answers for the mesh. Raises WorkerLost when any rank has died: rank 0 would wait forever
        for the dead rank."""
        calls = [asyncio.ensure_future(self.call_rank(0, operation, *args, timeout_s=timeout_s))]
        calls += [asyncio.ensure_future(self._watch(rank)) for rank in range(1, self.num_ranks)]
        try:
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            return next(call for call in calls if call.done()).result()
        finally:
            for call in calls:
                if not call.cancel() and not call.cancelled():
                    call.exception()  # read, so that asyncio does not warn

    async def _watch(self, rank: int) -> None:
        """Never returns. Raises WorkerLost soon after the rank's process has died."""
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            await self.call_rank(rank, WorkerProcess.pid)

    def _waiting(self, operation: Operation, num_ranks: int) -> AbstractContextManager:
        """The wait for the answers of a call, from when it is sent: the ranks may begin before a task here runs."""
        return span(f"wait for {self.role}.{operation.__name__}", ranks=num_ranks)

    async def _all(
        self,
        operation: Operation,
        ranks: Sequence[int],
        calls: list,
        waiting: AbstractContextManager,
        timeout_s: float | None = None,
    ) -> list:
        setting = "generator.hang_timeout_s" if operation is GeneratorOperations.probe else _DEADLINES
        waits = [
            asyncio.ensure_future(deadline(call, timeout_s or self.timeout_s, self._name(rank, operation), setting))
            for rank, call in zip(ranks, calls, strict=True)
        ]
        try:
            with waiting:
                done, left = await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION, timeout=_LOOK_EVERY_S)
                while left and not any(wait.exception() for wait in done):
                    self._refuse_ended(operation, ranks)
                    done, left = await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION, timeout=_LOOK_EVERY_S)
            errors = [wait.exception() for wait in done if wait.exception()]
            if errors:
                raise await self._culprit(operation, errors[0])
            return [wait.result() for wait in waits]
        finally:
            for wait in waits:
                if not wait.cancel() and not wait.cancelled():
                    wait.exception()  # read, so that asyncio does not warn

    def _refuse_ended(self, operation: Operation, ranks: Sequence[int]) -> None:
        for rank in ranks if self.pids else ():
            if _has_ended(self.pids[rank]):
                raise ProcessDied(f"{self._name(rank, operation)}: its process died; see its log")

    def _name(self, rank: int, operation: Operation) -> str:
        return f"{self.role}-{rank}.{operation.__name__}" + (f" on {self.hosts[rank]}" if self.hosts else "")

    async def _culprit(self, operation: Operation, first: BaseException) -> BaseException:
        """The error to raise for a failed call: names a lost host if there is one, else a stopped process, else a dead
        process; else `first`."""
        name = f"{self.role}.{operation.__name__}"
        if self._lost_hosts is not None and (lost := await self._lost_hosts()):
            return ProcessDied(f"{name}: host {', '.join(lost)} is gone: its worker does not answer ({first})")
        if stopped := self._stopped():  # Monarch takes a stopped process for a dead one
            kind = NoAnswer if isinstance(first, WorkerLost) else RuntimeError
            return kind(f"{name}: no answer, {', '.join(stopped)} is stopped (SIGSTOP): {first}")
        if isinstance(first, ProcessDied):
            return first
        # The rank that died may have answered the call first, so ask every rank. A rank that is busy, or waits for the
        # dead rank, does not answer within _BLAME_S, which blames nobody.
        answers = await asyncio.gather(
            *(
                deadline(worker.pid.call_one(), _BLAME_S, self._name(rank, operation))
                for rank, worker in enumerate(self._workers)
            ),
            return_exceptions=True,
        )
        return next((answer for answer in answers if isinstance(answer, ProcessDied)), first)

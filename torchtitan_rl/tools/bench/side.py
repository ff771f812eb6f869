"""A side of a comparison: a process of its own, started once, that does a piece of work whenever it is asked.

Sides stay alive beside each other, so that all of them are warm and take turns: a machine whose speed drifts slows them
alike. An idle side waits for its pipe and computes nothing.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from torchtitan_rl.record.user_code import error_text
from torchtitan_rl.tools.bench.measurement import Repeat
from torchtitan_rl.tools.bench.workload import Lengths

__all__ = ["Amount", "Once", "OpenSide", "Side", "in_turn", "opened"]

Amount = Lengths | int
"""How much work: a batch with lengths of this distribution, or so many groups."""
Once = Callable[[Any, int], Awaitable[Repeat]]
"""Does an `Amount` of work of the kind that the side knows, in the form of this repeat."""
OpenSide = Callable[[], AbstractAsyncContextManager[Once]]
"""Starts what a side needs, in the side's process, and ends it. A pickle carries it there."""

_START_S, _ONCE_S = 600.0, 1200.0
_END_S, _ABORT_S = 60.0, 10.0
"""Seconds in which a side ends in order: after its work, and after a failure."""


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str


class Side:
    """A side's process, seen by who asks. It starts at once; `wait_ready` says when it can work."""

    def __init__(self, name: str, open_side: OpenSide, log: Path, temporary: str) -> None:
        """`log` gets everything that the side and its processes print. `temporary` is its directory of temporary files:
        vLLM leaves one there."""
        self.name, self._log = name, log
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(open_side, theirs, str(log), temporary), name=name)
        self._process.start()
        theirs.close()

    def wait_ready(self) -> None:
        self._answer(_START_S, "its start")

    def once(self, amount: Amount, repeat: int) -> Repeat:
        with suppress(ConnectionError):  # it has ended, and the answer says why
            self._connection.send((amount, repeat))
        work = f"{amount} groups" if isinstance(amount, int) else f"{amount} lengths"
        return self._answer(_ONCE_S, f"repeat {repeat} with {work}")

    def _answer(self, seconds: float, work: str):
        """The next message. Raises RuntimeError, which names a copy of the log, where none comes in time or at all."""
        if not self._connection.poll(seconds):
            raise RuntimeError(self._problem(f"{work} took more than {seconds:g} s"))
        try:
            answer = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join(_END_S)
            raise RuntimeError(self._problem(f"{work}: its process ended ({self._process.exitcode})")) from None
        if isinstance(answer, _Failure):
            raise RuntimeError(self._problem(f"{work}: {answer.text}"))
        return answer

    def _problem(self, reason: str) -> str:
        """An error that names a copy of the log, which outlives the bench; no log where the process printed none."""
        from torchtitan_rl.train.start import dated

        if not self._log.exists():  # it ended before it began
            return f"side={self.name!r}: {reason}; it has printed nothing"
        log_copy = Path(dated("bench"), self._log.name)
        log_copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self._log, log_copy)
        return f"side={self.name!r}: {reason}; what it printed is in {log_copy}"

    def close(self, within_s: float) -> None:
        """Ends the side in order, and kills what is left of its processes after `within_s` seconds."""
        processes = self.processes()
        with suppress(ConnectionError):
            self._connection.send(None)
        self._connection.close()
        self._process.join(within_s)
        if self._process.is_alive():
            processes |= self.processes()
            self._process.kill()
            self._process.join()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def processes(self) -> set[psutil.Process]:
        """The side's process and all that it has started."""
        try:
            own = psutil.Process(self._process.pid)
            return {own, *own.children(recursive=True)}
        except psutil.NoSuchProcess:
            return set()


@contextmanager
def opened(sides: dict[str, OpenSide], logs: Path) -> Iterator[list[Side]]:
    """The sides by name, ready. All of them start at the same time."""
    logs.mkdir(parents=True, exist_ok=True)
    processes: list[Side] = []
    within_s = _ABORT_S
    # Not beside the logs: Monarch's sockets are in this directory, and a socket's path has at most 108 characters.
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-", ignore_cleanup_errors=True) as temporary:
        try:
            for name, open_side in sides.items():
                processes.append(Side(name, open_side, logs / f"{name.replace(' ', '-')}.log", temporary))
            for side in processes:
                side.wait_ready()
            yield processes
            within_s = _END_S
        finally:
            for side in processes:
                side.close(within_s)


def in_turn(
    sides: Sequence[Side], all_lengths: Iterable[Lengths], repeats: int, note: Callable[[str], None]
) -> dict[Lengths, dict[str, list[Repeat]]]:
    """Lengths -> side -> `repeats` repeats. One more before them warms up and does not count. Each round begins with
    another side."""
    measured: dict[Lengths, dict[str, list[Repeat]]] = {}
    for lengths in all_lengths:
        measured[lengths] = {side.name: [] for side in sides}
        for repeat in range(repeats + 1):
            note(f"{lengths} lengths, " + (f"repeat {repeat} of {repeats}" if repeat else "warming up"))
            first = repeat % len(sides)
            for side in [*sides[first:], *sides[:first]]:
                done = side.once(lengths, repeat)
                if repeat:
                    measured[lengths][side.name].append(done)
    return measured


def _serve(open_side: OpenSide, connection: Connection, log: str, temporary: str) -> None:
    """The life of a side's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to every process of a terminal; the bench ends its sides
    stream, code = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 0
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    os.environ["TMPDIR"] = temporary
    try:
        asyncio.run(_work(open_side, connection))
    except BaseException as error:  # any error at all: who asks would wait for an answer
        code = 1
        traceback.print_exc()
        with suppress(OSError):
            connection.send(_Failure(error_text(error)))
    os._exit(code)  # threads of Monarch or vLLM must not keep a side alive


async def _work(open_side: OpenSide, connection: Connection) -> None:
    async with open_side() as once:
        connection.send("ready")
        while (order := await asyncio.to_thread(_received, connection)) is not None:
            connection.send(await once(*order))


def _received(connection: Connection) -> tuple[Amount, int] | None:
    """The next order; None where there will be none."""
    try:
        return connection.recv()
    except (EOFError, ConnectionError):  # the bench has ended without a word
        return None

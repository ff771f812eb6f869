"""Processes for rewards that compute: they use other cores, can be ended in the middle, and end with the run.

A regular expression that never comes back holds Python's lock, so a thread that runs it stops everything else and
cannot be stopped; a process can.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import cloudpickle

from torchtitan_rl import platform
from torchtitan_rl.tasks.outcomes import Outcome, outcome_in_thread, until

__all__ = ["Pool", "RewardProcess", "RewardProcessError", "cpu_bound", "outcome_in_process"]

MAX_PROCESSES = 16
"""At most; fewer where there are fewer cores. They are started as they are needed."""
START_S = 120.0
"""For a process to start and to import what a reward function needs; not part of the function's own deadline."""


def cpu_bound(function: Callable) -> Callable:
    """Marks a reward function that computes rather than waits: it runs in a process, which is ended when it is late.

    The function, its task and what it returns are pickled, functions of a config file and lambdas included. It sees
    no other state of this process, and what it changes is not seen here. Raises ValueError for an async function.

    Example::

        @cpu_bound
        def reward(task, completions):
            return [float(sympy.simplify(completion) == task.answer) for completion in completions]
    """
    if inspect.iscoroutinefunction(function):
        raise ValueError(
            f"cpu_bound={function.__qualname__}: is async, so it waits and does not compute; leave the mark out"
        )
    function.cpu_bound = True  # type: ignore[attr-defined]  # a mark on the user's function
    return function


async def outcome_in_process(function: Callable, args: tuple, timeout_s: float) -> Outcome:
    """What a function gave when it was called in a process of this thread's pool. Raises TimeoutError.

    The deadline counts from when a process has the function: a call that waits for a free process is not late yet.
    """
    async with _pool.slot():
        process = _pool.take()
        try:
            loaded = outcome_in_thread(process.load, function)
            try:
                value, error = await until(loaded, time.monotonic() + START_S)
            except TimeoutError:
                return None, RewardProcessError(f"was not loaded by a process within {START_S:g} s")
            if error is None:
                value, error = await until(outcome_in_thread(process.call, *args), time.monotonic() + timeout_s)
            _pool.give_back(process)
            process = None
            return value, error
        finally:
            if process is not None:  # it hangs, or nobody waits for its answer any more
                process.kill()


class RewardProcessError(Exception):
    """What went wrong in or with a process, said so that it goes on from the function's name: "raised KeyError: 3"."""


class RewardProcess:
    """One process. Its methods block, and raise RewardProcessError: call them from one thread at a time."""

    def __init__(self) -> None:
        # Sees the modules that are seen here. One thread each: there are as many processes as cores. A session of
        # its own, because a terminal sends Ctrl-C to the whole group and the controller decides what becomes of it.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torchtitan_rl.tasks.reward_worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._loaded: bytes | None = None

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def load(self, function: Callable) -> None:
        """Gives it the function, unless it has it. Covers the start of the process and the function's imports."""
        pickled = _pickled(function)
        if pickled != self._loaded:
            self._ask("load", pickled)
            self._loaded = pickled

    def call(self, *args: Any) -> Any:
        return self._ask("call", _pickled(args))

    def kill(self) -> None:
        """Ends it and what it has started, whatever they do; who waits for its answer goes on with an error."""
        if self.alive:
            os.killpg(self.process.pid, signal.SIGKILL)

    def _ask(self, verb: str, pickled: bytes) -> Any:
        try:
            pickle.dump((verb, pickled), self.process.stdin)
            self.process.stdin.flush()
            problem, answer = pickle.load(self.process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            self.kill()
            raise RewardProcessError(f"ended its process ({_ending(self.process.wait())})") from None
        if problem:
            error = RewardProcessError(problem)
            error.add_note(answer.decode())  # the traceback over there
            raise error
        return pickle.loads(answer)


class Pool(threading.local):
    """The processes of this thread, whose end is theirs too (see reward_worker.py): an event loop uses its own."""

    def __init__(self) -> None:
        self._idle: list[RewardProcess] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots: asyncio.Semaphore

    def slot(self) -> asyncio.Semaphore:
        """To be held while a process is taken: who finds all of them busy waits for its turn."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._slots = loop, asyncio.Semaphore(min(MAX_PROCESSES, platform.num_cores()))
        return self._slots

    def take(self) -> RewardProcess:
        """An idle process, or a new one."""
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
        return RewardProcess()

    def give_back(self, process: RewardProcess) -> None:
        self._idle.append(process)


_pool = Pool()


def _pickled(value: Any) -> bytes:
    try:
        return cloudpickle.dumps(value)
    except Exception as error:  # whatever a __reduce__ or __getstate__ raises
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise RewardProcessError(f"cannot be sent to a process ({message})") from error


def _ending(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

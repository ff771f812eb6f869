"""Processes for reward functions that compute: they use other cores, can be killed at any time, and end with the run.

A process, not a thread: a regular expression that never returns holds Python's lock, so its thread stops every other
thread and cannot be killed.

Requests are pickles. Answers are JSON, because a reward function or a program that it starts may write what it likes,
and the controller must not run it. Requests are numbered and an answer names its request, so an answer too many ends
the process and is never taken for the answer of the next request.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import cloudpickle

from torchtitan_rl import platform
from torchtitan_rl.tasks.outcomes import Outcome, outcome_in_thread, until
from torchtitan_rl.tasks.process_tree import STOP

__all__ = ["Pool", "RewardProcess", "RewardProcessError", "cpu_bound", "outcome_in_process"]

MAX_PROCESSES = 16
"""Largest pool; a machine with fewer cores has one process per core. A process starts when a call needs it."""
START_S = 120.0
"""Seconds for a process to start and to import a reward function's modules, before the function's deadline begins."""
MAX_ANSWER_BYTES = 64 * 2**20
"""Largest answer: two million rewards."""

_LENGTH = struct.Struct("!Q")
"""Bytes of an answer, before the answer."""


def cpu_bound(function: Callable) -> Callable:
    """Marks a reward function that computes rather than waits: it runs in a process that is killed at the deadline.

    The function and its arguments travel as pickles, functions of a config file and lambdas included, and its result as
    JSON: numbers, text, None, and lists, tuples, arrays and tensors of them. The function sees no other state of this
    process, and this process sees no change that the function makes. Processes that it starts, of whatever session, end
    with its process: when a call is late or cancelled, and when the run ends.
    Raises ValueError for an async function.

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
    """The outcome of `function` in a process of this thread's pool. Raises TimeoutError after `timeout_s` seconds.

    The time counts from when a process has loaded the function; waiting for a free process does not count.
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
            if process is not None:  # the function hangs, or the call was cancelled
                process.kill()


class RewardProcessError(Exception):
    """A failure in or of a process; the message continues the function's name, as in "raised KeyError: 3"."""


class RewardProcess:
    """One process, below a supervisor (see process_tree.py). Methods block and raise RewardProcessError; call them from
    one thread at a time."""

    def __init__(self) -> None:
        # PYTHONPATH: the process finds the modules of this one; -P: and no others, of the working directory.
        # OMP_NUM_THREADS: there is a process per core. A session of its own: a terminal sends Ctrl-C to a whole group,
        # but only the controller may end this process.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "torchtitan_rl.tasks.reward_worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._loaded: bytes | None = None
        self._last_request = 0
        """The number of the last request."""
        self._killed = False

    @property
    def alive(self) -> bool:
        return not self._killed and self.process.poll() is None

    def load(self, function: Callable) -> None:
        """Sends the function unless the process holds it; returns when the process runs and the imports are done."""
        pickled = _pickled(function)
        if pickled != self._loaded:
            self._loaded = None  # whatever happens, the process gives up the function that it holds
            self._ask("load", pickled)
            self._loaded = pickled

    def call(self, *args: Any) -> Any:
        """What the function returns: numbers, text, None, lists of them; `(rewards, parts)` as a tuple and a dict."""
        answer = self._ask("call", _pickled(args))
        if "parts" in answer:
            return answer["value"], dict(answer["parts"])
        return answer["value"]

    def kill(self) -> None:
        """Has the process and everything below it killed; a thread that waits for an answer gets a RewardProcessError.
        Returns at once."""
        if self.alive:
            self._killed = True
            self.process.send_signal(STOP)

    def _ask(self, verb: str, pickled: bytes) -> dict[str, Any]:
        self._last_request += 1
        try:
            pickle.dump((self._last_request, verb, pickled), self.process.stdin)
            self.process.stdin.flush()
            answer = self._answer()
        except (EOFError, OSError):
            self.kill()
            when = " before it was loaded" if self._last_request == 1 else ""
            raise RewardProcessError(f"ended its process{when} ({_ending(self.process.wait())})") from None
        if answer is None or answer.get("number") != self._last_request:
            self.kill()
            answered = "something else" if answer is None else f"request {answer.get('number')!r}"
            raise RewardProcessError(
                f"answered {answered} when request {self._last_request} was asked, and its process was killed (a "
                "child that it forks must end by os._exit and must not write to the descriptors that it inherits)"
            )
        if answer["problem"]:
            error = RewardProcessError(answer["problem"])
            error.add_note(answer["traceback"])  # of the process
            raise error
        return answer

    def _answer(self) -> dict[str, Any] | None:
        """The next answer; None for what is none. Raises EOFError when the process has ended."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > MAX_ANSWER_BYTES:
            return None
        try:
            answer = json.loads(self._read(length))
        except (ValueError, RecursionError):
            return None
        return answer if isinstance(answer, dict) else None

    def _read(self, size: int) -> bytes:
        content = self.process.stdout.read(size)
        if len(content) < size:
            raise EOFError
        return content


class Pool(threading.local):
    """The processes that this thread started, which the kernel kills when the thread ends (see reward_worker.py)."""

    def __init__(self) -> None:
        self._idle: list[RewardProcess] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots: asyncio.Semaphore

    def slot(self) -> asyncio.Semaphore:
        """The semaphore to hold while using a process; limits processes to the number of cores and MAX_PROCESSES."""
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
    except Exception as error:  # a __reduce__ or __getstate__ may raise anything
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise RewardProcessError(f"cannot be sent to a process ({message})") from error


def _ending(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

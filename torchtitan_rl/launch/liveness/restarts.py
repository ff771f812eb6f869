"""Starting a run again when it was killed or failed: a loop around one process, which runs a verb of the command.

The supervisor opens no socket and reads nothing but a status that its own child writes into a pipe. It passes signals
on, `launch.liveness.watchdog` kills a command that gives no sign of life, and the command ends with its supervisor.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from torchtitan_rl.environment import end_with_parent
from torchtitan_rl.launch.liveness import watchdog
from torchtitan_rl.record.console.notices import say
from torchtitan_rl.record.disk import full_disk

__all__ = ["Outcome", "attempt", "for_attempt", "is_final", "leave_outcome", "run_with_restarts", "supervised"]

_RESTARTS = "TORCHTITAN_RL_RESTARTS"
"""The environment variable with the number of restarts so far and the supervisor's process id."""
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PIPE_BYTES = 65536


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a command ended that was started again where that could help."""

    status: int
    """The exit status of the last attempt; 128 + N where signal N ended it."""
    asked_by: int = 0
    """Number of the first signal that asked the supervisor to end, also where the command came to its end all the same;
    0: none has come."""
    printed_from: int = 0
    """Where in the file of the output the last attempt began, in bytes; 0 without such a file."""


class _Supervisor:
    """The process that runs now, and the signal that asked the supervisor to end."""

    def __init__(self, output: IO[str] | None = None) -> None:
        self.process: subprocess.Popen | None = None
        self.output = output
        """The file that has what the process prints; None: this process's own."""
        self.asked_by = 0
        """Number of the first signal; 0: none has come."""
        self.printed_from = 0
        """The size of `output` before the process began."""

    def start(self, command: list[str], restarts: int, outcome: int) -> None:
        """Starts the command in a session of its own, which a terminal's Ctrl-C reaches through `pass_on` alone."""
        environment = os.environ | for_attempt(restarts)
        self.printed_from = 0 if self.output is None else os.fstat(self.output.fileno()).st_size
        self.process = subprocess.Popen(
            command,
            env=environment,
            pass_fds=[outcome],
            start_new_session=True,
            stdout=self.output,
            stderr=None if self.output is None else subprocess.STDOUT,
        )
        if self.asked_by:  # the signal came while there was no process
            self.process.send_signal(self.asked_by)

    def pass_on(self, number: int, _frame) -> None:
        self.asked_by = self.asked_by or number
        if self.process is not None:
            self.process.send_signal(number)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Passes signals on while the block runs. One that is ignored, as under nohup, stays ignored."""
        heard = [number for number in _PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self.pass_on) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run_with_restarts(verb: str, arguments: list[str], max_restarts: int, directory: str | Path) -> int:
    """`supervised` for a command that prints where this process does. Returns its exit status."""
    return supervised(verb, arguments, max_restarts, directory).status


def supervised(
    verb: str, arguments: list[str], max_restarts: int, directory: str | Path, output: IO[str] | None = None
) -> Outcome:
    """Runs `torchtitan-rl VERB ARGUMENTS`, again (`train` with `--resume auto`) when it was killed or failed, at most
    `max_restarts` times. `directory` is the run's: while the file system of the run, of shared memory or of temporary
    files is full, nothing is started again. `output` gets what the command prints; None: it prints where this process
    does."""
    supervisor = _Supervisor(output)
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-") as signs, supervisor.signals():
        status = _last_status(supervisor, verb, arguments, max_restarts, directory, Path(signs))
    return Outcome(status=status, asked_by=supervisor.asked_by, printed_from=supervisor.printed_from)


def _last_status(
    supervisor: _Supervisor, verb: str, arguments: list[str], max_restarts: int, directory: str | Path, signs: Path
) -> int:
    """Starts the attempts, one after the other. Returns the exit status of the last one."""
    for restarts in range(max_restarts + 1):
        status, final = _run_once(supervisor, verb, arguments, restarts, signs / f"signs_of_life-{restarts}.json")
        ended = f"was ended by signal {-status}" if status < 0 else f"failed with status {status}"
        status = 128 - status if status < 0 else status
        if final or status == 0 or supervisor.asked_by:
            return status
        if problem := full_disk([directory, "/dev/shm", tempfile.gettempdir()]):
            say(f"error: an attempt {ended}, and {problem}", event="error", level="error")
            return status
        if restarts < max_restarts:
            line = f"warning: an attempt {ended}; restart {restarts + 1} of {max_restarts} begins"
            say(line, event="restart", level="warning")
    if max_restarts:
        say(f"error: the last attempt {ended}; {max_restarts} restarts are used up", event="error", level="error")
    return status


def _run_once(
    supervisor: _Supervisor, verb: str, arguments: Sequence[str], restarts: int, signs_of_life: Path
) -> tuple[int, bool]:
    """(the process's exit status, the negative number of a signal that ended it; whether a restart would not help)."""
    read, write = os.pipe()
    with os.fdopen(read, "rb", buffering=0) as pipe, watchdog.watch(signs_of_life):
        try:
            command = [sys.executable, "-m", "torchtitan_rl.cli", verb, *arguments, "--outcome", str(write)]
            supervisor.start(command, restarts, write)
        finally:
            os.close(write)
        return supervisor.process.wait(), is_final(pipe)


def is_final(pipe: IO[bytes]) -> bool:
    """Whether a command that has ended has said, with `leave_outcome`, that a restart would not help. `pipe` is
    unbuffered."""
    os.set_blocking(pipe.fileno(), False)  # a process that outlives the command may hold the other end
    report = pipe.read(_PIPE_BYTES)
    return bool(report and json.loads(report)["final"])


def for_attempt(restarts: int) -> dict[str, str]:
    """The environment variables that `attempt` reads in a child of this process."""
    return {_RESTARTS: f"{restarts} {os.getpid()}"}


def attempt(outcome: int) -> int:
    """Makes this process, a child of `run_with_restarts` or of torchrun's process, end when its parent ends, and keeps
    the pipe `outcome` from processes that it starts. Returns the number of restarts so far."""
    restarts, supervisor = map(int, os.environ.pop(_RESTARTS).split())
    end_with_parent(signal.SIGKILL)
    if os.getppid() != supervisor:  # it ended before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)
    os.set_inheritable(outcome, False)
    watchdog.sign_of_life(watchdog.START_S)
    return restarts


def leave_outcome(outcome: int, status: int, *, final: bool) -> int:
    """Tells who started this process how the command ends; `final`: a restart would not help. Returns the status."""
    os.write(outcome, json.dumps({"status": status, "final": final}).encode())
    return status

"""A command that plays one attempt: a tree of processes with a directory of its own, limits, and nothing left behind.

In namespaces of its own (see tasks/process_tree.py) a command sees neither processes nor files of other attempts, so it
reads no other key and writes no other reward. This is no sandbox all the same: the command runs as the user who runs
the controller, and reads what else that user may read.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan_rl.rollout.agent import AgentFailed, CommandLimits, Endpoint
from torchtitan_rl.tasks import process_tree

__all__ = ["no_isolation", "run_command"]

_LOOK_EVERY_S = 0.25
_END_S = 40.0
"""Seconds for a supervisor to kill what is below it."""
_TAIL = 2000
_MAX_REWARD_BYTES = 65536


@functools.cache
def no_isolation() -> str:
    """Why commands cannot have namespaces of their own on this machine; empty where they can. Takes 0.1 s once."""
    if sys.platform != "linux":
        return f"{sys.platform} has no namespaces"
    directory = _directory()
    try:
        (directory / "home").mkdir()
        line = process_tree.command_line(str(directory), ["sh", "-c", ":"], isolated=True)
        done = subprocess.run(line, capture_output=True, text=True, timeout=30)
        return "" if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        _remove(directory)


async def run_command(
    command: list[str], endpoint: Endpoint, task_json: str, env: dict[str, str], limits: CommandLimits, timeout_s: float
) -> Any:
    """Runs a command to its end. Returns the reward that it wrote to `REWARD_FILE`, as `external` takes one, or None.
    Raises AgentFailed for an exit status other than 0, a limit that is passed, and a reward file without a number."""
    isolated = limits.isolate != "off" and not await asyncio.to_thread(no_isolation)
    directory = _directory()
    try:
        (directory / "task.json").write_text(task_json)
        home = directory / "home"
        home.mkdir()
        line = process_tree.command_line(
            str(directory),
            command,
            isolated=isolated,
            memory_bytes=int(limits.memory_gib * 2**30),
            file_bytes=int(limits.max_disk_mib * 2**20),
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *line,
                cwd=home,
                env=_environment(endpoint, directory) | env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise AgentFailed(f"agent: {command[0]!r} cannot be started ({error}); mend external(agent=...)") from error
        output = _Output(limits)
        try:
            await _watched(process, output, home, limits, timeout_s)
        finally:
            await _ended(process, endpoint.session_id)
        if process.returncode:
            raise AgentFailed(f"agent: {command[0]!r} ended with status {process.returncode}: {output.tail()}")
        return _reward(directory / "reward")
    finally:
        await asyncio.to_thread(_remove, directory)


def _directory() -> Path:
    """A new directory, below one for the commands of all of this user's runs: a command in namespaces of its own sees
    no other directory below that. Raises RuntimeError where another user has taken the name."""
    parent = Path(tempfile.gettempdir()).resolve() / f"torchtitan-rl-agents-{os.geteuid()}"
    while True:
        with suppress(FileExistsError):
            parent.mkdir(mode=0o700)
        try:
            status = parent.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                raise RuntimeError(f"directory={str(parent)!r}: belongs to another user; set TMPDIR to one of your own")
            return Path(tempfile.mkdtemp(prefix="agent-", dir=parent))
        except FileNotFoundError:  # another run has removed the empty parent
            continue


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    with suppress(OSError):  # another attempt has its directory there
        directory.parent.rmdir()


def _environment(endpoint: Endpoint, directory: Path) -> dict[str, str]:
    """Nothing of the controller's environment but where programs are and which letters a terminal has: it may hold
    secrets."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "TZ") if name in os.environ}
    home = str(directory / "home")
    return kept | {
        "HOME": home,
        "TMPDIR": home,
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "OPENAI_MODEL": endpoint.model,
        "ANTHROPIC_BASE_URL": endpoint.session_url,
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "ANTHROPIC_MODEL": endpoint.model,
        "SESSION_ID": endpoint.session_id,
        "SESSION_URL": endpoint.session_url,
        "SEED": str(endpoint.seed),
        "TRAINING": "1" if endpoint.training else "0",
        "TASK_FILE": str(directory / "task.json"),
        "REWARD_FILE": str(directory / "reward"),
    }


class _Output:
    """The end of what a command wrote, and how much it was."""

    def __init__(self, limits: CommandLimits) -> None:
        self.max_bytes, self.num_bytes, self._kept = int(limits.max_output_mib * 2**20), 0, b""

    async def read(self, pipe: asyncio.StreamReader) -> None:
        """Reads to the end. Raises AgentFailed for more than the limit."""
        while part := await pipe.read(65536):
            self.num_bytes += len(part)
            self._kept = (self._kept + part)[-_TAIL:]
            if self.num_bytes > self.max_bytes:
                raise AgentFailed(
                    f"agent: wrote more than {self.max_bytes} bytes of output; write less, or raise "
                    "external(command=CommandLimits(max_output_mib=...))",
                    breach=True,
                )

    def tail(self) -> str:
        lines = self._kept.decode(errors="replace").strip().splitlines()
        return " | ".join(line.strip() for line in lines[-3:])[-500:] or "it wrote nothing"


async def _watched(process, output: _Output, home: Path, limits: CommandLimits, timeout_s: float) -> None:
    """Waits until the command has ended. Raises AgentFailed when it passes a limit."""
    waits = {
        asyncio.ensure_future(process.wait()),
        asyncio.ensure_future(output.read(process.stdout)),
        asyncio.ensure_future(_within(process, home, limits)),
    }
    ended, *_ = waits
    try:
        async with asyncio.timeout(timeout_s):
            while process.returncode is None:
                done, waits = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in done:
                    wait.result()  # raises what passed a limit
    except TimeoutError:
        raise AgentFailed(f"agent: was not done within {timeout_s:g} s", breach=True) from None
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def _within(process, home: Path, limits: CommandLimits) -> None:
    """Looks at processes and files until the command has ended, also where a process of the command still holds the
    pipe open. Raises AgentFailed for too many."""
    while process.returncode is None:
        await asyncio.sleep(_LOOK_EVERY_S)
        if (number := len(process_tree.descendants(process.pid, _parents()))) > limits.max_processes:
            raise AgentFailed(f"agent: has {number} processes; {limits.max_processes} are allowed", breach=True)
        if (mib := await asyncio.to_thread(_size_mib, home)) > limits.max_disk_mib:
            raise AgentFailed(f"agent: has {mib:.0f} MiB of files; {limits.max_disk_mib:g} are allowed", breach=True)


_seen: tuple[float, dict[int, int]] = (0.0, {})


def _parents() -> dict[int, int]:
    """The parent of each process of this machine, at most a fraction of a second old."""
    global _seen
    if time.monotonic() - _seen[0] >= _LOOK_EVERY_S / 2:
        _seen = time.monotonic(), process_tree.parents()
    return _seen[1]


def _size_mib(directory: Path) -> float:
    size = 0
    for at, _, files in os.walk(directory):
        for name in files:
            with suppress(OSError):
                size += os.lstat(os.path.join(at, name)).st_blocks * 512
    return size / 2**20


async def _ended(process, session_id: str) -> None:
    """Has the supervisor kill what is left of a command. Where the command has killed its supervisor, whatever has the
    session's environment is killed."""
    if process.returncode is None:
        process.send_signal(process_tree.STOP)
        # The pipe first: asyncio says that a process has ended once its pipes have, and nobody reads this one any more.
        process._transport.get_pipe_transport(1).close()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _END_S)
    if process.returncode is not None and process.returncode >= 0:
        return
    for _ in range(20):
        if not (left := await asyncio.to_thread(_with_session, session_id)):
            break
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.01)
    await process.wait()


def _with_session(session_id: str) -> list[int]:
    """Processes that inherited the session's environment; zombies have none."""
    mark, pids = f"SESSION_ID={session_id}".encode(), []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                if mark in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                    pids.append(int(name))
    return pids


def _reward(file: Path) -> Any:
    """The content of a reward file: a number, or a JSON object with `reward` and parts. None where there is no file."""
    try:
        # Not a link into the machine's files, and no pipe that would never end.
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AgentFailed(f"agent: REWARD_FILE cannot be read ({error.strerror}); write a plain file") from error
    with os.fdopen(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise AgentFailed("agent: REWARD_FILE is no plain file; write one")
        text = opened.read(_MAX_REWARD_BYTES)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise AgentFailed("agent: REWARD_FILE holds neither a number nor JSON; write one of them") from None
    if not isinstance(value, dict):
        return value
    if "reward" not in value:
        raise AgentFailed("agent: REWARD_FILE holds a JSON object without 'reward'; add it")
    return value.pop("reward"), value

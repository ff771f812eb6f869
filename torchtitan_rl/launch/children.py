"""The processes that a host's process of a job starts: they end with it, and it ends all that they have started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

import psutil

from torchtitan_rl.environment import end_with_parent, without_torchrun

__all__ = ["end_children", "free_port", "start_module"]

_END_S = 10.0
"""Seconds for killed processes to end."""


def free_port(address: str) -> int:
    """A port of this host that nobody listens at. Raises ValueError for an address of another host."""
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise ValueError(
                f"TORCHTITAN_RL_HOST_ADDRESS={address!r}: cannot be bound ({error.strerror}); give an "
                "address of this host"
            ) from None
        return probe.getsockname()[1]


def start_module(
    module: str, *arguments: str, ignore: Sequence[signal.Signals] = (), pass_fds: Sequence[int] = ()
) -> subprocess.Popen:
    """Starts a module of the package. It and all that it starts ignore the signals `ignore`. It has the files
    `pass_fds`."""

    def prepare() -> None:
        end_with_parent(signal.SIGKILL)
        for number in ignore:
            signal.signal(number, signal.SIG_IGN)

    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, env=without_torchrun(os.environ), preexec_fn=prepare, pass_fds=pass_fds)


def end_children(children: list[subprocess.Popen]) -> None:
    """Kills the children and all their descendants, and waits until they have ended."""
    processes = []
    for child in children:
        try:
            processes += [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            pass  # the child has ended, and its own children with it
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(processes, timeout=_END_S)

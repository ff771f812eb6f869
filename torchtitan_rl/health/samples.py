"""Samples of a run's processes on this host: memory, and how long requests are with each replica."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

__all__ = ["Samples"]

_FIRST_S, _LAST_S = 1.0, 30.0
_OF_TIME = 0.01
"""Share of the time so far that passes between two samples, at most `_LAST_S`: some 440 in the first 50 minutes of a
run, and 120 in each hour after."""
_LOOK_AGAIN_S = 30.0
_NAMED = re.compile(r": (\S+) rank (\d+) of \d+, pid (\d+), host (\S+), ")
_TAIL_BYTES = 65_536


class Samples:
    """Takes samples of the calling process and its children, seldom enough to cost next to nothing.

    A process is named after its log, such as `policy-0`, `generator-1-0`, and `controller` for the calling process.
    `times()` gives, per role of a replica, the requests in flight summed over seconds, and the requests answered; {}
    with one replica.
    """

    def __init__(
        self,
        logs: Path,
        times: Callable[[], dict[str, tuple[float, int]]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logs, self.times, self._clock = logs, times, clock
        self._began = clock()
        self._due, self._look_at = self._began, self._began
        self._processes: dict[str, psutil.Process] = {}

    def due(self) -> bool:
        return self._clock() >= self._due

    def look_again(self) -> None:
        """Makes the next sample look for processes that have started."""
        self._look_at = self._due = self._clock()

    def take(self) -> list[dict[str, Any]]:
        """Records of the table `samples`, one per process and one per replica."""
        now = self._clock()
        self._due = now + min(_LAST_S, max(_FIRST_S, _OF_TIME * (now - self._began)))
        if now >= self._look_at:
            self._look_at, self._processes = now + _LOOK_AGAIN_S, self._processes_by_name()
        at = datetime.now().astimezone().isoformat(timespec="milliseconds")
        records: list[dict[str, Any]] = []
        for who, process in self._processes.items():
            if rss := _rss(process):
                records.append({"at": at, "who": who, "pid": process.pid, "rss_mib": rss / 2**20})
            else:
                self._look_at = now + _FIRST_S  # it has ended, and another one may take its place
        for who, (in_flight_s, answered) in self.times().items():
            records.append({"at": at, "who": who, "in_flight_s": in_flight_s, "answered": answered})
        return records

    def _processes_by_name(self) -> dict[str, psutil.Process]:
        """Name -> process, of the calling process and its children."""
        own, names = psutil.Process(os.getpid()), self._names()
        processes = {"controller": own}
        for child in own.children(recursive=True):
            processes[names.get(child.pid, f"pid-{child.pid}")] = child
        return processes

    def _names(self) -> dict[int, str]:
        """Pid -> role and rank, as the logs of this host say. A log of a replaced process names the newest one last."""
        names, host = {}, socket.gethostname()
        for file in self._logs.glob("*.log") if self._logs.is_dir() else ():
            with open(file, "rb") as stream:
                text = stream.read(_TAIL_BYTES)
                size = stream.seek(0, 2)
                if size > len(text):
                    stream.seek(max(len(text), size - _TAIL_BYTES))
                    text += stream.read()
            for role, rank, pid, log_host in _NAMED.findall(text.decode("utf-8", "replace")):
                if log_host == host:
                    names[int(pid)] = f"{role}-{rank}"
        return names


def _rss(process: psutil.Process) -> int:
    """Bytes of memory that a process holds; 0 once it has ended, whether its parent knows or not."""
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0

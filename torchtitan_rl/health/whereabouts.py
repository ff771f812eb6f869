"""Whether the process of a run is there and reports, why it ended, and when it last wrote. Nothing is locked."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.record.json_lines import parsed
from torchtitan_rl.record.status import ENDS, HEARTBEAT_S

__all__ = ["Pulse", "Whereabouts", "end_of", "pulse", "seconds_since", "whereabouts"]

Pulse = Literal["reports", "silent", "gone", "unknown"]
"""Whether a run's process reports in `status.json`: it does; it is there and does not; it is gone; nobody knows."""

_HOLDER = re.compile(r"pid (\d+) on (\S+)")


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """State of a run's process."""

    state: Literal["running", "gone", "elsewhere", "unknown"]
    """`elsewhere`: the process is, or was, on another host; `unknown`: there is no run.lock."""
    pid: int | None
    host: str
    ended: str
    """Why the run ended, where a restart cannot mend that (`ended.json`)."""
    written: float | None
    """When a file of the run last changed, in seconds since 1970; None: no file."""


def whereabouts(run: Run) -> Whereabouts:
    """Where the process of a run is. A process runs here if it holds the lock on `run.lock`."""
    lock = run.path / "run.lock"
    try:
        holder, inode = _HOLDER.search(lock.read_text(encoding="utf-8")), lock.stat().st_ino
    except OSError:
        holder, inode = None, 0
    pid, host = (int(holder[1]), holder[2]) if holder else (None, "")
    state: Literal["running", "gone", "elsewhere", "unknown"] = "unknown"
    if pid is not None:
        state = "elsewhere" if host != socket.gethostname() else "running" if _is_locked(inode, pid) else "gone"
    return Whereabouts(state, pid, host, _reason(run.path / "ended.json"), _written(run.path))


def pulse(process: Whereabouts, status: dict[str, Any], now: float) -> Pulse:
    """Whether a process reports. `status` is what `status.json` holds, `now` in seconds since 1970. A process on
    another host that does not report counts as gone."""
    age = seconds_since(status.get("at"), now)
    if age is None:
        return "unknown"
    heartbeat = status.get("heartbeat_s")
    late = age > 2 * (float(heartbeat) if isinstance(heartbeat, (int, float)) else HEARTBEAT_S) + 2
    if process.state == "gone" or (process.state != "running" and late):
        return "gone"
    return "silent" if late else "reports"


def seconds_since(at: Any, now: float) -> float | None:
    """Seconds from an ISO time with an offset to `now`, at least 0; None for anything else."""
    try:
        return max(0.0, now - datetime.fromisoformat(at).timestamp())
    except (TypeError, ValueError):
        return None


def end_of(status: dict[str, Any], events: list[dict[str, Any]]) -> dict[str, Any]:
    """The event that says why the newest attempt ended before its last act; {} for none. `status` is what status.json
    holds."""
    ends = [event for event in events if event.get("kind") in ENDS]
    newest = status.get("attempt", max((event.get("attempt") or 0 for event in events), default=0))
    return ends[-1] if ends and ends[-1].get("attempt") == newest else {}


def _is_locked(inode: int, pid: int) -> bool:
    """Whether somebody holds a lock on the file, as the kernel lists locks; without that list, whether the process is
    there. Asking by `flock` would refuse a run that starts in this instant."""
    try:
        locks = Path("/proc/locks").read_text(encoding="utf-8")
    except OSError:
        return Path(f"/proc/{pid}").exists()
    return re.search(rf"FLOCK .*:{inode} ", locks) is not None


def _reason(file: Path) -> str:
    try:
        return str(parsed(file.read_text(encoding="utf-8")).get("reason", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def _written(path: Path) -> float | None:
    """The newest change of metrics, tables or checkpoints. Logs do not count: engines write to them while they wait."""
    times = []
    for folder in (path, *(path / name for name in ("rollouts", "ledger", "versions", "checkpoints"))):
        if folder.is_dir():
            names = [entry for entry in os.scandir(folder) if folder != path or entry.name in _GROWING]
            for entry in names:
                try:
                    times.append(entry.stat().st_mtime)
                except OSError:
                    continue
    return max(times, default=None)


_GROWING = ("config.json", "metrics.jsonl", "run.lock")

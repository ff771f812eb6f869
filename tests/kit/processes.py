"""Whether a process has ended."""

import time

import psutil


def ended(pid: int) -> bool:
    """True for a process that is gone, goes while it is asked for, or waits as a zombie for its parent."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


def gone(pid: int, within_s: float = 5.0) -> bool:
    """Waits until a process has ended; False where it has not by then."""
    deadline = time.monotonic() + within_s
    while not ended(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True

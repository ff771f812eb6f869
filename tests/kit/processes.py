"""Whether a process has ended."""

import psutil


def ended(pid: int) -> bool:
    """True for a process that is gone, goes while it is asked for, or waits as a zombie for its parent."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True

"""The start of a rank's process: logs, threads, signals and imports."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
from contextlib import contextmanager

from torchtitan_rl import platform
from torchtitan_rl.environment import TIMELINE, ignore_interrupts, let_garbage_wait
from torchtitan_rl.record.logs import setup_rank_logging

__all__ = ["prepare_process", "setup_logs", "heavy_imports"]


def prepare_process(role: str, rank: int, world_size: int, num_threads: int, log_dir: str | None) -> None:
    """Sets up logs and threads, and ignores Ctrl-C: the controller ends a run."""
    ignore_interrupts()
    setup_logs(role, rank, world_size, log_dir)
    platform.set_threads(num_threads)
    atexit.register(_leave)
    if TIMELINE in os.environ:
        from torchtitan_rl.record.timeline import recording

        recording.begin(f"{role}-{rank}")


def setup_logs(role: str, rank: int, world_size: int, log_dir: str | None) -> None:
    """Sets up a rank's logs, at the level of the environment variable TORCHTITAN_RL_LOG_LEVEL (default INFO)."""
    if log_dir is not None:
        setup_rank_logging(log_dir, role, rank, world_size, os.environ.get("TORCHTITAN_RL_LOG_LEVEL", "INFO"))
    # torch's logger warns that collectives of torchtitan's layouts could be merged: no user can act on the warning.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def _leave() -> None:
    """Ends a stopped actor's process at once: interpreter shutdown is slow, and packages complain of leaks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def heavy_imports():
    """Turns the garbage collector off around imports of vLLM and torchtitan. Imported modules are never garbage, and
    the collector's walks over the modules would take a third of the import time."""
    gc.disable()
    try:
        yield
    finally:
        let_garbage_wait()
        gc.enable()

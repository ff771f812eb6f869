"""What a process that works as a rank does first."""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import os
import signal
import sys
from contextlib import contextmanager

from torchtitan_rl import platform
from torchtitan_rl.observability.logs import setup_rank_logging

__all__ = ["prepare_process", "setup_logs", "heavy_imports"]


def prepare_process(role: str, rank: int, world_size: int, num_threads: int, log_dir: str | None) -> None:
    """Logging with a first line that says who this is, threads, and a deaf ear to Ctrl-C: the controller decides."""
    # Actors do not run on the main thread, where alone signal.signal works.
    ctypes.pythonapi.PyOS_setsig(ctypes.c_int(signal.SIGINT), ctypes.c_void_p(int(signal.SIG_IGN)))
    setup_logs(role, rank, world_size, log_dir)
    platform.set_threads(num_threads)
    atexit.register(_leave)


def setup_logs(role: str, rank: int, world_size: int, log_dir: str | None) -> None:
    """Logs of a process that works as this rank, at the level the user asks for by environment."""
    if log_dir is not None:
        setup_rank_logging(log_dir, role, rank, world_size, os.environ.get("TORCHTITAN_RL_LOG_LEVEL", "INFO"))
    # Says of torchtitan's own layouts that their collectives could be merged: nothing a user can act on.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def _leave() -> None:
    """A stopped actor's process ends here: taking the interpreter apart takes long, and packages complain of leaks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def heavy_imports():
    """Around imports of vLLM and torchtitan: the garbage collector would walk their modules over and over, for
    nothing and for a third of the time, and what was imported is never garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

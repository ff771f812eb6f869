"""torch.profiler on one rank, begun and ended by the controller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["profiled"]

_running: list[profile] = []
"""The profiler of this process, while it runs: torch allows one."""


def profiled(file: str) -> None:
    """Begins to profile all threads of this process; with `file`, ends and writes the trace there.

    The trace is Chrome's trace event format, compressed where the name ends in `.gz`; ui.perfetto.dev opens it.
    """
    if not file and not _running:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        threads: Any = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # the engine's thread too
        _running.append(begun := profile(activities=activities, experimental_config=threads))
        begun.start()
    elif file and _running:
        ended = _running.pop()
        ended.stop()
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        ended.export_chrome_trace(file)

"""Checks of a config's sinks before a process starts."""

from __future__ import annotations

import inspect
from functools import partial
from importlib.util import find_spec
from typing import Any

from torchtitan_rl.config.recording import RecordConfig
from torchtitan_rl.config.resolve import named
from torchtitan_rl.record.recorder import Listener

__all__ = ["check_sinks"]


def check_sinks(record: RecordConfig) -> None:
    """Raises ValueError for a sink whose package is missing, or that cannot be called as sinks are."""
    for package in ("tensorboard", "wandb"):
        if getattr(record, package) and find_spec(package) is None:
            raise ValueError(
                f"record.{package}: the package {package} is not installed; scripts/setup.sh {package}, or pip install "
                f"'torchtitan-rl[{package}]'"
            )
    if record.wandb is not None and (not record.wandb.project or set(record.wandb.project) & set("/\\#?%:")):
        raise ValueError(f"record.wandb.project={record.wandb.project!r}: is no name; use letters, digits, - and _")
    for sink in record.sinks:
        _check_own(sink)


def _check_own(sink: Any) -> None:
    if not callable(sink):
        hint = "name its class" if isinstance(sink, Listener) else "give a function (line) -> None, or a Listener class"
        raise ValueError(f"record.sinks: holds a {type(sink).__name__}, which nothing can call; {hint}")
    made = sink.func if isinstance(sink, partial) else sink
    arguments = () if isinstance(made, type) and issubclass(made, Listener) else ({},)
    try:
        inspect.signature(sink).bind(*arguments)
    except (TypeError, ValueError) as error:
        wanted = "(line)" if arguments else "()"
        raise ValueError(f"record.sinks={named(sink)}: cannot be called as {wanted} ({error}); change it") from error

"""Checks of a run's `record` section: sinks, and the steps and ranks of profiles."""

from __future__ import annotations

import inspect
from functools import partial
from importlib.util import find_spec
from typing import Any

from torchtitan_rl.config.record import RecordConfig
from torchtitan_rl.config.resolve import named
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.record.recorder import Listener

__all__ = ["check_profile", "check_sinks"]


def check_sinks(record: RecordConfig) -> None:
    """Raises ValueError for a sink whose package is missing, or that cannot be called as sinks are."""
    for package in ("tensorboard", "wandb"):
        if getattr(record, package) and find_spec(package) is None:
            raise ValueError(
                f"record.{package}: the package {package} is not installed; scripts/setup.sh {package}, or pip install "
                f"{package}"
            )
    for sink in record.sinks:
        _check_own(sink)


def _check_own(sink: Any) -> None:
    if not callable(sink):
        hint = "name its class" if isinstance(sink, Listener) else "give a function (line) -> None, or a Listener class"
        raise ValueError(f"record.sinks: holds a {type(sink).__name__}, which nothing can call; {hint}")
    callable_sink = sink.func if isinstance(sink, partial) else sink
    arguments = () if isinstance(callable_sink, type) and issubclass(callable_sink, Listener) else ({},)
    try:
        inspect.signature(sink).bind(*arguments)
    except (TypeError, ValueError) as error:
        wanted = "(line)" if arguments else "()"
        raise ValueError(f"record.sinks={named(sink)}: cannot be called as {wanted} ({error}); change it") from error


def check_profile(config: RunConfig) -> None:
    """Raises ValueError for steps and ranks to profile that the run does not have."""
    profile, num_steps = config.record.profile, config.controller.num_steps
    for step in profile.steps:
        if not 1 <= step <= num_steps:
            raise ValueError(
                f"record.profile.steps={profile.steps}: {step} is no step of the reinforcement phase; choose from 1 to "
                f"controller.num_steps={num_steps}"
            )
    if not profile.steps:
        return
    sizes = {role: trainer.num_ranks for role, (trainer, _) in config.trainers().items()}
    sizes |= {f"generator-{i}": config.generator.tensor_parallel_degree for i in range(config.generator.num_replicas)}
    known = [f"{role}-{rank}" for role, size in sizes.items() for rank in range(size)]
    if not profile.ranks:
        raise ValueError(f"record.profile.ranks=[]: names no rank; choose from {', '.join(known)}")
    for name in profile.ranks:
        if name not in known:
            raise ValueError(
                f"record.profile.ranks={profile.ranks}: there is no {name!r}; choose from {', '.join(known)}"
            )

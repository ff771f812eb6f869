"""Checks of a run's recording settings."""

from __future__ import annotations

from torchtitan_rl.config.run import RunConfig

__all__ = ["check_recording"]


def check_recording(config: RunConfig) -> None:
    """Raises ValueError for steps and ranks that the run does not have."""
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

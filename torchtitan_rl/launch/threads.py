"""Who gets a CPU's cores where trainers and generators compute at the same time."""

from __future__ import annotations

import dataclasses

from torchtitan_rl import platform
from torchtitan_rl.config.run import RunConfig

__all__ = ["side_by_side"]

_NICE = 5
"""Of a core that two threads want, one that is so nice gets a quarter."""


def side_by_side(config: RunConfig) -> RunConfig:
    """The config with half of this machine's cores for the generators, divided among the ranks of all replicas, at
    least one thread a rank. Trainers keep threads for all cores, and yield to a generator that wants one. What the user
    has set stays.

    For batches that are generated while others train. With half of the cores for trainers too, cores are idle whenever
    either side waits. With all cores for generators too, their many small operators wait for threads that a trainer has
    displaced (docs/asynchrony.md has figures).
    """
    generator = config.generator
    ranks = generator.num_replicas * generator.tensor_parallel_degree
    threads = generator.num_threads or max(1, platform.num_cores() // 2 // ranks)
    trainers = {
        role: dataclasses.replace(trainer, nice=_NICE if trainer.nice is None else trainer.nice)
        for role, (trainer, _) in config.trainers().items()
    }
    roles = {
        name: dataclasses.replace(role, trainer=trainers[name]) for name, role in config.roles.configured().items()
    }
    return dataclasses.replace(
        config,
        trainer=trainers["policy"],
        roles=dataclasses.replace(config.roles, **roles),  # type: ignore[arg-type]  # names of roles
        generator=dataclasses.replace(generator, num_threads=threads),
    )

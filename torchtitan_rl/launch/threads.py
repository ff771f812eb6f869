"""How many CPU threads trainers and generators get where both compute at the same time."""

from __future__ import annotations

import dataclasses

from torchtitan_rl import platform
from torchtitan_rl.config.run import RunConfig

__all__ = ["side_by_side"]


def side_by_side(config: RunConfig) -> RunConfig:
    """The config with half of this machine's cores for the trainers and half for the generators, each half divided
    among the ranks of a trainer or of all replicas; at least one thread a rank. A `num_threads` other than 0 stays.

    For batches that are generated while others train: with every core for either side, threads of one wait for cores
    that the other has (docs/asynchrony.md has figures).
    """
    half, generator = platform.num_cores() // 2, config.generator

    def threads(configured: int, ranks: int) -> int:
        return configured or max(1, half // ranks)

    trainers = {
        role: dataclasses.replace(trainer, num_threads=threads(trainer.num_threads, trainer.num_ranks))
        for role, (trainer, _) in config.trainers().items()
    }
    roles = {
        name: dataclasses.replace(role, trainer=trainers[name]) for name, role in config.roles.configured().items()
    }
    ranks = generator.num_replicas * generator.tensor_parallel_degree
    return dataclasses.replace(
        config,
        trainer=trainers["policy"],
        roles=dataclasses.replace(config.roles, **roles),  # type: ignore[arg-type]  # names of roles
        generator=dataclasses.replace(generator, num_threads=threads(generator.num_threads, ranks)),
    )

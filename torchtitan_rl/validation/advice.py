"""Warnings before a run starts about settings that are allowed and seldom meant."""

from __future__ import annotations

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.health.siblings import compares_siblings

__all__ = ["advice"]

_LR = {"full": (1e-8, 1e-2), "lora": (1e-7, 1e-1)}
"""Learning rates of AdamW between which language models are trained, with a margin of ten on either side."""


def advice(config: RunConfig) -> list[str]:
    """One line for each setting far outside what works: the field, its value, what happens, what to do."""
    lines = []
    low, high = _LR["full" if config.trainer.lora is None else "lora"]
    phases = (
        ("trainer.optimizer.lr", config.trainer.optimizer.lr, config.controller.num_steps),
        ("supervised.lr", config.supervised.lr, config.supervised.num_steps),
    )
    for where, lr, num_steps in phases:
        if num_steps and lr > high:
            lines.append(f"{where}={lr:g}: AdamW at this rate destroys a model in a few steps; 1e-6 to 1e-3 is usual")
        elif num_steps and lr < low:
            lines.append(f"{where}={lr:g}: the weights will hardly move; 1e-6 to 1e-3 is usual")
    size, compared = config.algorithm.group_size, compares_siblings(config)
    if size in (2, 3) and compared:
        lines.append(f"algorithm.group_size={size}: few groups will hold unequal rewards; 8 to 64 is usual")
    if size > 256:
        lines.append(f"algorithm.group_size={size}: far beyond what is usual, 8 to 64; raise tasks_per_step instead")
    return lines

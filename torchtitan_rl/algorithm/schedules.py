"""Learning-rate schedules, as a factor of the peak."""

from __future__ import annotations

import math

from torchtitan_rl.config.algorithm import ScheduleConfig

__all__ = ["lr_factor"]


def lr_factor(config: ScheduleConfig, step: int, num_steps: int) -> float:
    """Factor for optimizer step `step` (from 0) of `num_steps`; `num_steps` may be 1, or all steps warm-up."""
    # Rounded first: 0.07 x 100 is 7.000000000000001 in floating point, which is not eight steps.
    warmup_steps = config.warmup_steps or math.ceil(round(config.warmup_ratio * num_steps, 9))
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if config.decay == "constant":
        return 1.0
    remaining = num_steps - warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, remaining - 1))
    shape = 1 - progress if config.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.final_factor + (1 - config.final_factor) * shape

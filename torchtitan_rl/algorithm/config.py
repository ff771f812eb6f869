"""What turns rollouts into a loss, as data and functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torchtitan_rl.algorithm.schedules import ScheduleConfig

__all__ = ["AlgorithmConfig", "SupervisedConfig"]


def _default(module: str, name: str) -> Callable:
    """The named function, imported when a config is made (losses need torch, configs should not)."""
    import importlib

    return getattr(importlib.import_module(f"torchtitan_rl.algorithm.{module}"), name)


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """One policy-gradient algorithm. Functions are named by themselves; anything with the signature will do."""

    group_size: int = 8
    """Rollouts of each task; their rewards are compared with each other."""
    tasks_per_step: int = 16
    """Groups in a batch, which is one optimizer step."""
    temperature: float = 1.0
    """Of sampling and, so that log-probabilities agree, of the trainer's logits."""
    advantage_fn: Callable = field(default_factory=lambda: _default("advantages", "group_centered"))
    """`(rewards_G) -> advantages_G`; see algorithm/advantages.py."""
    loss_fn: Callable = field(default_factory=lambda: _default("losses", "ppo"))
    """`(LossInputs, **loss_config) -> (token sum, metric sums)`; see algorithm/losses.py."""
    loss_config: dict[str, float] = field(default_factory=dict)
    """Keyword arguments of `loss_fn`, such as `clip_low`."""
    reduction: Callable = field(default_factory=lambda: _default("reductions", "token_mean"))
    """`(masks, groups) -> weights`; see algorithm/reductions.py."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over the run; its peak is `trainer.optimizer.lr`."""


@dataclass(kw_only=True, slots=True)
class SupervisedConfig:
    """A warm start on the task's demonstrations, before the first rollout. 0 steps: none."""

    num_steps: int = 0
    batch_size: int = 128
    lr: float = 3e-3
    """Peak learning rate."""
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(decay="cosine"))
    betas: tuple[float, float] = (0.9, 0.95)

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
    """Groups in a batch."""
    tasks_per_minibatch: int = 0
    """Groups in an optimizer step; the last minibatch may be smaller. 0: the whole batch is one step."""
    num_epochs: int = 1
    """Times a batch is trained on."""
    recompute_logprobs_per_minibatch: bool = False
    """Take ratios against the policy just before each minibatch's step, so that they start at exactly 1, rather than
    against the generator."""
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
    workflow: Callable | None = None
    """`async (task, policy, *, rollout_id, seed) -> Rollout`, in place of one turn, or of the turns of the family's
    environments; see workflows/. Evaluations use it too."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over the run; its peak is `trainer.optimizer.lr`."""
    gae_gamma: float = 1.0
    """Discount per token. Used with a critic only, as are the next three."""
    gae_lambda: float = 1.0
    """1 is the return minus the critic's value, less is lower variance and more of the critic's bias."""
    critic_loss_fn: Callable = field(default_factory=lambda: _default("losses", "value_loss"))
    """Like `loss_fn`, of `predicted_values`, `values` and `returns`."""
    critic_loss_config: dict[str, float] = field(default_factory=dict)

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps taken on one batch."""
        return self.num_epochs * -(-self.tasks_per_step // (self.tasks_per_minibatch or self.tasks_per_step))


@dataclass(kw_only=True, slots=True)
class SupervisedConfig:
    """A warm start on the task's demonstrations, before the first rollout. 0 steps: none."""

    num_steps: int = 0
    batch_size: int = 128
    lr: float = 3e-3
    """Peak learning rate."""
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(decay="cosine"))
    betas: tuple[float, float] = (0.9, 0.95)

"""What turns rollouts into a loss, as data and functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

__all__ = ["AlgorithmConfig", "DistillConfig", "FilterConfig", "ScheduleConfig", "SupervisedConfig"]


def _default(module: str, name: str) -> Callable:
    """The named function, imported when a config is made (losses need torch, configs should not)."""
    import importlib

    return getattr(importlib.import_module(f"torchtitan_rl.algorithm.{module}"), name)


def _unwrapped(function: Any) -> Any:
    """What `functools.partial` and `functools.wraps` have been put around."""
    while True:
        inner = getattr(function, "__wrapped__", None) or (function.func if isinstance(function, partial) else None)
        if inner is None:
            return function
        function = inner


@dataclass(kw_only=True, slots=True)
class FilterConfig:
    """What does not train. Example, as in DAPO: `FilterConfig(zero_variance=True, max_resamples=4, overlong="penalty",
    overlong_buffer=64)`."""

    zero_variance: bool = False
    """Leave out groups whose rewards are all equal, up to rounding (`algorithm.advantages.all_equal`): an estimator
    that compares siblings learns nothing from them."""
    overlong: Literal["keep", "drop", "mask", "penalty"] = "keep"
    """What becomes of rollouts that a token limit cut off: a completion that reached `sampling.max_tokens` or the room
    that was left for it, or an environment that had no room for another turn (`end_reason="tokens"`). `drop` leaves
    them out of their group, `mask` lets their reward count among their siblings' but not their tokens, `penalty` lowers
    the reward the closer a completion comes to the limit."""
    overlong_buffer: int = 0
    """Tokens before the limit over which the penalty grows from 0 to all of it."""
    overlong_penalty: float = 1.0
    """What a completion that reaches the limit loses."""
    max_resamples: int = 0
    """How many more times other tasks are rolled out in place of those left out, until the batch is full."""
    max_stalled_rounds: int = 10
    """Rounds of rollouts in a row with nothing left to train on before the run ends."""

    @property
    def drops(self) -> bool:
        """Whether any of it can leave a whole group out."""
        return self.zero_variance or self.overlong in ("drop", "mask")


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    """Warm-up, then a decay. Example: `ScheduleConfig(decay="cosine", warmup_steps=5)`."""

    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up, reaching `final_factor` on the last step."""
    warmup_steps: int = 0
    """Steps of linear warm-up; the first step already trains."""
    warmup_ratio: float = 0.0
    """Warm-up as a part of all steps, rounded up; instead of `warmup_steps`."""
    final_factor: float = 0.0
    """Factor of the peak at the end of a linear or cosine decay."""


@dataclass(kw_only=True, slots=True)
class DistillConfig:
    """How the policy learns from `roles.teacher`."""

    divergence: Literal["tokens", "top_k", "full"] = "tokens"
    """What is compared: `tokens` the sampled token, its log-ratio as an advantage; `top_k` the teacher's likeliest
    tokens, as targets of a cross-entropy; `full` the whole vocabulary, as the reverse KL."""
    coef: float = 1.0
    """Weight of the advantage, or of the divergence in the loss."""
    top_k: int = 16
    """Tokens for `top_k`."""
    discount: float = 0.0
    """For `tokens`: how much of the next token's log-ratio counts for a token as well; 0: its own only."""
    rewards: bool = False
    """Whether rewards train too, through `loss_fn`, or the teacher alone."""


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
    recompute_logprobs_per_batch: bool = False
    """Take ratios against the trainer's policy as the batch starts, rather than against the generator."""
    recompute_logprobs_per_minibatch: bool = False
    """Take ratios against the policy just before each minibatch's step: they are exactly 1, and nothing is clipped."""
    temperature: float = 1.0
    """Of sampling and, so that log-probabilities agree, of the trainer's logits."""
    advantage_fn: Callable | dict[str, Callable] = field(
        default_factory=lambda: _default("advantages", "group_centered")
    )
    """`(rewards_G) -> advantages_G`, or one for each role of a workflow by its name; see algorithm/advantages.py."""
    precomputed_advantages: Literal["auto", "require", "ignore"] = "auto"
    """Advantages that turns carry: use them where a whole group has sound ones, insist on them, or do not look."""
    trajectory_grouping_hook: Callable | None = None
    """`(rollouts, config) -> list[RolloutGroup]`: which rollouts are compared, and with what rewards; None: those of
    one task and role. See docs/grouping.md."""
    stepwise_mode: Literal["broadcast", "per_step"] = "broadcast"
    """Every turn has the advantage of its rollout. `"per_step"` is no more: it warns and becomes `"broadcast"`; a
    `trajectory_grouping_hook` does what it did."""
    filters: FilterConfig = field(default_factory=FilterConfig)
    """What does not train; see algorithm/filters.py."""
    loss_fn: Callable = field(default_factory=lambda: _default("losses", "ppo"))
    """`(LossInputs, **loss_config) -> (token sum, metric sums)`; see algorithm/losses.py."""
    loss_config: dict[str, float] = field(default_factory=dict)
    """Keyword arguments of `loss_fn`, such as `clip_low`."""
    reduction: Callable = field(default_factory=lambda: _default("reductions", "token_mean"))
    """`(masks, groups) -> weights`; see algorithm/reductions.py."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference role; 0: none."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """See algorithm/kl.py. As a reward only k1, as a loss only k2 and k3."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL counts: as a term of the loss, or taken off each token's advantage."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; 0: none."""
    correction_fn: Callable | None = None
    """`(LossInputs, **correction_config) -> (factor_T, metric sums)`: how much a token counts when the generator that
    sampled it differs from the trainer; see algorithm/corrections.py. Needs one of `recompute_logprobs_per_*`."""
    correction_config: dict[str, float] = field(default_factory=dict)
    """Keyword arguments of `correction_fn`, such as `cap`."""
    correction_denominator: Literal["all", "kept"] = "all"
    """What a mean is over when a correction rejects tokens, by a factor of 0: all trained tokens, or those that are
    kept, as in verl. See `objective.with_kept_weights`."""
    distill: DistillConfig | None = None
    """Learning from `roles.teacher`; None: a teacher's log-probabilities are there for a loss of your own, no more."""
    refresh_teacher_every: int = 0
    """Steps after which the policy version that scores for `self_distill` is the newest again; 0: never, it stays the
    one that reinforcement starts from. Only for workflows that ask for it, see workflows/self_distill.py."""
    workflow: Callable | None = None
    """`async (task, policy, *, rollout_id, seed) -> Rollout` (or a list of them, one for each role), in place of one
    turn, or of the turns of the family's environments; see workflows/. Evaluations use it too."""
    after_rewards: Callable | None = None
    """`async (group, policy) -> None`, given the judged rollouts of each task before they are grouped for training; may
    give turns advantages or soft targets. See workflows/self_distill.py."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over the run; its peak is `trainer.optimizer.lr`."""
    gae_gamma: float = 1.0
    """Discount per token. Used with a critic only, as are the next three."""
    gae_lambda: float = 1.0
    """1 is the return minus the critic's value, less is lower variance and more of the critic's bias."""
    critic_loss_fn: Callable = field(default_factory=lambda: _default("losses", "value_loss"))
    """Like `loss_fn`, of `predicted_values`, `values` and `returns`."""
    critic_loss_config: dict[str, float] = field(default_factory=dict)

    def __setattr__(self, name: str, value: object) -> None:
        # Here, not in validation: a consumer that looks before or without it must see the same mode.
        if name == "stepwise_mode" and value != "broadcast":
            if value != "per_step":
                raise ValueError(f"algorithm.stepwise_mode={value!r}: is not a mode; use 'broadcast'")
            warnings.warn(
                "algorithm.stepwise_mode='per_step': is deprecated and now means 'broadcast'; to weigh turns one by "
                "one set algorithm.trajectory_grouping_hook (docs/grouping.md)",
                DeprecationWarning,
                stacklevel=3,
            )
            value = "broadcast"
        object.__setattr__(self, name, value)

    @property
    def asks_teacher(self) -> bool:
        """Whether a version of the policy is to score what it samples; see workflows/self_distill.py."""
        return bool(self.own_teachers)

    @property
    def own_teachers(self) -> list[Any]:
        """Those of `workflow` and `after_rewards` that ask for it, without what is wrapped around them."""
        asked = [_unwrapped(function) for function in (self.workflow, self.after_rewards)]
        return [function for function in asked if getattr(function, "asks_teacher", False)]

    @property
    def hooks(self) -> list[Callable]:
        """What is done with the judged rollouts of each task: what the workflow brings along, then `after_rewards`."""
        own = getattr(_unwrapped(self.workflow), "after_rewards", None)
        return [hook for hook in (own, self.after_rewards) if hook is not None]

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps taken on one batch."""
        return self.num_epochs * -(-self.tasks_per_step // (self.tasks_per_minibatch or self.tasks_per_step))


@dataclass(kw_only=True, slots=True)
class SupervisedConfig:
    """A warm start on the task's demonstrations, before the first rollout. 0 steps: none."""

    num_steps: int = 0
    task: Any = None
    """A task family's Config whose demonstrations to imitate; None: the run's own."""
    batch_size: int = 128
    lr: float = 3e-3
    """Peak learning rate."""
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(decay="cosine"))
    betas: tuple[float, float] = (0.9, 0.95)

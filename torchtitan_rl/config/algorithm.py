"""Config of an algorithm: how rollouts become a loss, given as numbers and functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval

from torchtitan_rl.constraints import BETAS, Hint
from torchtitan_rl.types import MIN_TEMPERATURE

__all__ = ["AlgorithmConfig", "DistillConfig", "EntropyControlConfig", "FilterConfig", "ScheduleConfig"]
__all__ += ["SupervisedConfig", "unwrapped"]


# Defaults of `AlgorithmConfig` that are functions of `torchtitan_rl.algorithm`, imported when a config is made: losses
# import torch, which this module must not, and estimators import this module.


def _default_advantage_fn() -> Callable:
    from torchtitan_rl.algorithm.advantages import group_centered

    return group_centered


def _default_loss_fn() -> Callable:
    from torchtitan_rl.algorithm.losses import ppo

    return ppo


def _default_reduction() -> Callable:
    from torchtitan_rl.algorithm.reductions import token_mean

    return token_mean


def _default_critic_loss_fn() -> Callable:
    from torchtitan_rl.algorithm.losses import value_loss

    return value_loss


def unwrapped(function: Any) -> Any:
    """The innermost function, without the layers of `functools.partial` and `functools.wraps` around it."""
    while True:
        inner = getattr(function, "__wrapped__", None) or (function.func if isinstance(function, partial) else None)
        if inner is None:
            return function
        function = inner


@dataclass(kw_only=True, slots=True)
class FilterConfig:
    """Which groups and rollouts do not train. Example, as in DAPO: `FilterConfig(zero_variance=True, max_resamples=4,
    overlong="penalty", overlong_buffer=64)`."""

    zero_variance: bool = False
    """Leave out groups whose rewards are all equal, up to rounding (`algorithm.advantages.all_equal`): an estimator
    that compares siblings learns nothing from such a group."""
    overlong: Literal["keep", "drop", "mask", "penalty"] = "keep"
    """How to treat a rollout that a token limit cut off. The limit is `sampling.max_tokens` for a completion, or
    `sampling.max_rollout_tokens` for the whole rollout (`end_reason="tokens"`). `keep` trains on the rollout. `drop`
    leaves the rollout out of its group. `mask` counts the rollout's reward in the group, but no token of the rollout
    trains. `penalty` lowers the reward of a rollout whose longest completion comes close to `sampling.max_tokens`."""
    overlong_buffer: Annotated[int, Ge(0), Hint("use 0 for a penalty at the limit alone")] = 0
    """Tokens before `sampling.max_tokens` over which the penalty grows linearly to `overlong_penalty`; 0: only a
    rollout at the limit loses reward, and all of `overlong_penalty` at once."""
    overlong_penalty: Annotated[float, Gt(0), Hint("use what a completion at the limit loses, or overlong='keep'")] = (
        1.0
    )
    """Reward that a rollout at the limit loses."""
    max_resamples: Annotated[int, Ge(0)] = 0
    """Further rounds of rollouts that replace left-out groups by groups of other tasks, at most, until the batch is
    full; 0: train on the groups that are left."""
    max_stalled_rounds: Annotated[int, Ge(1)] = 10
    """Rounds of rollouts for one batch after which the run ends if filters left every group out (`max_resamples` + 1
    rounds where that is more)."""

    @property
    def all_off(self) -> bool:
        """Whether every group trains as it was played."""
        return not self.zero_variance and self.overlong == "keep"

    @property
    def drops(self) -> bool:
        """Whether a filter that is on can leave a whole group out."""
        return self.zero_variance or self.overlong in ("drop", "mask")


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    """Learning rate over a phase: warm-up, then a decay. Example: `ScheduleConfig(decay="cosine", warmup_steps=5)`."""

    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; `linear` and `cosine` reach `final_factor` on the last step."""
    warmup_steps: Annotated[int, Ge(0), Hint("use 0 for no warm-up")] = 0
    """Optimizer steps of linear warm-up, of which the first already has a learning rate above 0; 0: see
    `warmup_ratio`."""
    warmup_ratio: Annotated[float, Interval(ge=0, le=1), Hint("use a part of all steps, such as 0.1")] = 0.0
    """Warm-up as a fraction of the phase's steps, rounded up, where `warmup_steps` is 0; 0: no warm-up."""
    final_factor: Annotated[float, Ge(0), Hint("use 0 to end at 0")] = 0.0
    """Learning rate at the end of a linear or cosine decay, as a fraction of the peak."""


@dataclass(kw_only=True, slots=True)
class EntropyControlConfig:
    """How `entropy_coef` follows the policy's entropy; see algorithm/entropy_control.py. The defaults are those of
    Skywork-OR1's scripts. Example: `EntropyControlConfig(target=0.3, max_coef=0.01)`."""

    target: Annotated[float, Gt(0), Hint("use an entropy that the policy has early in training")] = 0.2
    """Mean entropy of a trained token, in nats. The bonus acts on the batch after one whose entropy is at most this."""
    step: Annotated[float, Gt(0), Hint("use entropy_control=None for a coefficient that stays")] = 1e-4
    """By how much the coefficient rises after a batch with an entropy of at most `target`, and falls after another."""
    min_coef: Annotated[float, Ge(0), Hint("use 0 for a bonus that may vanish")] = 0.0
    """The smallest coefficient."""
    max_coef: Annotated[float, Gt(0)] = 5e-3
    """The largest coefficient."""


@dataclass(kw_only=True, slots=True)
class DistillConfig:
    """How the policy learns from `roles.teacher`."""

    divergence: Literal["tokens", "top_k", "full"] = "tokens"
    """How policy and teacher are compared at each position. `tokens`: the log-ratio of the sampled token is an
    advantage. `top_k`: the teacher's likeliest tokens are targets of a cross-entropy. `full`: the reverse KL over the
    whole vocabulary is a term of the loss."""
    coef: Annotated[float, Gt(0), Hint("use 1, as 0 would learn nothing")] = 1.0
    """Factor of the advantage (`tokens`) or of the divergence in the loss (`top_k`, `full`)."""
    top_k: Annotated[int, Ge(1)] = 16
    """Tokens per position that the teacher gives with `divergence="top_k"`."""
    discount: Annotated[float, Interval(ge=0, le=1), Hint("use 0 for none")] = 0.0
    """With `divergence="tokens"`, the discount per token at which a token's advantage counts the log-ratios of later
    tokens; 0: a token's advantage is its own log-ratio."""
    rewards: bool = False
    """True: rewards train the policy as well, through `loss_fn`. False: the policy learns from the teacher alone."""


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """One policy-gradient algorithm. A field for a function takes any function with the signature that it states."""

    group_size: Annotated[int, Ge(1)] = 8
    """Rollouts of each task, whose rewards are compared with each other."""
    tasks_per_step: Annotated[int, Ge(1)] = 16
    """Tasks in a batch. A task has one group, or one for each role that plays it."""
    tasks_per_minibatch: Annotated[int, Ge(0), Hint("use 0 for the whole batch")] = 0
    """Tasks in a minibatch, which is one optimizer step, with all groups of each task; the last minibatch may be
    smaller. 0: the whole batch."""
    num_epochs: Annotated[int, Ge(1)] = 1
    """Passes over a batch before its weights are published."""
    max_policy_lag: Annotated[int, Ge(0), Hint("use 0 for none, 1 to overlap generation and training")] = 0
    """How many publications of weights the oldest token of a batch may be behind when the batch starts to train: as
    many batches are generated while one trains. 0: generation and training take turns. See docs/asynchrony.md."""
    batch_order: Literal["slots", "finished"] = "slots"
    """`slots`: every batch waits for the slots that are due in it. `finished`, for a lag of 2 or more: a batch consists
    of the slots that finished first, and a slot trains before a token of it is older than the lag. See
    docs/asynchrony.md."""
    recompute_logprobs_per_batch: bool = False
    """True: the old policy of a ratio is the trainer's policy before the batch's first step, by log-probabilities that
    the trainer recomputes. False: the generator that sampled."""
    recompute_logprobs_per_minibatch: bool = False
    """True: the old policy of a ratio is the trainer's policy just before each optimizer step, so every ratio is
    exactly 1 and nothing is clipped."""
    temperature: Annotated[float, Ge(MIN_TEMPERATURE), Hint("use 1, training samples are not greedy")] = 1.0
    """Temperature of sampled rollouts. The trainer divides its logits by the same number, so that log-probabilities
    agree."""
    advantage_fn: Callable | dict[str, Callable] = field(default_factory=_default_advantage_fn)
    """`(rewards_G) -> advantages_G`, or a dictionary from a workflow's roles to such functions; see
    algorithm/advantages.py, and algorithm/group_estimators.py for those that see lengths and reward parts."""
    greedy_baseline: bool = False
    """True: every task is played and judged once more, greedily; the rollout does not train, its reward is the baseline
    of estimators such as `group_estimators.remax`. False: it is not played."""
    precomputed_advantages: Literal["auto", "require", "ignore"] = "auto"
    """How to treat advantages that turns carry. `auto`: use the advantages of a group in which every turn carries valid
    ones. `require`: raise ValueError for any other group. `ignore`: always call `advantage_fn`."""
    trajectory_grouping_hook: Callable | None = None
    """`(rollouts, config) -> list[RolloutGroup]`: which rollouts are compared, and with what rewards. None: a group is
    the rollouts of one task and role. See docs/grouping.md."""
    stepwise_mode: Literal["broadcast", "per_step"] = "broadcast"
    """Every turn has the advantage of its rollout. `"per_step"` is deprecated: setting it warns and sets `"broadcast"`;
    use a `trajectory_grouping_hook` to compare single turns."""
    credit_fn: Callable | None = None
    """`(rollout) -> one number per turn`, the factor of the rollout's advantage for the turn's tokens; a turn with 0
    does not train. For rollouts with branches, such as an agent's; see algorithm/credit.py. None: every turn of every
    branch counts alike."""
    filters: FilterConfig = field(default_factory=FilterConfig)
    """Which groups and rollouts do not train; see algorithm/filters.py."""
    loss_fn: Callable = field(default_factory=_default_loss_fn)
    """`(LossInputs, **loss_config) -> (token sum, metric sums)`; see algorithm/losses.py."""
    loss_config: dict[str, float] = field(default_factory=dict)
    """Keyword arguments of `loss_fn`, such as `clip_low`."""
    reduction: Callable = field(default_factory=_default_reduction)
    """`(masks, groups) -> token weights`: over what the loss is a mean; see algorithm/reductions.py."""
    kl_coef: Annotated[float, Ge(0), Hint("use 0 for none")] = 0.0
    """Factor of the KL to the reference role, with `kl_target` the first one; 0: no KL term."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL per token, see algorithm/kl.py. `kl_in="loss"` takes k2 or k3, or with `kl_ratio_weighted` k1
    or k3; the others k1 only."""
    kl_ratio_weighted: bool = False
    """True: each token's KL in the loss is multiplied by its ratio to the old policy, with gradient, so that the
    gradient is that of KL(policy || reference) on tokens that the old policy sampled. False: it has the token's weight
    alone."""
    kl_in: Literal["loss", "reward", "return"] = "loss"
    """`loss`: the KL is a term of the loss. `reward`: each token's own KL is subtracted from its advantage. `return`:
    the KL is subtracted from the token's reward, so that the tokens before it pay for it too; see
    algorithm/returns.py."""
    kl_target: Annotated[float, Ge(0), Hint("use 0 for a coefficient that stays")] = 0.0
    """KL of a whole rollout to the reference, in nats, that `kl_coef` is raised and lowered for after every batch; see
    algorithm/kl_control.py. Not with `kl_in="loss"`. 0: `kl_coef` stays."""
    kl_horizon: Annotated[int, Ge(1)] = 10_000
    """A batch of n rollouts multiplies `kl_coef` by 1 + e n / horizon, with e the relative error of the KL, at most 0.2
    either way. Acts only with `kl_target`."""
    entropy_coef: Annotated[float, Ge(0), Hint("use 0 for none")] = 0.0
    """Factor of the entropy bonus, with `entropy_control` the first one; 0: no bonus."""
    entropy_control: EntropyControlConfig | None = None
    """How the factor of the entropy bonus follows the policy's entropy after every batch. None: `entropy_coef`
    stays."""
    correction_fn: Callable | None = None
    """`(LossInputs, **correction_config) -> (factor_T, metric sums)`: a factor of each token's weight, for a generator
    whose log-probabilities differ from the trainer's; see algorithm/corrections.py. Needs
    `recompute_logprobs_per_batch` or `recompute_logprobs_per_minibatch`. None: no correction."""
    correction_config: dict[str, float] = field(default_factory=dict)
    """Keyword arguments of `correction_fn`, such as `cap`."""
    correction_denominator: Literal["all", "kept"] = "all"
    """Denominator of the loss's mean when a correction rejects tokens, with a factor of 0: all trained tokens, or the
    kept tokens only, as in verl. See `terms.with_kept_weights`."""
    minibatch_fn: Callable | None = None
    """`(list[Datum], **minibatch_config) -> list[Datum]`: changes weights or advantages of a minibatch by statistics of
    all its tokens, once before its optimizer step; see algorithm/minibatch_statistics.py. Needs
    `recompute_logprobs_per_minibatch`. None: no call."""
    minibatch_config: dict[str, float] = field(default_factory=dict)
    """Keyword arguments of `minibatch_fn`, such as `fraction`."""
    expert_routing: Literal["own", "compare", "replay"] = "own"
    """Which experts of a mixture the policy's forward uses in training. `own`: those that the trainer's routers choose.
    `replay`: those that the generator used when it sampled, weighted by the trainer's own scores of them (rollout
    routing replay). `compare`: those of `own`, and metrics say how often they are the generator's. See
    algorithm/routed_data.py."""
    distill: DistillConfig | None = None
    """How the policy learns from `roles.teacher`. None: the teacher's log-probabilities are only a loss input
    (`teacher_logprobs`) that a loss of your own may use."""
    refresh_teacher_every: Annotated[int, Ge(0), Hint("use 0 for never")] = 0
    """Optimizer steps after which the newest policy version becomes the snapshot that scores for self-distillation; 0:
    the snapshot stays the version at which reinforcement starts. Acts only with the workflows and hooks of
    rollout/self_distill.py."""
    workflow: Callable | None = None
    """`async (task, policy, *, rollout_id, seed) -> Rollout`, or a list with one rollout for each role: plays a task
    once, in training and in evaluations. None: play the family's environment, or one turn where the family has no
    environment. See rollout/policy.py and rollout/multi_turn.py."""
    batch_source: Callable | None = None
    """`(player, draws, state) -> BatchSource` makes what the loop takes its batches from, see rollout/batches.py and
    docs/extending.md; only without a lag. None: batches of the next slots, or with `max_policy_lag` batches that are
    played ahead."""
    after_rewards: Callable | None = None
    """`async (group, policy) -> None`: called with the judged rollouts of each task before the rollouts are grouped for
    training; may set advantages or soft targets of turns. None: no call. See rollout/self_distill.py."""
    on_rollout_failure: Literal["fail", "retry", "drop_group"] = "fail"
    """What follows a workflow, environment, tool or reward that raises or is late. `fail`: the run ends. `retry`: the
    rollout is played again, in a fresh environment, and after `rollout_retries` its group is dropped whole.
    `drop_group`: its group is dropped at once. `filters.max_resamples` rounds replace dropped groups. In an evaluation
    an attempt that fails to the last counts as wrong, and its siblings count as they are."""
    rollout_retries: Annotated[int, Ge(0)] = 2
    """Further attempts at a failed rollout. Acts only with `on_rollout_failure="retry"`."""
    max_failed_frac: Annotated[float, Interval(gt=0, le=1), Hint("use 1 for no limit")] = 0.2
    """Share of rollouts and rewards that may fail before the run ends. Acts from the 32nd on, and not with
    `on_rollout_failure="fail"`."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over the reinforcement phase, relative to the peak `trainer.optimizer.lr`."""
    gae_gamma: Annotated[float, Interval(ge=0, le=1), Hint("use 1 for no discount")] = 1.0
    """Discount per token of GAE, and of returns with `kl_in="return"`. Acts only with one of these. 1: no discount."""
    gae_lambda: Annotated[float, Interval(ge=0, le=1), Hint("use 1 for no discount")] = 1.0
    """Lambda of GAE. Acts only with `roles.critic`. 1: the advantage is the return minus the critic's value; less gives
    a lower variance and more of the critic's bias."""
    whiten_advantages: bool = False
    """True: the advantages of a batch get mean 0 and standard deviation 1 over its trained tokens, after GAE and the KL
    as a reward; see algorithm/whitening.py. False: they stay as they are."""
    critic_loss_fn: Callable = field(default_factory=_default_critic_loss_fn)
    """Loss of `roles.critic`: like `loss_fn`, on `predicted_values`, `values` and `returns`."""
    critic_loss_config: dict[str, float] = field(default_factory=dict)
    """Keyword arguments of `critic_loss_fn`, such as `clip`."""

    def __setattr__(self, name: str, value: object) -> None:
        # Not in validation: code that reads an unvalidated config must see the same mode.
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
        """Whether the run keeps a snapshot that scores the policy's samples; see rollout/self_distill.py."""
        return bool(self.own_teachers)

    @property
    def own_teachers(self) -> list[Any]:
        """The innermost functions of `workflow` and `after_rewards` that have `asks_teacher` set."""
        functions = [unwrapped(function) for function in (self.workflow, self.after_rewards)]
        return [function for function in functions if getattr(function, "asks_teacher", False)]

    @property
    def hooks(self) -> list[Callable]:
        """Functions to call with the judged rollouts of each task: the workflow's own `after_rewards`, then the
        config's."""
        own = getattr(unwrapped(self.workflow), "after_rewards", None)
        return [hook for hook in (own, self.after_rewards) if hook is not None]

    @property
    def minibatch_reads_entropy(self) -> bool:
        """Whether `minibatch_fn` reads `old_entropy`; see algorithm/minibatch_statistics.py."""
        return getattr(unwrapped(self.minibatch_fn), "reads_entropy", False)

    @property
    def minibatch_reads_batch_start(self) -> bool:
        """Whether `minibatch_fn` reads `batch_logprobs`; see algorithm/minibatch_statistics.py."""
        return getattr(unwrapped(self.minibatch_fn), "reads_batch_start", False)

    @property
    def scores_each_batch(self) -> bool:
        """Whether the policy scores a batch before its first step."""
        return self.recompute_logprobs_per_batch or self.minibatch_reads_batch_start

    @property
    def recomputes_logprobs(self) -> bool:
        """Whether the loss's ratios are to the trainer's own log-probabilities, before the batch or the minibatch."""
        return self.recompute_logprobs_per_batch or self.recompute_logprobs_per_minibatch

    @property
    def teacher_trains_alone(self) -> bool:
        """Whether the teacher takes the place of rewards and of their advantages."""
        return self.distill is not None and not self.distill.rewards

    @property
    def teacher_replaces_loss_fn(self) -> bool:
        """Whether the divergence from the teacher is the loss: `loss_fn` has no advantages to act on."""
        return self.distill is not None and not self.distill.rewards and self.distill.divergence != "tokens"

    @property
    def kl_in_return(self) -> bool:
        """Whether tokens pay for their KL to the reference in their rewards."""
        return self.kl_coef > 0 and self.kl_in == "return"

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps taken on one batch."""
        return self.num_epochs * -(-self.tasks_per_step // (self.tasks_per_minibatch or self.tasks_per_step))


@dataclass(kw_only=True, slots=True)
class SupervisedConfig:
    """The supervised phase: a warm start on a task family's demonstrations, before the first rollout."""

    num_steps: Annotated[int, Ge(0), Hint("use 0 for no warm start")] = 0
    """Optimizer steps of the supervised phase; 0: no warm start."""
    task: Any = None
    """Config of the task family whose demonstrations the policy imitates; None: `RunConfig.task`."""
    batch_size: Annotated[int, Ge(1)] = 128
    """Tasks whose demonstrations make one optimizer step."""
    lr: Annotated[float, Ge(0)] = 3e-3
    """Peak learning rate."""
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(decay="cosine"))
    """Learning rate over the supervised phase, relative to the peak `lr`."""
    betas: Annotated[tuple[float, float], BETAS] = (0.9, 0.95)
    """AdamW's decay rates in the supervised phase."""

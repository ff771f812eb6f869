"""Training on one batch: data of judged groups, scores of the other roles, optimizer steps."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable
from dataclasses import dataclass

import torch

from torchtitan_rl.algorithm import soft_targets
from torchtitan_rl.algorithm.datums import to_datums
from torchtitan_rl.algorithm.objective import policy_objective
from torchtitan_rl.algorithm.terms import with_kept_weights, with_minibatch_fn
from torchtitan_rl.algorithm.whitening import with_whitened
from torchtitan_rl.config.algorithm import AlgorithmConfig, ScheduleConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.record.tracing import span
from torchtitan_rl.train import role_scores
from torchtitan_rl.train.role_step import RoleStep
from torchtitan_rl.train.step_metrics import StepMetrics
from torchtitan_rl.types import Datum, OptimParams, RolloutGroup

__all__ = ["StepOutput", "lr_factor", "optim_params", "take_step", "training_data", "with_seconds_since"]


async def training_data(
    groups: list[RolloutGroup], roles: dict[str, TrainingClient], config: AlgorithmConfig
) -> list[Datum]:
    """Training data of judged groups, with the scores of reference, teacher and critic, and whitened where the config
    says so. Raises ValueError for groups without a turn."""
    with span("make training data"):
        data = to_datums(groups, config)
    if not data:
        raise ValueError(f"groups: {len(groups)} of them hold no turn to train on; give rollouts with turns")
    if len(roles) > 1 or config.scores_each_batch:
        data = await role_scores.with_roles(data, groups, roles, config)
    return with_whitened(data) if config.whiten_advantages else data


@dataclass(kw_only=True, slots=True)
class StepOutput:
    """One optimizer step of every role that trains."""

    steps: dict[str, RoleStep]
    """Role -> its step."""
    policy_logprobs: list[torch.Tensor]
    """The policy's log-probabilities of the minibatch before the step, one tensor (T,) per datum."""


async def take_step(
    minibatch: list[Datum], roles: dict[str, TrainingClient], config: RunConfig, step: int, metrics: StepMetrics
) -> StepOutput:
    """Optimizer step number `step` (from 0) of every role that trains; adds to `metrics`."""
    policy, algorithm = roles["policy"], config.algorithm
    if algorithm.recompute_logprobs_per_minibatch:
        entropy = algorithm.minibatch_reads_entropy
        minibatch = await role_scores.with_old_logprobs(minibatch, policy, metrics, entropy=entropy)
    critic: list[Awaitable[RoleStep]] = []  # its one step, or none
    if "critic" in roles:  # submitted before the policy's step: the two may take turns on shared devices
        params = optim_params(config, "critic", step)
        critic = [role_scores.critic_step(minibatch, roles["critic"], algorithm, params, metrics)]
    if algorithm.correction_denominator == "kept":
        minibatch = with_kept_weights(minibatch, algorithm)
    if algorithm.minibatch_fn is not None:
        minibatch = with_minibatch_fn(minibatch, algorithm)
    if "soft_tokens" in minibatch[0].loss_inputs:
        minibatch = soft_targets.appended(minibatch)
    start = time.perf_counter()
    with span("make training data"):
        objective = policy_objective(algorithm, minibatch[0].loss_inputs)
    forward_backward = policy.forward_backward(minibatch, objective)
    optim_step = policy.optim_step(optim_params(config, "policy", step))
    (output, forward_backward_s), (optim, both_s), *critic_steps = await asyncio.gather(
        with_seconds_since(start, forward_backward), with_seconds_since(start, optim_step), *critic
    )
    metrics.add_step(output, optim)
    metrics.add("time/forward_backward_s", forward_backward_s)
    # The answer with all log-probabilities takes longer to arrive than the optimizer's, which may overtake it.
    metrics.add("time/optim_s", max(0.0, both_s - forward_backward_s))
    steps = {"policy": RoleStep(optim, output.loss)}
    if critic_steps:
        [steps["critic"]] = critic_steps
    return StepOutput(steps=steps, policy_logprobs=output.policy_logprobs)


def optim_params(config: RunConfig, role: str, step: int) -> OptimParams:
    """Optimizer parameters of a step: the role's peak learning rate times the schedule's factor."""
    factor = lr_factor(config.algorithm.schedule, step, config.controller.num_steps)
    trainer = config.trainer if role == "policy" else config.roles.configured()[role].trainer
    return OptimParams(lr=trainer.optimizer.lr * factor, betas=trainer.optimizer.betas)


async def with_seconds_since(start: float, awaitable: Awaitable):
    """(result, seconds since `start`)."""
    result = await awaitable
    return result, time.perf_counter() - start


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

"""From judged groups to optimizer steps: the training data of a batch, and one step on a minibatch of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable

import torch

from torchtitan_rl.algorithm import soft_targets
from torchtitan_rl.algorithm.datums import to_datums
from torchtitan_rl.algorithm.objective import policy_objective, with_kept_weights
from torchtitan_rl.algorithm.schedules import lr_factor
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.run import scoring
from torchtitan_rl.run.lines import StepMetrics
from torchtitan_rl.types import Datum, OptimParams, OptimStepOutput, RolloutGroup

__all__ = ["scored", "step_on", "optim_params", "timed"]


async def scored(groups: list[RolloutGroup], roles: dict[str, TrainingClient], config: AlgorithmConfig) -> list[Datum]:
    """Training data of judged groups, with the scores of reference, teacher and critic. Raises ValueError for groups
    without a turn."""
    data = to_datums(groups, config)
    if not data:
        raise ValueError(f"groups: {len(groups)} of them hold no turn to train on; give rollouts with turns")
    if len(roles) > 1 or config.recompute_logprobs_per_batch:
        data = await scoring.with_roles(data, groups, roles, config)
    return data


async def step_on(
    minibatch: list[Datum], roles: dict[str, TrainingClient], config: RunConfig, step: int, line: StepMetrics
) -> tuple[dict[str, tuple[OptimStepOutput, float]], list[torch.Tensor]]:
    """Optimizer step number `step` (from 0) of every role that trains; adds metrics to `line`.

    Returns role -> (output of `optim_step`, loss), and the policy's log-probabilities of the minibatch before the step,
    one tensor per datum.
    """
    policy, others = roles["policy"], {}
    if config.algorithm.recompute_logprobs_per_minibatch:
        minibatch = await scoring.with_old_logprobs(minibatch, policy, line)
    if "critic" in roles:  # submitted before the policy's step: they may take turns on shared devices
        others["critic"] = scoring.critic_step(
            minibatch, roles["critic"], config.algorithm, optim_params(config, "critic", step), line
        )
    if config.algorithm.correction_denominator == "kept":
        minibatch = with_kept_weights(minibatch, config.algorithm)
    if "soft_tokens" in minibatch[0].loss_inputs:
        minibatch = soft_targets.appended(minibatch)
    start = time.perf_counter()
    forward_backward = policy.forward_backward(minibatch, policy_objective(config.algorithm, minibatch[0].loss_inputs))
    optim_step = policy.optim_step(optim_params(config, "policy", step))
    (output, forward_backward_s), (optim, step_s), *answers = await asyncio.gather(
        timed(forward_backward, start), timed(optim_step, start), *others.values()
    )
    line.add(output, optim)
    line.mean("time/forward_backward_s", forward_backward_s)
    line.mean("time/optim_s", step_s - forward_backward_s)
    return {"policy": (optim, output.loss), **dict(zip(others, answers, strict=True))}, output.policy_logprobs


def optim_params(config: RunConfig, role: str, step: int) -> OptimParams:
    """Optimizer parameters of a step: the role's peak learning rate times the schedule's factor."""
    factor = lr_factor(config.algorithm.schedule, step, config.controller.num_steps)
    trainer = config.trainer if role == "policy" else config.roles.configured()[role].trainer
    return OptimParams(lr=trainer.optimizer.lr * factor, betas=trainer.optimizer.betas)


async def timed(awaitable: Awaitable, start: float):
    """(result, seconds since `start`)."""
    result = await awaitable
    return result, time.perf_counter() - start

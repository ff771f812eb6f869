"""From judged groups to optimizer steps: what the roles say of a batch, and one step on a minibatch of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from torchtitan_rl import metrics
from torchtitan_rl.algorithm.config import AlgorithmConfig
from torchtitan_rl.algorithm.datums import to_datums, with_gae, with_inputs
from torchtitan_rl.algorithm.distill import teacher_request, with_distillation, with_teacher, without_distillation
from torchtitan_rl.algorithm.objective import policy_objective, with_kept_weights, with_kl_reward
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.types import Datum, OptimParams, OptimStepOutput, RolloutGroup

__all__ = ["scored", "step_on", "timed"]


async def scored(
    groups: list[RolloutGroup], roles: dict[str, TrainingClient], config: AlgorithmConfig, *, oldest_version: int
) -> list[Datum]:
    """Training data of judged groups, with what reference, teacher and critic say of them. Their forwards overlap.

    With a critic, advantages are its own and per token: the groups then have none, unless they brought theirs. Nor do
    they where a teacher alone trains.
    """
    data = to_datums(groups, config, oldest_version=oldest_version)
    if not data:
        raise ValueError(f"groups: {len(groups)} of them hold no turn to train on; give rollouts with turns")
    waits = {
        role: client.forward(data, **(teacher_request(config.distill) if role == "teacher" else {}))
        for role, client in roles.items()
        if role != "policy" or config.recompute_logprobs_per_batch
    }
    outputs = dict(zip(waits, await asyncio.gather(*waits.values())))
    if "policy" in outputs:
        data = with_inputs(data, old_logprobs=outputs["policy"].policy_logprobs)
    for role in outputs.keys() & {"reference", "teacher"}:
        data = with_inputs(data, **{f"{role}_logprobs": outputs[role].policy_logprobs})
    if "critic" in outputs:
        rewards = [reward for group in groups for reward in group.rewards]
        data = with_gae(
            data,
            [rewards[datum.rollout] for datum in data],
            outputs["critic"].values,
            config,
            keep_groups={index for index, group in enumerate(groups) if group.precomputed},
        )
    if config.distill is not None:
        data = with_teacher(data, outputs["teacher"], config.distill)
    taught = config.distill is not None and not config.distill.rewards
    for group in groups:
        if taught or ("critic" in outputs and not group.precomputed):
            group.advantages = None
    return with_kl_reward(data, config)


async def step_on(
    minibatch: list[Datum],
    roles: dict[str, TrainingClient],
    config: AlgorithmConfig,
    optim_params: Callable[[str], OptimParams],
    line: metrics.StepMetrics,
) -> dict[str, OptimStepOutput]:
    """One optimizer step of the policy, and of the critic where there is one. Returns both by role; fills `line`."""
    policy = roles["policy"]
    if config.recompute_logprobs_per_minibatch:
        output, score_s = await timed(policy.forward(minibatch))
        minibatch = with_inputs(minibatch, old_logprobs=output.policy_logprobs)
        line.mean("time/score_s", score_s)
    steps = {}
    if "critic" in roles:  # before the policy's, where they share devices
        steps["critic"] = _critic_step(minibatch, roles["critic"], config, optim_params("critic"), line)
    if config.correction_denominator == "kept":
        minibatch = with_kept_weights(minibatch, config)
    start = time.perf_counter()
    forward_backward = policy.forward_backward(with_distillation(minibatch), policy_objective(config))
    optim_step = policy.optim_step(optim_params("policy"))
    (output, forward_backward_s), (optim, step_s), *others = await asyncio.gather(
        timed(forward_backward, start), timed(optim_step, start), *steps.values()
    )
    line.add(output, optim)
    line.mean("time/forward_backward_s", forward_backward_s)
    line.mean("time/optim_s", step_s - forward_backward_s)
    return {"policy": optim, **dict(zip(steps, others))}


def _critic_step(
    minibatch: list[Datum],
    critic: TrainingClient,
    config: AlgorithmConfig,
    params: OptimParams,
    line: metrics.StepMetrics,
) -> Awaitable[OptimStepOutput]:
    """Submits the critic's step; awaiting it gathers its metrics."""
    forward_backward = critic.forward_backward(
        without_distillation(minibatch), config.critic_loss_fn, loss_config=config.critic_loss_config
    )
    optim_step = critic.optim_step(params)

    async def gather() -> OptimStepOutput:
        output, optim = await forward_backward, await optim_step
        line.add(output)
        line.mean("critic/loss", output.loss)
        line.mean("critic/grad_norm", optim.grad_norm)
        line.mean("critic/skipped", optim.skipped)
        return optim

    return gather()


async def timed(awaitable: Awaitable, start: float | None = None):
    """(result, seconds since `start`, or since now)."""
    start = time.perf_counter() if start is None else start
    result = await awaitable
    return result, time.perf_counter() - start

"""Forward passes over a batch before its step: log-probabilities of policy, reference and teacher, values of the
critic; and the critic's optimizer step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable

from torchtitan_rl.algorithm.distill import teacher_request, with_teacher
from torchtitan_rl.algorithm.gae import with_gae
from torchtitan_rl.algorithm.inputs import with_inputs, without_inputs
from torchtitan_rl.algorithm.returns import with_kl_returns
from torchtitan_rl.algorithm.routed_data import without_routing
from torchtitan_rl.algorithm.terms import with_kl_reward
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.train.role_step import RoleStep
from torchtitan_rl.train.step_metrics import StepMetrics
from torchtitan_rl.types import Datum, ForwardBackwardOutput, OptimParams, RolloutGroup

__all__ = ["critic_step", "with_old_logprobs", "with_roles"]

_SCORE_BATCHES = ("reference", "critic", "teacher")  # a reward model scores rollouts, before there is a batch


async def with_roles(
    data: list[Datum], groups: list[RolloutGroup], roles: dict[str, TrainingClient], config: AlgorithmConfig
) -> list[Datum]:
    """The data with log-probabilities of reference and teacher, GAE advantages from the critic's values, and the KL to
    the reference in advantages or returns; with `scores_each_batch` also the policy's own, as `old_logprobs`. Forwards
    of roles on devices of their own overlap.

    A critic's advantages are per token and stay in the datums: `advantages` of a group becomes None, unless the group
    has precomputed advantages. With distillation that does not use rewards, `advantages` of every group becomes None.
    """
    forwards: dict[str, Awaitable[ForwardBackwardOutput]] = {}
    if config.scores_each_batch:
        forwards["policy"] = roles["policy"].forward(data)
    unrouted = without_routing(data)
    for role, client in roles.items():
        if role in _SCORE_BATCHES:
            request = teacher_request(config.distill) if role == "teacher" else {}
            forwards[role] = client.forward(unrouted, **request)
    outputs = dict(zip(forwards, await asyncio.gather(*forwards.values())))
    if "policy" in outputs:
        data = with_inputs(data, old_logprobs=outputs["policy"].policy_logprobs)
    for role in outputs.keys() & {"reference", "teacher"}:
        data = with_inputs(data, **{f"{role}_logprobs": outputs[role].policy_logprobs})
    precomputed = {index for index, group in enumerate(groups) if group.precomputed}
    if "critic" in outputs:
        rewards = [reward for group in groups for reward in group.rewards]
        data = with_gae(
            data, [rewards[datum.rollout] for datum in data], outputs["critic"].values, config, keep_groups=precomputed
        )
    elif config.kl_in_return:
        data = with_kl_returns(data, config, keep_groups=precomputed)
    if config.distill is not None:
        data = with_teacher(data, outputs["teacher"], config.distill)
    for group in groups:
        if config.teacher_trains_alone or ("critic" in outputs and not group.precomputed):
            group.advantages = None
    return with_kl_reward(data, config)


async def with_old_logprobs(
    data: list[Datum], policy: TrainingClient, metrics: StepMetrics, *, entropy: bool
) -> list[Datum]:
    """The data with `old_logprobs`: the policy's log-probabilities now, the denominator of the loss's ratios. With
    `entropy` also `old_entropy`, the entropy of its distribution at each token.

    Data that the policy scored before the batch also get `batch_logprobs`, the log-probabilities of then. Before the
    batch's first step these are the ones of now: two forward passes of the same policy may differ by rounding.
    """
    start = time.perf_counter()
    output = await policy.forward(data, entropy=entropy)
    metrics.add("time/score_s", time.perf_counter() - start)
    columns = {"old_logprobs": output.policy_logprobs}
    if entropy:
        columns["old_entropy"] = output.entropy
    if "old_logprobs" in data[0].loss_inputs:
        earlier_logprobs = [datum.loss_inputs["old_logprobs"] for datum in data]
        columns["batch_logprobs"] = output.policy_logprobs if metrics.num_steps == 0 else earlier_logprobs
    return with_inputs(data, **columns)


def critic_step(
    data: list[Datum], critic: TrainingClient, config: AlgorithmConfig, params: OptimParams, metrics: StepMetrics
) -> Awaitable[RoleStep]:
    """Submits an optimizer step of the critic. The awaitable adds the critic's metrics to `metrics`, and returns the
    step."""
    forward_backward = critic.forward_backward(
        without_inputs(without_routing(data), "soft_tokens", "soft_shares", "teacher_hidden"),
        config.critic_loss_fn,
        loss_config=config.critic_loss_config,
    )
    optim_step = critic.optim_step(params)

    async def gather() -> RoleStep:
        output, optim = await forward_backward, await optim_step
        metrics.add_step(output)
        metrics.add("critic/loss", output.loss)
        metrics.add("critic/grad_norm", optim.grad_norm)
        metrics.add("critic/skipped", optim.skipped)
        return RoleStep(optim, output.loss)

    return gather()

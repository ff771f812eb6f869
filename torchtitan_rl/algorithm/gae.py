"""Generalised advantage estimation: a critic's values turn one reward into an advantage per token."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from torchtitan_rl.algorithm.inputs import with_inputs
from torchtitan_rl.algorithm.returns import episodes_of, kl_costs, with_kl_returns
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.types import Datum

__all__ = ["gae", "with_gae"]


def gae(
    values_T: torch.Tensor,
    mask_T: torch.Tensor,
    reward: float,
    *,
    gamma: float,
    lam: float,
    costs_T: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns) of one sequence, both float64 (T,), 0 where the mask is 0 (Schulman et al.,
    arXiv:1506.02438).

    The last trained token earns the reward; the value after that token is 0. Masked tokens (prompt and observations)
    are no steps of the policy: the recursion skips them. `costs_T` come off each token's reward; None: there are none.
    """
    steps = mask_T.nonzero()[:, 0].tolist()
    advantages_T, values = torch.zeros(len(mask_T), dtype=torch.float64), values_T.double().tolist()
    costs = [0.0] * len(values) if costs_T is None else costs_T.tolist()
    next_value, next_advantage, step_reward = 0.0, 0.0, reward
    for t in reversed(steps):
        delta = step_reward - costs[t] + gamma * next_value - values[t]
        next_advantage = delta + gamma * lam * next_advantage
        advantages_T[t] = next_advantage
        next_value, step_reward = values[t], 0.0
    return advantages_T, torch.where(mask_T > 0, advantages_T + values_T.double(), 0.0)


def with_gae(
    data: list[Datum],
    rewards: list[float],
    values: list[torch.Tensor],
    config: AlgorithmConfig,
    *,
    keep_groups: Collection[int] = (),
) -> list[Datum]:
    """Datums with advantages, returns and values by GAE, from the critic's values and the rollout's reward per datum.

    The datums of a rollout are one episode, in order. Only the last trained token of the last datum earns the reward.
    The value after a datum's last trained token is the value at the next datum's first trained token. With
    `kl_in="return"` every trained token pays its `returns.kl_costs`.
    Datums of `keep_groups` keep their precomputed advantages, less the costs to go; the critic learns from the datums
    of every group.
    """
    columns_of_datum: list[Any] = [None] * len(data)
    for members in episodes_of(data):
        episode_columns = gae(
            torch.cat([values[i] for i in members]),
            torch.cat([data[i].loss_inputs["loss_mask"] for i in members]),
            rewards[members[-1]],
            gamma=config.gae_gamma,
            lam=config.gae_lambda,
            costs_T=torch.cat([kl_costs(data[i], config) for i in members]) if config.kl_in_return else None,
        )
        split = zip(*(column.float().split([len(data[i]) for i in members]) for column in episode_columns), strict=True)
        for index, pair in zip(members, split, strict=True):
            columns_of_datum[index] = pair
    precomputed = (
        with_kl_returns(data, config, keep_groups=keep_groups) if keep_groups and config.kl_in_return else data
    )
    advantages = [
        datum.loss_inputs["advantages"] if datum.group in keep_groups else advantages_T
        for datum, (advantages_T, _) in zip(precomputed, columns_of_datum, strict=True)
    ]
    return with_inputs(data, values=values, advantages=advantages, returns=[returns for _, returns in columns_of_datum])

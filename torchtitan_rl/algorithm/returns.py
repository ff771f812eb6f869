"""Returns of tokens: what a token and those after it in its rollout earn, with the KL to the reference among it."""

from __future__ import annotations

from collections.abc import Collection

import torch

from torchtitan_rl.algorithm.inputs import with_inputs
from torchtitan_rl.algorithm.kl import k1
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.types import Datum

__all__ = ["episodes_of", "kl_costs", "reward_to_go", "with_kl_returns"]


def episodes_of(data: list[Datum]) -> list[list[int]]:
    """The indices of each rollout's datums: they are one episode, in order."""
    episodes: dict[int, list[int]] = {}
    for index, datum in enumerate(data):
        episodes.setdefault(datum.rollout, []).append(index)
    return list(episodes.values())


def kl_costs(datum: Datum, config: AlgorithmConfig) -> torch.Tensor:
    """`kl_coef` x k1 of each trained token, float64 of shape (T,), 0 where the mask is 0: what `kl_in="return"` takes
    off the token's reward. The policy's log-probabilities are the generator's."""
    inputs = datum.loss_inputs
    difference_T = inputs["sampling_logprobs"].double() - inputs["reference_logprobs"].double()
    return config.kl_coef * k1(torch.where(inputs["loss_mask"] > 0, difference_T, 0.0))


def reward_to_go(rewards_T: torch.Tensor, mask_T: torch.Tensor, *, gamma: float) -> torch.Tensor:
    """Of each trained token the sum over itself and the trained tokens after it of gamma^distance x reward, (T,), 0
    where the mask is 0. Masked tokens (prompt and observations) are no steps of the policy: they earn and discount
    nothing."""
    returns_T, rewards = torch.zeros_like(rewards_T), rewards_T.tolist()
    later = 0.0
    for t in reversed(mask_T.nonzero()[:, 0].tolist()):
        later = rewards[t] + gamma * later
        returns_T[t] = later
    return returns_T


def with_kl_returns(data: list[Datum], config: AlgorithmConfig, *, keep_groups: Collection[int] = ()) -> list[Datum]:
    """Datums whose advantages are returns (PPO's token rewards without a critic; REINFORCE++, arXiv:2501.03262): every
    trained token pays its `kl_costs`, and the last one of a rollout earns the rollout's advantage. The discount is
    `gae_gamma`.

    The precomputed advantages of `keep_groups` are returns already: the costs to go come off them.
    """
    advantages: list[torch.Tensor] = [torch.empty(0)] * len(data)
    for members in episodes_of(data):
        mask_T = torch.cat([data[i].loss_inputs["loss_mask"] for i in members])
        own_T = torch.cat([data[i].loss_inputs["advantages"] for i in members]).double()
        rewards_T = -torch.cat([kl_costs(data[i], config) for i in members])
        is_precomputed = data[members[0]].group in keep_groups
        trained = mask_T.nonzero()[:, 0]
        if not is_precomputed and len(trained):
            rewards_T[trained[-1]] += own_T[trained[-1]]
        returns_T = reward_to_go(rewards_T, mask_T, gamma=config.gae_gamma) + (own_T if is_precomputed else 0.0)
        for i, part_T in zip(members, returns_T.float().split([len(data[i]) for i in members]), strict=True):
            advantages[i] = part_T
    return with_inputs(data, advantages=advantages)

"""Generalised advantage estimation: a critic's values turn one reward into an advantage per token."""

from __future__ import annotations

import torch

__all__ = ["gae"]


def gae(
    values_T: torch.Tensor, mask_T: torch.Tensor, reward: float, *, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns) of one sequence, both (T,) and 0 where the mask is (Schulman et al., arXiv:1506.02438).

    The reward falls on the last token with a mask; after it the value is 0. Tokens without a mask (the prompt, what
    an environment said) are no steps of the policy and are passed over.
    """
    steps = mask_T.nonzero()[:, 0].tolist()
    advantages_T, values = torch.zeros(len(mask_T), dtype=torch.float64), values_T.double().tolist()
    next_value, next_advantage, step_reward = 0.0, 0.0, reward
    for t in reversed(steps):
        delta = step_reward + gamma * next_value - values[t]
        next_advantage = delta + gamma * lam * next_advantage
        advantages_T[t] = next_advantage
        next_value, step_reward = values[t], 0.0
    returns_T = torch.where(mask_T > 0, advantages_T + values_T.double(), 0.0)
    return advantages_T.float(), returns_T.float()

"""Advantage estimators: functions from a group's rewards to one advantage per rollout."""

from __future__ import annotations

import torch

__all__ = ["group_centered", "grpo"]


def group_centered(rewards_G: torch.Tensor) -> torch.Tensor:
    """Reward minus the group's mean (Dr. GRPO, arXiv:2503.20783). A group of one gets 0."""
    return rewards_G - rewards_G.mean()


def grpo(rewards_G: torch.Tensor) -> torch.Tensor:
    """Centred and divided by the group's standard deviation (GRPO, arXiv:2402.03300); equal rewards give 0."""
    if (rewards_G == rewards_G[0]).all():  # rounding of their mean would leave a tiny difference to divide by
        return torch.zeros_like(rewards_G)
    return group_centered(rewards_G) / rewards_G.std(correction=0)

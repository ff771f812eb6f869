"""Advantage estimators that see more of a group than its rewards: lengths, reward parts.

Each maps a `JudgedGroup` to one advantage per rollout, float64 of shape (G,). Arguments are filled in with
`functools.partial`.
"""

from __future__ import annotations

import torch

from torchtitan_rl.algorithm.advantages import group_estimator
from torchtitan_rl.algorithm.judged_group import JudgedGroup

__all__ = ["opo"]


@group_estimator
def opo(group: JudgedGroup) -> torch.Tensor:
    """Reward minus the group's mean reward weighted by lengths, sum l_i r_i / sum l_i (OPO, arXiv:2505.23585).

    The baseline of the lowest variance where the squared norm of a sequence's gradient grows with its length. A group
    whose rollouts are all empty has the plain mean.
    """
    total = group.lengths_G.sum()
    if total == 0:
        return group.rewards_G - group.rewards_G.mean()
    return group.rewards_G - (group.lengths_G / total * group.rewards_G).sum()

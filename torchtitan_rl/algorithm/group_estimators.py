"""Advantage estimators that see more of a group than its rewards: lengths, reward parts, a greedy baseline.

`length_rewarded` and `length_discounted` change rewards by length within the group, then call an estimator of rewards:
`partial(length_rewarded, weight=0.5, estimator=rloo)`.

Each maps a `JudgedGroup` to one advantage per rollout, float64 of shape (G,). Arguments are filled in with
`functools.partial`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from torchtitan_rl.algorithm.advantages import (
    NO_SPREAD,
    batch_estimator,
    divided_by_std,
    group_estimator,
    grpo,
    rloo,
    sees_batch,
    sees_group,
)
from torchtitan_rl.algorithm.judged_group import JudgedGroup

__all__ = ["gdpo", "length_discounted", "length_rewarded", "opo", "remax"]


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


@batch_estimator
@group_estimator
def gdpo(groups: list[JudgedGroup], *, weights: Mapping[str, float] | None = None) -> list[torch.Tensor]:
    """GRPO of each reward part alone, added up, and divided by the batch's standard deviation (GDPO, arXiv:2601.05242).

    `weights` maps the names of parts to their factors; None takes every part that all rollouts of a group have, with
    the factor 1. The reward itself is not read. The sums have mean 0 in every group, so normalising over the batch's
    rollouts divides by their population standard deviation. A part that is equal within a group adds 0 to it.
    Raises ValueError for weights that are not finite or all 0, and for a rollout without one of the parts.
    """
    if weights is not None and not (all(map(math.isfinite, weights.values())) and any(weights.values())):
        raise ValueError(f"weights={dict(weights)}: weigh nothing; give finite numbers, at least one other than 0")
    return divided_by_std([_sum_of_parts(group, weights) for group in groups])


def _sum_of_parts(group: JudgedGroup, weights: Mapping[str, float] | None) -> torch.Tensor:
    if weights is None:
        weights = dict.fromkeys(group.part_names, 1.0)
    if not weights:
        raise ValueError(
            f"gdpo: the rollouts of group {group.id} have no reward part in common; let the reward return (rewards, "
            "parts), as rewards.Rewards does, or name parts in weights"
        )
    sum_G = torch.stack([weight * grpo(group.part(name)) for name, weight in weights.items()]).sum(0)
    # Parts that cancel leave rounding, which must not be divided by its own deviation.
    rounding = NO_SPREAD * sum(map(abs, weights.values()))
    return sum_G if sum_G.abs().max() > rounding else torch.zeros_like(sum_G)


@group_estimator
def length_rewarded(
    group: JudgedGroup, *, weight: float, correct: float = 1.0, estimator: Callable = grpo
) -> torch.Tensor:
    """`estimator` of each reward plus `weight` times a reward for being short (Kimi k1.5, arXiv:2501.12599, section
    2.3.3): 1/2 - (l_i - shortest) / (longest - shortest) for a right rollout, at most 0 for a wrong one.

    Shortest and longest are those of the whole group; in a group of equal lengths the length reward is 0. A rollout is
    right with a reward of at least `correct`. Raises ValueError for a weight that is not above 0, and for an estimator
    that sees more than a group's rewards.
    """
    if not 0 < weight < float("inf"):
        raise ValueError(f"weight={weight}: is no weight of a length reward; use a number above 0, such as 0.5")
    _check_estimator(estimator)
    shortest, longest = group.lengths_G.min(), group.lengths_G.max()
    if shortest == longest:
        return estimator(group.rewards_G)
    short_G = 0.5 - (group.lengths_G - shortest) / (longest - shortest)
    is_right_G = group.rewards_G >= correct
    return estimator(group.rewards_G + weight * torch.where(is_right_G, short_G, short_G.clamp(max=0)))


@group_estimator
def length_discounted(
    group: JudgedGroup, *, alpha: float, correct: float = 1.0, estimator: Callable = rloo
) -> torch.Tensor:
    """`estimator` of rewards of which a right rollout loses a share that grows with its length among the right ones
    (Arora and Zanette, arXiv:2502.04463): r_i (1 - alpha sigmoid((l_i - mean) / std)).

    Mean and population standard deviation are over the lengths of the right rollouts; where these are all equal the
    sigmoid is 1/2. A rollout is right with a reward of at least `correct`; a wrong one keeps its reward. Raises
    ValueError for an alpha outside of 0 to 1, and for an estimator that sees more than a group's rewards.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha={alpha}: is no share of a reward; use a number between 0 and 1, such as 0.1")
    _check_estimator(estimator)
    is_right_G = group.rewards_G >= correct
    if not is_right_G.any():
        return estimator(group.rewards_G)
    right_lengths = group.lengths_G[is_right_G]
    spread = right_lengths.std(correction=0)
    relative_G = (group.lengths_G - right_lengths.mean()) / (
        spread if right_lengths.max() > right_lengths.min() else 1.0
    )
    relative_G = torch.where(is_right_G, relative_G, 0.0)
    return estimator(torch.where(is_right_G, group.rewards_G * (1 - alpha * relative_G.sigmoid()), group.rewards_G))


@group_estimator
def remax(group: JudgedGroup) -> torch.Tensor:
    """Reward minus the reward of a greedy rollout of the same task (ReMax, arXiv:2310.10505). Needs
    `algorithm.greedy_baseline=True`; siblings are not compared. Raises ValueError without the greedy rollout."""
    return group.rewards_G - group.baselines_G


def _check_estimator(estimator: Callable) -> None:
    if not callable(estimator) or sees_batch(estimator) or sees_group(estimator):
        raise ValueError(
            f"estimator={estimator!r}: is not an estimator of one group's rewards; give one such as grpo or rloo"
        )

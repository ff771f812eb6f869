"""Advantage estimators: functions from a group's rewards to one advantage per rollout.

`(rewards_G) -> advantages_G`, both float64 of shape (G,); advantages may be a list of numbers too. An estimator that
needs the whole batch is marked with `@batch_estimator` and maps a list of groups' rewards to a list of groups'
advantages. One that needs more of a group than its rewards, such as lengths or reward parts, is marked with
`@group_estimator` and receives a `JudgedGroup` in their place (some are in algorithm/group_estimators.py). With both
marks it maps a list of `JudgedGroup` to a list of groups' advantages. Every estimator here with a baseline gives 0 to a
group of one and to a group whose rewards are all equal: there is nothing to compare. Estimators that divide by a
standard deviation treat rewards that differ by rounding only as equal (`all_equal`).
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from torchtitan_rl.algorithm.judged_group import JudgedGroup
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.types import RolloutGroup, is_float32

__all__ = ["all_equal", "batch_estimator", "divided_by_std", "estimate_advantages", "estimator_for", "estimators_of"]
__all__ += [
    "group_centered",
    "group_estimator",
    "grpo",
    "pass_at_k",
    "reinforce",
    "reinforce_pp_baseline",
    "rloo",
    "sees_batch",
    "sees_group",
]

NO_SPREAD = 1e-6
"""A spread of rewards up to this fraction of the largest absolute reward is rounding.

Rewards that are sums, such as .1 + .2 beside .3, differ in their last bits. Divided by its own standard deviation that
noise would become advantages of full size.
"""

_STDS = ("none", "population", "unbiased")


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether rewards differ by no more than rounding: largest - smallest <= 1e-6 x the largest absolute reward.

    A single reward equals itself; a reward that is not finite equals no other. Raises ValueError on no rewards.
    """
    finite = all(map(math.isfinite, rewards))
    return finite and max(rewards) - min(rewards) <= NO_SPREAD * max(map(abs, rewards))


def batch_estimator(function: Callable) -> Callable:
    """Marks an estimator that sees the whole batch: `(list of rewards_G) -> list of advantages_G`."""
    function.sees_batch = True  # type: ignore[attr-defined]  # a mark on the user's function
    return function


def group_estimator(function: Callable) -> Callable:
    """Marks an estimator that sees more of a group than its rewards: `(JudgedGroup) -> advantages_G`."""
    function.sees_group = True  # type: ignore[attr-defined]  # a mark on the user's function
    return function


def group_centered(rewards_G: torch.Tensor) -> torch.Tensor:
    """Reward minus the group's mean (Dr. GRPO, arXiv:2503.20783). A group of one gets 0."""
    return rewards_G - rewards_G.mean()


def grpo(rewards_G: torch.Tensor, *, std: str = "population") -> torch.Tensor:
    """Centred and divided by the group's standard deviation (GRPO, arXiv:2402.03300); equal rewards give 0.

    `std`: "population" divides squares by G, "unbiased" by G - 1, "none" does not divide the advantage at all.
    """
    if std not in _STDS:
        raise ValueError(f"std={std!r}: is not a kind of standard deviation; use one of {', '.join(map(repr, _STDS))}")
    if all_equal(rewards_G.tolist()):
        return torch.zeros_like(rewards_G)
    centered_G = group_centered(rewards_G)
    return centered_G if std == "none" else _divided(centered_G, rewards_G.std(correction=int(std == "unbiased")))


def rloo(rewards_G: torch.Tensor) -> torch.Tensor:
    """Reward minus the mean reward of the *other* rollouts (leave-one-out, Ahmadian et al., arXiv:2402.14740)."""
    num_siblings = len(rewards_G) - 1
    if num_siblings == 0:
        return torch.zeros_like(rewards_G)
    return rewards_G - (rewards_G.sum() - rewards_G) / num_siblings


def pass_at_k(rewards_G: torch.Tensor, *, k: int, correct: float = 1.0) -> torch.Tensor:
    """How much a rollout adds to the chance that one of k rollouts is right (Pass@k training, arXiv:2508.10751).

    A rollout is right with a reward of at least `correct`. Each of the C(G, k) subsets of k rollouts has the reward 1
    if one of its rollouts is right, else 0. A rollout's advantage is the mean reward of the subsets with it, less the
    mean over all subsets, divided by the standard deviation over all subsets; closed form (section 2.4). 0 where all
    subsets have the same reward, and for a group smaller than k. With k = 1 and rewards of 0 and 1 this is `grpo`.
    Raises ValueError for a k below 1.
    """
    if k < 1 or k != int(k):
        raise ValueError(f"k={k}: is no number of rollouts; use 2 or more, fewer than algorithm.group_size")
    k, size, is_right_G = int(k), len(rewards_G), rewards_G >= correct
    num_wrong = size - int(is_right_G.sum())
    all_wrong = math.comb(num_wrong, k) / math.comb(size, k) if k <= size else 0.0
    std = math.sqrt(all_wrong * (1 - all_wrong))
    if std == 0:
        return torch.zeros_like(rewards_G)
    all_siblings_wrong = math.comb(num_wrong - 1, k - 1) / math.comb(size - 1, k - 1)
    right = rewards_G.new_tensor(all_wrong / std)
    wrong = rewards_G.new_tensor((all_wrong - all_siblings_wrong) / std)
    return torch.where(is_right_G, right, wrong)


def reinforce(rewards_G: torch.Tensor) -> torch.Tensor:
    """The reward itself, without a baseline (Williams 1992): a group of one and equal rewards train too."""
    return rewards_G.clone()


@batch_estimator
def reinforce_pp_baseline(rewards: list[torch.Tensor]) -> list[torch.Tensor]:
    """REINFORCE++ with baseline (arXiv:2501.03262): minus the group's mean, then whitened over the batch.

    The centred rewards of the batch have mean 0 already, so whitening divides by their population standard deviation
    over rollouts. A batch in which every group's rewards are equal gets 0.
    """
    return divided_by_std([grpo(rewards_G, std="none") for rewards_G in rewards])


def divided_by_std(centered: list[torch.Tensor]) -> list[torch.Tensor]:
    """Groups of numbers of mean 0, divided by the population standard deviation of them all; 0 where that is 0."""
    std = torch.cat(centered).square().mean().sqrt()
    return [_divided(centered_G, std) for centered_G in centered]


def _divided(centered_G: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    # Squares of differences below some 1e-160 underflow: the standard deviation of unequal rewards may be 0.
    return torch.zeros_like(centered_G) if std == 0 else centered_G / std


def estimate_advantages(groups: list[RolloutGroup], config: AlgorithmConfig) -> None:
    """Fills `group.advantages`, one per rollout, by the estimator of the group's role (its first rollout's role).

    A batch estimator sees all groups of its role. Raises ValueError when an estimator gives anything but one number per
    rollout that is finite in float32, as the datums hold it.
    """
    by_role: dict[str, list[RolloutGroup]] = {}
    for group in groups:
        by_role.setdefault(group.rollouts[0].role, []).append(group)
    for role, role_groups in by_role.items():
        advantage_fn = estimator_for(config, role)
        inputs: list[Any]
        if sees_group(advantage_fn):
            inputs = [JudgedGroup.of(group) for group in role_groups]
        else:
            inputs = [torch.tensor(group.rewards, dtype=torch.float64) for group in role_groups]
        advantages = advantage_fn(inputs) if sees_batch(advantage_fn) else [advantage_fn(each) for each in inputs]
        advantages = [_as_tensor(each) for each in advantages]
        if len(advantages) != len(role_groups):
            raise ValueError(
                f"{_setting(advantage_fn)}: gave {len(advantages)} tensors for {len(role_groups)} groups; return one "
                "per group, in order"
            )
        for group, advantages_G in zip(role_groups, advantages, strict=True):
            _check_advantages(advantages_G, group, advantage_fn)
            group.advantages = advantages_G.tolist()


def estimator_for(config: AlgorithmConfig, role: str) -> Callable:
    """The estimator for rollouts of `role`. Raises ValueError when `advantage_fn` names roles, but not `role`."""
    chosen = config.advantage_fn
    if not isinstance(chosen, dict):
        return chosen
    if role not in chosen:
        near = difflib.get_close_matches(role, chosen, 1)
        hint = f"did you mean {near[0]!r}, or add it" if near else "add it"
        raise ValueError(
            f"algorithm.advantage_fn: has no estimator for role {role!r}, only for {', '.join(chosen)}; {hint}"
        )
    return chosen[role]


def estimators_of(config: AlgorithmConfig) -> dict[str, Callable]:
    """The estimators by role; one for all roles has the name ""."""
    return config.advantage_fn if isinstance(config.advantage_fn, dict) else {"": config.advantage_fn}


def _as_tensor(advantages_G: Any) -> Any:
    """A list, tuple or array of numbers as a float64 tensor; anything else as it is, for `_check_advantages`."""
    if not isinstance(advantages_G, (list, tuple, numpy.ndarray)):
        return advantages_G
    try:
        return torch.tensor([float(advantage) for advantage in advantages_G], dtype=torch.float64)
    except (TypeError, ValueError):
        return advantages_G


def _check_advantages(advantages_G: Any, group: RolloutGroup, advantage_fn: Callable) -> None:
    """Raises ValueError for anything but one advantage per rollout that is finite in float32."""
    is_tensor = isinstance(advantages_G, torch.Tensor)
    numbers = advantages_G.tolist() if is_tensor else advantages_G
    if is_tensor and advantages_G.shape == (len(group.rollouts),) and all(map(is_float32, numbers)):
        return
    finite = is_tensor and bool(torch.isfinite(advantages_G).all())
    too_large = finite and any(not is_float32(number) for number in advantages_G.flatten().tolist())
    raise ValueError(
        f"{_setting(advantage_fn)}: gave {numbers} for rewards {group.rewards} of group {group.id}; return one finite "
        f"number per rollout, as a tensor or a list{'; these overflow float32' if too_large else ''}"
    )


def _setting(advantage_fn: Callable) -> str:
    return f"algorithm.advantage_fn={getattr(advantage_fn, '__name__', repr(advantage_fn))}"


def sees_group(advantage_fn: Callable) -> bool:
    """Whether an estimator, or the one that a partial fills in, is marked with `@group_estimator`."""
    return getattr(_bare(advantage_fn), "sees_group", False)


def sees_batch(advantage_fn: Callable) -> bool:
    """Whether an estimator, or the one that a partial fills in, is marked with `@batch_estimator`."""
    return getattr(_bare(advantage_fn), "sees_batch", False)


def _bare(advantage_fn: Callable) -> Any:
    return advantage_fn.func if isinstance(advantage_fn, functools.partial) else advantage_fn

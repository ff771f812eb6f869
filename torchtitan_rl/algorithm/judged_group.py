"""A group as an estimator sees it that asks for more than rewards."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchtitan_rl.types import Rollout, RolloutGroup

__all__ = ["JudgedGroup"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedGroup:
    """The rollouts of a group with their rewards, lengths, reward parts and greedy baselines; tensors are float64 of
    shape (G,)."""

    id: str
    rollouts: tuple[Rollout, ...]
    rewards_G: torch.Tensor
    lengths_G: torch.Tensor
    """Sampled tokens of each rollout, over all its turns."""

    @classmethod
    def of(cls, group: RolloutGroup) -> JudgedGroup:
        lengths = [sum(len(turn.completion.tokens) for turn in rollout.turns) for rollout in group.rollouts]
        return cls(
            id=group.id,
            rollouts=tuple(group.rollouts),
            rewards_G=torch.tensor(group.rewards, dtype=torch.float64),
            lengths_G=torch.tensor(lengths, dtype=torch.float64),
        )

    @property
    def baselines_G(self) -> torch.Tensor:
        """Reward of the greedy rollout beside each rollout, (G,). Raises ValueError where there is none."""
        for rollout in self.rollouts:
            if rollout.baseline is None:
                raise ValueError(
                    f"algorithm.greedy_baseline: rollout {rollout.id} has no greedy one beside it; set it to True, let "
                    f"a hook keep the rollouts that were played, and let every greedy attempt have a turn of role "
                    f"{rollout.role!r}"
                )
        return torch.tensor([rollout.baseline for rollout in self.rollouts], dtype=torch.float64)

    @property
    def part_names(self) -> list[str]:
        """The reward parts that every rollout has, sorted."""
        return sorted(set.intersection(*(set(rollout.reward_parts) for rollout in self.rollouts)))

    def part(self, name: str) -> torch.Tensor:
        """A reward part of every rollout, (G,). Raises ValueError where a rollout has no part of this name."""
        return torch.tensor([_part(rollout, name) for rollout in self.rollouts], dtype=torch.float64)


def _part(rollout: Rollout, name: str) -> float:
    try:
        return rollout.reward_parts[name]
    except KeyError:
        has = ", ".join(map(repr, sorted(rollout.reward_parts))) or "none"
        raise ValueError(
            f"reward part {name!r}: rollout {rollout.id} has {has}; let the reward return (rewards, parts) with this "
            "part for every completion"
        ) from None

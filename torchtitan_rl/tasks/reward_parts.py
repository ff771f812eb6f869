"""Rewards in parts: an answer `(rewards, {"exact": [...], "format": [...]})`, and the mean of each part."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any

from torchtitan_rl.types import Rollout

__all__ = ["Parts", "read_parts", "part_means"]

Parts = dict[str, list[float]]
"""Name of a part -> one number per completion."""


def read_parts(
    value: tuple[Any, dict[str, Any]], parts: Parts | None, checked: Callable[..., list[float]], who: str
) -> list[float]:
    """The rewards of an answer `(rewards, parts)`; `parts`, unless None, becomes the numbers of each part by name.

    `checked(numbers, part)` refuses anything but one finite number per completion, `part` being the part's name in the
    message. Raises RuntimeError, which begins with `who`, for a part whose name is no text.
    """
    rewards = checked(value[0])
    read = {}
    for name, numbers in value[1].items():
        if not isinstance(name, str) or not name:
            raise RuntimeError(f"{who}: returned a part named {name!r}; name each part by a text, such as 'format'")
        read[name] = checked(numbers, f": part {name!r}")
    if parts is not None:
        parts.update(read)
    return rewards


def part_means(rollouts: Iterable[Rollout], name: str) -> dict[str, float]:
    """The mean of each part over the rollouts that have the part, under `name` with the part's name filled in."""
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        for part, number in rollout.reward_parts.items():
            values.setdefault(part, []).append(number)
    return {name.format(part): fmean(numbers) for part, numbers in values.items()}

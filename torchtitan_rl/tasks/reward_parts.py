"""Rewards in parts: an answer `(rewards, {"exact": [...], "format": [...]})`, and the mean of each part."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any

from torchtitan_rl.metrics import A_NAME, is_name
from torchtitan_rl.types import Rollout

__all__ = ["MAX_PARTS", "PartNames", "Parts", "read_parts", "part_means"]

Parts = dict[str, list[float]]
"""Name of a part -> one number per completion."""

MAX_PARTS = 64
"""Parts of one reward. Each name becomes a metric, with a curve of its own."""
_MAX_NAMES = 256
_MAX_LETTERS = 128


class PartNames:
    """The names that the parts of a run's rewards have had. Agents choose them, so there is a bound on how many."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def admit(self, names: Iterable[str]) -> None:
        """Remembers the names of a reward's parts. Raises ValueError, and remembers none, for more than 64 of them, for
        a name without letters, with more than 128 or with letters that no metric has, and beyond 256 names in the
        run."""
        names = set(names)
        if len(names) > MAX_PARTS:
            raise ValueError(f"parts: has {len(names)} names, and a reward may have {MAX_PARTS} parts; give fewer")
        if long := [name for name in names if not 0 < len(name) <= _MAX_LETTERS]:
            raise ValueError(f"parts: a name has {len(long[0])} letters; give it 1 to {_MAX_LETTERS}")
        if wrong := sorted(name for name in names if not is_name(name)):
            raise ValueError(f"parts: the name {wrong[0]!r} cannot stand in that of a metric; use {A_NAME}")
        if len(self.names | names) > _MAX_NAMES:
            new = sorted(names - self.names)
            raise ValueError(
                f"parts: {', '.join(map(repr, new[:3]))} would be more than the {_MAX_NAMES} names that the parts of a "
                "run's rewards may have; give parts the same names in every attempt"
            )
        self.names |= names


def read_parts(
    value: tuple[Any, dict[str, Any]], parts: Parts | None, checked: Callable[..., list[float]], who: str
) -> list[float]:
    """The rewards of an answer `(rewards, parts)`; `parts`, unless None, becomes the numbers of each part by name.

    `checked(numbers, part)` refuses anything but one finite number per completion, `part` being the part's name in the
    message. Raises RuntimeError, which begins with `who`, for a part whose name no metric can contain and for more than
    64 parts.
    """
    rewards = checked(value[0])
    if len(value[1]) > MAX_PARTS:
        raise RuntimeError(
            f"{who}: returned {len(value[1])} parts, and {MAX_PARTS} may be; each is a curve; give fewer"
        )
    read = {}
    for name, numbers in value[1].items():
        if not isinstance(name, str) or not is_name(name):
            raise RuntimeError(f"{who}: returned a part named {name!r}; name each part by a text of {A_NAME}")
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

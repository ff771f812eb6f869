"""Precomputed advantages: turns carry them from a workflow that computed them, such as self-distillation.

A turn carries one number for all of its sampled tokens, or one number per token. `scan` checks every turn of a group.
If one turn fails the check, the estimator computes the advantages of the whole group: precomputed and estimated
advantages in one group would compare numbers of different kinds.
"""

from __future__ import annotations

import enum
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan_rl.types import is_float32

if TYPE_CHECKING:
    from torchtitan_rl.config.algorithm import AlgorithmConfig
    from torchtitan_rl.types import Rollout, RolloutGroup, Turn

__all__ = [
    "Verdict",
    "Scan",
    "scan",
    "computed_for",
    "drop_stale",
    "use_precomputed",
    "precomputed_advantages",
    "turn_advantages",
]

logger = logging.getLogger(__name__)


class Verdict(enum.Enum):
    """What the turns of one group carry. Where several verdicts are true, `scan` gives the last of them below."""

    NONE = "no turn carries advantages"
    ALL = "every turn carries finite advantages of the right length"
    MIXED = "some turns carry advantages and others do not"
    NOT_FINITE = "an advantage is NaN, infinite, or overflows float32"
    BAD_LENGTH = "there are neither one nor as many advantages as sampled tokens"
    EMPTY = "the group has no turns"


@dataclass(kw_only=True, slots=True)
class Scan:
    """Result of `scan`: the verdict on a group, and numbers of turns."""

    verdict: Verdict
    num_turns: int = 0
    num_with: int = 0
    """Turns that carry advantages, valid or not."""
    num_bad_length: int = 0
    num_not_finite: int = 0
    first: str = ""
    """The first turn that caused the verdict, and why."""

    def __str__(self) -> str:
        counts = {
            "carry advantages": self.num_with,
            "have a wrong length": self.num_bad_length,
            "are not finite": self.num_not_finite,
        }
        counted = ", ".join(
            f"{count} {label}" for label, count in counts.items() if count or label == "carry advantages"
        )
        first = f"; the first is {self.first}" if self.first else ""
        return f"{self.verdict.name}: of {self.num_turns} turns {counted}{first}"


def scan(group: RolloutGroup) -> Scan:
    """Checks the advantages of every turn of a group.

    Raises ValueError when a turn carries advantages that are not numbers.
    """
    result, blame = Scan(verdict=Verdict.EMPTY), {}
    for rollout in group.rollouts:
        for index, turn in enumerate(rollout.turns):
            result.num_turns += 1
            kind, why = _kind(turn, f"turn {index} of rollout {rollout.id}")
            blame.setdefault(kind, f"turn {index} of rollout {rollout.id}: {why}")
            result.num_with += kind != "missing"
            result.num_bad_length += kind == "bad length"
            result.num_not_finite += kind == "not finite"
    if not result.num_turns:
        return result
    order: tuple[str, ...]
    if result.num_bad_length:
        result.verdict, order = Verdict.BAD_LENGTH, ("bad length",)
    elif result.num_not_finite:
        result.verdict, order = Verdict.NOT_FINITE, ("not finite",)
    elif result.num_with == result.num_turns:
        result.verdict, order = Verdict.ALL, ()
    elif result.num_with:
        result.verdict, order = Verdict.MIXED, ("missing",)
    else:
        result.verdict, order = Verdict.NONE, ("missing",)
    result.first = next((blame[kind] for kind in order if kind in blame), "")
    return result


def drop_stale(rollouts: list[Rollout], policy_version: int) -> None:
    """Removes advantages and soft targets that were computed for a version before `policy_version`.

    A workflow may reuse a turn of an earlier batch; the turn's advantages then describe an older policy.
    """
    stale = []
    for rollout in rollouts:
        for index, turn in enumerate(rollout.turns):
            carries = turn.advantages is not None or turn.soft_targets is not None
            if carries and (version := computed_for(turn)) is not None and version < policy_version:
                stale.append(f"turn {index} of rollout {rollout.id}, of version {version}")
                turn.advantages = turn.soft_targets = None
    if stale:
        logger.warning(
            "advantages of %d turns were computed for an older policy version than %d and do not count; "
            "the first is %s",
            len(stale),
            policy_version,
            stale[0],
        )


def use_precomputed(groups: list[RolloutGroup], config: AlgorithmConfig) -> dict[int, list[list[list[float]]]]:
    """Index of a group -> its valid precomputed advantages, `[rollout][turn][token]`; other groups are absent.

    In groups with precomputed advantages sets `group.advantages`, one per rollout, the mean over its tokens.
    """
    advantages = {}
    for index, group in enumerate(groups):
        own = precomputed_advantages(group, config)
        if own is not None:
            numbers = [[number for turn in turns for number in turn] for turns in own]
            group.advantages = [
                math.fsum(rollout_numbers) / max(1, len(rollout_numbers)) for rollout_numbers in numbers
            ]
            advantages[index] = own
    return advantages


def precomputed_advantages(group: RolloutGroup, config: AlgorithmConfig) -> list[list[list[float]]] | None:
    """The group's precomputed advantages, one per sampled token: `[rollout][turn][token]`; None: use an estimator.

    By `config.precomputed_advantages`: `"auto"` warns about invalid ones and gives None, `"require"` raises ValueError
    unless every turn carries valid ones, `"ignore"` always gives None.
    """
    if config.precomputed_advantages == "ignore":
        return None
    result = scan(group)
    if result.verdict is Verdict.ALL:
        return [[turn_advantages(turn) for turn in rollout.turns] for rollout in group.rollouts]
    if config.precomputed_advantages == "require":
        raise ValueError(
            f"algorithm.precomputed_advantages='require': group {group.id} is {result}; let the workflow give every "
            "turn advantages, or use 'auto'"
        )
    if result.verdict is Verdict.EMPTY:
        logger.warning("precomputed advantages of group %s: %s; there is nothing to train on in it", group.id, result)
    elif result.verdict is not Verdict.NONE:
        logger.warning(
            "precomputed advantages of group %s: %s; the whole group is weighed by algorithm.advantage_fn instead",
            group.id,
            result,
        )
    return None


def computed_for(turn: Turn) -> int | None:
    """The policy version that a turn's advantages and soft targets were computed for.

    `turn.advantages_version` where it is set, else the newest version that sampled a token of the turn; None: no token
    of it was sampled, and there is nothing that can be too old.
    """
    if turn.advantages_version is not None:
        return turn.advantages_version
    return max(turn.completion.policy_versions, default=None)


def turn_advantages(turn: Turn) -> list[float]:
    """One advantage per sampled token, of a turn with valid advantages."""
    numbers, count = _plain(turn.advantages), len(turn.completion.logprobs)
    if isinstance(numbers, list):
        assert len(numbers) == count, "scan has looked at the length"
        return numbers
    return [numbers] * count


def _kind(turn: Turn, where: str) -> tuple[str, str]:
    """(kind, reason): kind is "missing", "bad length", "not finite" or "good"; the reason is empty for "good"."""
    if turn.advantages is None:
        return "missing", "carries none"
    try:
        numbers = _plain(turn.advantages)
    except (TypeError, ValueError):
        raise ValueError(
            f"turn.advantages={_short(turn.advantages)}: {where} carries a {type(turn.advantages).__name__}; give a "
            "number or a flat sequence of numbers"
        ) from None
    count = len(turn.completion.logprobs)
    if isinstance(numbers, list) and len(numbers) != count:
        return "bad length", f"{len(numbers)} advantages for {count} sampled tokens"
    for position, number in enumerate(numbers if isinstance(numbers, list) else [numbers]):
        if not is_float32(number):
            return "not finite", f"advantage {position} is {number}"
    return "good", ""


def _plain(value) -> float | list[float]:
    """A number, or a list of numbers. Raises TypeError or ValueError for anything else."""
    if hasattr(value, "tolist"):  # NumPy and torch, scalars included
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_number(item) for item in value]
    return _number(value)


def _number(value) -> float:
    if isinstance(value, str):
        raise TypeError(value)
    return float(value)  # also converts a one-number array or tensor inside a list


def _short(value) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."

"""A rollout as a tree of turns: which turn goes on from which, and the branches that lead to its leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtitan_rl.types.data import Turn

__all__ = ["branches", "last_branch", "parents"]


def parents(turns: Sequence[Turn]) -> list[int | None]:
    """Of each turn the index of the turn that it goes on from: among the turns before it, the one with the most tokens
    of those whose prompt and completion begin the turn's prompt. None: the turn begins from a prompt of its own.

    Example: of turns with (prompt, completion) `([1], [2])`, `([1, 2, 3], [4])` and `([1, 2, 5], [6])` the parents are
    `[None, 0, 0]`.
    """
    whole = [[*turn.prompt_tokens, *turn.completion.tokens] for turn in turns]
    return [_parent(turn.prompt_tokens, whole[:index]) for index, turn in enumerate(turns)]


def _parent(prompt: list[int], earlier: list[list[int]]) -> int | None:
    by_length = sorted(range(len(earlier)), key=lambda i: (len(earlier[i]), i), reverse=True)  # a chain: found at once
    return next((i for i in by_length if prompt[: len(earlier[i])] == earlier[i]), None)


def branches(turns: Sequence[Turn]) -> list[list[int]]:
    """The paths from a turn without a parent to each turn that nothing goes on from, as indices, by their last one."""
    up = parents(turns)
    return [_path(up, leaf) for leaf in range(len(turns)) if leaf not in up]


def last_branch(turns: Sequence[Turn]) -> list[int]:
    """The path to the turn that was asked for last, as indices. By `Turn.seconds` where every turn has it, because the
    turns of a session are in the order of their sequences; else to the last turn. Raises ValueError without turns."""
    if not turns:
        raise ValueError("turns=[]: have no last branch; give at least one turn")
    begins = [turn.seconds[0] for turn in turns if turn.seconds is not None]
    is_timed = len(begins) == len(turns)
    last = max(range(len(turns)), key=lambda i: (begins[i], i)) if is_timed else len(turns) - 1
    return _path(parents(turns), last)


def _path(up: list[int | None], leaf: int) -> list[int]:
    path, at = [leaf], up[leaf]
    while at is not None:
        path.insert(0, at)
        at = up[at]
    return path

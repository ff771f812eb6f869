"""The turns of a rollout as a picture of a tree: a row for each turn, a column for each run of turns that extend each
other, and a line from each turn to the one that it goes on from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["TurnNode", "TurnTree"]

_ROW, _COLUMN, _MARGIN = 24, 14, 8
"""Pixels. The rows of the list beside the picture have the same height (`style.css`)."""
_MOST_DRAWN = 300


@dataclass(kw_only=True, slots=True)
class TurnNode:
    """One turn in the picture."""

    column: int
    row: int
    num_tokens: int
    path: str
    """The SVG path from the turn that this one goes on from; empty: it begins from a prompt of its own."""
    trains: bool | None
    """Whether a token of the turn is in the loss; None: the rollout has no training sequence."""
    advantage: float | None
    """Of the turn's first token in the loss."""

    @property
    def x(self) -> int:
        return _x(self.column)

    @property
    def y(self) -> int:
        return _y(self.row)


@dataclass(kw_only=True, slots=True)
class TurnTree:
    """The tree of a rollout's turns."""

    nodes: list[TurnNode]
    """The first turns, in the record's order."""
    num_turns: int
    num_branches: int
    """Turns that no other turn goes on from."""

    @property
    def width(self) -> int:
        return _x(max((node.column for node in self.nodes), default=0)) + _MARGIN

    @property
    def height(self) -> int:
        return _ROW * len(self.nodes)

    @classmethod
    def of(cls, record: dict[str, Any]) -> TurnTree | None:
        """The tree of a rollout's record; None where the record does not say which turn goes on from which, as those of
        earlier versions do not."""
        turns = [turn for turn in record.get("turns") or [] if isinstance(turn, dict)]
        if not turns or any("extends" not in turn for turn in turns):
            return None
        extended = [_earlier(turn["extends"], index) for index, turn in enumerate(turns)]
        columns, advantages = _columns(extended), _advantages(record)
        nodes = [
            TurnNode(
                column=columns[index],
                row=index,
                num_tokens=len(turn.get("tokens") or []),
                path="" if (at := extended[index]) is None else _path(columns[at], at, columns[index], index),
                trains=index in advantages if record.get("sequences") else None,
                advantage=advantages.get(index),
            )
            for index, turn in enumerate(turns[:_MOST_DRAWN])
        ]
        return cls(nodes=nodes, num_turns=len(turns), num_branches=len(turns) - len(set(extended) - {None}))


def _earlier(extends: Any, index: int) -> int | None:
    return extends if isinstance(extends, int) and 0 <= extends < index else None


def _columns(extended: list[int | None]) -> list[int]:
    """The column of each turn: that of the turn it goes on from where it is the first to do so, else a new one."""
    columns: list[int] = []
    continued: set[int] = set()
    for parent in extended:
        if parent is None or parent in continued:
            columns.append(max(columns, default=-1) + 1)
        else:
            continued.add(parent)
            columns.append(columns[parent])
    return columns


def _advantages(record: dict[str, Any]) -> dict[int, float | None]:
    """Turn -> the advantage of its first token in the loss, for the turns that have one."""
    advantages: dict[int, float | None] = {}
    for sequence in record.get("sequences") or []:
        mask, values = sequence.get("loss_mask") or [], sequence.get("advantages") or []
        for index, first, count in sequence.get("turns") or []:
            trained = [place for place in range(first, min(first + count, len(mask))) if mask[place]]
            if trained:
                advantages[index] = values[trained[0]] if trained[0] < len(values) else None
    return advantages


def _path(from_column: int, from_row: int, column: int, row: int) -> str:
    """Down the column of the earlier turn, then to this one."""
    bend = _y(row) - _ROW // 2
    return f"M{_x(from_column)} {_y(from_row)}V{bend}L{_x(column)} {_y(row)}"


def _x(column: int) -> int:
    return _MARGIN + _COLUMN * column


def _y(row: int) -> int:
    return _ROW * row + _ROW // 2

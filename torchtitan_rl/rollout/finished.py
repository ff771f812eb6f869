"""Groups that have been played and have not trained: a checkpoint holds them, and a resumed run does not play them
again.

A group is kept as `run_group` returned it, before hooks, filters and penalties, which a resumed run applies again. The
file in a checkpoint has a line of JSON per draw, `{"draw": "37/0", "task": id of the task, "group": {...}}`, or
`{"draw": "37/0", "why": "..."}` for a group that is not plain data. Tasks are not written: the draws give them. Experts
of tokens are the base64 of their bytes, with shape and dtype; a completion without them has no such field.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from torchtitan_rl.record.json_lines import parsed
from torchtitan_rl.types import Completion, Rollout, RolloutGroup, Task, Turn

__all__ = ["FinishedGroups", "GroupLine", "read", "write"]

GroupLine = dict[str, Any]
"""A line of the file."""


class FinishedGroups:
    """The groups that have been played and have not trained, by draw."""

    def __init__(self) -> None:
        self._lines: dict[str, GroupLine] = {}
        self._restored: set[str] = set()
        """The draws of `restore` that have not been played since."""

    def take(self, draw: str, task: Task) -> RolloutGroup | None:
        """The restored group of a draw, once; None where the draw is to be played."""
        if draw not in self._restored or self._lines[draw]["task"] != task.id:
            return None
        self._restored.remove(draw)
        return _group(self._lines[draw]["group"], task)

    def keep(self, draw: str, task: Task, group: RolloutGroup) -> None:
        """Keeps a copy of a group as it was played."""
        self._lines[draw] = _line(group, draw, task)

    def forget(self, slots: set[int]) -> None:
        """Drops the groups of slots that train now."""
        self._lines = {draw: line for draw, line in self._lines.items() if _slot(draw) not in slots}
        self._restored &= self._lines.keys()

    def since(self, slot: int) -> list[GroupLine]:
        """The groups of `slot` and the slots after it, for `write`; nothing changes them."""
        return [line for draw, line in self._lines.items() if _slot(draw) >= slot]

    def restore(self, lines: Iterable[GroupLine]) -> list[str]:
        """Takes over what `read` returned. Returns a note about groups that are played again, if any."""
        again = []
        for line in lines:
            if "why" in line:
                again.append(line)
            else:
                self._lines[line["draw"]] = line
        self._restored = set(self._lines)
        first = [f", such as {line['draw']}: {line['why']}" for line in again[:1]]
        return [f"{len(again)} draws had finished and are played again{''.join(first)}"] if again else []


def write(file: Path, lines: Iterable[GroupLine]) -> None:
    """Writes a file for `read`. Numbers are exact."""
    with open(file, "w") as f:
        for line in lines:
            try:
                text = json.dumps(line)
            except (TypeError, ValueError) as error:  # tensors and other values of a workflow's own
                text = json.dumps({"draw": line["draw"], "why": f"is not plain data ({error})"})
            f.write(text + "\n")


def read(file: Path) -> list[GroupLine]:
    """The lines of a file that `write` wrote; none where the file is missing. Raises ValueError for another file."""
    lines = []
    for number, line in enumerate(file.read_text().splitlines() if file.exists() else (), 1):
        try:
            lines.append(parsed(line))
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: is not JSON ({error}); use another checkpoint") from error
    return lines


def _slot(draw: str) -> int:
    return int(draw.split("/")[0])


def _line(group: RolloutGroup, draw: str, task: Task) -> GroupLine:
    """A copy of a group that shares no list with the group, or why there is none."""
    for rollout in group.rollouts:
        parts = (rollout, Rollout), *((turn, Turn) for turn in rollout.turns)
        parts += tuple((turn.completion, Completion) for turn in rollout.turns)
        if odd := next((type(part).__name__ for part, kind in parts if type(part) is not kind), ""):
            return {"draw": draw, "why": f"rollout {rollout.id} has a {odd}, a class of the workflow's own"}
        if rollout.task is not task:
            return {"draw": draw, "why": f"rollout {rollout.id} has another task than its draw"}
    rollouts = [
        _fields(rollout, without="task")
        | {"turns": [_fields(turn) | {"completion": _completion_fields(turn.completion)} for turn in rollout.turns]}
        for rollout in group.rollouts
    ]
    return {"draw": draw, "task": task.id, "group": _fields(group) | {"rollouts": rollouts}}


def _fields(item: Any, without: str = "") -> dict[str, Any]:
    names = _names(type(item))  # type: ignore[arg-type]  # a class has a hash
    return {name: _copied(getattr(item, name)) for name in names if name != without}


def _completion_fields(completion: Completion) -> dict[str, Any]:
    fields, experts = _fields(completion, without="routed_experts"), completion.routed_experts
    if experts is not None:
        data = base64.b64encode(experts.contiguous().numpy().tobytes()).decode()
        fields["routed_experts"] = {"dtype": str(experts.dtype), "shape": list(experts.shape), "base64": data}
    return fields


def _completion(fields: dict[str, Any]) -> Completion:
    fields = {name: _copied(value) for name, value in fields.items()}
    if experts := fields.get("routed_experts"):
        data = bytearray(base64.b64decode(experts["base64"]))
        flat = torch.frombuffer(data, dtype=getattr(torch, experts["dtype"].removeprefix("torch.")))
        fields["routed_experts"] = flat.reshape(experts["shape"])
    return Completion(**fields)


@functools.cache
def _names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _copied(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return list(value)
    return dict(value) if isinstance(value, dict) else value


def _group(group_fields: dict[str, Any], task: Task) -> RolloutGroup:
    """A group with lists of its own."""
    rollouts = []
    for rollout in group_fields["rollouts"]:
        turns = []
        for turn in rollout["turns"]:
            completion = _completion(turn["completion"])
            turns.append(Turn(**{name: _copied(value) for name, value in turn.items()} | {"completion": completion}))
        fields = {name: _copied(value) for name, value in rollout.items()}
        rollouts.append(Rollout(**fields | {"task": task, "turns": turns}))
    return RolloutGroup(**{name: _copied(value) for name, value in group_fields.items()} | {"rollouts": rollouts})

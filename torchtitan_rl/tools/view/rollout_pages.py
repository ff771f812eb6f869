"""The values of the pages on rollouts: a list, the groups of a step, one group, one rollout token by token."""

from __future__ import annotations

import math
from typing import Any

from torchtitan_rl.rollout.token_texts import pieces
from torchtitan_rl.tools.rollout_tokens import ReadTurn, clip_of, explained
from torchtitan_rl.tools.rollouts import SORTS, Query
from torchtitan_rl.tools.view.pages import Missing
from torchtitan_rl.tools.view.query import Parameters
from torchtitan_rl.tools.view.runs import ShownRun
from torchtitan_rl.tools.view.text import TINTS
from torchtitan_rl.tools.view.turn_tree import TurnTree

__all__ = ["group", "groups", "listed", "rollout", "whole_text"]

MAX_TOKENS, MOST_TOKENS = 3000, 30_000
"""Tokens of a rollout that are shown one by one before all are asked for, and then."""
_HEIGHT, _STROKE = 32, 2
_GROUPS_PER_PAGE, _SIDE_BY_SIDE = 60, 32
_NUMBERS = ("reward_min", "reward_max")
_WHOLE = ("tokens_min", "tokens_max", "step_min", "step_max")


def listed(parameters: Parameters) -> dict[str, Any]:
    shown = parameters.one()
    query = Query(
        text=parameters.text("q"),
        task=parameters.text("task"),
        group=parameters.text("group"),
        reason=parameters.text("reason"),
        sort=parameters.choice("sort", SORTS),
        descending=parameters.choice("order", ("down", "up")) == "down",
        page=max(1, parameters.whole("page") or 1),
        **{name: parameters.number(name) for name in _NUMBERS},  # type: ignore[arg-type]
        **{name: parameters.whole(name) for name in _WHOLE},
    )
    records = shown.rollouts.find(query)
    return {
        "chosen": [shown],
        "run": shown,
        "query": query,
        "records": records,
        "reasons": ["trained", "masked", *shown.rollouts.reasons()],
        "num_pages": -(-records.total // query.per_page),
        "columns": SORTS,
        "empty": _why_empty(shown) if not records.total else "",
    }


def groups(parameters: Parameters) -> dict[str, Any]:
    shown = parameters.one()
    steps = shown.rollouts.steps()
    step = parameters.whole("step")
    if step is None and steps:
        step = steps[-1]
    step_groups = shown.rollouts.groups(step) if step is not None else []
    page = max(1, parameters.whole("page") or 1)
    return {
        "chosen": [shown],
        "run": shown,
        "step": step,
        "previous": max((s for s in steps if step is not None and s < step), default=None),
        "next": min((s for s in steps if step is not None and s > step), default=None),
        "last": steps[-1] if steps else None,
        "scale": _scale([reward for one in step_groups for reward in one["rewards"]]),
        "bar_of": _bar,
        "groups": step_groups[(page - 1) * _GROUPS_PER_PAGE : page * _GROUPS_PER_PAGE],
        "total": len(step_groups),
        "page": page,
        "num_pages": -(-len(step_groups) // _GROUPS_PER_PAGE),
        "empty": _why_empty(shown) if not step_groups else "",
    }


def _scale(rewards: list[float | None]) -> tuple[float, float]:
    """The least and the largest of some rewards and 0, and never an empty range: (0, 1) where all are 0."""
    known = [reward for reward in rewards if reward is not None and math.isfinite(reward)]
    low, high = min([0.0, *known]), max([0.0, *known])
    return (low, high) if high > low else (0.0, 1.0)


def _bar(reward: float, scale: tuple[float, float]) -> tuple[float, float]:
    """Top and height of a reward's bar in a picture of height 32. The bar stands on 0, or hangs from it; a reward of 0
    is a stroke."""
    low, high = scale
    reward = min(high, max(low, reward)) if math.isfinite(reward) else 0.0
    zero = high / (high - low) * _HEIGHT
    height = max(float(_STROKE), abs(reward) / (high - low) * _HEIGHT)
    top = zero - height if reward > 0 else zero
    return round(min(max(0.0, top), _HEIGHT - height), 2), round(height, 2)


def group(parameters: Parameters) -> dict[str, Any]:
    shown, group_id = parameters.one(), parameters.text("id")
    rows = shown.rollouts.siblings(group_id, parameters.whole("step"))
    if not rows:
        raise Missing(f"group={group_id!r}: is not recorded in {shown.name}")
    records = [
        dict.fromkeys(_KNOWN) | (shown.rollouts.complete(row["rollout_id"]) or {}) for row in rows[:_SIDE_BY_SIDE]
    ]
    return {"chosen": [shown], "run": shown, "group_id": group_id, "rows": list(zip(rows, records)), "num": len(rows)}


def rollout(parameters: Parameters) -> dict[str, Any]:
    shown, record = _record(parameters)
    tree = TurnTree.of(record)
    sampled = [turn.get("tokens") or [] for turn in record["turns"] or [] if isinstance(turn, dict)]
    num_tokens, limit = sum(map(len, sampled)), MOST_TOKENS if parameters.text("all") == "1" else MAX_TOKENS
    _shorten(record, limit)
    tokenizer = shown.tokenizer
    clip = clip_of(shown.run.config())
    turns = explained(record, clip, None if tokenizer is None else lambda tokens: pieces(tokenizer, tokens))
    siblings = shown.rollouts.siblings(str(record.get("group_id")), record.get("step"))
    ids = [row["rollout_id"] for row in siblings]
    at = ids.index(record["rollout_id"]) if record.get("rollout_id") in ids else -1
    return {
        "chosen": [shown],
        "run": shown,
        "record": record,
        "turns": turns,
        "tree": tree,
        "num_tokens": num_tokens,
        "is_short": num_tokens > limit,
        "most": min(num_tokens, MOST_TOKENS) if limit < MOST_TOKENS else 0,
        "tint_by": parameters.choice("tint", ("advantage", *TINTS)),
        "clip": clip,
        "siblings": siblings,
        "previous": ids[at - 1] if at > 0 else None,
        "next": ids[at + 1] if 0 <= at < len(ids) - 1 else None,
        "spans": _spans(record),
        "missing": _missing(record, turns, tokenizer),
        "unknown": {name: value for name, value in record.items() if name not in _KNOWN and value is not None},
    }


def whole_text(parameters: Parameters) -> dict[str, Any]:
    """One text of a rollout: `text`, `prompt`, or of turn i `prompt-i` and `text-i`."""
    shown, record = _record(parameters)
    field, _, index = parameters.text("part", "text").partition("-")
    if field not in ("text", "prompt"):
        raise ValueError(f"part={field!r}: is none of text, prompt")
    source = record
    if index:
        turns = record.get("turns") or []
        if not index.isdecimal() or int(index) >= len(turns):
            raise Missing(f"part={field}-{index}: the rollout has {len(turns)} turns")
        source = turns[int(index)]
    return {"chosen": [shown], "run": shown, "record": record, "text": str(source.get(field) or ""), "field": field}


def _record(parameters: Parameters) -> tuple[ShownRun, dict[str, Any]]:
    shown, rollout_id = parameters.one(), parameters.text("id")
    record = shown.rollouts.complete(rollout_id)
    if record is None:
        raise Missing(f"rollout={rollout_id!r}: is not recorded in {shown.name}, or in a step that was taken again")
    return shown, dict.fromkeys(_KNOWN) | record


def _shorten(record: dict[str, Any], limit: int) -> None:
    """Leaves the first `limit` tokens of a record's turns."""
    for turn in record["turns"] or []:
        if isinstance(turn, dict) and turn.get("tokens"):
            turn["tokens"] = turn["tokens"][:limit]
            limit -= len(turn["tokens"])


def _spans(record: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(what, begin, length) of the stretches of a rollout, in hundredths of its time."""
    turns = [times for times in record.get("turn_seconds") or [] if times and len(times) == 3]
    seconds = record.get("seconds") or {}
    play = float(seconds.get("play") or (turns[-1][2] if turns else 0.0))
    reward = float(seconds.get("reward") or 0.0)
    whole = play + reward
    if not whole > 0:
        return []
    spans = []
    for i, (requested, sampled, answered) in enumerate(turns):
        spans.append((f"turn {i}: sampling {sampled - requested:.3f} s", requested, sampled - requested))
        spans.append((f"turn {i}: environment {answered - sampled:.3f} s", sampled, answered - sampled))
    if not turns:
        spans.append((f"play {play:.3f} s", 0.0, play))
    if reward:
        spans.append((f"reward {reward:.3f} s", play, reward))
    return [(label, 100 * begin / whole, 100 * length / whole) for label, begin, length in spans]


def _missing(record: dict[str, Any], turns: list[ReadTurn], tokenizer: Any) -> list[str]:
    missing = []
    if not record.get("turns"):
        missing.append("No turns are recorded: controller.record_tokens is off. Only the texts can be shown.")
    elif tokenizer is None:
        missing.append("The run's tokenizer is not on this machine: tokens are shown by their numbers.")
    if turns and not record.get("sequences"):
        left_out = record.get("left_out")
        why = f"{left_out} left the rollout out of training" if left_out else "no training sequence is recorded"
        missing.append(f"No advantages, ratios or trainer's log-probabilities: {why}.")
    return missing


def _why_empty(shown: ShownRun) -> str:
    if not shown.has_rollouts:
        return "No rollouts are recorded: the run has no rollouts/ yet, or never reached its reinforcement phase."
    return "No rollout fits."


_KNOWN = (
    *("step", "attempt", "phase", "group_id", "rollout_id", "draw", "role", "task_id", "prompt", "answer", "text"),
    *("reward", "reward_parts", "advantage", "left_out", "masked", "num_tokens", "finish_reason", "end_reason"),
    *("policy_version_min", "policy_version_max", "seconds", "turn_seconds", "turns", "sequences"),
)

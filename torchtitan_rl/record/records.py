"""Records of rollouts, made from judged groups and from what trained, and of attempts in evaluations;
`record.schemas` has the columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torchtitan_rl.types.branches import parents

if TYPE_CHECKING:
    from torchtitan_rl.types import Datum, Rollout, RolloutGroup, Task, Turn

__all__ = ["Trained", "evaluation_record", "rollout_records"]

Trained = tuple["Datum", Any]
"""A training sequence, and the policy's log-probability of each of its targets when it trained first, (T,)."""

_OF_ROLLOUT = ("role", "text", "end_reason", "reward", "seconds", "masked")
_OF_COMPLETION = ("seed", "finish_reason", "tokens", "logprobs", "policy_versions")
_PER_TOKEN = (
    *("advantages", "token_weights", "old_logprobs", "reference_logprobs", "teacher_logprobs"),
    *("values", "returns"),
)
"""The loss inputs that are recorded as they are, where the run has them."""


def rollout_records(
    groups: Sequence[RolloutGroup], trained: Sequence[Trained], decode: Callable[[list[int]], str] | None
) -> Iterator[dict[str, Any]]:
    """One record per rollout of `groups`. `trained` has the training sequences; `Datum.rollout` is a rollout's place
    among all rollouts of the groups. `decode` turns tokens into text; None leaves out whatever is per token or turn."""
    sequences: dict[int, list[Trained]] = {}
    for datum, logprobs_T in trained:
        sequences.setdefault(datum.rollout, []).append((datum, logprobs_T))
    rollouts = ((group, index) for group in groups for index in range(len(group.rollouts)))
    for place, (group, index) in enumerate(rollouts):
        yield {
            "group_id": group.id,
            **_of_rollout(group.rollouts[index]),
            "advantage": None if group.advantages is None else group.advantages[index],
            "left_out": group.left_out,
            **({} if decode is None else _per_token(group.rollouts[index], sequences.get(place, []), decode)),
        }


def evaluation_record(task: Task, rollout: Rollout | None, *, correct: bool, failed: str) -> dict[str, Any]:
    """The record of an attempt at a task of an evaluation. `rollout` is None where the attempt has none because it
    failed, and `failed` says why: such an attempt has no reward."""
    record: dict[str, Any] = {"task_id": task.id, "correct": correct, "failed": failed}
    record |= {name: _as_text(getattr(task, name)) for name in ("prompt", "answer")}
    if rollout is None:
        return record
    completions = [turn.completion for turn in rollout.turns]
    return record | {
        "text": rollout.text,
        "reward": None if failed else rollout.reward,
        "num_tokens": [len(completion.tokens) for completion in completions],
        "finish_reason": completions[-1].finish_reason if completions else None,
        "end_reason": rollout.end_reason,
    }


def _of_rollout(rollout: Rollout) -> dict[str, Any]:
    completions = [turn.completion for turn in rollout.turns]
    versions = [version for completion in completions for version in completion.policy_versions]
    return {
        "rollout_id": rollout.id,
        "draw": rollout.group,
        "task_id": rollout.task.id,
        **{name: _as_text(getattr(rollout.task, name)) for name in ("prompt", "answer")},
        **{name: getattr(rollout, name) for name in _OF_ROLLOUT},
        "reward_parts": rollout.reward_parts or None,
        "turn_seconds": [turn.seconds for turn in rollout.turns],
        "num_tokens": [len(completion.tokens) for completion in completions],
        "finish_reason": completions[-1].finish_reason if completions else None,
        "policy_version_min": min(versions, default=None),
        "policy_version_max": max(versions, default=None),
    }


def _as_text(value: Any) -> str | None:
    """Text as it is; anything else as JSON, or as Python writes it where JSON cannot."""
    if value is None or isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=repr)
    except (TypeError, ValueError):  # a key that is no text, such as a tuple; a value that contains itself
        return repr(value)


def _per_token(rollout: Rollout, trained: list[Trained], decode: Callable[[list[int]], str]) -> dict[str, Any]:
    extended = parents(rollout.turns)
    turns = [_of_turn(rollout.turns, i, parent, decode) for i, parent in enumerate(extended)]
    return {"turns": turns, "sequences": [_of_sequence(datum, logprobs_T) for datum, logprobs_T in trained]}


def _of_turn(
    turns: Sequence[Turn], index: int, parent: int | None, decode: Callable[[list[int]], str]
) -> dict[str, Any]:
    """`parent` is the index of the turn that this one goes on from: the prompt is recorded without the tokens up to
    there."""
    turn, completion = turns[index], turns[index].completion
    num_before = 0 if parent is None else len(turns[parent].prompt_tokens) + len(turns[parent].completion.tokens)
    return {
        "prompt": _prompt(decode, tuple(turn.prompt_tokens[num_before:])),
        "text": decode(completion.tokens),
        "reward": turn.reward,
        "num_prompt_tokens": len(turn.prompt_tokens),
        "extends": parent,
        **{name: getattr(completion, name) for name in _OF_COMPLETION},
    }


@lru_cache(maxsize=8)  # the rollouts of a group share a prompt
def _prompt(decode: Callable[[list[int]], str], tokens: tuple[int, ...]) -> str:
    return decode(list(tokens))


def _of_sequence(datum: Datum, logprobs_T) -> dict[str, Any]:
    """Lists of one entry per token. Data with several targets a token is recorded without what is per target."""
    inputs, one_target = datum.loss_inputs, datum.target_tokens.dim() == 1
    return {name: inputs[name].tolist() for name in _PER_TOKEN if name in inputs and inputs[name].dim() == 1} | {
        "tokens": datum.tokens.tolist(),
        "loss_mask": inputs["loss_mask"].int().tolist(),
        "turns": datum.turns,
        "target_tokens": datum.target_tokens.tolist() if one_target else None,
        "policy_logprobs": logprobs_T.tolist() if one_target and logprobs_T.dim() == 1 else None,
    }

"""Why a token was pushed up or down: what generator and trainer said of it, its advantage, weight, ratio and clip."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Clip", "ReadTurn", "Token", "clip_of", "explained"]

_PPO = "torchtitan_rl.algorithm.surrogate:ppo"
_LIMIT = 20.0  # nats; the losses clamp log-ratios there too


@dataclass(kw_only=True, slots=True)
class Token:
    """One sampled token. A number is None where the record does not have it."""

    number: int
    text: str | None
    """None: no tokenizer at hand."""
    version: int | None = None
    """The policy version that sampled the token."""
    generator: float | None = None
    """Log-probability where it was sampled."""
    trainer: float | None = None
    """The policy's log-probability in the trainer, before the batch's first step."""
    old: float | None = None
    """The old policy's, where the run computes it anew; else the generator's is the ratio's denominator."""
    advantage: float | None = None
    weight: float | None = None
    """How much the token counts in the loss."""
    trained: bool | None = None
    """Whether the token is in the loss."""
    clipped: bool | None = None
    """Whether the ratio is beyond the bounds in the direction of the advantage; None: bounds not known."""

    @property
    def gap(self) -> float | None:
        """Trainer's minus generator's log-probability."""
        return None if self.trainer is None or self.generator is None else self.trainer - self.generator

    @property
    def ratio(self) -> float | None:
        """Probability ratio of the policy to the old one, at the batch's first step."""
        before = self.generator if self.old is None else self.old
        if self.trainer is None or before is None or math.isnan(self.trainer - before):
            return None
        return math.exp(max(-_LIMIT, min(_LIMIT, self.trainer - before)))


@dataclass(kw_only=True, slots=True)
class Clip:
    """Bounds of the ratio: 1 - `low` to 1 + `high`."""

    low: float
    high: float


@dataclass(kw_only=True, slots=True)
class ReadTurn:
    """One turn of a rollout: what it added to the prompt, and what the policy said."""

    prompt: str | None
    text: str | None
    reward: float | None
    finish_reason: str | None
    seconds: list[float] | None
    """Asked, answered, and the environment's answer, since the rollout began."""
    extends: int | None = None
    """The turn that this one goes on from; None: it begins from a prompt of its own, or the record does not say."""
    tokens: list[Token] = field(default_factory=list)


def clip_of(config: dict[str, Any]) -> Clip | None:
    """The bounds in a resolved config; None where they are not there, and for another loss than `ppo`: GSPO bounds a
    sequence's ratio, and a token that CISPO clips still trains."""
    algorithm = config.get("algorithm")
    try:
        if algorithm["loss_fn"]["function"].partition("(")[0] != _PPO:
            return None
        loss_config = algorithm["loss_config"]
        return Clip(low=float(loss_config["clip_low"]), high=float(loss_config["clip_high"]))
    except (TypeError, KeyError, ValueError, AttributeError):
        return None


def explained(
    record: dict[str, Any], clip: Clip | None, pieces: Callable[[Sequence[int]], list[str]] | None
) -> list[ReadTurn]:
    """The turns of a rollout's record, token by token. `pieces` gives the text of each of some tokens. What a record of
    another version lacks is None."""
    seconds = record.get("turn_seconds") or []
    turns = [
        _turn(turn, seconds[i] if i < len(seconds) else None, pieces)
        for i, turn in enumerate(record.get("turns") or [])
        if isinstance(turn, dict)
    ]
    _add_training(turns, [s for s in record.get("sequences") or [] if isinstance(s, dict)])
    for token in (token for turn in turns for token in turn.tokens):
        if clip is not None and token.ratio is not None and token.advantage is not None and token.trained:
            above, below = token.ratio > 1 + clip.high, token.ratio < 1 - clip.low
            token.clipped = (above and token.advantage > 0) or (below and token.advantage < 0)
    return turns


def _turn(turn: dict[str, Any], seconds: list[float] | None, pieces: Callable | None) -> ReadTurn:
    numbers = turn.get("tokens") or []
    texts = pieces(numbers) if pieces is not None else [None] * len(numbers)
    logprobs, versions = turn.get("logprobs") or [], turn.get("policy_versions") or []
    tokens = [
        Token(number=number, text=text, generator=_at(logprobs, i), version=versions[i] if i < len(versions) else None)
        for i, (number, text) in enumerate(zip(numbers, texts))
    ]
    return ReadTurn(
        prompt=turn.get("prompt"),
        text=turn.get("text"),
        reward=_number(turn.get("reward")),
        finish_reason=turn.get("finish_reason"),
        seconds=seconds,
        extends=turn.get("extends"),
        tokens=tokens,
    )


def _add_training(turns: list[ReadTurn], sequences: list[dict[str, Any]]) -> None:
    """Adds to tokens what the training sequences say of them."""
    for sequence in sequences:
        for index, first, count in _places(turns, sequence):
            if not 0 <= index < len(turns):
                continue
            for i, token in enumerate(turns[index].tokens[:count]):
                token.trainer = _at(sequence.get("policy_logprobs"), first + i)
                token.old = _at(sequence.get("old_logprobs"), first + i)
                token.advantage = _at(sequence.get("advantages"), first + i)
                token.weight = _at(sequence.get("token_weights"), first + i)
                trained = _at(sequence.get("loss_mask"), first + i)
                token.trained = None if trained is None else trained > 0


def _places(turns: list[ReadTurn], sequence: dict[str, Any]) -> list[tuple[int, int, int]]:
    """(turn, first position, number of tokens) of a sequence; for records without `turns`, where the turns' tokens are
    found among the targets, in order."""
    if sequence.get("turns"):
        return [(int(index), int(first), int(count)) for index, first, count in sequence["turns"]]
    targets, start, positions = sequence.get("target_tokens") or [], 0, []
    for index, turn in enumerate(turns):
        sampled = [token.number for token in turn.tokens]
        wanted = (i for i in range(start, len(targets) - len(sampled) + 1) if targets[i : i + len(sampled)] == sampled)
        if sampled and all(token.trained is None for token in turn.tokens) and (at := next(wanted, None)) is not None:
            positions.append((index, at, len(sampled)))
            start = at + len(sampled)
    return positions


def _at(values: Any, index: int) -> float | None:
    return _number(values[index]) if isinstance(values, list) and 0 <= index < len(values) else None


def _number(value: Any) -> float | None:
    """JSON lines hold text for what JSON has no number for."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None

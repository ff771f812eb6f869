"""Soft targets: tokens to learn besides the sampled token, each with a share, such as a teacher's probability.

Above dispatch soft targets are two loss inputs of a datum, `soft_tokens` (T, K), int64, and `soft_shares` (T, K).
`appended` adds them to the datum's targets just before a step of the policy.
"""

from __future__ import annotations

import dataclasses

import torch

from torchtitan_rl.types import Datum, Turn

__all__ = ["with_soft_targets", "with_soft_columns", "appended"]


def with_soft_targets(data: list[Datum], turns: list[tuple[str, list[tuple[int, Turn]]]]) -> list[Datum]:
    """Datums with the soft targets that turns carry; missing soft targets have share 0.

    For each datum `turns` holds (rollout id, [(position, turn), ...]): the position in the datum's whole sequence of
    the turn's first sampled token.
    Raises ValueError for soft targets that do not fit their turn or are not finite.
    """
    for rollout, datum_turns in turns:
        for _, turn in datum_turns:
            _check(turn, rollout)
    width = max(
        turn.soft_targets[0].shape[1] for _, datum_turns in turns for _, turn in datum_turns if turn.soft_targets
    )
    soft = []
    for datum, (_, datum_turns) in zip(data, turns, strict=True):
        tokens_TK = torch.zeros(len(datum) + 1, width, dtype=torch.long)
        shares_TK = torch.zeros(len(datum) + 1, width)
        for start, turn in datum_turns:
            if turn.soft_targets is not None:
                tokens, shares = turn.soft_targets
                place = slice(start, start + len(tokens)), slice(0, tokens.shape[1])
                tokens_TK[place], shares_TK[place] = tokens, shares
        soft.append((tokens_TK[1:], shares_TK[1:]))
    return with_soft_columns(data, soft)


def with_soft_columns(data: list[Datum], soft: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Datum]:
    """Datums with the soft targets replaced: per datum a pair of tokens (T, K) and shares (T, K)."""
    return [
        dataclasses.replace(datum, loss_inputs={**datum.loss_inputs, "soft_tokens": tokens, "soft_shares": shares})
        for datum, (tokens, shares) in zip(data, soft, strict=True)
    ]


def appended(data: list[Datum]) -> list[Datum]:
    """Datums in the trainer's form: targets (T, 1 + K), the sampled token first, and `soft_weights` (T, K), which are
    shares x the token's weight."""
    with_targets = []
    for datum in data:
        inputs = dict(datum.loss_inputs)
        tokens_TK, shares_TK = inputs.pop("soft_tokens"), inputs.pop("soft_shares")
        inputs["soft_weights"] = inputs["token_weights"][:, None] * shares_TK
        targets = torch.cat([datum.target_tokens[:, None], tokens_TK], 1)
        with_targets.append(dataclasses.replace(datum, target_tokens=targets, loss_inputs=inputs))
    return with_targets


def _check(turn: Turn, rollout: str) -> None:
    sampled = len(turn.completion.tokens)
    for part in turn.soft_targets or ():
        if part.shape != turn.soft_targets[0].shape or len(part) != sampled:
            raise ValueError(
                f"turn.soft_targets: of shapes {[tuple(p.shape) for p in turn.soft_targets]}, rollout {rollout} "
                f"sampled {sampled} tokens; give tokens (n, K) and weights (n, K)"
            )
        if not torch.isfinite(part).all():
            raise ValueError(
                f"turn.soft_targets: of rollout {rollout} are not all finite; the teacher's weights or "
                "numerics are broken"
            )

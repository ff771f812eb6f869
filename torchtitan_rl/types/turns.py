"""Where the tokens of turns lie in training data: the position of each token in its completion, and its turn."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Turns", "missing"]

Turns = list[tuple[int, int, int]]
"""The turns of a datum: (index of the turn in its rollout, index in the datum's targets of the turn's first sampled
token, number of its sampled tokens)."""

_BY_TURN = ("position", "turn")


def missing(inputs: Any, name: str) -> torch.Tensor:
    """A loss input that `inputs`, of the type LossInputs, does not hold: `position` and `turn` are computed when a loss
    first reads one of them. Raises AttributeError for any other, and where the turns of the data are not known."""
    if name not in _BY_TURN:
        raise AttributeError(
            f"loss input {name!r}: the data carry only {sorted(inputs.tensors)}; fill it where datums are built"
        ) from None
    inputs.tensors.update(_by_turn(inputs.turns, inputs.datum))
    return inputs.tensors[name]


def _by_turn(turns: list[Turns | None], datum_T: torch.Tensor) -> dict[str, torch.Tensor]:
    """`position` (index of each token in its completion) and `turn` (index of its turn in the rollout), int64 (T,), -1
    where the policy did not sample the token. `datum_T` has the index of each token's datum, and `turns` one entry per
    datum. Raises AttributeError where a datum has None, and ValueError for a turn outside of its datum.
    """
    position_T, turn_T = (torch.full(datum_T.shape, -1) for _ in _BY_TURN)
    lengths = torch.bincount(datum_T.cpu(), minlength=len(turns)).tolist()
    start = 0
    if not turns or None in turns:
        raise AttributeError(
            "loss inputs 'position' and 'turn': the data do not say where their turns are; set Datum.turns where "
            "datums are built"
        ) from None
    for datum_turns, length in zip(turns, lengths, strict=True):
        for index, first, count in datum_turns or ():
            if first < 0 or first + count > length:
                raise ValueError(
                    f"datum.turns: turn {index} is at targets {first} to {first + count} of {length}; give "
                    "(turn, index of its first sampled token in target_tokens, number of sampled tokens)"
                )
            place = slice(start + first, start + first + count)
            position_T[place], turn_T[place] = torch.arange(count), index
        start += length
    return {"position": position_T.to(datum_T.device), "turn": turn_T.to(datum_T.device)}

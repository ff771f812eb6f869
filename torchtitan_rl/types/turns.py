"""Where the tokens of turns lie in training data: the position of each token in its completion, and its turn."""

from __future__ import annotations

import torch

__all__ = ["Turns", "BY_TURN", "by_turn"]

Turns = list[tuple[int, int, int]]
"""The turns of a datum: (index of the turn in its rollout, index in the datum's targets of the turn's first sampled
token, number of its sampled tokens)."""

BY_TURN = ("position", "turn")
"""Loss inputs that a microbatch's turns give, computed when a loss reads one of them."""


def by_turn(turns: list[Turns | None], datum_T: torch.Tensor) -> dict[str, torch.Tensor]:
    """`position` (index of each token in its completion) and `turn` (index of its turn in the rollout), int64 (T,), -1
    where the policy did not sample the token. `datum_T` has the index of each token's datum, and `turns` one entry per
    datum. Raises AttributeError where a datum has None, and ValueError for a turn outside of its datum.
    """
    position_T, turn_T = (torch.full(datum_T.shape, -1) for _ in BY_TURN)
    lengths = torch.bincount(datum_T.cpu(), minlength=len(turns)).tolist()
    start = 0
    if not turns or None in turns:
        raise AttributeError(
            "loss inputs 'position' and 'turn': the data do not say where their turns are; set Datum.turns where "
            "datums are built"
        )
    for of_datum, length in zip(turns, lengths, strict=True):
        for index, first, count in of_datum or ():
            if first < 0 or first + count > length:
                raise ValueError(
                    f"datum.turns: turn {index} is at targets {first} to {first + count} of {length}; give "
                    "(turn, index of its first sampled token in target_tokens, number of sampled tokens)"
                )
            place = slice(start + first, start + first + count)
            position_T[place], turn_T[place] = torch.arange(count), index
        start += length
    return {"position": position_T.to(datum_T.device), "turn": turn_T.to(datum_T.device)}

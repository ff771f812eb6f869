"""From demonstrations to datums, the trainer's input."""

from __future__ import annotations

import torch

from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.types import Datum

__all__ = ["demonstration_datums"]


def demonstration_datums(pairs: list[tuple[list[int], list[int]]], config: AlgorithmConfig) -> list[Datum]:
    """Datums from (prompt tokens, completion tokens), for `cross_entropy`: only completion tokens train."""
    sequences, masks = [], []
    for prompt, completion in pairs:
        sequences.append(torch.tensor(prompt + completion))
        mask_T = torch.zeros(len(prompt) + len(completion) - 1)
        mask_T[len(prompt) - 1 :] = 1.0
        masks.append(mask_T)
    weights = config.reduction(masks, list(range(len(masks))))
    return [
        Datum(
            tokens=sequence[:-1], target_tokens=sequence[1:], loss_inputs={"loss_mask": mask, "token_weights": weight}
        )
        for sequence, mask, weight in zip(sequences, masks, weights, strict=True)
    ]

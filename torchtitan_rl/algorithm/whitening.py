"""Advantages of a batch at mean 0 and standard deviation 1 over its trained tokens."""

from __future__ import annotations

import torch

from torchtitan_rl.algorithm.advantages import NO_SPREAD
from torchtitan_rl.algorithm.inputs import with_inputs
from torchtitan_rl.types import Datum

__all__ = ["whitened", "with_whitened"]


def whitened(advantages: list[torch.Tensor], masks: list[torch.Tensor]) -> list[torch.Tensor]:
    """Advantages less their mean over all trained tokens, divided by their population standard deviation; float64, each
    (T,), 0 where the mask is 0. Advantages that differ by rounding only are 0 (`advantages.all_equal`)."""
    trained = torch.cat([row_T[mask_T > 0] for row_T, mask_T in zip(advantages, masks, strict=True)]).double()
    if not len(trained) or trained.max() - trained.min() <= NO_SPREAD * trained.abs().max():
        return [torch.zeros(len(mask_T), dtype=torch.float64) for mask_T in masks]
    mean, std = trained.mean(), trained.std(correction=0)
    return [
        torch.where(mask_T > 0, (row_T.double() - mean) / std, 0.0)
        for row_T, mask_T in zip(advantages, masks, strict=True)
    ]


def with_whitened(data: list[Datum]) -> list[Datum]:
    """The datums of a batch with whitened advantages; precomputed ones are whitened with the others."""
    advantages, masks = ([datum.loss_inputs[name] for datum in data] for name in ("advantages", "loss_mask"))
    return with_inputs(data, advantages=[row_T.float() for row_T in whitened(advantages, masks)])

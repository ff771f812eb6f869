"""A critic's head: one value per position where a language model has logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torchtitan.models.common.linear import Linear

from torchtitan_rl import adapters

__all__ = ["ValueHead"]

adapters.adapt_torchtitan()


class ValueHead(Linear):
    """Hidden states (1, T, D) to `predicted_values` (1, T), at least float32. Whole on every tensor-parallel rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def target(self, targets: torch.Tensor, temperature: float) -> None:
        """Does nothing: a value depends on neither."""

    def forward(self, input: torch.Tensor) -> dict[str, torch.Tensor]:
        values = super().forward(input)
        if isinstance(values, DTensor):
            values = values.to_local()
        return {"predicted_values": values[..., 0].to(torch.promote_types(values.dtype, torch.float32))}

"""A critic's head: one value per position where a language model has logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
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
        # Not in bfloat16, in which values of a group tie: the product has a single column.
        dtype = torch.promote_types(input.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        values = F.linear(input.to(dtype), self.weight.to(dtype), bias)
        if isinstance(values, DTensor):
            values = values.to_local()
        return {"predicted_values": values[..., 0]}

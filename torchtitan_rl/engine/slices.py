"""Layers of a generator rank that holds a part of them: vLLM's all-reduces add the ranks' outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import RoutedExperts
from vllm.distributed import tensor_model_parallel_all_reduce

from torchtitan_rl import adapters

__all__ = ["RowParallelLinear", "SlicedExperts"]

adapters.adapt_torchtitan()


class RowParallelLinear(Linear):
    """A linear layer whose input features are split over the ranks; an all-reduce sums the ranks' outputs. The bias is
    whole on every rank, and added to the sum."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = tensor_model_parallel_all_reduce(F.linear(input, self.weight))
        return out if self.bias is None else out + self.bias


class SlicedExperts(RoutedExperts):
    """Experts whose inner features are split over the ranks; one all-reduce sums the ranks' outputs per token."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def forward(self, *args, **kwargs) -> torch.Tensor:
        return tensor_model_parallel_all_reduce(super().forward(*args, **kwargs))

"""Layers of a generator rank that holds a part of them: vLLM's all-reduces add the ranks' outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchtitan.models.common.moe import RoutedExperts
from vllm.distributed import tensor_model_parallel_all_reduce

from torchtitan_rl import adapters
from torchtitan_rl.engine.kernels import PackedLinear

__all__ = ["RowParallelLinear", "SlicedExperts"]

adapters.adapt_torchtitan()


class RowParallelLinear(PackedLinear):
    """A linear layer whose input features are split over the ranks; an all-reduce sums the ranks' outputs. The bias is
    whole on every rank, and added to the sum."""

    @dataclass(kw_only=True, slots=True)
    class Config(PackedLinear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = tensor_model_parallel_all_reduce(self.product(input))
        return out if self.bias is None else out + self.bias


class SlicedExperts(RoutedExperts):
    """Experts whose inner features are split over the ranks; one all-reduce sums the ranks' outputs per token."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def forward(self, *args, **kwargs) -> torch.Tensor:
        return tensor_model_parallel_all_reduce(super().forward(*args, **kwargs))

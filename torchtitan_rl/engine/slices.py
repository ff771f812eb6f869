"""Experts of a generator rank that holds a part of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchtitan.models.common.moe import RoutedExperts
from vllm.distributed import tensor_model_parallel_all_reduce

from torchtitan_rl import adapters

__all__ = ["SlicedExperts"]

adapters.adapt_torchtitan()


class SlicedExperts(RoutedExperts):
    """Experts whose inner features are split over the ranks. One all-reduce of vLLM's sums the ranks' outputs."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def forward(self, *args, **kwargs) -> torch.Tensor:
        return tensor_model_parallel_all_reduce(super().forward(*args, **kwargs))

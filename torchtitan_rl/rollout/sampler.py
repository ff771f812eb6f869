"""What a workflow asks of the generators."""

from __future__ import annotations

from typing import Protocol

import torch

from torchtitan_rl.types import Completion, SamplingParams

__all__ = ["Sampler"]


class Sampler(Protocol):
    """Completes and scores tokens, such as `dispatch.SamplingClient`. Only self-distillation calls `score`,
    `score_top`."""

    async def sample(
        self, tokens: list[int], params: SamplingParams, *, policy_version: int | None = None
    ) -> Completion: ...

    async def score(self, tokens: list[int], *, policy_version: int | None = None) -> list[float]: ...

    async def score_top(
        self, tokens: list[int], top_k: int, *, policy_version: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

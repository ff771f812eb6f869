"""torchtitan's rotary embedding with YaRN's growth of queries and keys, which torchtitan leaves to the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchtitan_rl import adapters

adapters.adapt_torchtitan()

from torchtitan.models.common import CosSinRoPE  # noqa: E402

from torchtitan_rl.families.rope import YarnScaling  # noqa: E402

__all__ = ["AmplifiedCosSinRoPE", "half_rotation"]


class AmplifiedCosSinRoPE(CosSinRoPE):
    """Rotates halves, and multiplies what it rotates by `amplitude`. Generators run `engine.kernels.KernelHalfRotation`
    in its place."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        amplitude: float = 1.0

    def _precompute_cache(self) -> torch.Tensor:
        return super()._precompute_cache() * self.config.amplitude


def half_rotation(dim: int, max_seq_len: int, theta: float, scaling: YarnScaling | None) -> CosSinRoPE.Config:
    """The rotary embedding that pairs dimension i with i + dim / 2, as Hugging Face's models have it."""
    if scaling is None:
        return CosSinRoPE.Config(dim=dim, max_seq_len=max_seq_len, theta=theta)
    return AmplifiedCosSinRoPE.Config(
        dim=dim,
        max_seq_len=max_seq_len,
        theta=theta,
        scaling="yarn",
        rope_factor=scaling.factor,
        beta_fast=scaling.beta_fast,
        beta_slow=scaling.beta_slow,
        original_seq_len=scaling.original_max_seq_len,
        truncate=scaling.truncate,
        amplitude=scaling.amplitude,
    )

"""Settings that alter the distribution which an evaluation's tokens are drawn from."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_rl.types.completions import DistributionSettings

__all__ = ["AlteredSampling"]


@dataclass(kw_only=True, slots=True)
class AlteredSampling(DistributionSettings):
    """The distribution that an evaluation's tokens are drawn from, where it is not the policy's own.

    Example: `AlteredSampling(top_p=0.95, top_k=20)`.
    """

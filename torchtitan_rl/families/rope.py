"""Scaled rotary embeddings: their settings in a config, and in the `config.json` of Hugging Face."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from annotated_types import Ge, Gt

from torchtitan_rl.families.hf_keys import required

__all__ = ["YarnScaling", "Llama3Scaling"]


@dataclass(kw_only=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): slow frequencies are divided by `factor`, fast ones stay, and queries
    and keys grow with the context. Example: `YarnScaling(factor=4.0, original_max_seq_len=32768)`."""

    factor: Annotated[float, Gt(0)]
    """By how much the context is longer than the original one."""
    original_max_seq_len: Annotated[int, Ge(1)]
    """Positions of the original training, in tokens."""
    beta_fast: Annotated[float, Gt(0)] = 32.0
    """Rotations over the original context from which on a frequency stays."""
    beta_slow: Annotated[float, Gt(0)] = 1.0
    """Rotations over the original context below which a frequency is divided by the whole factor."""
    truncate: bool = True
    """Whether the bounds between them are whole dimensions."""
    attention_factor: Annotated[float | None, Gt(0)] = None
    """Factor of rotated queries and keys; None: 0.1 ln(factor) + 1, as in the paper."""

    hf_names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor")

    @property
    def amplitude(self) -> float:
        """The factor of rotated queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @classmethod
    def from_hf(cls, scaling: Mapping[str, Any], where: str) -> Self:
        """From the value of `rope_scaling`. Raises ValueError, beginning with `where`, for missing names."""
        required(scaling, ("factor", "original_max_position_embeddings"), f"{where}: rope_scaling")
        return cls(
            factor=scaling["factor"],
            original_max_seq_len=scaling["original_max_position_embeddings"],
            # As transformers reads them: 0 is as good as none.
            beta_fast=scaling.get("beta_fast") or 32.0,
            beta_slow=scaling.get("beta_slow") or 1.0,
            truncate=scaling.get("truncate", True),
            attention_factor=scaling.get("attention_factor"),
        )

    def to_hf(self) -> dict[str, Any]:
        """The value of `rope_parameters`, without the base."""
        return dict(
            rope_type="yarn",
            factor=self.factor,
            original_max_position_embeddings=self.original_max_seq_len,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            truncate=self.truncate,
            attention_factor=self.attention_factor,
        )


@dataclass(kw_only=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's rule (Meta, 2024): frequencies with long wavelengths are divided by `factor`, short ones stay, and
    those between are interpolated. Example: `Llama3Scaling(factor=32.0, original_max_seq_len=8192)`."""

    factor: Annotated[float, Gt(0)]
    original_max_seq_len: Annotated[int, Ge(1)]
    """Positions of the original training, in tokens."""
    low_freq_factor: Annotated[float, Gt(0)] = 1.0
    """Wavelengths above `original_max_seq_len` / this are divided by the whole factor."""
    high_freq_factor: Annotated[float, Gt(0)] = 4.0
    """Wavelengths below `original_max_seq_len` / this stay."""

    hf_names = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")

    @classmethod
    def from_hf(cls, scaling: Mapping[str, Any], where: str) -> Self:
        """From the value of `rope_scaling`. Raises ValueError, beginning with `where`, for missing names."""
        required(scaling, cls.hf_names, f"{where}: rope_scaling")
        return cls(
            factor=scaling["factor"],
            original_max_seq_len=scaling["original_max_position_embeddings"],
            low_freq_factor=scaling["low_freq_factor"],
            high_freq_factor=scaling["high_freq_factor"],
        )

    def to_hf(self) -> dict[str, Any]:
        """The value of `rope_parameters`, without the base."""
        return dict(
            rope_type="llama3",
            factor=self.factor,
            original_max_position_embeddings=self.original_max_seq_len,
            low_freq_factor=self.low_freq_factor,
            high_freq_factor=self.high_freq_factor,
        )

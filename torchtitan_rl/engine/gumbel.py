"""Draws of tokens by keys in torch's operators: what vLLM's kernel for a CPU computes, on any device."""

from __future__ import annotations

import torch

__all__ = ["gumbel_argmax"]

_CHUNK = 2**22  # entries of the noise that are in memory at once


def gumbel_argmax(logits_RV: torch.Tensor, keys_R: torch.Tensor) -> torch.Tensor:
    """Draws one token per row by the row's key (int64). A logit of minus infinity is never drawn.

    The noise of token v is output v of SplitMix64 seeded with SplitMix64's mix of the key, as u in (0, 1) with 53 bits
    and then as -log(-log(u))."""
    steps_V = torch.arange(1, logits_RV.shape[1] + 1, device=logits_RV.device) * _signed(0x9E3779B97F4A7C15)
    rows = max(1, _CHUNK // logits_RV.shape[1])
    drawn = [
        (logits + _gumbel(_mix(keys)[:, None] + steps_V)).argmax(1)
        for logits, keys in zip(logits_RV.split(rows), keys_R.split(rows))
    ]
    return torch.cat(drawn)


def _gumbel(state: torch.Tensor) -> torch.Tensor:
    u = ((_mix(state) >> 11 & 2**53 - 1).double() + 0.5) * 2.0**-53
    return -(-u.clamp(max=1 - 2.0**-53).log()).log()  # the largest u rounds to 1, whose noise would be infinite


def _mix(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's mix of int64s; `&` makes shifts of signed numbers unsigned ones."""
    z = (z ^ (z >> 30 & 2**34 - 1)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> 27 & 2**37 - 1)) * _signed(0x94D049BB133111EB)
    return z ^ (z >> 31 & 2**33 - 1)


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant

"""Reductions: how a batch is averaged, written into per-token weights before anything is split.

A reduction takes every datum's loss mask (float32, (T,) each) and its group index, and returns each
datum's weights; masked tokens get exactly 0.
"""

from __future__ import annotations

import torch

__all__ = ["token_mean", "sequence_mean", "prompt_mean"]


def token_mean(masks: list[torch.Tensor], groups: list[int]) -> list[torch.Tensor]:
    """Every trained token of the batch counts the same (DAPO)."""
    total = sum(float(mask.sum()) for mask in masks)
    return [mask / max(total, 1.0) for mask in masks]


def sequence_mean(masks: list[torch.Tensor], groups: list[int]) -> list[torch.Tensor]:
    """Mean within each sequence, then over sequences (GRPO as published). Empty sequences still count."""
    return [mask / (max(float(mask.sum()), 1.0) * len(masks)) for mask in masks]


def prompt_mean(masks: list[torch.Tensor], groups: list[int]) -> list[torch.Tensor]:
    """Token mean within each group (prompt), then over groups."""
    totals: dict[int, float] = {}
    for mask, group in zip(masks, groups, strict=True):
        totals[group] = totals.get(group, 0.0) + float(mask.sum())
    return [mask / (max(totals[group], 1.0) * len(totals)) for mask, group in zip(masks, groups, strict=True)]

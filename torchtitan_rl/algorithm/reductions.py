"""Reductions: how a batch is averaged, written into per-token weights before anything is split.

A reduction takes every datum's loss mask (float32, (T,) each) and group index, and returns every datum's token weights.
Masked tokens get exactly 0; a batch without a trained token gets zeros only.
"""

from __future__ import annotations

import torch

__all__ = ["token_mean", "sequence_mean", "prompt_mean", "constant_length"]


def token_mean(masks: list[torch.Tensor], groups: list[int]) -> list[torch.Tensor]:
    """Every trained token of the batch counts the same (DAPO)."""
    total = sum(float(mask.sum()) for mask in masks)
    return [mask / max(total, 1.0) for mask in masks]


def sequence_mean(masks: list[torch.Tensor], groups: list[int]) -> list[torch.Tensor]:
    """Mean within each sequence, then over sequences (GRPO as published). Empty sequences still count."""
    return [mask / (max(float(mask.sum()), 1.0) * len(masks)) for mask in masks]


def prompt_mean(masks: list[torch.Tensor], groups: list[int]) -> list[torch.Tensor]:
    """Token mean within each group (prompt), then over groups (ScaleRL, arXiv:2510.13786)."""
    totals: dict[int, float] = {}
    for mask, group in zip(masks, groups, strict=True):
        totals[group] = totals.get(group, 0.0) + float(mask.sum())
    return [mask / (max(totals[group], 1.0) * len(totals)) for mask, group in zip(masks, groups, strict=True)]


def constant_length(masks: list[torch.Tensor], groups: list[int], *, length: float) -> list[torch.Tensor]:
    """Every token counts 1 / (sequences x `length`), however long its sequence (Dr. GRPO, arXiv:2503.20783).

    `length` is a constant of the run, such as `sampling.max_tokens`: `functools.partial(constant_length, length=512)`.
    Raises ValueError unless it is positive.
    """
    if not 0 < length < float("inf"):
        raise ValueError(f"length={length}: must be positive, it divides every token's weight; use sampling.max_tokens")
    return [mask / (length * len(masks)) for mask in masks]

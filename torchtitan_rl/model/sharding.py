"""Tensors in parts: the whole of a sharded tensor, and the rows of a vocabulary that a rank holds."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

__all__ = ["whole", "vocabulary_cut"]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The unsharded tensor; a collective call when it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def vocabulary_cut(vocab_size: int, rank: int, size: int) -> tuple[int, int]:
    """(first row, number of rows) of a rank's slice, by DTensor's rule: the last rank may have fewer than others."""
    rows = -(-vocab_size // size)
    return rows * rank, min(rows, vocab_size - rows * rank)

"""A tensor in blocks of rows: every core works on another one, and what is done to a block twice finds it in the core's
cache."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import EllipsisType

import torch

from torchtitan_rl import platform

__all__ = ["copy_all", "row_blocks"]

_BLOCK_BYTES = 2**21


def row_blocks(tensor: torch.Tensor) -> list[slice | EllipsisType]:
    """Indices of the first dimension that cut a tensor into blocks of some `_BLOCK_BYTES`, or of one row; none of a
    tensor without elements."""
    if not tensor.numel():
        return []
    if not tensor.dim():
        return [...]
    rows = max(1, math.ceil(_BLOCK_BYTES * len(tensor) / tensor.nbytes))
    return [slice(first, first + rows) for first in range(0, len(tensor), rows)]


def copy_all(copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies the second tensor of each pair into the first one, in host memory by every core at once."""
    blocks = []
    for target, source in copies:
        if target.is_cuda:
            target.copy_(source)
        else:
            blocks += [(target[rows], source[rows]) for rows in row_blocks(target)]
    platform.in_threads(_copy, blocks)


def _copy(block: tuple[torch.Tensor, torch.Tensor]) -> None:
    block[0].copy_(block[1])

"""Siblings that share their prompt in one forward: which tokens are computed, and whose numbers each token gets.

A token's hidden states depend on the tokens before it alone. So the tokens of a prompt that several documents begin
with have the same hidden states in all of them, and are computed once, in the first document. This is the shared-prefix
forward of Liu et al., "Prefix Grouper" (arXiv:2506.05433); here siblings may have any lengths, and a microbatch any
mixture of groups and single documents.

The loss sees every document whole: the head's rows of the prompt are copied to every sibling, and the gradients of the
copies add up in backward. The prompt's last token is computed by each sibling, because the token that it predicts
differs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["MASKED_QUERIES", "MAX_KEYS", "SharedPrefix"]

MASKED_QUERIES = 256
"""Queries of a sibling that one call of attention takes. Keys after the last of them are left out, those between them
are computed and masked."""
MAX_KEYS = 4
"""The most keys of attention in a microbatch, in multiples of `max_tokens_per_microbatch`: every sibling has a copy of
the prompt's keys and values."""


class SharedPrefix(NamedTuple):
    """Between the packed tokens of a microbatch, T, and those that are computed, U."""

    computed_U: torch.Tensor
    """For every computed token, the packed token that it is."""
    row_T: torch.Tensor
    """For every packed token, the computed token whose numbers it gets."""
    lengths: list[int]
    """Computed tokens of each document, in packed order."""

    @classmethod
    def build(cls, lengths: list[int], shared: list[int]) -> SharedPrefix:
        """`lengths`: tokens of each document. `shared`: how many of them are the first tokens of the last document
        before it that has 0 here."""
        computed, rows, first, start, num_computed = [], [], 0, 0, 0
        for length, size in zip(lengths, shared, strict=True):
            own = length - size
            first = first if size else num_computed
            computed.append(torch.arange(start + size, start + length))
            rows += [torch.arange(first, first + size), torch.arange(num_computed, num_computed + own)]
            start, num_computed = start + length, num_computed + own
        owns = [length - size for length, size in zip(lengths, shared, strict=True)]
        return cls(torch.cat(computed), torch.cat(rows), owns)

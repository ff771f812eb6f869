"""Operations of a decoder's forward and backward passes, by arithmetic: a multiplication and an addition are two."""

from __future__ import annotations

from collections.abc import Iterable

from torchtitan_rl.families import DecoderShape

__all__ = ["forward_flops", "multiplied_parameters", "training_flops"]


def multiplied_parameters(shape: DecoderShape) -> int:
    """Parameters that a token is multiplied with: the head, and of a mixture the chosen experts alone."""
    tables = shape.vocab_size * shape.dim
    multiplied = shape.num_parameters - (0 if shape.tie_embeddings else tables)
    if shape.experts is not None:
        idle = shape.experts.num_experts - shape.experts.top_k
        multiplied -= shape.num_mixture_layers * idle * 3 * shape.dim * shape.hidden_dim
    return multiplied


def forward_flops(shape: DecoderShape, length: int) -> int:
    """Of one token of a sequence of `length` tokens, on average over the sequence (Kaplan et al., 2020,
    arXiv:2001.08361, section 2.1): 2 per parameter, and 4 Q for each token that a layer's attention looks back to, Q
    the size of all query heads. Those are half of the sequence, because attention is causal."""
    attention = shape.num_attention_layers * 2 * shape.n_heads * shape.head_dim * length
    return 2 * multiplied_parameters(shape) + attention


def training_flops(shape: DecoderShape, lengths: Iterable[int], *, adapters: bool = False) -> int:
    """Of sequences of these lengths, forward and backward. A backward is two forwards; with `adapters` it is one,
    because a frozen matrix gets no gradient. What a backward computes again does not count."""
    passes = 2 if adapters else 3
    return sum(passes * length * forward_flops(shape, length) for length in lengths)

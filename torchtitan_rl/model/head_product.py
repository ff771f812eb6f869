"""Hidden states times the language-model head, for trainers and generators alike.

Shape letters: t tokens, V rows of the vocabulary that this rank holds, D hidden size.
"""

from __future__ import annotations

import torch

from torchtitan_rl.model.products import outputs

__all__ = ["head_product"]


def head_product(hidden_tD: torch.Tensor, weight_VD: torch.Tensor, *, float32: bool) -> torch.Tensor:
    """Logits (t, V) in the dtype of hidden states and head. `float32`: in float32 where that dtype has fewer bits, from
    the same hidden states and head, with nothing rounded to it on the way (MiniMax-M1, arXiv:2506.13585)."""
    if not float32 or hidden_tD.dtype.itemsize >= 4:
        return outputs(hidden_tD, weight_VD)
    if hidden_tD.is_cuda:  # the products of two such numbers are exact in float32, in which tensor cores sum them
        return torch.mm(hidden_tD, weight_VD.T, out_dtype=torch.float32)
    return outputs(hidden_tD.float(), weight_VD.float())

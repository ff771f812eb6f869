"""Gradients of hidden states and head from those of the logits, a chunk of tokens at a time: the backward of every
function of logits that keeps none.

Shape letters: T tokens, V rows of the vocabulary that this rank holds, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchtitan_rl.model.products import input_gradient

__all__ = ["chunked_gradients"]


def chunked_gradients(ctx, hidden_TD, weight_VD, dtype, grad_logits: Callable[[slice], torch.Tensor]):
    """Gradients of hidden states and head, chunk by chunk; `grad_logits(rows)` is the gradient of the unscaled
    logits, in the hidden states' dtype.

    `ctx` is the context of an autograd function whose first two inputs are hidden states and head; `ctx.chunk_tokens`
    is set. Chunks of the head's gradient are summed in `dtype`.
    """
    # A frozen head (LoRA) wants no gradient, which would cost a third of this pass and the memory of the head.
    wants_hidden, wants_weight = ctx.needs_input_grad[:2]
    grad_hidden = torch.empty_like(hidden_TD) if wants_hidden else None
    grad_weight = torch.zeros(weight_VD.shape, dtype=dtype, device=weight_VD.device) if wants_weight else None
    for start in range(0, len(hidden_TD), ctx.chunk_tokens):
        rows = slice(start, start + ctx.chunk_tokens)
        hidden = hidden_TD[rows]
        grad = grad_logits(rows)
        if wants_hidden:
            input_gradient(grad, weight_VD, out=grad_hidden[rows])
        if wants_weight and grad_weight.dtype == grad.dtype:
            grad_weight.addmm_(grad.T, hidden)  # by torch's library: to add oneDNN's product is a further pass
        elif wants_weight and grad.is_cuda:  # the product is added before it is rounded to bfloat16
            torch.addmm(grad_weight, grad.T, hidden, out_dtype=dtype, out=grad_weight)
        elif wants_weight:  # bfloat16 products, summed over chunks in float32
            grad_weight += grad.T @ hidden
    return grad_hidden, grad_weight.to(weight_VD.dtype) if wants_weight else None

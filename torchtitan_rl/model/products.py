"""The three matrix products of a linear layer, forward and backward, by the faster library that torch has for them.

torch multiplies float32 matrices on an x86 CPU by MKL, which on an AMD EPYC with AVX-512 takes twice the time of oneDNN
(docs/numerics.md; `platform.multiplies_by_onednn`). No public operator of torch takes oneDNN for float32:
`mkldnn::_linear_pointwise` is what torch's compiler calls.

Shape letters: X any number of dimensions, T tokens, I and O inputs and outputs of the layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torchtitan_rl import platform

__all__ = ["outputs", "input_gradient", "weight_gradient"]


def outputs(input_XI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """input W^T + bias, (X, O)."""
    if platform.multiplies_by_onednn(input_XI):
        return _onednn(input_XI, weight_OI, bias_O)
    return F.linear(input_XI, weight_OI, bias_O)


def input_gradient(grad_TO: torch.Tensor, weight_OI: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """grad W, (T, I), written to `out` where that is a tensor."""
    if not platform.multiplies_by_onednn(grad_TO):
        return torch.mm(grad_TO, weight_OI, out=out)
    product = _onednn(grad_TO, weight_OI.t())
    return product if out is None else out.copy_(product)


def weight_gradient(grad_TO: torch.Tensor, input_TI: torch.Tensor) -> torch.Tensor:
    """grad^T input, (O, I)."""
    if not platform.multiplies_by_onednn(grad_TO):
        return grad_TO.t() @ input_TI
    if input_TI.shape[1] < grad_TO.shape[1]:  # the operator copies its first matrix where that is transposed
        return _onednn(input_TI.t(), grad_TO.t()).t()
    return _onednn(grad_TO.t(), input_TI.t())


@torch.library.custom_op("torchtitan_rl::onednn_product", mutates_args=(), device_types="cpu")
def _onednn(left_XI: torch.Tensor, right_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """left right^T + bias. In an operator of this package's, which torch's compiler calls as it is: with torch's
    operator and a parameter it fails (an assertion, torch 2.13)."""
    return torch.ops.mkldnn._linear_pointwise(left_XI, right_OI, bias_O, "none", [], "")


@_onednn.register_fake
def _(left_XI, right_OI, bias_O=None):
    return left_XI.new_empty((*left_XI.shape[:-1], right_OI.shape[0]))

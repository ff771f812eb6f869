"""A trainer's linear layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torchtitan.models.common.linear import Linear

from torchtitan_rl import adapters, platform
from torchtitan_rl.model.products import input_gradient, outputs, weight_gradient

__all__ = ["TrainedLinear"]

adapters.adapt_torchtitan()


class TrainedLinear(Linear):
    """torchtitan's linear layer. Where oneDNN is the faster library, its products are oneDNN's, forward and backward.

    Cut by tensor parallelism, the layer computes as torchtitan's: a DTensor has no rule for oneDNN's operator."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if isinstance(self.weight, DTensor) or not platform.multiplies_by_onednn(input):
            return super().forward(input)
        return _Products.apply(input, self.weight, self.bias)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input_XI, weight_OI, bias_O):
        ctx.save_for_backward(input_XI, weight_OI)
        return outputs(input_XI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx, grad_XO):
        input_XI, weight_OI = ctx.saved_tensors
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad
        grad_TO, input_TI = grad_XO.flatten(0, -2), input_XI.flatten(0, -2)
        return (
            input_gradient(grad_TO, weight_OI).view(input_XI.shape) if wants_input else None,
            weight_gradient(grad_TO, input_TI) if wants_weight else None,
            grad_TO.sum(0) if wants_bias else None,
        )

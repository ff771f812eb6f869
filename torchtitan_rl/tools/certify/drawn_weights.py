"""Random weights with which every parameter and every constant of a model matters.

Weights as a model is initialised hide mistakes: norms at 1, biases at 0, logits near 0. Here normed activations and
logits are of order one, norms and biases are off their initial values, and what enters a norm is small, so that also
the number that the norm adds to the mean square shows.
"""

from __future__ import annotations

import torch

__all__ = ["draw_weights"]

_EMBEDDING, _RESIDUAL, _BEFORE_HEAD_NORM, _BEFORE_STATE, _LOGITS = 0.04, 0.3, 0.1, 0.03, 1.5
_LOG_RATES = (-4.0, 0.0)
"""Logarithms of the rates at which states decay: states then last from one token to a hundred. With faster ones no
state of a chunk of 64 tokens would reach the next chunk, and an output of one term in the place of many can be all
rounding, which the norm after it makes as large as any other."""
_WRITES_RESIDUAL = ("o_proj.weight", "down_proj.weight", "down_proj", "out_proj.weight")


@torch.no_grad()
def draw_weights(model: torch.nn.Module) -> None:
    """Draws every parameter of one of transformers' causal language models, in place, by its name and its shape."""
    generator = torch.Generator().manual_seed(0)
    parameters = dict(model.named_parameters())
    head_norms = any(name.endswith("q_norm.weight") for name in parameters)
    tied = not any(name.startswith("lm_head") for name in parameters)
    for name, parameter in parameters.items():
        drawn = torch.randn(parameter.shape, generator=generator)
        if name.endswith("bias"):
            drawn *= 0.3
        elif name.endswith("A_log"):
            drawn = torch.empty(parameter.shape).uniform_(*_LOG_RATES, generator=generator)
        elif parameter.dim() == 1:
            drawn = 0.5 + torch.rand(parameter.shape, generator=generator)
            if name.endswith("model.norm.weight") and tied:  # makes up for the small embedding
                drawn *= _LOGITS / (_EMBEDDING * parameter.shape[0] ** 0.5)
            if not parameter.any():  # a norm whose scale is 1 + weight
                drawn -= 1
        elif "embed_tokens" in name:
            drawn *= _EMBEDDING
        else:
            drawn *= parameter.shape[-1] ** -0.5
            if name.startswith("lm_head"):
                drawn *= _LOGITS
            elif name.endswith(_WRITES_RESIDUAL):
                drawn *= _RESIDUAL
            elif name.endswith("in_proj_qkv.weight"):
                drawn *= _BEFORE_STATE
            elif head_norms and name.endswith(("q_proj.weight", "k_proj.weight")):
                drawn *= _BEFORE_HEAD_NORM
        parameter.copy_(drawn)

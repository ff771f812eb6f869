"""Losses that keep the policy near the old one by other means than a clipped ratio.

`algorithm.losses` has the other losses, and says what a loss is given and returns.
"""

from __future__ import annotations

import torch

from torchtitan_rl.algorithm.surrogate import masked_sum, ratio
from torchtitan_rl.types import LossInputs

__all__ = ["sapo"]


def sapo(
    inputs: LossInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Soft adaptive policy optimisation: a sigmoid of the ratio in the place of a clip (Gao et al., arXiv:2511.20347).

    -sum w x gate(ratio) x A with gate(r) = 4 / tau x sigmoid(tau x (r - 1)), where tau is `tau_pos` for A > 0 and
    `tau_neg` otherwise. The gate has slope 1 at a ratio of 1, as the ratio itself, and less the further the ratio is
    from 1. A higher tau narrows the range of ratios that train. The defaults are the paper's.
    """
    for name, tau in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
        if not 0 < tau < float("inf"):
            raise ValueError(f"{name}={tau}: must be positive and finite, it is how fast the gate closes; use 1")
    tau_T = torch.full_like(inputs.advantages, tau_neg).masked_fill(inputs.advantages > 0, tau_pos)
    gate_T = 4 / tau_T * torch.sigmoid(tau_T * (ratio(inputs) - 1))
    return -masked_sum(inputs, inputs.token_weights * gate_T * inputs.advantages), {}

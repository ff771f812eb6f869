"""Mixture-of-experts parts that compute alike in trainer and generator, in fp32 as in bf16, on a CPU as on a GPU.

torchtitan's experts multiply in bf16 whatever the model's dtype, and torchtitan's router asks autocast for fp32, which
a CPU does not give. `Experts` multiplies in the dtype of the input, and `Gate` chooses experts in fp32 in trainer and
generator. Shape letters: R rows routed to this rank's experts, D model size, F inner size, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE

from torchtitan_rl import adapters

__all__ = ["Experts", "Gate", "ExpertLayer"]

adapters.adapt_torchtitan()


class Experts(GroupedExperts):
    """This rank's experts as three grouped matrix products, in the dtype of the input."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        offsets_E = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)

        def multiply(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            if isinstance(weight, DTensor):  # a DTensor cannot express row counts that differ between ranks
                weight = weight.to_local()
            return self._grouped_mm(A=rows, B_t=weight.to(rows.dtype).transpose(-2, -1), offs=offsets_E)

        h_RF = F.silu(multiply(x_RD, self.w1_EFD)) * multiply(x_RD, self.w3_EFD)
        return multiply(h_RF, self.w2_EDF)


class Gate(Linear):
    """The router's scores before softmax, in fp32: in bf16 near-ties would choose other experts on other devices."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input.float(), self.weight.float())


class ExpertLayer(MoE):
    """torchtitan's layer: router, experts, and the weighted sum of the experts' outputs."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        pass

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        # Under sequence parallelism x comes from an all-gather that may not have finished. torch 2.13's local_map waits
        # for the all-gather outside of autograd, which silently loses the experts' gradient for x. A copy waits before.
        return super().forward(x_BLD.clone() if isinstance(x_BLD, DTensor) else x_BLD)

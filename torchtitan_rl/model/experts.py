"""Mixture-of-experts parts that compute alike in trainer and generator, in fp32 as in bf16, on a CPU as on a GPU.

torchtitan's experts multiply in bf16 whatever the model's dtype, and torchtitan's router asks autocast for fp32, which
a CPU does not give. `Experts` multiplies in the dtype of the input, and `Gate` chooses experts in fp32 in trainer and
generator. `ExpertRouter` can take the experts that a generator has chosen. Shape letters: R rows routed to this rank's
experts, D model size, F inner size, G = 2 F, E experts, K experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, TokenChoiceTopKRouter
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, ScaleBiasForward, swiglu

from torchtitan_rl import adapters

__all__ = ["Experts", "BiasedExperts", "Gate", "ExpertRouter", "ExpertLayer"]

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


class BiasedExperts(GptOssGroupedExperts):
    """This rank's experts with biases and a clamped activation, in the dtype of the input. Columns of gate and up take
    turns in `mlp1`."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        num_parts: int = 1
        """Ranks that hold a part of each expert's inner features and add up their outputs, outside of torchtitan's own
        tensor parallelism."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.num_parts = config.num_parts

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        num_parts, weight = self.num_parts, self.mlp1_weight_EGD
        if isinstance(weight, DTensor) and "tp" in (weight.device_mesh.mesh_dim_names or ()):
            num_parts *= weight.device_mesh["tp"].size()
        w1_EGD, b1_EG, w2_EDF, b2_ED = (
            # A DTensor cannot express row counts that differ between ranks.
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).to(x_RD.dtype)
            for parameter in (self.mlp1_weight_EGD, self.mlp1_bias_EG, self.mlp2_weight_EDF, self.mlp2_bias_ED)
        )
        offsets_E = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
        expert_R = torch.bucketize(torch.arange(len(x_RD), device=x_RD.device), offsets_E, right=True)
        # Dispatch may leave rows after the last expert's. No product writes them or their gradient: another row, which
        # is no expert's, takes it.
        b1_EG, b2_ED = (torch.cat([bias, bias.new_zeros(1, bias.shape[1])]) for bias in (b1_EG, b2_ED))
        h_RG = self._grouped_mm(A=x_RD, B_t=w1_EGD.transpose(-2, -1), offs=offsets_E) + _rows(b1_EG, expert_R)
        h_RF = swiglu(h_RG, limit=self.swiglu_limit)
        # Each of the ranks adds its share of the bias. The gradient of every rank's copy is the whole bias's.
        shares_RD = ScaleBiasForward.apply(_rows(b2_ED, expert_R), num_parts, x_RD.dtype)
        return self._grouped_mm(A=h_RF, B_t=w2_EDF.transpose(-2, -1), offs=offsets_E) + shares_RD


def _rows(bias_ED: torch.Tensor, expert_R: torch.Tensor) -> torch.Tensor:
    """The bias of each row's expert, (R, D), with a gradient that is summed in float32, in one order.

    Indexing's gradient is summed on a CPU by threads in any order, and in bfloat16, where a sum of many small numbers
    stops growing; embedding's is in order, and on CUDA in float32 whatever the dtype."""
    table_ED = bias_ED if bias_ED.is_cuda else bias_ED.float()
    return F.embedding(expert_R, table_ED).to(bias_ED.dtype)


class Gate(Linear):
    """The router's scores before softmax, in fp32: in bf16 near-ties would choose other experts on other devices."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input.float(), self.weight.float(), None if self.bias is None else self.bias.float())


class ExpertRouter(TokenChoiceTopKRouter):
    """torchtitan's router, which can be asked to send the tokens of its next forwards to experts chosen elsewhere.

    The chosen experts are weighted by this router's own scores of them, so that gradients reach the router: with
    softmax scores and `route_norm` the weights are a softmax over the chosen experts alone, as in rollout routing
    replay, arXiv:2510.11370."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    def __init__(self, config: Config):
        super().__init__(config)
        self._expected_BLK: torch.Tensor | None = None
        self._replays = False
        self.agreement: dict[str, torch.Tensor] = {}
        """Of the last forward, each bool (B, L): `experts`, whether a token was sent to the expected experts, and
        `choice`, whether this router would have chosen them. Empty before a forward with expected experts."""

    def expect(self, experts_BLK: torch.Tensor | None, *, replays: bool = False) -> None:
        """Sets the experts of another program for the tokens of every forward until the next call, int64 (B, L, K), the
        same on every tensor-parallel rank. `replays`: tokens are sent to them; else the forward compares only. None:
        nothing is compared."""
        self._expected_BLK, self._replays, self.agreement = experts_BLK, replays, {}

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scores (B, L, K) and numbers (B, L, K) of each token's experts, and the scores of all experts (B, L, E)."""
        scores_BLK, experts_BLK, scores_BLE = super().forward(x_BLD, expert_bias_E)
        if self._expected_BLK is None:
            return scores_BLK, experts_BLK, scores_BLE
        expected_BLK = _cut_as(experts_BLK, self._expected_BLK)
        choice_BL = _same_experts(experts_BLK, expected_BLK)
        if self._replays:
            experts_BLK, scores_BLK = expected_BLK, scores_BLE.gather(-1, expected_BLK)
            if self.route_norm:
                scores_BLK = scores_BLK / (scores_BLK.sum(-1, keepdim=True) + 1e-20)  # as torchtitan's router
            scores_BLK = scores_BLK * self.route_scale
        self.agreement = {"experts": _same_experts(experts_BLK, expected_BLK), "choice": choice_BL}
        return scores_BLK, experts_BLK, scores_BLE


def _cut_as(like: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The whole tensor of every rank in the layout of another: without communication, each rank keeps its part."""
    if not isinstance(like, DTensor):
        return whole
    mesh = like.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, like.placements)


@torch.no_grad()
def _same_experts(one_BLK: torch.Tensor, other_BLK: torch.Tensor) -> torch.Tensor:
    """Whether two tensors of one layout name the same experts, in any order; bool (B, L) in that layout."""
    if isinstance(one_BLK, DTensor) and isinstance(other_BLK, DTensor):
        same_BL = _same_experts(one_BLK.to_local(), other_BLK.to_local())
        return DTensor.from_local(same_BL, one_BLK.device_mesh, one_BLK.placements, run_check=False)
    return (one_BLK.sort(-1).values == other_BLK.sort(-1).values).all(-1)


class ExpertLayer(MoE):
    """torchtitan's layer: router, experts, and the weighted sum of the experts' outputs."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        pass

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        # Under sequence parallelism x comes from an all-gather that may not have finished. torch 2.13's local_map waits
        # for the all-gather outside of autograd, which silently loses the experts' gradient for x. A copy waits before.
        return super().forward(x_BLD.clone() if isinstance(x_BLD, DTensor) else x_BLD)

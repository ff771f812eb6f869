"""Which experts the generator sends tokens to, kept beside vLLM's cache.

vLLM 0.32 has a record of its own (`enable_return_routed_experts`), which needs its V2 model runner, and that needs a
GPU. The record here has a row for each slot of the KV cache. A router writes a token's experts to the slot of the
token's keys and values, so a row stays as long as the keys and values that were computed with it: for a prompt in the
prefix cache, whose tokens no router sees again, and from one part of a long prompt to the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchtitan.models.common.moe import TokenChoiceTopKRouter
from vllm.forward_context import get_forward_context

from torchtitan_rl import adapters
from torchtitan_rl.families import DecoderShape
from torchtitan_rl.types.routing import experts_dtype

__all__ = ["RecordingRouter", "RoutingRecord"]

adapters.adapt_torchtitan()


class RoutingRecord:
    """The experts of every token in the cache, by the slots of one attention layer that attends to all tokens before:
    vLLM frees the slots of a sliding window early."""

    def __init__(self, shape: DecoderShape) -> None:
        assert shape.experts is not None
        self._row = shape.num_mixture_layers, shape.experts.top_k
        self._dtype = experts_dtype(shape.experts.num_experts)
        self._experts_SLK: torch.Tensor | None = None
        self._block_size = 0
        self.attention_layer = ""
        """vLLM's name of the layer; the plan of the model fills it in."""

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> None:
        """Makes a row for each slot. Until then nothing is recorded: vLLM measures the model first."""
        self._block_size = block_size
        rows = num_blocks * block_size + 1  # the last one is for padding, whose slot is -1
        self._experts_SLK = torch.zeros((rows, *self._row), dtype=self._dtype, device=device)

    def write(self, layer: int, experts_TK: torch.Tensor) -> None:
        """Records the experts of the tokens of this forward in layer number `layer` of those with a mixture."""
        if self._experts_SLK is not None:
            slots_T = get_forward_context().slot_mapping[self.attention_layer]
            self._experts_SLK[slots_T, layer] = experts_TK[: len(slots_T)].to(self._dtype)

    def read(self, blocks: list[int], num_tokens: int) -> torch.Tensor:
        """The experts (num_tokens, layers, K) of the first tokens of a request, on the host. `blocks`: the request's
        blocks of the cache, in order."""
        assert self._experts_SLK is not None
        within = torch.arange(self._block_size)
        slots_T = (torch.tensor(blocks)[:, None] * self._block_size + within).flatten()[:num_tokens]
        assert len(slots_T) == num_tokens, "the request has fewer blocks than tokens"
        return self._experts_SLK[slots_T.to(self._experts_SLK.device)].cpu()


class RecordingRouter(TokenChoiceTopKRouter):
    """torchtitan's router, which records its choice. A generator's routers replay nothing."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        layer: int = 0
        """Number of the layer among those with a mixture."""
        record: RoutingRecord | None = None

    def __init__(self, config: Config):
        super().__init__(config)
        assert config.record is not None
        self._layer, self._record = config.layer, config.record

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        routed = super().forward(x_BLD, expert_bias_E)
        self._record.write(self._layer, routed[1][0])
        return routed

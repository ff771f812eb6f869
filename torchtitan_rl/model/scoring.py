"""A forward without gradient: log-probabilities or values of the targets of microbatches."""

from __future__ import annotations

import time

import torch
from torch.distributed.fsdp import FSDPModule

from torchtitan_rl.model.train_step import add_rows, head_outputs
from torchtitan_rl.record.tracing import span
from torchtitan_rl.types import Microbatch, RankOutput

__all__ = ["score"]

_ROWS = {
    "policy_logprobs": torch.float32,
    "predicted_values": torch.float32,
    "top_tokens": torch.int64,
    "top_logprobs": torch.float32,
    "hidden": None,
    "entropy": torch.float32,
}
"""Model outputs that `RankOutput.rows` returns, and the dtype of each; None keeps the output's dtype."""


def score(
    model,
    microbatches: list[Microbatch],
    device: torch.device,
    *,
    temperature: float = 1.0,
    multiple_of: int = 1,
    top_k: int = 0,
    hidden: bool = False,
    entropy: bool = False,
) -> RankOutput:
    """Log-probabilities of the targets, or a critic's values. A language model can also return the `top_k` likeliest
    tokens, the `hidden` states that enter the head, and the `entropy` of each position's distribution."""
    began = time.time()
    result = RankOutput(rows={}, loss=0.0, sums={})
    extra = {"top_k": top_k, "hidden": hidden} if top_k or hidden else {}
    names = _ROWS.keys() if entropy else _ROWS.keys() - {"entropy"}  # the head always computes it
    with torch.no_grad():
        for microbatch in microbatches:
            with span("forward"):
                outputs = head_outputs(
                    model, microbatch, device, temperature=temperature, multiple_of=multiple_of, **extra
                )
            for name in outputs.keys() & names:
                add_rows(result, name, outputs[name].to(_ROWS[name] or outputs[name].dtype), microbatch.lengths)
    # Without a backward FSDP leaves the last group gathered: `model.parameters()` would not be the optimizer's.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    result.interval = (began, time.time())
    return result

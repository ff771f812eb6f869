"""Log-probabilities and entropy of target tokens straight from hidden states, a chunk of tokens at a time.

The language-model head is replaced (in the model's config, before it is built) by `LogprobHead`: called
where the head would be, so FSDP and TP treat it as they treat the head, it returns per-token
log-probabilities instead of logits. Logits of `chunk_tokens` tokens are the most that ever exists.
Under tensor parallelism each rank holds a slice of the vocabulary and the softmax is vocabulary-parallel:
three all-reduces of one number per token instead of a gather of the logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial
from torchtitan.models.common.linear import Linear

__all__ = ["LogprobHead", "chunked_logprobs"]


class _ChunkedLogprobs(torch.autograd.Function):
    """Forward keeps no logits; backward recomputes them chunk by chunk.

    With z = h W^T / temperature, p = softmax(z), H = -sum p log p:
    d logp[y] / dz = onehot(y) - p,  dH / dz = -p (log p + H).
    """

    @staticmethod
    def _chunk(hidden, weight, targets, temperature, vocab_start, group):
        """(logits, logsumexp, target's slot in this shard, whether the target is in it) of a chunk."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logits = (hidden @ weight.T).to(dtype) / temperature
        peak = logits.amax(-1)
        if group is not None:
            dist.all_reduce(peak, dist.ReduceOp.MAX, group)
        total = (logits - peak[:, None]).exp_().sum(-1)
        if group is not None:
            dist.all_reduce(total, group=group)
        local = targets - vocab_start
        mine = (local >= 0) & (local < weight.shape[0])
        return logits, peak + total.log(), local.clamp(0, weight.shape[0] - 1), mine

    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, targets_T, temperature, chunk_tokens, vocab_start, group):
        logprobs, entropies, lses = [], [], []
        for start in range(0, len(targets_T), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits, lse, local, mine = _ChunkedLogprobs._chunk(
                hidden_TD[rows], weight_VD, targets_T[rows], temperature, vocab_start, group)
            chosen = logits.gather(1, local[:, None])[:, 0] * mine
            mean_logit = ((logits - lse[:, None]).exp_() * logits).sum(-1)
            if group is not None:
                both = torch.stack([chosen, mean_logit])
                dist.all_reduce(both, group=group)
                chosen, mean_logit = both
            logprobs.append(chosen - lse)
            entropies.append(lse - mean_logit)
            lses.append(lse)
        lse_T, entropy_T = torch.cat(lses), torch.cat(entropies)
        ctx.save_for_backward(hidden_TD, weight_VD, targets_T, lse_T, entropy_T)
        ctx.temperature, ctx.chunk_tokens, ctx.vocab_start = temperature, chunk_tokens, vocab_start
        return torch.cat(logprobs), entropy_T

    @staticmethod
    def backward(ctx, grad_logprobs_T, grad_entropy_T):
        hidden_TD, weight_VD, targets_T, lse_T, entropy_T = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden_TD)
        # A frozen head (LoRA) needs no gradient: it would cost a third of this pass and the size of the head.
        trained = ctx.needs_input_grad[1]
        grad_weight = torch.zeros(weight_VD.shape, dtype=lse_T.dtype, device=weight_VD.device) if trained else None
        for start in range(0, len(targets_T), ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            hidden = hidden_TD[rows]
            logp = (hidden @ weight_VD.T).to(lse_T.dtype).div_(ctx.temperature).sub_(lse_T[rows, None])
            p = logp.exp()
            grad = p * -grad_logprobs_T[rows, None]
            if grad_entropy_T.any():
                grad -= p * (logp + entropy_T[rows, None]) * grad_entropy_T[rows, None]
            local = targets_T[rows] - ctx.vocab_start
            mine = (local >= 0) & (local < weight_VD.shape[0])
            grad.scatter_add_(1, local.clamp(0, weight_VD.shape[0] - 1)[:, None], (grad_logprobs_T[rows] * mine)[:, None])
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[rows] = grad @ weight_VD
            if trained:
                grad_weight += grad.T @ hidden
        return grad_hidden, grad_weight.to(weight_VD.dtype) if trained else None, None, None, None, None, None


def chunked_logprobs(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor, *,
    temperature: float = 1.0, chunk_tokens: int = 2048, vocab_start: int = 0, group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of each distribution, both (T,), at least float32.

    Differentiable in `hidden_TD` and `weight_VD`. With `group`, `weight_VD` is this rank's rows of the
    vocabulary starting at `vocab_start`; results are then equal on all ranks of the group, and the
    gradient of `hidden_TD` is this rank's share (their sum is the whole).
    """
    return _ChunkedLogprobs.apply(hidden_TD, weight_VD, targets_T, temperature, chunk_tokens, vocab_start, group)


class LogprobHead(Linear):
    """A language-model head that returns (logprobs, entropy), each (1, T), of the targets set by `target`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        chunk_tokens: int = 2048
        """Tokens whose logits exist at once."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.chunk_tokens = config.chunk_tokens
        self._targets: tuple[torch.Tensor, float] | None = None

    def target(self, targets_T: torch.Tensor, temperature: float) -> None:
        """Says what the next call scores; the decoder's forward has no argument for it."""
        self._targets = (targets_T, temperature)

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._targets is not None, "LogprobHead.target() must be called before the model"
        (targets_T, temperature), self._targets = self._targets, None
        weight, group, vocab_start = self.weight, None, 0
        if isinstance(weight, DTensor):
            group = weight.device_mesh.get_group()
            rows = -(-self.out_features // group.size())
            vocab_start = rows * group.rank()
            weight = weight.to_local()
            input = input.to_local(grad_placements=[Partial()])
        logprobs_T, entropy_T = chunked_logprobs(
            input.flatten(0, 1), weight, targets_T, temperature=temperature,
            chunk_tokens=self.chunk_tokens, vocab_start=vocab_start, group=group)
        return logprobs_T[None], entropy_T[None]

"""Log-probabilities and entropy of target tokens straight from hidden states, a chunk of tokens at a time.

The language-model head is replaced (in the model's config, before it is built) by `LogprobHead`: called
where the head would be, so FSDP and TP treat it as they treat the head, it returns per-token
log-probabilities instead of logits. At most `chunk_bytes` of float32 logits exist at once (and a second buffer of
that size). Under tensor parallelism each rank holds a slice of the vocabulary and the softmax is vocabulary-parallel:
two all-reduces, of one and of three numbers per token, instead of a gather of the logits.
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
    def _logits(hidden, weight, temperature):
        """Scaled logits of a chunk, at least float32: one of the two buffers of that size that a chunk takes."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return (hidden @ weight.T).to(dtype).div_(temperature)

    @staticmethod
    def _slots(targets, weight, vocab_start):
        """Each target's row of this shard (any row where it has none), and whether the target is in the shard."""
        local = targets - vocab_start
        return local.clamp(0, weight.shape[0] - 1)[:, None], (local >= 0) & (local < weight.shape[0])

    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, targets_T, temperature, chunk_tokens, vocab_start, group):
        logprobs, entropies, lses = [], [], []
        for start in range(0, len(targets_T), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = _ChunkedLogprobs._logits(hidden_TD[rows], weight_VD, temperature)
            slots, mine = _ChunkedLogprobs._slots(targets_T[rows], weight_VD, vocab_start)
            peak = logits.amax(-1)
            if group is not None:
                dist.all_reduce(peak, dist.ReduceOp.MAX, group)
            logits.sub_(peak[:, None])
            chosen = logits.gather(1, slots)[:, 0] * mine
            exp = logits.exp()
            sums = torch.stack([exp.sum(-1), exp.mul_(logits).sum(-1), chosen])
            if group is not None:
                dist.all_reduce(sums, group=group)
            total, weighted, chosen = sums
            lse = total.log()
            logprobs.append(chosen - lse)
            entropies.append(lse - weighted / total)
            lses.append(peak + lse)
        entropy_T = torch.cat(entropies)
        ctx.save_for_backward(hidden_TD, weight_VD, targets_T, torch.cat(lses), entropy_T)
        ctx.temperature, ctx.chunk_tokens, ctx.vocab_start = temperature, chunk_tokens, vocab_start
        ctx.set_materialize_grads(False)  # a loss without an entropy term gives None, known without asking the device
        return torch.cat(logprobs), entropy_T

    @staticmethod
    def backward(ctx, grad_logprobs_T, grad_entropy_T):
        hidden_TD, weight_VD, targets_T, lse_T, entropy_T = ctx.saved_tensors
        # A frozen head (LoRA) wants no gradient: it would cost a third of this pass and the size of the head.
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_TD) if wants_hidden else None
        grad_weight = torch.zeros(weight_VD.shape, dtype=lse_T.dtype, device=weight_VD.device) if wants_weight else None
        if grad_logprobs_T is None:
            grad_logprobs_T = torch.zeros_like(lse_T)
        for start in range(0, len(targets_T), ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            hidden, grad_logprobs = hidden_TD[rows], grad_logprobs_T[rows]
            grad = _ChunkedLogprobs._logits(hidden, weight_VD, ctx.temperature).sub_(lse_T[rows, None])
            if grad_entropy_T is None:
                grad.exp_().mul_(-grad_logprobs[:, None])
            else:
                p = grad.exp()
                grad.add_(entropy_T[rows, None]).mul_(-grad_entropy_T[rows, None]).sub_(grad_logprobs[:, None]).mul_(p)
            slots, mine = _ChunkedLogprobs._slots(targets_T[rows], weight_VD, ctx.vocab_start)
            grad.scatter_add_(1, slots, (grad_logprobs * mine)[:, None])
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            if wants_hidden:
                torch.mm(grad, weight_VD, out=grad_hidden[rows])
            if wants_weight and grad_weight.dtype == grad.dtype:
                grad_weight.addmm_(grad.T, hidden)
            elif wants_weight:  # bfloat16 products, summed over chunks in float32
                grad_weight += grad.T @ hidden
        return grad_hidden, grad_weight.to(weight_VD.dtype) if wants_weight else None, None, None, None, None, None


def chunked_logprobs(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor, *,
    temperature: float = 1.0, chunk_tokens: int, vocab_start: int = 0, group: dist.ProcessGroup | None = None,
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
        chunk_bytes: int = 128 * 2**20
        """Memory that the float32 logits of one chunk may take; a chunk has at least one token."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.chunk_bytes = config.chunk_bytes
        self._targets: tuple[torch.Tensor, float] | None = None

    def target(self, targets_T: torch.Tensor, temperature: float) -> None:
        """Says what the next call scores; the decoder's forward has no argument for it."""
        self._targets = (targets_T, temperature)

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._targets is not None, "LogprobHead.target() must be called before the model"
        (targets_T, temperature), self._targets = self._targets, None
        weight, group, vocab_start, rows = self.weight, None, 0, self.out_features
        if isinstance(weight, DTensor):
            group = weight.device_mesh.get_group()
            rows = -(-self.out_features // group.size())  # DTensor's cut; the last rank may have fewer
            vocab_start = rows * group.rank()
            weight = weight.to_local()
            assert len(weight) == min(rows, self.out_features - vocab_start) > 0, "not DTensor's cut of the vocabulary"
            input = input.to_local(grad_placements=[Partial()])
        chunk_tokens = max(1, self.chunk_bytes // (4 * rows))  # the same on every rank: chunks hold collectives
        logprobs_T, entropy_T = chunked_logprobs(
            input.flatten(0, 1), weight, targets_T, temperature=temperature,
            chunk_tokens=chunk_tokens, vocab_start=vocab_start, group=group)
        return logprobs_T[None], entropy_T[None]

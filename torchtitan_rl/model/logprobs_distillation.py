"""The likeliest tokens and the KL to a teacher's whole distribution, straight from hidden states, a chunk of tokens at
a time. `LogprobHead.ask` requests them.

Shape letters: T tokens, t tokens of a chunk, V rows of the vocabulary that this rank holds, D hidden size (a teacher's
may differ), K targets or likeliest tokens of a position.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from torchtitan_rl.model.head_gradients import chunked_gradients
from torchtitan_rl.model.logprobs import scaled_logits, score_chunk

__all__ = ["chunked_kl", "chunked_top_k"]

_MAX_ID = 2**31 - 1


def chunked_top_k(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets: torch.Tensor,
    *,
    top_k: int,
    temperature: float = 1.0,
    chunk_tokens: int,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    float32_head: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`chunked_logprobs` without gradient, and the `top_k` likeliest tokens of each distribution: int64 ids and float32
    log-probabilities, both (T, top_k), best first. Logits are compared in float32; the lower id wins a tie."""
    targets_TK = targets.reshape(len(targets), -1)
    chunks = []
    with torch.no_grad():
        for start in range(0, len(targets_TK), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits_tV = scaled_logits(hidden_TD[rows], weight_VD, temperature, float32_head=float32_head)
            tokens, best = _top_k(logits_tV, top_k, vocab_start, group)
            logprobs, entropy, lse = score_chunk(logits_tV, targets_TK[rows], vocab_start, group)
            chunks.append((logprobs, entropy, tokens, best - lse[:, None]))
        logprobs_TK, entropy_T, top_tokens_TK, top_logprobs_TK = map(torch.cat, zip(*chunks))
    return logprobs_TK.view(targets.shape), entropy_T, top_tokens_TK, top_logprobs_TK.float()


def _top_k(logits_tV: torch.Tensor, top_k: int, vocab_start: int, group: dist.ProcessGroup | None):
    """The `top_k` likeliest tokens and their logits in float32, both (t, top_k), best first; the lower id wins a tie.

    One int64 key per logit holds the logit in the upper half and the id in the lower half. No two keys are equal, so
    sorting keys decides every tie. Ranks send each other `top_k` keys per token.
    """
    ids = torch.arange(vocab_start, vocab_start + logits_tV.shape[1], device=logits_tV.device)
    keys = _sortable((logits_tV.float() + 0.0).view(torch.int32)).long()  # + 0.0: -0.0 equals 0.0
    best = keys.bitwise_left_shift_(32).add_(_MAX_ID - ids).topk(min(top_k, logits_tV.shape[1])).values
    if group is not None:
        best = F.pad(best, (0, top_k - best.shape[1]), value=torch.iinfo(torch.int64).min)
        gathered = [torch.empty_like(best) for _ in range(group.size())]
        dist.all_gather(gathered, best, group)
        best = torch.cat(gathered, 1).topk(top_k).values
    return _MAX_ID - (best & (2**32 - 1)), _sortable((best >> 32).int()).view(torch.float32)


def _sortable(bits_of_floats: torch.Tensor) -> torch.Tensor:
    """Maps the int32 bits of floats to int32 in the floats' order; the map is its own inverse."""
    return bits_of_floats ^ ((bits_of_floats >> 31) & _MAX_ID)


class _ChunkedKL(torch.autograd.Function):
    """KL(p || q) = sum p (log p - log q) of a policy p to a teacher q; forward keeps neither's logits.

    With z = h W^T / temperature and p = softmax(z), and q likewise from the teacher's hidden states and head:
    dKL / dz = p (log p - log q - KL). The teacher gets no gradient.
    """

    @staticmethod
    def forward(
        ctx, hidden_TD, weight_VD, teacher_hidden_TD, teacher_weight_VD, temperature, chunk_tokens, group, float32_head
    ):
        kls, lses = [], []
        for start in range(0, len(hidden_TD), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = scaled_logits(hidden_TD[rows], weight_VD, temperature, float32_head=float32_head)
            teacher = scaled_logits(teacher_hidden_TD[rows], teacher_weight_VD, temperature, float32_head=float32_head)
            peaks = torch.stack([logits.amax(-1), teacher.amax(-1)])
            if group is not None:
                dist.all_reduce(peaks, dist.ReduceOp.MAX, group)
            logits.sub_(peaks[0, :, None])
            teacher.sub_(peaks[1, :, None])
            teacher_total = teacher.exp().sum(-1)
            difference = teacher.neg_().add_(logits)
            exp = logits.exp_()
            sums = torch.stack([exp.sum(-1), teacher_total, difference.mul_(exp).sum(-1)])
            if group is not None:
                dist.all_reduce(sums, group=group)
            lse = sums[:2].log()
            kls.append(sums[2] / sums[0] - lse[0] + lse[1])
            lses.append(peaks + lse)
        kl_T = torch.cat(kls)
        ctx.save_for_backward(hidden_TD, weight_VD, teacher_hidden_TD, teacher_weight_VD, torch.cat(lses, 1), kl_T)
        ctx.temperature, ctx.chunk_tokens, ctx.float32_head = temperature, chunk_tokens, float32_head
        return kl_T

    @staticmethod
    def backward(ctx, grad_kl_T):
        hidden_TD, weight_VD, teacher_hidden_TD, teacher_weight_VD, (lse_T, teacher_lse_T), kl_T = ctx.saved_tensors

        def grad_logits(rows):
            softmax = {"temperature": ctx.temperature, "float32_head": ctx.float32_head}
            logp = scaled_logits(hidden_TD[rows], weight_VD, **softmax).sub_(lse_T[rows, None])
            logq = scaled_logits(teacher_hidden_TD[rows], teacher_weight_VD, **softmax)
            grad = logq.sub_(teacher_lse_T[rows, None])
            grad.neg_().add_(logp).sub_(kl_T[rows, None])
            grad.mul_(logp.exp_()).mul_(grad_kl_T[rows, None])
            return grad.div_(ctx.temperature).to(hidden_TD.dtype)

        return *chunked_gradients(ctx, hidden_TD, weight_VD, kl_T.dtype, grad_logits), *[None] * 6


def chunked_kl(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    teacher_hidden_TD: torch.Tensor,
    teacher_weight_VD: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int,
    group: dist.ProcessGroup | None = None,
    float32_head: bool = False,
) -> torch.Tensor:
    """KL(policy || teacher) over the whole vocabulary at each token, (T,), at least float32.

    Differentiable in `hidden_TD` and `weight_VD`. The two hidden sizes may differ. Both heads have equal rows of
    the vocabulary. With `group`, heads and gradients are this rank's share, as in `chunked_logprobs`.
    """
    return _ChunkedKL.apply(
        hidden_TD, weight_VD, teacher_hidden_TD, teacher_weight_VD, temperature, chunk_tokens, group, float32_head
    )

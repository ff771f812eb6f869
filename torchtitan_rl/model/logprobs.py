"""Log-probabilities and entropy of target tokens straight from hidden states, a chunk of tokens at a time.

At most `LogprobHead.Config.chunk_bytes` of float32 logits exist at once (and a second buffer of the same size). Under
tensor parallelism each rank holds a slice of the vocabulary and the softmax is vocabulary-parallel: two all-reduces, of
one and of three numbers per token, instead of a gather of the logits.

On CUDA `chunked_logprobs` leaves the logits to the kernels of `logprob_kernels.py`, which pass over them fewer times.

Shape letters: T tokens, t tokens of a chunk, V rows of the vocabulary that this rank holds, D hidden size, K targets of
a token (one, unless a distillation asks for several).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from torchtitan_rl import adapters, platform
from torchtitan_rl.model.head_gradients import chunked_gradients
from torchtitan_rl.model.head_product import head_product

__all__ = ["chunked_logprobs", "scaled_logits", "score_chunk", "target_scores"]

adapters.adapt_torchtitan()


def scaled_logits(
    hidden_tD: torch.Tensor, weight_VD: torch.Tensor, temperature: float, *, float32_head: bool
) -> torch.Tensor:
    """Logits (t, V) of a chunk, at least float32, divided by the temperature: one of the chunk's two buffers."""
    dtype = torch.promote_types(hidden_tD.dtype, torch.float32)
    return head_product(hidden_tD, weight_VD, float32=float32_head).to(dtype).div_(temperature)


def score_chunk(
    logits_tV: torch.Tensor, targets_tK: torch.Tensor, vocab_start: int, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities (t, K), entropies (t,) and logarithms of the softmax's denominator (t,) of a chunk. Overwrites
    `logits_tV`, the scaled logits."""
    rows, mine = _rows_of_shard(targets_tK, logits_tV.shape[1], vocab_start)
    peak = logits_tV.amax(-1)
    if group is not None:
        dist.all_reduce(peak, dist.ReduceOp.MAX, group)
    logits_tV.sub_(peak[:, None])
    chosen = logits_tV.gather(1, rows) * mine
    exp = logits_tV.exp()
    sums = torch.cat([torch.stack([exp.sum(-1), exp.mul_(logits_tV).sum(-1)]), chosen.T])
    if group is not None:
        dist.all_reduce(sums, group=group)
    total, weighted, chosen = sums[0], sums[1], sums[2:].T
    lse = total.log()
    return chosen - lse[:, None], lse - weighted / total, peak + lse


def _rows_of_shard(targets_tK: torch.Tensor, num_rows: int, vocab_start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each target's row of this shard (an arbitrary row for a target of another shard), and whether the target is in
    this shard."""
    local = targets_tK - vocab_start
    return local.clamp(0, num_rows - 1), (local >= 0) & (local < num_rows)


class _ChunkedLogprobs(torch.autograd.Function):
    """Forward keeps no logits; backward recomputes them chunk by chunk.

    With z = h W^T / temperature, p = softmax(z), H = -sum p log p:
    d logp[y] / dz = onehot(y) - p,  dH / dz = -p (log p + H).
    With several targets y_k and gradients g_k, dL / dz = scatter_add(g_k at y_k) - (sum g_k) p.
    """

    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, targets_TK, temperature, chunk_tokens, vocab_start, group, float32_head):
        chunks = []
        for start in range(0, len(targets_TK), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits_tV = scaled_logits(hidden_TD[rows], weight_VD, temperature, float32_head=float32_head)
            chunks.append(score_chunk(logits_tV, targets_TK[rows], vocab_start, group))
        logprobs_TK, entropy_T, lse_T = map(torch.cat, zip(*chunks))
        ctx.save_for_backward(hidden_TD, weight_VD, targets_TK, lse_T, entropy_T)
        ctx.temperature, ctx.chunk_tokens, ctx.vocab_start = temperature, chunk_tokens, vocab_start
        ctx.float32_head = float32_head
        ctx.set_materialize_grads(False)  # a loss without an entropy term gives None, known without asking the device
        return logprobs_TK, entropy_T

    @staticmethod
    def backward(ctx, grad_logprobs_TK, grad_entropy_T):
        hidden_TD, weight_VD, targets_TK, lse_T, entropy_T = ctx.saved_tensors
        if grad_logprobs_TK is None:
            grad_logprobs_TK = torch.zeros_like(lse_T)[:, None].expand(targets_TK.shape)

        def grad_logits(rows):
            grad_logprobs = grad_logprobs_TK[rows]
            total = grad_logprobs.sum(-1)
            grad = scaled_logits(hidden_TD[rows], weight_VD, ctx.temperature, float32_head=ctx.float32_head)
            grad.sub_(lse_T[rows, None])
            if grad_entropy_T is None:
                grad.exp_().mul_(-total[:, None])
            else:
                _add_entropy(grad, entropy_T[rows, None], grad_entropy_T[rows, None], total[:, None])
            slots, mine = _rows_of_shard(targets_TK[rows], len(weight_VD), ctx.vocab_start)
            return grad.scatter_add_(1, slots, grad_logprobs * mine).div_(ctx.temperature).to(hidden_TD.dtype)

        return *chunked_gradients(ctx, hidden_TD, weight_VD, lse_T.dtype, grad_logits), *[None] * 6


def _add_entropy(grad, entropy_t1, grad_entropy_t1, total_t1) -> None:
    """Turns log p, in place, into the gradient of both outputs, but for the targets' own share."""
    p = grad.exp()
    grad.add_(entropy_t1).mul_(-grad_entropy_t1).sub_(total_t1).mul_(p)


def chunked_logprobs(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    kernels: bool = True,
    float32_head: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target, (T,) or (T, K) as the targets are, and entropy of each distribution, (T,), at
    least float32.

    Differentiable in `hidden_TD` and `weight_VD`. With `group`, `weight_VD` is this rank's rows of the
    vocabulary starting at `vocab_start`; results are then equal on all ranks of the group, and the
    gradient of `hidden_TD` is this rank's share (the ranks' shares sum to the whole).
    `kernels=False` computes with torch's operators alone, on every device. `float32_head`: see `head_product`.
    """
    function: type[torch.autograd.Function] = _ChunkedLogprobs
    if kernels and platform.has_logprob_kernels(hidden_TD):
        from torchtitan_rl.model.logprob_kernels import KernelLogprobs  # imports Triton

        function = KernelLogprobs
    logprobs_TK, entropy_T = function.apply(
        hidden_TD,
        weight_VD,
        targets.reshape(len(targets), -1),
        temperature,
        chunk_tokens,
        vocab_start,
        group,
        float32_head,
    )
    return logprobs_TK.view(targets.shape), entropy_T


def target_scores(hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets: torch.Tensor, **softmax) -> dict:
    """`LogprobHead`'s default outputs, by name: `policy_logprobs` and `entropy`."""
    logprobs, entropy_T = chunked_logprobs(hidden_TD, weight_VD, targets, **softmax)
    return {"policy_logprobs": logprobs, "entropy": entropy_T}

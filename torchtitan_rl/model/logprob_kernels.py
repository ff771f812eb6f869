"""Log-probabilities, entropies and their gradients by Triton kernels: `logprobs.py` imports this module on CUDA only.

The logits of a chunk stay in the dtype of the matrix product (float32 with `float32_head`), and every number is
computed in float32 from there, as `logprobs.py` computes it. Forward writes a chunk of logits (the product) and reads
it once (`_row_sums`). Backward turns it in place into its gradient (`_gradients`: one read, one write), which the two
products of the gradients read. Only one chunk is kept until then; backward computes the others again. That makes four
reads and two writes of the chunk that is kept, and a third write of any other. Two reads and one write are the
kernels'.

Shape letters: T tokens, t tokens of a chunk, V rows of the vocabulary that this rank holds, D hidden size, K targets of
a token.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from torchtitan_rl.model.head_gradients import chunked_gradients
from torchtitan_rl.model.head_product import head_product

__all__ = ["KernelLogprobs"]

_BLOCK = 4096
"""Logits that a program has in registers at once. 16 for each of 256 threads: two loads of 16 bytes in bfloat16."""
_LOWEST = tl.constexpr(-1e30)
"""Below every logit, and finite: 0 times the difference to a logit is 0."""
_PER_TOKEN = (
    *("targets", "peaks", "totals", "weighteds", "chosen"),
    *("log_totals", "entropies", "grad_logprobs", "grad_totals", "grad_entropies"),
)
"""Arguments that are read or written a number at a time: Triton need not compile again where a chunk's first token is
not at a multiple of 16 bytes."""


@triton.jit
def _add_block(x, peak, total, weighted, inverse_temperature):
    """The sums of a row with a block of logits added. An online softmax (arXiv:1805.02867): sums are relative to the
    largest logit so far, and scaled when a larger one comes."""
    largest = tl.maximum(peak, tl.max(x, 0))
    shift = (peak - largest) * inverse_temperature
    scale = tl.exp(shift)
    z = (x - largest) * inverse_temperature
    exp = tl.exp(z)
    weighted = (weighted + shift * total) * scale + tl.sum(z * exp, 0)
    return largest, total * scale + tl.sum(exp, 0), weighted


@triton.jit(do_not_specialize_on_alignment=_PER_TOKEN)
def _row_sums(
    logits, targets, peaks, totals, weighteds, chosen, num_columns, num_targets, temperature, BLOCK: tl.constexpr
):
    """One program per token, which reads the token's logits once. Writes the largest logit and the logit of each target
    (0 where this shard has no such row); with z = (logits - largest) / temperature also sum exp(z) and sum z exp(z)."""
    row = tl.program_id(0).to(tl.int64)  # the offset of a row may pass 2^31
    logits += row * num_columns
    columns = tl.arange(0, BLOCK)
    inverse = 1.0 / temperature
    peak = tl.full((), _LOWEST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    end = num_columns // BLOCK * BLOCK
    for start in range(0, end, BLOCK):
        x = tl.load(logits + start + columns).to(tl.float32)
        peak, total, weighted = _add_block(x, peak, total, weighted, inverse)
    if end < num_columns:
        inside = end + columns < num_columns
        x = tl.load(logits + end + columns, mask=inside, other=0.0).to(tl.float32)
        peak, total, weighted = _add_block(tl.where(inside, x, _LOWEST), peak, total, weighted, inverse)
    tl.store(peaks + row, peak)
    tl.store(totals + row, total)
    tl.store(weighteds + row, weighted)
    for k in range(num_targets):
        target = tl.load(targets + row * num_targets + k)
        x = tl.load(logits + target, mask=(target >= 0) & (target < num_columns), other=0.0)
        tl.store(chosen + row * num_targets + k, x.to(tl.float32))


@triton.jit(do_not_specialize_on_alignment=_PER_TOKEN)
def _gradients(
    logits,
    targets,
    peaks,
    log_totals,
    entropies,
    grad_logprobs,
    grad_totals,
    grad_entropies,
    num_columns,
    num_targets,
    num_blocks,
    temperature,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per block of a token's logits, which overwrites them with the loss's gradient in them. The largest
    logit is subtracted before anything is rounded, so that the size of logits costs no digits."""
    program = tl.program_id(0)
    row = (program // num_blocks).to(tl.int64)  # the offset of a row may pass 2^31
    start = program % num_blocks * BLOCK
    logits += row * num_columns
    columns = start + tl.arange(0, BLOCK)
    inside = columns < num_columns
    inverse = 1.0 / temperature
    x = tl.load(logits + columns, mask=inside, other=0.0).to(tl.float32)
    logp = (x - tl.load(peaks + row)) * inverse - tl.load(log_totals + row)
    share = -tl.load(grad_totals + row)
    if HAS_ENTROPY:
        share -= tl.load(grad_entropies + row) * (logp + tl.load(entropies + row))
    grad = tl.exp(logp) * share
    for k in range(num_targets):
        target = tl.load(targets + row * num_targets + k)
        if (target >= start) & (target < start + BLOCK):
            grad += tl.where(columns == target, tl.load(grad_logprobs + row * num_targets + k), 0.0)
    tl.store(logits + columns, (grad * inverse).to(logits.dtype.element_ty), mask=inside)


def _launch(num_columns: int) -> dict[str, int]:
    """Size of a block and warps of a program for rows of so many logits."""
    block = min(_BLOCK, triton.next_power_of_2(num_columns))
    return {"BLOCK": block, "num_warps": max(1, block // 512)}


class KernelLogprobs(torch.autograd.Function):
    """`logprobs._ChunkedLogprobs` by kernels: its inputs, outputs and formulas. Hidden states are bfloat16, float16 or
    float32; results are float32."""

    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, targets_TK, temperature, chunk_tokens, vocab_start, group, float32_head):
        targets_TK = (targets_TK - vocab_start).contiguous()  # from here on rows of this shard, or of none
        (num_tokens, num_targets), num_columns = targets_TK.shape, len(weight_VD)
        peak_T, total_T, weighted_T = hidden_TD.new_empty(3, num_tokens, dtype=torch.float32).unbind()
        chosen_TK = torch.empty_like(targets_TK, dtype=torch.float32)
        logits_tV = None
        for start in reversed(range(0, num_tokens, chunk_tokens)):  # backward begins with the chunk that is kept
            rows = slice(start, start + chunk_tokens)
            del logits_tV  # or this chunk's would be a second buffer
            logits_tV = head_product(hidden_TD[rows], weight_VD, float32=float32_head)
            _row_sums[(len(logits_tV),)](
                logits_tV,
                targets_TK[rows],
                peak_T[rows],
                total_T[rows],
                weighted_T[rows],
                chosen_TK[rows],
                num_columns,
                num_targets,
                float(temperature),
                **_launch(num_columns),
            )
        mine = (targets_TK >= 0) & (targets_TK < num_columns)
        if group is not None:
            own_peak_T, peak_T = peak_T, peak_T.clone()
            dist.all_reduce(peak_T, dist.ReduceOp.MAX, group)
            shift_T = (own_peak_T - peak_T) / temperature
            weighted_T = (weighted_T + shift_T * total_T) * shift_T.exp()
            total_T = total_T * shift_T.exp()
        chosen_TK = torch.where(mine, (chosen_TK - peak_T[:, None]) / temperature, 0.0)
        if group is not None:
            sums = torch.cat([torch.stack([total_T, weighted_T]), chosen_TK.T])
            dist.all_reduce(sums, group=group)
            total_T, weighted_T, chosen_TK = sums[0], sums[1], sums[2:].T
        log_total_T = total_T.log()
        logprobs_TK, entropy_T = chosen_TK - log_total_T[:, None], log_total_T - weighted_T / total_T
        ctx.save_for_backward(hidden_TD, weight_VD, targets_TK, peak_T, log_total_T, entropy_T)
        ctx.temperature, ctx.chunk_tokens, ctx.float32_head = temperature, chunk_tokens, float32_head
        ctx.first_logits_tV = logits_tV if any(ctx.needs_input_grad) else None
        ctx.set_materialize_grads(False)  # a loss without an entropy term gives None, known without asking the device
        return logprobs_TK, entropy_T

    @staticmethod
    def backward(ctx, grad_logprobs_TK, grad_entropy_T):
        hidden_TD, weight_VD, targets_TK, peak_T, log_total_T, entropy_T = ctx.saved_tensors
        if grad_logprobs_TK is None:
            grad_logprobs_TK = torch.zeros_like(targets_TK, dtype=torch.float32)
        grad_logprobs_TK, grad_total_T = grad_logprobs_TK.contiguous(), grad_logprobs_TK.sum(-1)
        has_entropy = grad_entropy_T is not None
        grad_entropy_T = grad_entropy_T.contiguous() if has_entropy else entropy_T  # which no program reads
        (num_columns, _), num_targets = weight_VD.shape, targets_TK.shape[1]
        launch = _launch(num_columns)
        num_blocks = triton.cdiv(num_columns, launch["BLOCK"])

        def grad_logits(rows):
            if rows.start == 0 and ctx.first_logits_tV is not None:
                # Overwritten below, so a second backward computes them again.
                logits_tV, ctx.first_logits_tV = ctx.first_logits_tV, None
            else:
                logits_tV = head_product(hidden_TD[rows], weight_VD, float32=ctx.float32_head)
            _gradients[(len(logits_tV) * num_blocks,)](
                logits_tV,
                targets_TK[rows],
                peak_T[rows],
                log_total_T[rows],
                entropy_T[rows],
                grad_logprobs_TK[rows],
                grad_total_T[rows],
                grad_entropy_T[rows],
                num_columns,
                num_targets,
                num_blocks,
                float(ctx.temperature),
                HAS_ENTROPY=has_entropy,
                **launch,
            )
            return logits_tV.to(hidden_TD.dtype)

        return *chunked_gradients(ctx, hidden_TD, weight_VD, torch.float32, grad_logits), *[None] * 6

"""Training attention over packed documents against attention written out, forward and backward."""

from __future__ import annotations

import argparse

import torch

from scripts.gpu_checks.result import Result, run_check
from torchtitan_rl import adapters, platform

adapters.adapt_torchtitan()

from torchtitan.models.common.attention import VarlenAttention, create_varlen_metadata_for_document  # noqa: E402

from torchtitan_rl.model.attention import PackedDocuments, PackedSDPA  # noqa: E402

HEADS = {128: (16, 8), 32: (4, 2)}
"""Query heads and key-value heads by head size: Qwen3-0.6B's, and the quickstart's."""
LENGTHS, TINY_LENGTHS = [700, 1, 333, 1500], [9, 1, 5, 17]
# Relative L2. bfloat16 keeps 8 bits, so each rounding is up to 0.4% of a number: inputs are exact, probabilities and
# outputs are rounded once, and gradients pass through two rounded products. GPU kernels may multiply float32 in TF32,
# which keeps 11 bits; a CPU keeps 24.
BOUNDS = {
    ("cuda", torch.bfloat16): 2e-2,
    ("cuda", torch.float32): 2e-3,
    ("cpu", torch.bfloat16): 2e-2,
    ("cpu", torch.float32): 1e-5,
}


def plain_attention(q_TNH, k_TMH, v_TMH, lengths: list[int]) -> torch.Tensor:
    """Softmax over the tokens of the same document that are not later, one document at a time."""
    shared, outputs = q_TNH.shape[1] // k_TMH.shape[1], []
    for q, k, v in zip(*(x.split(lengths) for x in (q_TNH, k_TMH, v_TMH)), strict=True):
        k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
        scores = torch.einsum("inh,jnh->nij", q, k) / q.shape[-1] ** 0.5
        later = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
        outputs.append(torch.einsum("nij,jnh->inh", scores.masked_fill(later, -torch.inf).softmax(-1), v))
    return torch.cat(outputs)


def packed_attention(kind: str, q_TNH, k_TMH, v_TMH, lengths: list[int]) -> torch.Tensor:
    """What a trainer's layer computes: `varlen` is torchtitan's FlashAttention, `sdpa` ours by buckets of lengths."""
    device = q_TNH.device
    if kind == "sdpa":
        attention, masks = PackedSDPA(PackedSDPA.Config()), PackedDocuments.build(lengths, device)
    else:
        positions_T = torch.cat([torch.arange(length) for length in lengths]).to(device)
        attention = VarlenAttention(VarlenAttention.Config())
        masks = create_varlen_metadata_for_document(positions_T[None])
    inputs = (x[None] for x in (q_TNH, k_TMH, v_TMH))
    return attention(*inputs, attention_masks=masks, scale=q_TNH.shape[-1] ** -0.5, enable_gqa=True)[0]


def errors(kind: str, dtype: torch.dtype, head_dim: int, lengths: list[int], device: str) -> dict[str, float]:
    """Relative L2 difference of output and gradients to plain attention in float64, on the same rounded inputs."""
    torch.manual_seed(0)
    heads, kv_heads = HEADS[head_dim]
    inputs = [
        torch.randn(sum(lengths), n, head_dim).to(device, dtype).requires_grad_() for n in (heads, kv_heads, kv_heads)
    ]
    upstream = torch.randn(sum(lengths), heads, head_dim).to(device, dtype)
    output = packed_attention(kind, inputs[0], inputs[1], inputs[2], lengths)
    got = (output, *torch.autograd.grad(output, inputs, upstream.to(output.dtype)))
    exact = [x.detach().double().requires_grad_() for x in inputs]
    output = plain_attention(exact[0], exact[1], exact[2], lengths)
    expected = (output, *torch.autograd.grad(output, exact, upstream.double()))
    names = ("output", "query gradient", "key gradient", "value gradient")
    with torch.no_grad():
        return {n: float((a.double() - b).norm() / b.norm()) for n, a, b in zip(names, got, expected, strict=True)}


def check(result: Result, args: argparse.Namespace) -> None:
    """Compares every kind of attention that this device runs, in every dtype that a trainer gives it."""
    device, lengths = platform.device_type(), TINY_LENGTHS if args.tiny else LENGTHS
    kinds = [("sdpa", torch.float32), ("sdpa", torch.bfloat16)]
    if device == "cuda":
        kinds.insert(0, ("varlen", torch.bfloat16))
    for head_dim in HEADS:
        for kind, dtype in kinds:
            bound = BOUNDS[device, dtype]
            where = f"{kind}, {str(dtype).removeprefix('torch.')}, head size {head_dim}"
            error_of = errors(kind, dtype, head_dim, lengths, device)
            result.note(**{where: {name: float(f"{error:.2e}") for name, error in error_of.items()}})
            for name, error in error_of.items():  # a NaN is above every bound
                result.require(error <= bound, f"{where}: the {name} is off by {error:.1e}, more than {bound:g}")


if __name__ == "__main__":
    run_check(check)

"""Which dimension of a tensor generator ranks share, by torchtitan's name; free of vLLM, so that trainers can ask."""

from __future__ import annotations

import math

import torch

__all__ = ["RankPart", "cut_dim", "num_cuts"]


_OF_VALUE_HEADS = ("A_log", "dt_bias")
"""Parameters of a gated delta net with one number for each of its value heads."""


class RankPart(torch.Tensor):
    """A tensor that is one rank's part already. Operators on a part give plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch.nn.Parameter has it


def cut_dim(name: str) -> int | None:
    """The dimension along which tensor-parallel generator ranks cut a parameter (`...wq.weight`, `...w2_EDF`); None
    for a parameter that every rank holds whole."""
    layer, last = ("", *name.split("."))[-2:]
    if layer in ("lora_a", "lora_b"):
        return _adapter_cut(name.split(".")[-3], layer)
    if last in ("w1_EFD", "w3_EFD", "mlp1_weight_EGD", "mlp1_bias_EG"):
        return 1
    if last in ("w2_EDF", "mlp2_weight_EDF"):
        return 2
    if layer in ("wq", "wk", "wv", "wq_b", "wkv_b", "w1", "w3") or last == "sinks":
        return 0
    if layer.startswith(("in_proj_", "conv_")) or last in _OF_VALUE_HEADS:
        return 0
    if layer in ("wo", "w2", "out_proj") and last == "weight":
        return 1
    return None


def _adapter_cut(layer: str, factor: str) -> int | None:
    """Of an adapter's A (rank, in) and B (out, rank): B has the rows of a layer whose rows are cut, A the columns of a
    layer whose columns are."""
    if layer == "wqkv":  # fused: the groups of query heads follow one another
        return 0 if factor == "lora_b" else None
    layer_dim = cut_dim(f"{layer}.weight")
    return layer_dim if (layer_dim, factor) in ((0, "lora_b"), (1, "lora_a")) else None


def num_cuts(size: int, n_kv_heads: int) -> int:
    """Equal parts of a cut dimension of `size`, such that the share of each rank of every tensor-parallel degree that
    the model allows is a number of whole parts: such a degree divides the KV heads and the dimension."""
    return math.gcd(size, n_kv_heads)

"""A model's state without copies: fused weights whole, or the memory behind every name of a state dict."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torchtitan.models.common.attention import FusedQKVLinear

from torchtitan_rl import adapters

__all__ = ["fused_state", "places"]

adapters.adapt_torchtitan()


def fused_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """`model.state_dict()`, with each fused query-key-value weight as one tensor `...wqkv.weight` of [rows, dim].

    Every tensor shares its storage with the model. `model.state_dict()` itself gathers each fused weight on every rank
    and copies the weight's parts to new memory as wq, wk and wv.
    """
    return dict(model.state_dict(destination=_Fused()))


def places(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The memory behind every name of `model.state_dict()`, for copies without a detour: (n_kv_heads, heads per KV
    head, head_dim, ...) for the query part of a fused weight, (n_kv_heads, head_dim, ...) for its key and value parts,
    the parameter's own shape for the rest. A parameter with two names, such as a tied head, is one tensor under both.
    """
    tensors, known = fused_state(model), {}
    for prefix, module in model.named_modules():
        if not isinstance(module, FusedQKVLinear):
            continue
        for kind in ("weight", "bias"):
            if (fused := tensors.pop(f"{prefix}.wqkv.{kind}", None)) is not None:
                heads = fused.unflatten(0, (-1, module.r_dim, module.head_dim))
                tensors[f"{prefix}.wq.{kind}"] = heads[:, : module.heads_per_kv]
                tensors[f"{prefix}.wk.{kind}"] = heads[:, module.heads_per_kv]
                tensors[f"{prefix}.wv.{kind}"] = heads[:, module.heads_per_kv + 1]
    return {name: known.setdefault((place.data_ptr(), place.shape), place) for name, place in tensors.items()}


class _Fused(OrderedDict):
    """A state dict whose `in` denies fused weights, so that torchtitan's hook does not split them."""

    def __contains__(self, name: object) -> bool:
        return not str(name).endswith((".wqkv.weight", ".wqkv.bias")) and super().__contains__(name)

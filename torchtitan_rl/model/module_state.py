"""A model's state without copies: fused weights whole, or the memory behind every name of a state dict."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torchtitan.models.common.attention import FusedQKVLinear

from torchtitan_rl import adapters
from torchtitan_rl.model.sharding import plain_name

__all__ = ["fused_layers", "fused_state", "places", "split"]

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
    layers, known = fused_layers(model), {}
    return {
        name: known.setdefault((place.data_ptr(), place.shape), place)
        for fused_name, tensor in fused_state(model).items()
        for name, place in split(fused_name, tensor, layers).items()
    }


def fused_layers(model: torch.nn.Module) -> dict[str, FusedQKVLinear]:
    """The layers that have a fused query-key-value weight, by their names in a state dict."""
    return {plain_name(name): module for name, module in model.named_modules() if isinstance(module, FusedQKVLinear)}


def split(name: str, tensor: torch.Tensor, layers: dict[str, FusedQKVLinear]) -> dict[str, torch.Tensor]:
    """The query, key and value part of a fused weight or bias, in its memory: (n_kv_heads, heads per KV head, head_dim,
    ...), (n_kv_heads, head_dim, ...) and the same. Any other tensor of `fused_state` under its name."""
    prefix, _, kind = name.rpartition(".wqkv.")
    if prefix not in layers:
        return {name: tensor}
    layer = layers[prefix]
    heads = tensor.unflatten(0, (-1, layer.r_dim, layer.head_dim))
    return {
        f"{prefix}.wq.{kind}": heads[:, : layer.heads_per_kv],
        f"{prefix}.wk.{kind}": heads[:, layer.heads_per_kv],
        f"{prefix}.wv.{kind}": heads[:, layer.heads_per_kv + 1],
    }


class _Fused(OrderedDict):
    """A state dict whose `in` denies fused weights, so that torchtitan's hook does not split them."""

    def __contains__(self, name: object) -> bool:
        return not str(name).endswith((".wqkv.weight", ".wqkv.bias")) and super().__contains__(name)

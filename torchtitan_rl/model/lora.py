"""Low-rank adapters (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models") by torchtitan's converter.

A targeted linear layer computes x W^T + (alpha / rank) x A^T B^T with W frozen, A (rank, in) and B (out, rank).
Code outside the trainer sees either the merged weight W + (alpha / rank) B A under W's name, or the adapters alone.
Functions here take `model.state_dict()`, which shows the fused query-key-value weight as wq, wk and wv.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator

import torch
import xxhash
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_rl import adapters
from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.model.sharding import whole

adapters.adapt_torchtitan()

from torchtitan.components.lora import LoRAConverter  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402

__all__ = [
    "Adapters",
    "lora_spec",
    "is_adapter",
    "adapter_state",
    "base_state",
    "require_frozen_base",
    "draw_adapters",
    "layer_adapters",
    "whole_adapters",
    "merge",
    "base_fingerprint",
]

# Layer names of `LoRAConfig.target_modules`, and torchtitan's names (query-key-value fused or separate).
_LAYERS = {
    "qkv_proj": ("wqkv", "wq", "wkv"),
    "o_proj": ("wo",),
    "gate_proj": ("w1",),
    "up_proj": ("w3",),
    "down_proj": ("w2",),
}

Adapters = dict[str, tuple[torch.Tensor, torch.Tensor, float]]
"""(A, B, alpha / rank) by the name of the weight to which B A is added."""


def lora_spec(spec: ModelSpec, lora: LoRAConfig) -> ModelSpec:
    """A new spec with adapters on the targeted layers and everything else frozen.

    Call after `training_spec`, so that the head from `training_spec` is frozen too. Raises ValueError for a target
    without a layer in the model.
    """
    present = {fqn.rsplit(".", 1)[-1] for fqn, *_ in spec.model.traverse(Linear.Config)}
    for target in lora.target_modules:
        if not present & set(_LAYERS[target]):
            having = [name for name, layers in _LAYERS.items() if present & set(layers)]
            raise ValueError(
                f"trainer.lora.target_modules={target!r}: no linear layer of this model is one (experts of "
                f"a mixture have no adapters); use {', '.join(having)}"
            )
    layers = sorted({layer for target in lora.target_modules for layer in _LAYERS[target]} & present)
    converter = LoRAConverter.Config(rank=lora.rank, alpha=lora.alpha, target_modules=layers).build()
    return dataclasses.replace(spec, model=converter.convert(copy.deepcopy(spec.model)))


def is_adapter(name: str) -> bool:
    return name.endswith((".lora_a.weight", ".lora_b.weight"))


def adapter_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if is_adapter(name)}


def base_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The frozen tensors: the state dict that the model would have without adapters."""
    return {name: tensor for name, tensor in state.items() if not is_adapter(name)}


def require_frozen_base(model: torch.nn.Module) -> None:
    """Asserts that adapters require gradients and no other parameter does."""
    wrong = [name for name, parameter in model.named_parameters() if parameter.requires_grad != is_adapter(name)]
    assert not wrong, f"adapters alone must require gradients; these disagree: {wrong[:3]}"


def draw_adapters(model: torch.nn.Module, seed: int) -> None:
    """Draws initial adapters by torchtitan's rule (B is zero). Only the seed matters, not the layout or the base."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for name, module in model.named_modules():
            if not name.endswith(("lora_a", "lora_b")):
                continue
            weight = module.weight
            drawn = torch.empty(weight.shape, dtype=weight.dtype)
            module._param_init["weight"](drawn)
            drawn = drawn.to(weight.device)
            if isinstance(weight, DTensor):
                drawn = distribute_tensor(drawn, weight.device_mesh, weight.placements)
            weight.copy_(drawn)


def layer_adapters(state: dict[str, torch.Tensor], lora: LoRAConfig) -> Adapters:
    """Unsharded adapters by the layer's own weight, which for a fused layer is the fused one; a collective call."""
    layers = [name.removesuffix(".lora_a.weight") for name in state if name.endswith(".lora_a.weight")]
    return {
        f"{layer}.weight": (
            whole(state[f"{layer}.lora_a.weight"]),
            whole(state[f"{layer}.lora_b.weight"]),
            lora.alpha / lora.rank,
        )
        for layer in layers
    }


def whole_adapters(state: dict[str, torch.Tensor], n_kv_heads: int, lora: LoRAConfig) -> Adapters:
    """Unsharded adapters by the names of `state`; a collective call.

    A fused layer has one A, which query, key and value share; B's rows are split between query, key and value.
    """
    adapters: Adapters = {}
    for name, (a, b, scaling) in layer_adapters(state, lora).items():
        prefix, fused, _ = name.rpartition("wqkv.weight")
        if fused:
            rows = {part: state[f"{prefix}{part}.weight"].shape[0] for part in ("wq", "wk", "wv")}
            for part, b_part in _split_fused(b, rows, n_kv_heads):
                adapters[f"{prefix}{part}.weight"] = a, b_part, scaling
        else:
            adapters[name] = a, b, scaling
    return adapters


def _split_fused(b: torch.Tensor, rows: dict[str, int], n_kv_heads: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Rows of a fused layer's B by part: per key-value head the layer stacks query heads, key head, value head."""
    per_head = b.view(n_kv_heads, -1, b.shape[1])
    start = 0
    for part, size in rows.items():
        width = size // n_kv_heads
        yield part, per_head[:, start : start + width].reshape(size, b.shape[1])
        start += width


def merge(name: str, weight: torch.Tensor, adapters: Adapters) -> torch.Tensor:
    """W + (alpha / rank) B A of an unsharded weight, W itself without an adapter; same shape and dtype as W."""
    if name not in adapters:
        return weight
    a, b, scaling = adapters[name]
    at_least_float32 = torch.promote_types(weight.dtype, torch.float32)
    a, b = a.to(weight.device, at_least_float32), b.to(weight.device, at_least_float32)
    return (weight.to(at_least_float32) + scaling * (b @ a)).to(weight.dtype)


def base_fingerprint(state: dict[str, torch.Tensor]) -> str:
    """A hash of the frozen weights that does not depend on the layout; a collective call."""
    digest = xxhash.xxh3_64()
    for name, tensor in sorted(base_state(state).items()):
        digest.update(name.encode())
        digest.update(whole(tensor).cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()

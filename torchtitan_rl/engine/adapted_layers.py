"""Which layers of a generator rank's decoder have adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from torchtitan_rl.engine.kernels import PackedFeedForward, PackedLinear, SplitQKVLinear
from torchtitan_rl.engine.layer_adapters import AdapterBatch, LayerAdapters

__all__ = ["AdaptedLayer", "add_adapters"]


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A linear layer with adapters."""

    adapters: LayerAdapters
    index: int
    """Of the layer among those of `adapters`."""
    rows: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Puts the rows of B into the order in which the layer computes its output; None: torchtitan's order."""


def add_adapters(decoder: torch.nn.Module, layers: Iterable[str], batch: AdapterBatch) -> dict[str, AdaptedLayer]:
    """Gives linear layers of a rank's decoder room for adapters. Returns them by torchtitan's name. Raises ValueError
    for a layer whose class has no place for any."""
    added: dict[str, AdaptedLayer] = {}
    for name in layers:
        layer, owner = decoder.get_submodule(name), decoder.get_submodule(name.rpartition(".")[0])
        weight = decoder.get_parameter(f"{name}.weight")
        if isinstance(owner, SplitQKVLinear):
            owner.adapters = LayerAdapters(batch, [weight])
            added[name] = AdaptedLayer(owner.adapters, 0, owner.adapter_rows)
        elif isinstance(owner, PackedFeedForward) and layer in (owner.w1, owner.w3):
            if owner.adapters is None:
                owner.adapters = LayerAdapters(batch, [owner.w1.weight, owner.w3.weight])
            added[name] = AdaptedLayer(owner.adapters, int(layer is owner.w3))
        elif isinstance(layer, PackedLinear):
            layer.adapters = LayerAdapters(batch, [weight])
            added[name] = AdaptedLayer(layer.adapters, 0)
        else:
            raise ValueError(
                f"generator.max_adapters={batch.num_slots}: the engine's {name} is a {type(layer).__qualname__}, which "
                "takes no adapters; use max_adapters=0"
            )
    return added

"""A model's state as the model holds it."""

from __future__ import annotations

from collections import OrderedDict

import torch

__all__ = ["held_state"]


def held_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """`model.state_dict()`, with each fused query-key-value weight as one tensor `...wqkv.weight` of [rows, dim].

    Every tensor shares its storage with the model. `model.state_dict()` itself gathers each fused weight on every rank
    and copies the weight's parts to new memory as wq, wk and wv.
    """
    return dict(model.state_dict(destination=_Fused()))


class _Fused(OrderedDict):
    """A state dict that hides fused weights from torchtitan's hook, which splits those that it finds with `in`."""

    def __contains__(self, name: object) -> bool:
        return not str(name).endswith((".wqkv.weight", ".wqkv.bias")) and super().__contains__(name)

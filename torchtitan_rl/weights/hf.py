"""Hugging Face directories: reading weights into a model and writing a model out, through torchtitan's adapter."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

from torchtitan_rl.families import shape_of_directory
from torchtitan_rl.model import lora
from torchtitan_rl.model.sharding import whole

__all__ = ["load_hf_weights", "full_state", "write_hf_dir"]


def load_hf_weights(model, adapter, directory: Path, *, head: bool = True) -> None:
    """Reads safetensors into a (possibly sharded) model; each rank reads only its part. Adapters stay unchanged.

    `head=False` leaves the model's head unchanged: a critic's value head is not in the directory. Raises ValueError for
    a directory whose config.json is of a model that no family computes, also where the sizes come from elsewhere.
    """
    if (directory / "config.json").exists():
        shape_of_directory(directory)
    state_dict = model.state_dict()
    state = adapter.to_hf(lora.base_state(state_dict))
    if not head:
        state.pop("lm_head.weight", None)
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(directory)))
    model.load_state_dict(state_dict | adapter.from_hf(state))


def full_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors of a model's state, on the CPU; a collective call when the model is sharded."""
    return {name: whole(tensor).cpu() for name, tensor in state.items()}


def write_hf_dir(state: dict[str, torch.Tensor], adapter, directory: Path) -> None:
    """Adds `model.safetensors` with Hugging Face's names to a directory made by `write_model_dir`."""
    tensors = {name: tensor.contiguous().clone() for name, tensor in adapter.to_hf(state).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

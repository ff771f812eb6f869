"""Hugging Face directories: reading weights into a model and writing a model out, through torchtitan's adapter."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor

__all__ = ["load_hf_weights", "full_state", "write_hf_dir"]


def load_hf_weights(model, adapter, directory: Path, *, head: bool = True) -> None:
    """Reads safetensors into a (possibly sharded) model; each rank reads only its part.

    Without `head` the model's own head stays: a critic has another one than the checkpoint.
    """
    own = model.state_dict()
    state = adapter.to_hf(own)
    if not head:
        state.pop("lm_head.weight", None)
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(directory)))
    model.load_state_dict({**own, **adapter.from_hf(state)})


def full_state(model) -> dict[str, torch.Tensor]:
    """Whole tensors under torchtitan's names, on the CPU; a collective call when the model is sharded."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()
        for name, tensor in model.state_dict().items()
    }


def write_hf_dir(state: dict[str, torch.Tensor], adapter, directory: Path) -> None:
    """Adds `model.safetensors` in Hugging Face's names to a directory made by `write_model_dir`."""
    tensors = {name: tensor.contiguous().clone() for name, tensor in adapter.to_hf(state).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

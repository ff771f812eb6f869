"""Moving tensors between the device and host memory in place: references to the tensors stay valid.

A tensor keeps its identity, shape and views; only the storage is emptied and filled again. Thus FSDP and the optimizer
need no notice when parameters, gradients and optimizer state leave the device and return. On a CPU `offload` copies
bytes from memory to memory: the mechanism runs and frees nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

__all__ = ["Part", "model_tensors", "gradient_tensors", "optimizer_tensors", "device_bytes"]


class Part:
    """A set of tensors (model, optimizer or gradients) that is on the device or in host memory as a whole."""

    def __init__(self) -> None:
        self.on_device = True
        self._host: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    def offload(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copies the tensors' storages to host memory and empties the storages. A second call changes nothing."""
        if not self.on_device:
            return
        self.on_device = False
        for storage in _storages(tensors):
            device_bytes_N = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            host_bytes_N = torch.empty_like(device_bytes_N, device="cpu", pin_memory=storage.device.type == "cuda")
            host_bytes_N.copy_(device_bytes_N)
            storage.resize_(0)
            self._host.append((storage, host_bytes_N))

    def onload(self) -> None:
        """Fills the emptied storages from host memory. A second call changes nothing."""
        for storage, host_bytes_N in self._host:
            storage.resize_(host_bytes_N.numel())
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(host_bytes_N)
        self._host, self.on_device = [], True


def model_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """A model's (sharded) parameters, and the slice of a teacher's head if one is held; small buffers stay."""
    teacher = getattr(model.lm_head, "teacher_weight_VD", None)  # a critic's head has none
    return [*model.parameters(), *([] if teacher is None else [teacher])]


def gradient_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def optimizer_tensors(optimizers) -> list[torch.Tensor]:
    return [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]


def device_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that the tensors' storages hold now; 0 once offloaded."""
    return sum(storage.nbytes() for storage in _storages(tensors))


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage
    return list(storages.values())

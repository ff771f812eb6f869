"""Moving tensors between the device and host memory in place: references to the tensors stay valid.

A tensor keeps its identity, shape and views; only the storage is emptied and filled again. Thus FSDP and the optimizer
need no notice when parameters, gradients and optimizer state leave the device and return. On a CPU `offload` copies
bytes from memory to memory: the mechanism runs and frees nothing.

The host's memory of a part is one piece, which stays for the next offload: pinning it takes longer than the copies.
torch would pin memory for each storage, of up to twice the storage's size.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import torch
from torch.distributed.tensor import DTensor

from torchtitan_rl import platform

__all__ = ["Part", "model_tensors", "gradient_tensors", "optimizer_tensors", "device_bytes"]

_ALIGNMENT = 64
"""Of a storage's bytes in host memory."""


class Part:
    """A set of tensors (model, optimizer or gradients) that is on the device or in host memory as a whole."""

    def __init__(self) -> None:
        self.on_device = True
        self._host = torch.empty(0, dtype=torch.uint8)
        self._emptied: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        """Each storage without its bytes, and where in `_host` these are."""

    def offload(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copies the tensors' storages to host memory and empties the storages. A second call changes nothing."""
        if not self.on_device:
            return
        storages = _storages(tensors)
        starts = [0, *accumulate(-(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT for storage in storages)]
        self._make_room(starts[-1])
        places = [self._host[start : start + storage.nbytes()] for storage, start in zip(storages, starts)]
        for storage, place in zip(storages, places):
            place.copy_(_bytes_of(storage), non_blocking=True)
        platform.wait_for_copies()
        for storage in storages:
            storage.resize_(0)
        self._emptied, self.on_device = list(zip(storages, places)), False

    def onload(self) -> None:
        """Fills the emptied storages from host memory. A second call changes nothing."""
        for storage, place in self._emptied:
            storage.resize_(len(place))
            _bytes_of(storage).copy_(place, non_blocking=True)
        platform.wait_for_copies()
        self._emptied, self.on_device = [], True

    def _make_room(self, nbytes: int) -> None:
        """Makes the host's memory as large as what is copied there: gradients may have been absent at first."""
        if nbytes > len(self._host):
            platform.unpin(self._host)
            self._host = torch.empty(nbytes, dtype=torch.uint8)
            platform.pin_new(self._host)


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


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage
    return list(storages.values())

"""A copy of a rank's state in host memory, made while the rank waits."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchtitan_rl import platform

__all__ = ["HostCopy", "local_part", "tensors"]

_PIECE = 16 * 2**20  # bytes that a thread copies at once
_MIN_PINNED = 2**20  # bytes; pinning a smaller tensor takes longer than its copy


class HostCopy:
    """At most one copy of a nested state. Each tensor has host memory of its own, which the next copy uses again: new
    memory takes several times as long as the copy itself, because the system clears its pages."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, ...], torch.Tensor] = {}

    @torch.no_grad()
    def take(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy of `state`, dicts of dicts of tensors and other values. The tensors of the copy are valid until the
        next call.

        Tensors are on the CPU and have the kind, dtype, shape and sharding of their originals. Two names of one tensor
        in `state` are two names of one tensor in the copy. Other values are deep copies.
        """
        first: dict[tuple, tuple[str, ...]] = {}
        names = {path: first.setdefault(_identity(path, tensor), path) for path, tensor in tensors(state)}
        originals = {path: tensor for path, tensor in tensors(state) if names[path] == path}
        for path in [path for path, copied in self._copies.items() if not _fits(copied, originals.get(path))]:
            platform.unpin(local_part(self._copies.pop(path)))
        for path, original in originals.items():
            if path not in self._copies:
                self._copies[path] = torch.empty_like(original, device="cpu")
                if (part := local_part(self._copies[path])).nbytes >= _MIN_PINNED:
                    platform.pin_new(part)
        _copy_all((local_part(self._copies[path]), local_part(original)) for path, original in originals.items())
        return self._copied(state, (), names)

    def _copied(self, value: Any, path: tuple[str, ...], names: dict[tuple[str, ...], tuple[str, ...]]) -> Any:
        if isinstance(value, dict):
            return {name: self._copied(inner, (*path, name), names) for name, inner in value.items()}
        return self._copies[names[path]] if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tensors(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """(path, tensor) of every tensor of a nested state, in order."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from tensors(inner, (*path, name))
    elif isinstance(value, torch.Tensor):
        yield path, value


def _copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies tensors to host memory, given as (target, original).

    Host memory is copied in pieces that threads take in turn. torch's own copy gives each thread an equal part of one
    tensor, so every tensor waits for the thread whose core is busiest. The pieces are addresses: a NumPy view of a
    tensor would stop the tensor's storage from being resized for good, and `Part.offload` resizes it.
    """
    pieces: list[tuple[int, int, int]] = []  # address to copy to, address to copy from, bytes
    for target, original in pairs:
        if original.is_cpu and original.is_contiguous() and target.is_contiguous():
            to, of, size = target.data_ptr(), original.data_ptr(), original.nbytes
            pieces += [(to + i, of + i, min(_PIECE, size - i)) for i in range(0, size, _PIECE)]
        else:
            target.copy_(original, non_blocking=True)
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for _ in threads.map(lambda piece: ctypes.memmove(*piece), pieces):  # releases the interpreter's lock
            pass
    platform.wait_for_copies()


def _identity(path: tuple[str, ...], tensor: torch.Tensor) -> tuple:
    """Equal for two names of one tensor. An empty tensor has no address, so its path stands for one."""
    part = local_part(tensor)
    return *_kind(tensor), part.stride(), part.device, part.data_ptr() if part.numel() else path


def _fits(copied: torch.Tensor, original: torch.Tensor | None) -> bool:
    """Whether the memory of a copy can take another tensor in the place of its original."""
    return original is not None and _kind(copied) == _kind(original)


def _kind(tensor: torch.Tensor) -> tuple:
    sharding = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return type(tensor), tensor.dtype, tensor.shape, local_part(tensor).shape, sharding

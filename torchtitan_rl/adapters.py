"""Settings and patches that torchtitan, vLLM, Monarch and TorchStore need before use.

Environment variables, which the packages read at import, are in `environment`. A module that imports one of the
packages calls the package's function here. Each function imports the package if need be and may be called again.
"""

from __future__ import annotations

import functools
import glob
import importlib.util
import logging
import multiprocessing
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from torchtitan_rl import platform

__all__ = [
    "adapt_torchtitan",
    "adapt_torchstore",
    "configure_monarch",
    "nameless_semaphores",
    "prepare_vllm",
    "private_shared_memory",
    "without_fla",
    "zeroed_blocks",
]

logger = logging.getLogger(__name__)


def prepare_vllm(*, eager: bool) -> None:
    """Turns torch.compile off for an eager vLLM on a CPU, and on for another; call before importing vLLM.

    The sampler of an eager vLLM would compile a helper: that needs a C++ compiler, takes seconds at the first request,
    and makes sampling no faster. A process that an eager vLLM's process has started inherits the variable."""
    if platform.device_type() == "cpu":
        if eager:
            os.environ["TORCHDYNAMO_DISABLE"] = "1"
        else:
            os.environ.pop("TORCHDYNAMO_DISABLE", None)


@contextmanager
def nameless_semaphores() -> Iterator[None]:
    """Lets multiprocessing take the name of each semaphore away at its creation, as for the start method `fork`.

    vLLM's executor makes a lock that no other process opens. Monarch's processes have the start method `forkserver`:
    there a semaphore keeps its name in /dev/shm for as long as it lives, and a process that is killed together with its
    resource tracker leaves the name behind.
    """
    method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(method, force=True)


@contextmanager
def zeroed_blocks() -> Iterator[None]:
    """Makes an engine that is built in this context zero a block of the attention cache before a request gets it, as
    vLLM does for models with a state.

    Attention reads whole blocks and masks what a request has not written: 0 times a NaN or an infinity that a request
    before left there is NaN. Other numbers change nothing, so what is computed from finite caches stays the same."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    original = KVCacheConfig.needs_kv_cache_zeroing
    KVCacheConfig.needs_kv_cache_zeroing = property(lambda config: True)
    try:
        yield
    finally:
        KVCacheConfig.needs_kv_cache_zeroing = original


@contextmanager
def private_shared_memory() -> Iterator[None]:
    """Names the shared memory of vLLM's CPU ranks uniquely on the host, and unlinks the name once all ranks have opened
    the segment.

    With `external_launcher` vLLM gives every engine the same name, and a killed engine leaves the name behind. The
    mesh's rendezvous port tells engines apart, and an open segment needs no name.
    """
    if platform.device_type() != "cpu" or "MASTER_PORT" not in os.environ:
        yield
        return
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original, names = _CPUSHMDistributed.make_group_name, []

    def make_group_name(communicator) -> str:
        names.append(f"torchtitan_rl-{os.environ['MASTER_PORT']}{original(communicator).lstrip('/')}")
        return names[-1]

    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(original)
        for name in names:
            for segment in Path("/dev/shm").glob(f"{glob.escape(name)}*"):
                segment.unlink(missing_ok=True)


def adapt_torchtitan() -> None:
    """Corrects torchtitan's device type without a GPU: torchtitan settles on `"cuda"`, and each torchtitan module
    copies the name at import. The copies in imported modules become `"cpu"`.

    Also selects the `partial_dtensor` SPMD backend, which runs on gloo and on NCCL (see docs/architecture.md). Also
    falls back to torch's own FlashAttention where torchtitan's choice is not installed. Also gives torch the name
    `set_timeout`, by which torchtitan sets time limits of process groups.
    """
    import torch.distributed as dist
    import torchtitan.tools.utils as titan_utils

    if not hasattr(titan_utils.get_cuda_flash_attention_impl, "__wrapped__"):
        titan_utils.get_cuda_flash_attention_impl = _if_installed(titan_utils.get_cuda_flash_attention_impl)
    if not hasattr(dist, "set_timeout"):  # torchtitan 0.3 calls set_timeout; torch 2.13 has the private name only
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]

    if platform.device_type() == "cpu":
        modules: list[tuple[str, Any]] = list(sys.modules.items())
        for name, module in modules:
            if name.startswith("torchtitan.") and getattr(module, "device_type", "cpu") != "cpu":
                module.device_type = "cpu"
                if hasattr(module, "device_module"):
                    module.device_module = torch.cpu
        # torchtitan's router asks autocast for fp32, and a CPU warns; `model.experts.Gate` computes in fp32 anyway.
        warnings.filterwarnings("ignore", message="In CPU autocast", category=UserWarning)
    # FSDP warns that an in-place change of a view that a module returns would fail; this package changes none in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("partial_dtensor")


# Modules that torch imports to activate FA3 and FA4 (torch/nn/attention/_fa3.py, _fa4.py); neither torch nor vLLM
# brings these modules.
_FLASH_ATTENTION_MODULES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute.interface"}


def _if_installed(choose: Callable[[], str | None]) -> Callable[[], str | None]:
    """Wraps torchtitan's choice of FlashAttention by GPU (3 on Hopper, 4 on Blackwell). The wrapped function returns
    None, torch's own FlashAttention 2, when the module of the chosen version is missing."""

    @functools.wraps(choose)
    def installed() -> str | None:
        wanted = choose()
        if wanted is None:
            return None
        module = _FLASH_ATTENTION_MODULES[wanted]
        available = _can_import(module)
        _log_once(
            f"variable-length attention: {wanted} of {module}"
            if available
            else f"variable-length attention: torch's own FlashAttention 2 ({wanted} needs the module {module})"
        )
        return wanted if available else None

    return installed


def _can_import(module: str) -> bool:
    """Whether a module is installed. Imports the module's parent packages; a failing parent counts as missing."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


@functools.cache
def _log_once(message: str) -> None:
    logger.info("%s", message)


_FLA_NAMES = {
    "fla.modules.conv.triton.ops": ("CausalConv1dFunction",),
    "fla.ops.gated_delta_rule": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "fla.ops.gated_delta_rule.chunk": ("ChunkGatedDeltaRuleFunction",),
    "fla.ops.gated_delta_rule.fused_recurrent": ("FusedRecurrentFunction",),
}
"""Modules of the package `fla` (flash-linear-attention) that torchtitan's Qwen3.5 imports, and the names it takes."""


@contextmanager
def without_fla() -> Iterator[None]:
    """Lets torchtitan's Qwen3.5 be imported in this context where `fla` is not installed: `fla` is Triton kernels, and
    `families.delta_net` has kernels of its own in their place.

    The stand-ins leave `sys.modules` with the context, so that other packages still see that `fla` is missing."""
    if _can_import("fla"):
        yield
        return
    modules: dict[str, Any] = {}
    for name, members in _FLA_NAMES.items():
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            parent = ".".join(parts[:length])
            modules.setdefault(parent, types.ModuleType(parent))
        for member in members:  # torchtitan only registers and keeps them
            setattr(modules[name], member, type(member, (torch.autograd.Function,), {}))
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def configure_monarch() -> None:
    """Declares a process or host dead after 8 s of silence. Monarch's default is 30 s and more, and silence is
    sometimes the only sign of a death that Monarch gets. Log lines of this process stay without Monarch's prefix."""
    from monarch._src.actor import config
    from monarch.config import configure

    config.prefix_python_logs_with_actor = False
    configure(get_actor_state_max_idle="8s", get_proc_state_max_idle="8s")


def adapt_torchstore() -> None:
    """torchstore 0.1.2 mixes sync and async endpoints in one actor, which Monarch 0.7 refuses: make all async."""
    from monarch.actor import endpoint
    from torchstore.controller import Controller

    for name in ("get_controller_strategy", "locate_volumes", "notify_put", "notify_delete", "keys"):
        method = getattr(Controller, name)._method
        if not getattr(method, "_made_async", False):
            setattr(Controller, name, endpoint(_as_async(method)))


def _as_async(method):
    async def call(self, *args, **kwargs):
        return method(self, *args, **kwargs)

    call.__name__ = method.__name__
    call._made_async = True  # type: ignore[attr-defined]  # marks the method, so that no second call wraps it
    return call

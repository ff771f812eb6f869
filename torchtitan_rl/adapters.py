"""What other packages are told or given before this one can use them: torchtitan, vLLM, Monarch, TorchStore.

Environment variables, which are read while those packages are imported, are in `environment`. Each function here may be
called again, and imports its package itself: whoever imports a package for use calls its function there.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from torchtitan_rl import platform

__all__ = ["adapt_torchtitan", "adapt_torchstore", "configure_monarch", "prepare_vllm"]

logger = logging.getLogger(__name__)


def prepare_vllm(*, eager: bool) -> None:
    """Call before importing vLLM. On a CPU it would compile a helper of its sampler, which needs a C++ compiler on
    the machine and seconds at the first request, and does not make it faster."""
    if platform.device_type() == "cpu" and eager:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"


def adapt_torchtitan() -> None:
    """Without a GPU torchtitan would settle on `"cuda"`: modules of torchtitan's that are imported already, in whatever
    order, have copied that name and are given the right one.

    Also selects the `partial_dtensor` SPMD backend, the one that runs on gloo as well as on NCCL (see
    docs/architecture.md); leaves attention to torch's own FlashAttention where the one torchtitan wants is not
    installed; and gives torch the name by which torchtitan sets time limits of process groups.
    """
    import torch.distributed as dist
    import torchtitan.tools.utils as titan_utils

    if not hasattr(titan_utils.get_cuda_flash_attention_impl, "__wrapped__"):
        titan_utils.get_cuda_flash_attention_impl = _if_installed(titan_utils.get_cuda_flash_attention_impl)
    if not hasattr(dist, "set_timeout"):  # torchtitan 0.3 calls it so; torch 2.13 has it under its private name only
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]

    if platform.device_type() == "cpu":
        modules: list[tuple[str, Any]] = list(sys.modules.items())
        for name, module in modules:
            if name.startswith("torchtitan.") and getattr(module, "device_type", "cpu") != "cpu":
                module.device_type = "cpu"
                if hasattr(module, "device_module"):
                    module.device_module = torch.cpu
        # Of its router, once per process; ours computes in fp32 without it (model/experts.py).
        warnings.filterwarnings("ignore", message="In CPU autocast", category=UserWarning)
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("partial_dtensor")


# What torch imports to activate them (torch/nn/attention/_fa3.py and _fa4.py); neither comes with torch or vLLM.
_FLASH_ATTENTION_MODULES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute.interface"}


def _if_installed(choose: Callable[[], str | None]) -> Callable[[], str | None]:
    """torchtitan's choice of FlashAttention by GPU (3 on Hopper, 4 on Blackwell); None, torch's own FlashAttention 2,
    where the chosen one's module cannot be found."""

    @functools.wraps(choose)
    def installed() -> str | None:
        wanted = choose()
        if wanted is None:
            return None
        module = _FLASH_ATTENTION_MODULES[wanted]
        found = _can_import(module)
        _log_once(
            f"variable-length attention: {wanted} of {module}"
            if found
            else f"variable-length attention: torch's own FlashAttention 2 ({wanted} needs the module {module})"
        )
        return wanted if found else None

    return installed


def _can_import(module: str) -> bool:
    """Whether a module is there. Its parent packages are imported for it; one that cannot be counts as missing."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


@functools.cache
def _log_once(message: str) -> None:
    logger.info("%s", message)


def configure_monarch() -> None:
    """How long a process or host may be silent: 8 s. Monarch's default is 30 s and more, and now and then Monarch hears
    of a death no other way."""
    from monarch.config import configure

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
    call._made_async = True  # type: ignore[attr-defined]  # a mark, so that no method is wrapped twice
    return call

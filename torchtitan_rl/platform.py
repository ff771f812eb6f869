"""CPU or CUDA: every choice that depends on the device, and the only file that adapts torchtitan to a CPU."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any, Literal

import torch

__all__ = [
    "device_type",
    "local_device",
    "distributed_backend",
    "attention_backend",
    "can_sleep",
    "has_float8",
    "grouped_mm_multiple",
    "missing_grouped_mm",
    "prepare_vllm",
    "adapt_torchtitan",
    "adapt_parallel_model",
    "set_threads",
    "num_cores",
    "to_device",
]

_set_num_threads = torch.set_num_threads  # vLLM's CPU worker replaces it by a no-op


def device_type() -> Literal["cpu", "cuda"]:
    return "cuda" if torch.cuda.is_available() else "cpu"


def local_device(local_rank: int) -> torch.device:
    """This process's device; on CUDA it also becomes the current one."""
    if device_type() == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def distributed_backend() -> str:
    return "nccl" if device_type() == "cuda" else "gloo"


def attention_backend(compute_dtype: str) -> Literal["sdpa", "varlen"]:
    """Training attention over packed documents: FlashAttention's variable-length kernel exists on CUDA only, and
    torchtitan gives it bfloat16 whatever the model computes in."""
    return "varlen" if device_type() == "cuda" and compute_dtype == "bfloat16" else "sdpa"


def can_sleep() -> bool:
    """Whether vLLM can take weights and KV cache off the device; on a CPU it only warns."""
    return device_type() == "cuda"


def has_float8() -> bool:
    """Whether this device multiplies 8-bit floats: NVIDIA from compute capability 8.9, AMD from gfx94x."""
    if device_type() == "cpu":
        return False
    return torch.cuda.get_device_capability() >= ((8, 9) if torch.version.hip is None else (9, 4))


def grouped_mm_multiple(dtype: str) -> int:
    """Rows of the experts' matrices must be a multiple of this: the kernel wants strides of 16 bytes."""
    return 16 // getattr(torch, dtype).itemsize


def missing_grouped_mm(dtype: str) -> str:
    """Why experts cannot be multiplied on this machine; empty when they can.

    A CPU is asked to do it, forward and backward. A GPU is judged by its compute capability: a kernel would leave
    memory allocated on it for as long as this process lives, which needs none.
    """
    if device_type() == "cuda":
        capability = torch.cuda.get_device_capability()
        if capability >= (8, 0):
            return ""
        return (
            "experts need torch's grouped matrix product, and "
            f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}, less than 8.0"
        )
    size = grouped_mm_multiple(dtype)
    rows = torch.ones(3, size, dtype=getattr(torch, dtype), requires_grad=True)
    weight = torch.ones(2, size, size, dtype=getattr(torch, dtype), requires_grad=True)
    try:
        out = torch._grouped_mm(rows, weight.transpose(-2, -1), offs=torch.tensor([1, 3], dtype=torch.int32))
        out.square().sum().backward()
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        return (
            "experts need torch's grouped matrix product, "
            f"which torch {torch.__version__} refuses on this CPU ({reason})"
        )
    return ""


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def set_threads(num_threads: int) -> int:
    """Threads of this process's CPU operators; 0 means every core it may use. Returns the number set."""
    num_threads = num_threads or num_cores()
    _set_num_threads(num_threads)
    return num_threads


def prepare_vllm(*, eager: bool) -> None:
    """Call before importing vLLM. On a CPU it would compile a helper of its sampler, which needs a C++ compiler on
    the machine and seconds at the first request, and does not make it faster."""
    if device_type() == "cpu" and eager:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"


def adapt_torchtitan() -> None:
    """Call before importing anything else of torchtitan: without a GPU it would settle on `"cuda"`.

    Also selects the `partial_dtensor` SPMD backend, the one that runs on gloo as well as on NCCL (see
    docs/architecture.md).
    """

    if device_type() == "cpu":
        # A converter in the config may have imported modules of torchtitan's, which have copied the names by now.
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


def adapt_parallel_model(model: torch.nn.Module) -> None:
    """After `parallelize`: gloo has no pre-multiplied sum, so FSDP must reduce with a plain one. And attention on a CPU
    depends on how documents fall into buckets: torchtitan's whole-block compile would give up at the ninth pattern."""
    from torch._dynamo import config as dynamo
    from torch.distributed.fsdp import FSDPModule

    if device_type() == "cpu":
        dynamo.recompile_limit = dynamo.accumulated_recompile_limit = 2**16
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def to_device(tensors, device: torch.device):
    """Tensors of a nested dict, moved; a no-op on CPU."""
    if isinstance(tensors, dict):
        return {name: to_device(value, device) for name, value in tensors.items()}
    return tensors.to(device, non_blocking=True)

"""CPU or CUDA: every choice that depends on the device."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Literal, TypeVar

import torch

__all__ = [
    "device_type",
    "local_device",
    "distributed_backend",
    "attention_backend",
    "attends_in_float32",
    "can_sleep",
    "can_cut_prompts",
    "head_dims",
    "packs_matrices",
    "multiplies_by_onednn",
    "missing_compiler",
    "has_float8",
    "grouped_mm_multiple",
    "missing_grouped_mm",
    "experts_ask_the_host",
    "logprob_chunk_bytes",
    "microbatch_tokens",
    "has_logprob_kernels",
    "has_fused_layers",
    "adapt_parallel_model",
    "set_threads",
    "in_threads",
    "one_thread",
    "num_cores",
    "pin",
    "pin_new",
    "unpin",
    "wait_for_copies",
]

logger = logging.getLogger(__name__)

_set_num_threads = torch.set_num_threads  # vLLM's CPU worker replaces torch.set_num_threads by a no-op


_own_device: torch.device | None = None
"""What `local_device` has chosen on CUDA."""


def device_type() -> Literal["cpu", "cuda"]:
    return "cuda" if torch.cuda.is_available() else "cpu"


def local_device(local_rank: int) -> torch.device:
    """This process's device; on CUDA also makes the device current."""
    if device_type() == "cpu":
        return torch.device("cpu")
    global _own_device
    _own_device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(_own_device)
    return _own_device


def distributed_backend() -> str:
    return "nccl" if device_type() == "cuda" else "gloo"


def attention_backend(compute_dtype: str) -> Literal["sdpa", "varlen"]:
    """Training attention over packed documents. FlashAttention's variable-length kernel exists on CUDA only, and
    torchtitan casts the kernel's inputs to bfloat16 whatever the model's compute dtype."""
    return "varlen" if device_type() == "cuda" and compute_dtype == "bfloat16" else "sdpa"


def attends_in_float32(query: torch.Tensor) -> bool:
    """Whether `sdpa` gets float32 in the place of bfloat16: on a CPU. On an AMD EPYC torch's backward pass takes three
    times as long in bfloat16."""
    return query.device.type == "cpu" and query.dtype == torch.bfloat16


def can_sleep() -> bool:
    """Whether vLLM can free weights and KV cache on the device; on a CPU vLLM only warns."""
    return device_type() == "cuda"


def can_cut_prompts() -> bool:
    """Whether one iteration of vLLM's engine may compute a part of a seeded prompt. vLLM then sets the request's random
    generator back, and torch's generators on a CPU cannot be set back: the engine would end."""
    return device_type() == "cuda"


def head_dims() -> tuple[int, ...]:
    """The head sizes that vLLM's attention computes on this device; empty where vLLM itself says which in time."""
    return () if device_type() == "cuda" else (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def cache_block_size() -> int:
    """Tokens of a block of vLLM's KV cache where nobody asks for another size."""
    return 16 if device_type() == "cuda" else 128


def packs_matrices(dtype: torch.dtype) -> bool:
    """Whether a generator multiplies by packed copies of its matrices: on a CPU a product of a few rows takes oneDNN a
    half to a quarter of the time then. The copies take as much memory as the matrices. oneDNN multiplies matrices of
    bfloat16 on processors with AVX-512 (or Arm's instructions for it) alone."""
    if device_type() != "cpu":
        return False
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def multiplies_by_onednn(matrix: torch.Tensor) -> bool:
    """Whether a trainer multiplies this matrix by oneDNN where torch would not: float32, on an x86 processor with
    AVX-512 that is not Intel's. MKL, torch's choice, takes twice the time on an AMD EPYC, as if it used AVX2 alone.
    oneDNN refuses a matrix without elements."""
    is_float32_here = matrix.dtype == torch.float32 and matrix.device.type == "cpu"
    return is_float32_here and matrix.numel() > 0 and _MKL_LEAVES_AVX512


def _mkl_leaves_avx512(cpuinfo: Path) -> bool:
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available() and cpuinfo.exists()):
        return False
    vendor_is_intel = "GenuineIntel" in cpuinfo.read_text(encoding="utf-8")
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not vendor_is_intel


_MKL_LEAVES_AVX512 = _mkl_leaves_avx512(Path("/proc/cpuinfo"))  # no call: torch's compiler looks into those


def missing_compiler() -> str:
    """Why torch cannot compile a model for this device; empty when it can. For a CPU torch writes C++."""
    names = tuple(filter(None, (os.environ.get("CXX"), "g++", "clang++")))
    if device_type() == "cuda" or any(map(shutil.which, names)):
        return ""
    return f"torch compiles for a CPU with a C++ compiler, and PATH has none of {', '.join(names)}"


def has_float8() -> bool:
    """Whether this device multiplies 8-bit floats: NVIDIA from compute capability 8.9, AMD from gfx94x."""
    if device_type() == "cpu":
        return False
    return torch.cuda.get_device_capability() >= ((8, 9) if torch.version.hip is None else (9, 4))


def grouped_mm_multiple(dtype: str) -> int:
    """The row length of the experts' matrices must be a multiple of this number: the kernel needs strides of 16
    bytes."""
    return 16 // getattr(torch, dtype).itemsize


def missing_grouped_mm(dtype: str) -> str:
    """Why this machine cannot multiply experts' matrices; empty when the machine can.

    On a CPU the check runs a small product, forward and backward. On a GPU the check reads the compute capability: a
    kernel would keep GPU memory allocated for the life of this process, which otherwise needs none.
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
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return (
            "experts need torch's grouped matrix product, "
            f"which torch {torch.__version__} refuses on this CPU ({reason})"
        )
    return ""


def experts_ask_the_host(dtype: str) -> bool:
    """Whether torch's grouped matrix product reads each expert's number of rows on the host, which no CUDA graph can
    capture. On CUDA only CUTLASS's kernel, for bfloat16 on Hopper and Blackwell, does without the read."""
    if device_type() == "cpu":
        return False
    return dtype != "bfloat16" or torch.cuda.get_device_capability()[0] not in (9, 10)


def logprob_chunk_bytes(mib: int, device: str | None = None) -> int:
    """Bytes of float32 logits in one chunk for a `logprob_chunk_mib`; 0 MiB stands for the default of `device`
    (`"cpu"` or `"cuda"`; None: this machine's device)."""
    return (mib or (2048 if (device or device_type()) == "cuda" else 128)) * 2**20


def microbatch_tokens(tokens: int, device: str | None = None) -> int:
    """Tokens of a microbatch at most for a `max_tokens_per_microbatch`; 0 stands for the default of `device` (`"cpu"`
    or `"cuda"`; None: this machine's device)."""
    return tokens or (8192 if (device or device_type()) == "cuda" else 4096)


def has_logprob_kernels(hidden: torch.Tensor) -> bool:
    """Whether Triton kernels compute the log-probabilities of these hidden states. They compute in float32, so hidden
    states in float64 are left to torch's operators, as is everything on a CPU."""
    return _is_of_cuda_kernels(hidden)


def has_fused_layers(hidden: torch.Tensor) -> bool:
    """Whether a generator's layers of these hidden states go by the kernels that CUDA has and a CPU has not."""
    return _is_of_cuda_kernels(hidden)


def _is_of_cuda_kernels(hidden: torch.Tensor) -> bool:
    return hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16, torch.float32)


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def set_threads(num_threads: int) -> int:
    """Sets the threads of this process's CPU operators; 0 means every core the process may use. Returns the number."""
    num_threads = num_threads or num_cores()
    _set_num_threads(num_threads)
    return num_threads


@contextmanager
def one_thread() -> Iterator[None]:
    """The block's CPU operators use the calling thread alone."""
    num_threads = torch.get_num_threads()
    _set_num_threads(1)
    try:
        yield
    finally:
        _set_num_threads(num_threads)


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_workers: ThreadPoolExecutor | None = None


def in_threads(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """`function` of every item, in order, by as many threads as CPU operators have here. An operator that one of them
    calls uses that thread alone. For work that releases the interpreter's lock: copies, checksums, operators. One item
    alone needs no thread."""
    if len(items) == 1:
        return [function(items[0])]
    results: list = [None] * len(items)
    left, inference = iter(enumerate(items)), torch.is_inference_mode_enabled()

    def work() -> None:
        with torch.inference_mode(inference):
            for index, item in left:
                results[index] = function(item)

    global _workers
    if _workers is None:
        _workers = ThreadPoolExecutor(num_cores(), "worker", _one_thread)
    num_threads = torch.get_num_threads()
    try:
        futures = [_workers.submit(work) for _ in range(min(num_threads, len(items)))]
        wait(futures)  # also when one fails: the others write to what the caller would give back
        for future in futures:
            future.result()
    finally:
        _set_num_threads(num_threads)  # of threads that begin later: a worker has set it to 1
    return results


def _one_thread() -> None:
    torch.get_num_threads()  # a thread's first call gives it the number that is set for all
    _set_num_threads(1)


def adapt_parallel_model(model: torch.nn.Module) -> None:
    """Adapts a model to its device after `parallelize`.

    Scaled-dot-product attention compiles once per pattern of buckets, and torchtitan's whole-block compile would give
    up at the ninth pattern. On a CPU gloo has no pre-multiplied sum, so FSDP must reduce with a plain sum."""
    from torch._dynamo import config as dynamo
    from torch.distributed.fsdp import FSDPModule

    dynamo.recompile_limit = dynamo.accumulated_recompile_limit = 2**16
    if device_type() == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def pin(buffer: torch.Tensor) -> None:
    """Pins the pages of a host buffer for CUDA, so that copies need no intermediate buffer and run asynchronously.
    Without CUDA does nothing. When CUDA refuses, logs a warning: copies stay correct and are slower."""
    if device_type() == "cpu" or not buffer.numel():
        return
    with _on_own_device():
        error = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, _PORTABLE))
    if error:
        _forget_error()
        logger.warning(
            "host memory of %d bytes: could not be pinned (cudaError %d); its copies will take longer",
            buffer.nbytes,
            error,
        )
    else:
        _pinned.add(buffer.data_ptr())


def pin_new(buffer: torch.Tensor) -> None:
    """Pins a buffer that nobody has written to, and sets it to 0. Without CUDA does nothing.

    All threads touch its pages first: on an H100 CUDA pinned pages that are there at 14 GB/s, and new ones, which the
    system clears one by one, at 1.8."""
    if device_type() == "cpu":
        return
    buffer.zero_()
    pin(buffer)


def unpin(buffer: torch.Tensor) -> None:
    """Undoes `pin` and `pin_new`; call before the buffer's memory is freed."""
    if buffer.data_ptr() in _pinned:
        _pinned.remove(buffer.data_ptr())
        with _on_own_device():
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())


def _on_own_device() -> AbstractContextManager:
    """CUDA's current device belongs to a thread: a thread that has not chosen makes a context on the first GPU, which
    costs that GPU half a GB for each process of the host."""
    return nullcontext() if _own_device is None else torch.cuda.device(_own_device)


def _forget_error() -> None:
    """Clears CUDA's last error of this thread, which the next launch of a kernel would report as its own. torch does
    not offer the call."""
    major = (torch.version.cuda or "").partition(".")[0]
    with suppress(OSError, AttributeError):
        ctypes.CDLL(f"libcudart.so.{major}").cudaGetLastError()


def wait_for_copies() -> None:
    """Waits for the copies to host memory that this thread began. Without CUDA no copy outlasts its call."""
    if device_type() == "cuda":
        torch.cuda.current_stream().synchronize()


_PORTABLE = 1  # cudaHostRegisterPortable: for every device of this process
_pinned: set[int] = set()  # addresses

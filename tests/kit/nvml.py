"""A stand-in for the module `pynvml`, which cannot answer where there is no driver."""

from types import ModuleType, SimpleNamespace

import torch

from torchtitan_rl.launch import gpus

GIB = 2**30


class NVMLError(Exception):
    pass


def gpu(total=80, free=80, name="NVIDIA H100 80GB HBM3", uuid="GPU-aaaa-0000", processes=()):
    """One GPU, GiB; `processes`: (pid, bytes or None)."""
    return SimpleNamespace(total=total * GIB, free=free * GIB, name=name, uuid=uuid, processes=list(processes))


def fake_nvml(devices, *, driver="580.65.06", cuda=13000, init_error=None):
    """The functions of `pynvml` that are asked; strings are bytes, as in older versions of it."""
    module = ModuleType("pynvml")
    module.NVMLError = NVMLError
    module.running = 0

    def init():
        if init_error is not None:
            raise NVMLError(init_error)
        module.running += 1

    def shutdown():
        module.running -= 1

    def by_uuid(uuid):
        return next(gpu for gpu in devices if gpu.uuid == uuid)

    def processes(handle):
        if handle.uuid.startswith("MIG-"):
            raise NVMLError("Not Supported")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in handle.processes]

    module.nvmlInit, module.nvmlShutdown = init, shutdown
    module.nvmlSystemGetDriverVersion = lambda: driver.encode()
    module.nvmlSystemGetCudaDriverVersion_v2 = lambda: cuda
    module.nvmlDeviceGetCount = lambda: len([gpu for gpu in devices if gpu.uuid.startswith("GPU-")])
    module.nvmlDeviceGetHandleByIndex = lambda index: devices[index]
    module.nvmlDeviceGetHandleByUUID = by_uuid
    module.nvmlDeviceGetUUID = lambda handle: handle.uuid.encode()
    module.nvmlDeviceGetName = lambda handle: handle.name.encode()
    module.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(
        total=handle.total, free=handle.free, used=handle.total - handle.free
    )
    module.nvmlDeviceGetComputeRunningProcesses = processes
    return module


def pretend_cuda_build(monkeypatch) -> None:
    """Makes torch a CUDA build, and the environment that of the extra `cuda`."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(gpus, "_has_cpu_engine", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

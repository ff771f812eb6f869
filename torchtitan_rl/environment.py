"""What a process has in its environment before it imports torch, Monarch or vLLM, which read it as they are imported.

`import torchtitan_rl` comes here first, whichever of the package's modules is wanted, so the order of imports does not
matter. Children inherit the environment; a process that another host's worker starts is sent it. What the user has set
stays. Nothing here imports anything heavy, or asks a GPU anything.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["has_nvidia_driver", "default_environment", "prepare_environment"]

_DEFAULTS = {
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",  # notice a dead process within a second
    "HYPERACTOR_CODEC_MAX_FRAME_LENGTH": "910737418240",  # TorchStore sets it too, too late for a host's worker
    # Asking whether there is a GPU must not start the driver: it would fix the visible devices too early.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the generator's process
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TOKENIZERS_PARALLELISM": "false",
}


def has_nvidia_driver() -> bool:
    """Whether this machine has one, asked without waking it."""
    return Path("/proc/driver/nvidia/version").exists()


def default_environment() -> dict[str, str]:
    """What every process of a run has in its environment, unless the user has set it."""
    if has_nvidia_driver():
        return _DEFAULTS | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # NVML's: a GPU's number means the same one to both
    # Without a GPU processes share the cores; a thread that spins while it waits for work takes them from the others.
    return _DEFAULTS | {"OMP_WAIT_POLICY": "passive"}


def prepare_environment() -> None:
    """Sets what the user has not set, for this process and its children; and OMP_DYNAMIC, whatever the user has set:
    with it libgomp starts fewer threads on a busy host, and one seed would not give the same bytes."""
    for name, value in default_environment().items():
        os.environ.setdefault(name, value)
    os.environ["OMP_DYNAMIC"] = "false"

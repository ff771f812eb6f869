"""What nvidia-smi and data sheets say of the GPUs of this machine."""

from __future__ import annotations

import subprocess
import threading
from typing import Any

__all__ = ["gpus", "process_memory", "PeakMemory", "peak_bf16_flops"]

# Dense bfloat16 FLOP/s from NVIDIA's data sheets, half of the figures with sparsity. The first name that is part of
# the device's name counts.
_PEAK_BF16 = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
}
_FIELDS = ("name", "driver_version", "compute_cap", "memory.total", "memory.used")


def _query(kind: str, fields: tuple[str, ...]) -> list[list[str]]:
    """Rows of `nvidia-smi --query-WHAT`; none where there is no driver."""
    command = ["nvidia-smi", f"--query-{kind}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def gpus() -> list[dict[str, str]]:
    """Name, driver, compute capability and memory (MiB) of every GPU, `CUDA_VISIBLE_DEVICES` or not."""
    return [dict(zip(_FIELDS, row, strict=True)) for row in _query("gpu", _FIELDS)]


def process_memory() -> dict[int, int]:
    """MiB of device memory by process id, summed over GPUs. A container may hide process ids: then it is empty or
    names ids of the host."""
    used_mib: dict[int, int] = {}
    for pid, used in _query("compute-apps", ("pid", "used_memory")):
        if pid.isdigit() and used.isdigit():
            used_mib[int(pid)] = used_mib.get(int(pid), 0) + int(used)
    return used_mib


class PeakMemory:
    """Asks nvidia-smi twice a second while its block runs: `device`, the most MiB in use on all GPUs together, whoever
    uses them, and `processes`, the most of each process id."""

    def __init__(self) -> None:
        self.device, self.processes = 0, {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            used = [gpu["memory.used"] for gpu in gpus()]  # `[N/A]` where a GPU does not say
            self.device = max(self.device, sum(int(mib) for mib in used if mib.isdigit()))
            for pid, mib in process_memory().items():
                self.processes[pid] = max(self.processes.get(pid, 0), mib)
            if self._end.wait(0.5):
                return


def peak_bf16_flops(name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU by its name; None for one that is not in the table."""
    return next((peak for part, peak in _PEAK_BF16.items() if part in name), None)

"""A stated model of hosts with GPUs: peaks by data sheets, and the share of each peak that a run is taken to reach."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Hardware", "GPUS", "REACHED"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One kind of GPU, and the networks of a host with such GPUs.

    Bandwidths are in 10^9 bytes per second, in one direction."""

    name: str
    memory_gib: float
    """What torch says a GPU has, in GiB of 2^30 bytes."""
    bfloat16_tflops: float
    """Dense matrix products in bfloat16, in 10^12 operations per second."""
    float32_tflops: float
    """The same in float32, without TF32."""
    hbm_gb_s: float
    """Bandwidth of a GPU's own memory."""
    within_gb_s: float
    """Bandwidth of one GPU to the other GPUs of its host."""
    between_gb_s: float
    """Bandwidth of one host to the other hosts, all of its network cards together."""


GPUS = {
    "a100": Hardware(
        name="A100 80 GB",
        memory_gib=79.2,
        bfloat16_tflops=312.0,
        float32_tflops=19.5,
        hbm_gb_s=2039.0,
        within_gb_s=300.0,
        between_gb_s=200.0,
    ),
    "h100": Hardware(
        name="H100 80 GB",
        memory_gib=79.1,
        bfloat16_tflops=989.0,
        float32_tflops=67.0,
        hbm_gb_s=3350.0,
        within_gb_s=450.0,
        between_gb_s=400.0,
    ),
    "h200": Hardware(
        name="H200 141 GB",
        memory_gib=139.8,
        bfloat16_tflops=989.0,
        float32_tflops=67.0,
        hbm_gb_s=4800.0,
        within_gb_s=450.0,
        between_gb_s=400.0,
    ),
}
"""NVIDIA's data sheets of the SXM modules: dense products, no sparsity, half of NVLink's bandwidth for one direction.
`between_gb_s` is a DGX with a network card per GPU: 8 x 200 Gbit/s (A100), 8 x 400 Gbit/s (H100, H200)."""

REACHED = {"compute": 0.4, "memory": 0.7, "network": 0.7}
"""Share of each peak that the estimate of time takes a run to reach. Assumed, not measured."""

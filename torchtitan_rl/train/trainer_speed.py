"""How fast the policy's trainer computes: tokens per second of each device, and model FLOPs utilisation (MFU).

MFU is the share of a device's peak that the model's own operations reach (Chowdhery et al., 2022, arXiv:2204.02311,
section 4.1). It is known where torchtitan knows the peak of the device: for GPUs in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.families import DecoderShape
from torchtitan_rl.model.flops import training_flops
from torchtitan_rl.model.shape import resolve_shape

__all__ = ["TrainerSpeed", "peak_flops"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSpeed:
    """What the metrics `perf/*` of a run need to know of its policy's trainer."""

    shape: DecoderShape
    num_devices: int
    """Ranks of the trainer; each has a device of its own, or a share of a CPU host's cores."""
    peak_flops: float | None
    """Operations per second of one device in the trainer's compute dtype; None: not known."""
    adapters: bool = False
    """Whether only low-rank adapters train."""

    @classmethod
    def of(cls, config: RunConfig, device_name: str) -> TrainerSpeed:
        """`device_name`: of the trainer's GPUs; "" on a CPU."""
        trainer = config.trainer
        in_bfloat16 = trainer.training.mixed_precision_param == "bfloat16"
        return cls(
            shape=resolve_shape(config.model),
            num_devices=trainer.num_ranks,
            peak_flops=peak_flops(device_name) if in_bfloat16 else None,
            adapters=trainer.lora is not None,
        )

    def metrics(self, lengths: Sequence[int], seconds: float) -> dict[str, float]:
        """Of sequences of these lengths, prompts included, that took `seconds` to train on: passes and optimizer
        steps."""
        per_device = self.num_devices * seconds
        line = {"perf/tokens_per_second_per_device": sum(lengths) / per_device}
        if self.peak_flops is not None:
            flops = training_flops(self.shape, lengths, adapters=self.adapters)
            line["perf/mfu"] = flops / per_device / self.peak_flops
        return line


def peak_flops(device_name: str) -> float | None:
    """torchtitan's figure for dense products in bfloat16; None for a CPU, and for a GPU that torchtitan does not know,
    for which it would give the A100's, and for a part of a GPU (MIG)."""
    if not device_name or "MIG" in device_name:
        return None
    from torchtitan.tools.utils import get_peak_flops

    peak = get_peak_flops(device_name)
    return None if peak == get_peak_flops("A100") and "A100" not in device_name else peak

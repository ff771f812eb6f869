"""One role's optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_rl.types import OptimStepOutput

__all__ = ["RoleStep"]


@dataclass(frozen=True, slots=True)
class RoleStep:
    """What `forward_backward` and `optim_step` of one role returned."""

    optim: OptimStepOutput
    loss: float

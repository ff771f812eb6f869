"""One role's optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_rl.types import OptimStepOutput

__all__ = ["RoleStep"]


@dataclass(frozen=True, slots=True)
class RoleStep:
    """The answer of one role's `optim_step`, and the loss of its `forward_backward`."""

    optim: OptimStepOutput
    loss: float

"""Refuses to draw rollouts that train from another distribution than the policy's, before a token is spent."""

from __future__ import annotations

from torchtitan_rl.types import SamplingParams
from torchtitan_rl.types.sampling import NEUTRAL

__all__ = ["AlteredForTraining", "refuse_altered"]


class AlteredForTraining(ValueError):
    """A workflow asked for a completion that could not train."""


def refuse_altered(params: SamplingParams) -> None:
    """Raises AlteredForTraining for a setting that alters the policy's distribution."""
    for name, off in NEUTRAL.items():
        if (value := getattr(params, name)) not in off:
            raise AlteredForTraining(
                f"policy.complete({name}={value}): this rollout is to train, and its log-probabilities would not be "
                f"those of the policy; leave {name} out where policy.for_training is True"
            )

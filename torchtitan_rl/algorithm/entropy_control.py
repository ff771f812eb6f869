"""A coefficient of the entropy bonus that goes up and down to hold the policy's entropy at a target.

The adaptive entropy control of Skywork-OR1 (He et al., arXiv:2505.22312, section 3.2), by the entropy of the batch
before, as in TRL.
"""

from __future__ import annotations

from torchtitan_rl.config.algorithm import EntropyControlConfig

__all__ = ["bonus_factor", "adapted_coef"]


def adapted_coef(coef: float, entropy: float, control: EntropyControlConfig) -> float:
    """The coefficient after a batch with this mean entropy of a trained token, in nats: `coef` + step where the entropy
    is at most the target, else `coef` - step, held within the bounds."""
    change = control.step if entropy <= control.target else -control.step
    return max(control.min_coef, min(control.max_coef, coef + change))


def bonus_factor(coef: float, entropy: float | None, control: EntropyControlConfig) -> float:
    """The factor of the bonus in the batch after one with this mean entropy: `coef`, or 0 where the entropy was above
    the target. None: there was no batch yet, and `coef` acts."""
    return coef if entropy is None or entropy <= control.target else 0.0

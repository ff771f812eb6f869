"""Estimators of advantages by the role of a rollout."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from torchtitan_rl.config.algorithm import AlgorithmConfig

__all__ = ["estimator_for"]


def estimator_for(config: AlgorithmConfig, role: str) -> Callable:
    """The estimator for rollouts of `role`. Raises ValueError when `advantage_fn` names roles, but not `role`."""
    chosen = config.advantage_fn
    if not isinstance(chosen, dict):
        return chosen
    if role not in chosen:
        near = difflib.get_close_matches(role, chosen, 1)
        hint = f"did you mean {near[0]!r}, or add it" if near else "add it"
        raise ValueError(
            f"algorithm.advantage_fn: has no estimator for role {role!r}, only for {', '.join(chosen)}; {hint}"
        )
    return chosen[role]

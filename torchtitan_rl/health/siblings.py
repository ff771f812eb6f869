"""Whether the rewards of siblings are what a run trains on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

__all__ = ["compares_siblings", "recorded_compares_siblings"]


def compares_siblings(config: Any) -> bool:
    """Whether what trains is the advantage that an estimator gives to the rewards of siblings. `config` is a
    `RunConfig`, or has its fields as attributes."""
    algorithm = config.algorithm
    extended = (algorithm.workflow, algorithm.after_rewards, algorithm.trajectory_grouping_hook, config.roles.critic)
    rewarded = algorithm.distill is None or algorithm.distill.rewards
    by_estimator = algorithm.precomputed_advantages != "require"
    return config.controller.num_steps > 0 and rewarded and by_estimator and all(part is None for part in extended)


def recorded_compares_siblings(settings: dict[str, Any]) -> bool:
    """`compares_siblings` of a config.json; True where the file lacks a field."""
    try:
        return compares_siblings(_as_object(settings))
    except AttributeError:
        return True


def _as_object(value: Any) -> Any:
    if isinstance(value, dict):
        return SimpleNamespace(**{name: _as_object(item) for name, item in value.items()})
    return value

"""Checks of the settings for checkpoints, time limits and failed rollouts."""

from __future__ import annotations

from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.config.run import ControllerConfig

__all__ = ["check_checkpoints", "check_failures"]


def check_checkpoints(config: ControllerConfig) -> None:
    """Raises ValueError for settings under which checkpoints would not be written or kept as they say."""
    for name in ("checkpoint_every", "keep_every", "max_hours"):
        if not 0 <= (value := getattr(config, name)) < float("inf"):
            raise ValueError(f"controller.{name}={value}: must not be negative; use 0 to switch it off")
    if config.keep_last == 0 or config.keep_last < -1:
        raise ValueError(
            f"controller.keep_last={config.keep_last}: would delete the checkpoint to resume from; use 1 or more, or "
            "-1 to keep all"
        )
    if config.keep_every and (not config.checkpoint_every or config.keep_every % config.checkpoint_every):
        raise ValueError(
            f"controller.keep_every={config.keep_every}: is no multiple of controller.checkpoint_every="
            f"{config.checkpoint_every}, so no checkpoint is written after those steps; use a multiple"
        )
    evaluations = ("validation", *config.eval_sets)
    if config.keep_best and config.keep_best not in evaluations:
        raise ValueError(
            f"controller.keep_best={config.keep_best!r}: is no evaluation of this run; use one of "
            f"{', '.join(evaluations)}"
        )
    if config.keep_best and not (config.eval_every and config.checkpoint_every):
        raise ValueError(
            f"controller.keep_best={config.keep_best!r}: needs evaluations and checkpoints during the run; set "
            "controller.eval_every and controller.checkpoint_every"
        )
    if config.checkpoint_export not in ("last", "all", "none"):
        raise ValueError(
            f"controller.checkpoint_export={config.checkpoint_export!r}: is not known; use 'last', 'all' or 'none'"
        )


def check_failures(config: AlgorithmConfig) -> None:
    """Raises ValueError for settings about failed rollouts that are out of range or have no effect."""
    if config.on_rollout_failure not in ("fail", "retry", "drop_group"):
        raise ValueError(
            f"algorithm.on_rollout_failure={config.on_rollout_failure!r}: is not known; use 'fail', 'retry' or "
            "'drop_group'"
        )
    if config.on_rollout_failure == "retry" and config.rollout_retries < 1:
        raise ValueError(
            f"algorithm.rollout_retries={config.rollout_retries}: retries nothing; use 1 or more, or "
            "on_rollout_failure='drop_group'"
        )
    if not 0 < config.max_failed_frac <= 1:
        raise ValueError(
            f"algorithm.max_failed_frac={config.max_failed_frac}: must be above 0 and at most 1; use 1 for no limit"
        )

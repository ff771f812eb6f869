"""Checks of a run's `controller` section: checkpoints, further evaluations, rules that end the run early."""

from __future__ import annotations

import math

from torchtitan_rl.config.run import ControllerConfig
from torchtitan_rl.config.stopping import StopConfig
from torchtitan_rl.types import MIN_TEMPERATURE

__all__ = ["check_checkpoints", "check_evaluations", "check_stop"]


def check_checkpoints(config: ControllerConfig) -> None:
    """Raises ValueError for settings under which checkpoints would not be written or kept as they say."""
    if config.keep_every and (not config.checkpoint_every or config.keep_every % config.checkpoint_every):
        raise ValueError(
            f"controller.keep_every={config.keep_every}: is no multiple of controller.checkpoint_every="
            f"{config.checkpoint_every}, so no checkpoint is written after those steps; use a multiple"
        )
    if config.keep_best:
        _check_evaluation("controller.keep_best", config.keep_best, config)
    if config.keep_best and not (config.eval_every and config.checkpoint_every):
        raise ValueError(
            f"controller.keep_best={config.keep_best!r}: needs evaluations and checkpoints during the run; set "
            "controller.eval_every and controller.checkpoint_every"
        )


def check_evaluations(config: ControllerConfig) -> None:
    """Raises ValueError for an evaluation set with a name of the run's own evaluations, or with settings that
    contradict each other."""
    for name, eval_set in config.eval_sets.items():
        where = f"controller.eval_sets.{name}"
        if name in ("validation", "test") or not name.isidentifier():
            raise ValueError(
                f"{where}: the run's own evaluations are validation and test, and overrides contain the name; "
                "use another Python identifier"
            )
        if eval_set.pass_at_k > eval_set.num_samples:
            raise ValueError(
                f"{where}.pass_at_k={eval_set.pass_at_k}: must be between 0 and num_samples={eval_set.num_samples}"
            )
        if eval_set.num_samples and eval_set.temperature == math.inf:
            raise ValueError(f"{where}.temperature=inf: must be finite; use 1 for the policy's own distribution")
        if eval_set.num_samples and not eval_set.temperature >= MIN_TEMPERATURE:
            raise ValueError(
                f"{where}.temperature={eval_set.temperature}: samples of one task would all be the same; use "
                f"{MIN_TEMPERATURE} or more"
            )


def check_stop(controller: ControllerConfig) -> None:
    """Raises ValueError for a rule that can never hold or has no effect."""
    stop = controller.stop
    _check_evaluation("controller.stop.evaluation", stop.evaluation, controller)
    for name in ("target_accuracy", "patience"):
        if (value := getattr(stop, name)) and not controller.eval_every:
            raise ValueError(
                f"controller.stop.{name}={value}: there is no evaluation between steps; set controller.eval_every"
            )
    _check_effect(stop)


def _check_evaluation(where: str, name: str, controller: ControllerConfig) -> None:
    names = controller.evaluation_names
    if name not in names:
        raise ValueError(f"{where}={name!r}: is no evaluation of this run; use one of {', '.join(names)}")


def _check_effect(stop: StopConfig) -> None:
    if stop.min_improvement and not stop.patience:
        raise ValueError(
            f"controller.stop.min_improvement={stop.min_improvement}: acts only with patience; set "
            "controller.stop.patience, or leave it 0"
        )
    if stop.evaluation != "validation" and not (stop.target_accuracy or stop.patience):
        raise ValueError(
            f"controller.stop.evaluation={stop.evaluation!r}: no rule looks at it; set controller.stop.target_accuracy "
            "or controller.stop.patience"
        )

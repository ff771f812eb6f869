"""Checks of the rules that end a run before its last step."""

from __future__ import annotations

from torchtitan_rl.config.run import ControllerConfig
from torchtitan_rl.config.stopping import StopConfig

__all__ = ["check_stop"]


def check_stop(controller: ControllerConfig) -> None:
    """Raises ValueError for a rule that is out of range or can never hold."""
    stop = controller.stop
    for name, good, must in (
        ("target_accuracy", 0 <= stop.target_accuracy <= 1, "must be between 0 and 1; use 0 for no target"),
        ("patience", stop.patience >= 0, "must not be negative; use 0 to switch it off"),
        ("min_improvement", 0 <= stop.min_improvement < 1, "must be at least 0 and below 1; use 0 for any improvement"),
        ("min_entropy", 0 <= stop.min_entropy < float("inf"), "must not be negative; use 0 to switch it off"),
        (
            "max_no_signal",
            0 <= stop.max_no_signal <= 1,
            "is a share of groups; use above 0 to 1, or 0 to switch it off",
        ),
        ("collapse_batches", stop.collapse_batches >= 1, "must be at least 1; use 10"),
    ):
        if not good:
            raise ValueError(f"controller.stop.{name}={getattr(stop, name)}: {must}")
    evaluations = ("validation", *controller.eval_sets)
    if stop.evaluation not in evaluations:
        raise ValueError(
            f"controller.stop.evaluation={stop.evaluation!r}: is no evaluation of this run; use one of "
            f"{', '.join(evaluations)}"
        )
    for name in ("target_accuracy", "patience"):
        if (value := getattr(stop, name)) and not controller.eval_every:
            raise ValueError(
                f"controller.stop.{name}={value}: there is no evaluation between steps; set controller.eval_every"
            )
    _check_effect(stop)


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

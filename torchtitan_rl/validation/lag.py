"""Checks of `algorithm.max_policy_lag` before a process starts: what older policies sampled needs a loss that knows
it."""

from __future__ import annotations

from functools import partial

from torchtitan_rl.algorithm import corrections
from torchtitan_rl.config.algorithm import unwrapped
from torchtitan_rl.config.resolve import function_name
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.validation.functions import reads

__all__ = ["check_lag_settings"]

_ADVICE = "presets.asynchronous, or a lag of 0"


def check_lag_settings(config: RunConfig) -> None:
    """Raises ValueError for a lag that devices or the objective do not allow."""
    algorithm, lag = config.algorithm, config.algorithm.max_policy_lag
    where = f"algorithm.max_policy_lag={lag}"
    if algorithm.batch_order == "finished":
        _check_order(config)
    if not lag:
        return
    if config.roles.colocation == "all":
        raise ValueError(
            f"{where}: roles.colocation='all' gives generators and trainers the devices in turn, so nothing can "
            "overlap; use 0, or generators with devices of their own"
        )
    recomputed = [
        name
        for name in ("recompute_logprobs_per_batch", "recompute_logprobs_per_minibatch")
        if getattr(algorithm, name)
    ]
    # Weights correct the ratio and rejections bound it; `opsm` leaves out what a negative advantage would push further,
    # and does neither.
    if recomputed and unwrapped(algorithm.correction_fn) not in (None, corrections.opsm):
        return
    for name in recomputed:
        raise ValueError(
            f"{where}: with {name}=True a ratio is against the trainer, and nothing corrects for the older "
            f"policy that sampled; use algorithm.correction_fn=corrections.truncated_token, {_ADVICE}"
        )
    if algorithm.teacher_replaces_loss_fn:
        return
    columns = {"token_weights", "loss_mask", "advantages", "sampling_logprobs"}
    columns |= {"reference_logprobs"} if config.roles.reference is not None else set()
    columns |= {"teacher_logprobs"} if config.roles.teacher is not None else set()
    columns |= {"values", "returns"} if config.roles.critic is not None else set()
    loss = partial(algorithm.loss_fn, **algorithm.loss_config)
    if not reads("sampling_logprobs", loss, columns, ["policy_logprobs"]):
        raise ValueError(
            f"{where}: {function_name(algorithm.loss_fn)} does not read sampling_logprobs, so it takes what an older "
            f"policy sampled for its own; use ppo or importance_sampling, {_ADVICE}"
        )


def _check_order(config: RunConfig) -> None:
    algorithm = config.algorithm
    where = "algorithm.batch_order='finished'"
    if algorithm.max_policy_lag < 2:
        raise ValueError(
            f"{where}: with algorithm.max_policy_lag={algorithm.max_policy_lag} every slot that is in flight is due in "
            "the next batch, so there is nothing to choose; use a lag of 2 or more, or 'slots'"
        )
    if algorithm.trajectory_grouping_hook is not None:
        raise ValueError(
            f"{where}: slots finish one by one, and a trajectory_grouping_hook groups the rollouts of a whole batch; "
            "use 'slots'"
        )

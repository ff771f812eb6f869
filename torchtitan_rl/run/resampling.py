"""Filling a batch: filter what was rolled out, and roll out other tasks in place of what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

from torchtitan_rl.algorithm.filters import filtered
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.run.batch import Batch, NothingToTrainOn
from torchtitan_rl.types import RolloutGroup

__all__ = ["fill_batch"]


async def fill_batch(
    roll_out: Callable[[int, int, Counter], Awaitable[list[RolloutGroup]]],
    groups: list[RolloutGroup],
    config: AlgorithmConfig,
    counts: Counter,
    *,
    max_tokens: int,
) -> Batch:
    """Groups of `config.tasks_per_step` tasks that pass `config.filters`, or of as many as its limits allow.

    `groups` are those of the first round, and `counts` what grouping left out of it. `roll_out(n, first, counts)` rolls
    out the next n tasks, after `first` others for this batch, and groups them. Each round makes up for the tasks that
    none of the groups so far is of (dynamic sampling of DAPO, arXiv:2503.14476, with as many rollouts as are missing
    rather than a whole batch). Raises NothingToTrainOn when no group is left.
    """
    filters, batch = config.filters, Batch()
    rounds, tried = 1, config.tasks_per_step
    while True:
        batch.sampled += groups
        kept, left_out = filtered(groups, config, max_tokens=max_tokens, counts=counts)
        batch.groups += kept
        batch.left_out += left_out
        missing = config.tasks_per_step - len({rollout.task.id for group in batch.groups for rollout in group.rollouts})
        limit = filters.max_resamples if batch.groups else max(filters.max_resamples, filters.max_stalled_rounds - 1)
        if missing <= 0 or rounds > limit:
            break
        groups = await roll_out(missing, tried, counts)
        rounds, tried = rounds + 1, tried + missing
    rollouts = sum(len(group.rollouts) for group in batch.sampled)
    penalties = counts.pop("filter/overlong_penalty_sum", 0.0)
    batch.metrics = dict(counts)
    if filters.overlong == "penalty":
        batch.metrics["filter/overlong_penalty_mean"] = penalties / max(1, rollouts)
    if filters.drops:
        batch.metrics |= {"filter/resampled_tasks": tried - config.tasks_per_step, "filter/missing_tasks": missing}
    if not batch.groups:
        raise NothingToTrainOn(_explanation(batch, config, rounds), batch.left_out)
    return batch


def _explanation(batch: Batch, config: AlgorithmConfig, rounds: int) -> str:
    rewards = [reward for group in batch.sampled for reward in group.rewards]
    where = f"algorithm.filters.max_stalled_rounds={config.filters.max_stalled_rounds}"
    counted = [f"{name}={value:g}" for name, value in sorted(batch.metrics.items()) if value]
    found = ", ".join(counted) or "no rollouts"
    if not rewards:
        return f"{where}: {rounds} rounds left nothing to train on ({found}); see that the workflow plays turns"
    return (
        f"{where}: {rounds} rounds with {len(batch.sampled)} groups left nothing to train on ({found}; rewards from "
        f"{min(rewards):g} to {max(rewards):g}); if rewards are as high as they can be the task is learned, else make "
        "it easier, check the reward, raise group_size or sampling.max_tokens, or switch the filter off"
    )

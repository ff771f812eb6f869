"""Filling a batch: filter groups, and roll out replacements for the slots whose group was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

from torchtitan_rl.algorithm.filters import filtered
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.record.tracing import span
from torchtitan_rl.rollout.draws import Batch, Draw, NothingToTrainOn
from torchtitan_rl.types import RolloutGroup

__all__ = ["fill_batch"]


async def fill_batch(
    play: Callable[[list[Draw], Counter], Awaitable[list[RolloutGroup]]],
    replace: Callable[[list[Draw]], list[Draw]],
    draws: list[Draw],
    groups: list[RolloutGroup],
    config: AlgorithmConfig,
    counts: Counter,
    *,
    max_tokens: int,
) -> Batch:
    """Groups of `config.tasks_per_step` slots that pass `config.filters`; of fewer slots once the filters' limits of
    rounds are reached.

    `groups` are the rollouts of `draws`, the first round; `counts` counts the rollouts that grouping left out. Each
    further round plays `replace(draws)` for the slots without a group: dynamic sampling of DAPO (arXiv:2503.14476), but
    with the missing slots only, not a whole batch. Raises NothingToTrainOn when no group passes.
    """
    filters, batch = config.filters, Batch(draws=list(draws))
    rounds, tried = 1, len(draws)
    while True:
        batch.sampled += groups
        with span("filter groups"):
            passing_groups, left_out = filtered(groups, config, max_tokens=max_tokens, counts=counts)
        batch.groups += passing_groups
        batch.left_out += left_out
        draws = _draws_without_group(draws, passing_groups)
        limit = filters.max_resamples if batch.groups else max(filters.max_resamples, filters.max_stalled_rounds - 1)
        if not draws or rounds > limit:
            break
        draws = replace(draws)
        batch.draws += draws
        groups = await play(draws, counts)
        rounds, tried = rounds + 1, tried + len(draws)
    missing = len(draws)
    rollouts = sum(len(group.rollouts) for group in batch.sampled)
    penalties = counts.pop("filter/overlong_penalty_sum", 0.0)
    batch.metrics = dict(counts)
    if filters.overlong == "penalty":
        batch.metrics["filter/overlong_penalty_mean"] = penalties / max(1, rollouts)
    if filters.drops or filters.max_resamples:  # without a filter, failures drop groups
        batch.metrics |= {"filter/resampled_tasks": tried - config.tasks_per_step, "filter/missing_tasks": missing}
    if not batch.groups:
        raise NothingToTrainOn(_explanation(batch, config, rounds), batch)
    return batch


def _draws_without_group(draws: list[Draw], passing_groups: list[RolloutGroup]) -> list[Draw]:
    """The draws without a rollout in a group that passed the filters. A rollout with no `group`, made by a hook, counts
    for every draw of its task."""
    rollouts = [rollout for group in passing_groups for rollout in group.rollouts]
    filled = {rollout.group for rollout in rollouts} | {r.task.id for r in rollouts if not r.group}
    return [draw for draw in draws if draw.id not in filled and draw.task.id not in filled]


def _explanation(batch: Batch, config: AlgorithmConfig, rounds: int) -> str:
    rewards = [reward for group in batch.sampled for reward in group.rewards]
    where = f"algorithm.filters.max_stalled_rounds={config.filters.max_stalled_rounds}"
    counted = [f"{name}={value:g}" for name, value in sorted(batch.metrics.items()) if value]
    summary = ", ".join(counted) or "no rollouts"
    if not rewards:
        return f"{where}: {rounds} rounds left nothing to train on ({summary}); see that the workflow plays turns"
    return (
        f"{where}: {rounds} rounds with {len(batch.sampled)} groups left nothing to train on ({summary}; rewards from "
        f"{min(rewards):g} to {max(rewards):g}); if rewards are as high as they can be the task is learned, else make "
        "it easier, check the reward, raise group_size or sampling.max_tokens, or switch the filter off"
    )

"""The source of batches that a config asks for: batches in turn with training, or played while earlier ones train."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.rollout.ahead import BatchesAhead
from torchtitan_rl.rollout.batches import BatchPlayer, BatchSource, SynchronousBatches
from torchtitan_rl.rollout.curriculum_batches import CurriculumBatches
from torchtitan_rl.rollout.draws import Draw, Draws
from torchtitan_rl.rollout.finished import FinishedGroups
from torchtitan_rl.rollout.first_finished import FirstFinished, one_slot
from torchtitan_rl.rollout.lagged_batches import LaggedBatches
from torchtitan_rl.rollout.player import RolloutPlayer
from torchtitan_rl.tasks.curriculum import CurriculumSource
from torchtitan_rl.types.run_state import RunState

__all__ = ["lagged_batches", "synchronous_batches"]


def synchronous_batches(
    config: RunConfig,
    rollouts: RolloutPlayer,
    draws: Draws,
    state: RunState,
    admitted: Callable[[list[Draw], int], None],
) -> BatchSource:
    """Batches that are played when the loop asks for them, by `algorithm.batch_source` or in the order of the slots,
    whose tasks a curriculum draws by what it counts. `admitted` is that of `BatchPlayer`."""
    player = BatchPlayer(config.algorithm, rollouts, draws, admitted, max_tokens=config.sampling.max_tokens)
    if isinstance(draws.source, CurriculumSource):
        batches = SynchronousBatches(player, draws, state)
        return CurriculumBatches(batches, draws.source, correct_reward=config.controller.correct_reward)
    return (config.algorithm.batch_source or SynchronousBatches)(player, draws, state)


def lagged_batches(
    config: RunConfig,
    rollouts: RolloutPlayer,
    draws: Draws,
    state: RunState,
    admitted: Callable[[list[Draw], int], None],
    *,
    publications: list[int],
    finished: FinishedGroups,
    recorded: Sequence[list[int]] = (),
) -> LaggedBatches:
    """Batches that are played while up to `algorithm.max_policy_lag` earlier ones train, in the order that
    `algorithm.batch_order` says. `publications` and `finished` are those of `LaggedBatches`, `admitted` is that of
    `BatchPlayer`. `recorded` are the slots of the first batches, where a replay follows a record."""
    algorithm, max_tokens = config.algorithm, config.sampling.max_tokens
    player = BatchPlayer(algorithm, rollouts, draws, admitted, max_tokens=max_tokens)
    if algorithm.batch_order == "slots":
        return BatchesAhead(config, player, draws, state, publications=publications, finished=finished)
    slot_player = BatchPlayer(one_slot(algorithm), rollouts, draws, admitted, max_tokens=max_tokens)
    return FirstFinished(
        config,
        player,
        draws,
        state,
        slot_player=slot_player,
        recorded=recorded,
        publications=publications,
        finished=finished,
    )

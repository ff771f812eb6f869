"""A reward model that the run hosts: a frozen classifier scores rollouts by their tokens."""

from __future__ import annotations

import math
import time

import torch

from torchtitan_rl.algorithm.grouping import by_task_and_role, fill_rewards
from torchtitan_rl.config.run import RewardModelConfig
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.record.tracing import running, span
from torchtitan_rl.types import A_REWARD, Datum, Rollout, is_reward
from torchtitan_rl.types.branches import last_branch
from torchtitan_rl.types.score_parts import SCORE, TASK_REWARD

__all__ = ["RewardModel", "sequence_of"]


class RewardModel:
    """The role `reward_model` as the rollouts see it. The score of a rollout is the classifier's value at the last
    token. Every group is scored in a call of its own, while other groups are still played."""

    def __init__(self, client: TrainingClient, config: RewardModelConfig) -> None:
        self._client, self._config = client, config

    async def judge(self, rollouts: list[Rollout]) -> None:
        """Adds the scores to the rewards that rollouts have: weight x score + task_weight x reward. Both numbers become
        parts of the reward, `reward_model` and `task_reward`. Rollouts without turns stay as they are.

        Raises RuntimeError for a score or a sum that is no reward (`types.is_reward`), and what the role's mesh raises.
        """
        played = [rollout for rollout in rollouts if rollout.turns]
        if not played:
            return
        for group in by_task_and_role(played):
            fill_rewards(group)
        began = time.perf_counter()
        with span("wait for the reward model"):
            scores = await running("score rollouts", self.scores([sequence_of(rollout) for rollout in played]))
        seconds = time.perf_counter() - began
        sums = [self._sum(rollout, score) for rollout, score in zip(played, scores, strict=True)]
        for rollout, score, total in zip(played, scores, sums, strict=True):
            rollout.reward_parts |= {TASK_REWARD: rollout.reward, SCORE: score}
            rollout.reward, rollout.seconds["reward_model"] = total, seconds

    async def scores(self, sequences: list[list[int]]) -> list[float]:
        """The classifier's value at the last token of each sequence of tokens."""
        output = await self._client.forward([_datum(tokens) for tokens in sequences])
        return [float(values_T[-1]) for values_T in output.values]

    def _sum(self, rollout: Rollout, score: float) -> float:
        for name in (TASK_REWARD, SCORE):
            if name in rollout.reward_parts:
                raise RuntimeError(
                    f"reward part {name!r}: of rollout {rollout.id} has the name of a part that roles.reward_model "
                    "adds; give yours another name"
                )
        if not is_reward(score):
            raise RuntimeError(
                f"roles.reward_model: gave rollout {rollout.id} of task {rollout.task.id!r} the score {score:g}; a "
                f"reward is {A_REWARD}; look at the classifier's weights"
            )
        config = self._config
        total = math.fsum((config.weight * score, config.task_weight * rollout.reward))
        if not is_reward(total):
            raise RuntimeError(
                f"roles.reward_model: {config.weight:g} x the score {score:g} + {config.task_weight:g} x the reward "
                f"{rollout.reward:g} of rollout {rollout.id} is {total:g}; a reward is {A_REWARD}, lower the weights"
            )
        return total


def sequence_of(rollout: Rollout) -> list[int]:
    """The tokens that the classifier reads: the prompt of the turn that was asked for last, which holds the
    conversation so far, and its completion, as they were sampled."""
    last = rollout.turns[last_branch(rollout.turns)[-1]]
    return [*last.prompt_tokens, *last.completion.tokens]


def _datum(tokens: list[int]) -> Datum:
    sequence_T = torch.tensor(tokens)
    return Datum(tokens=sequence_T, target_tokens=sequence_T, loss_inputs={})  # a value depends on no target

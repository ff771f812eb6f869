"""A loop over batches, with generators that take random times."""

import asyncio
import random
from collections import Counter
from types import SimpleNamespace

from tests.kit.family import Family
from torchtitan_rl.config.algorithm import AlgorithmConfig, FilterConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.rollout.ahead import BatchesAhead
from torchtitan_rl.rollout.batch_sources import lagged_batches, synchronous_batches
from torchtitan_rl.rollout.draws import Draws
from torchtitan_rl.rollout.finished import FinishedGroups
from torchtitan_rl.rollout.first_finished import FirstFinished
from torchtitan_rl.rollout.lag import age_metrics
from torchtitan_rl.tasks.family import TaskSource
from torchtitan_rl.types import Completion, Rollout, RolloutGroup, Turn
from torchtitan_rl.types.run_state import RunState

PER_BATCH, NUM_BATCHES = 3, 7


class BatchLoop:
    """A loop over batches with generators that take a random time, drawn from a seed; every batch is one step and is
    followed by a publication. `bad` groups have equal rewards, which the filter drops."""

    def __init__(self, lag, seed=0, bad=(), start=None, kind=BatchesAhead):
        self.random, self.bad, self.events = random.Random(seed), set(bad), []
        filters = FilterConfig(zero_variance=bool(bad), max_resamples=3 if bad else 0)
        algorithm = AlgorithmConfig(max_policy_lag=lag, tasks_per_step=PER_BATCH, group_size=2, filters=filters)
        self.config = RunConfig(name="unit", task=None, model=ModelConfig(assets="chars"), algorithm=algorithm)
        self.config.controller.num_steps = NUM_BATCHES
        self.config.sampling.max_tokens = 64
        algorithm.batch_order = "finished" if kind is FirstFinished else "slots"
        self.state, self.publications, self.draws = RunState(seed=0), [0], Draws(TaskSource(Family(), "train", 0))
        if start is not None:
            self.state.step, draws = start
            self.draws.load_state_dict(draws)
        self.finished, self.played = FinishedGroups(), []
        self.lags = []
        """`policy/lag_max` of each batch as it began to train."""
        arguments = self.config, SimpleNamespace(play=self.play), self.draws, self.state, self.admitted
        if lag:
            self.batches = lagged_batches(*arguments, publications=self.publications, finished=self.finished)
            assert type(self.batches) is kind
        else:
            self.batches = synchronous_batches(*arguments)

    def admitted(self, draws, step):
        self.events.append(("admitted", step, self.publications[-1], [draw.id for draw in draws]))

    async def play(self, draws, counts: Counter):
        return list(await asyncio.gather(*(self.play_draw(draw) for draw in draws)))

    async def play_draw(self, draw):
        """As `Rollouts` does: a group that a checkpoint holds is not played again."""
        if (group := self.finished.take(draw.id, draw.task)) is None:
            group = await self.group(draw.task, draw.id)
            self.finished.keep(draw.id, draw.task, group)
        return group

    async def group(self, task, group_id):
        versions = []
        for _ in range(self.random.randrange(1, 4)):  # tokens: each from the version that is served then
            await asyncio.sleep(self.random.choice([0, 0, 1e-4, 2e-3]))
            versions.append(self.publications[-1])
        tokens = Completion(
            tokens=[0] * len(versions), logprobs=[0.0] * len(versions), policy_versions=versions, finish_reason="stop"
        )
        rewards = [1.0, 1.0] if group_id in self.bad else [1.0, 0.0]
        turns = [Turn(prompt_tokens=[0], completion=tokens)]
        rollouts = [
            Rollout(id=f"{group_id}/{i}", task=task, turns=turns, reward=reward, group=group_id)
            for i, reward in enumerate(rewards)
        ]
        self.played.append(group_id)
        return RolloutGroup(id=group_id, rollouts=rollouts)

    async def batch(self):
        """One round of the loop. Returns the batch."""
        batch = await self.batches.next_batch()
        self.lags.append(age_metrics(batch.groups, self.publications)["policy/lag_max"])
        self.events.append(("trained", self.state.step, self.publications[-1], [group.id for group in batch.groups]))
        await asyncio.sleep(self.random.choice([0, 1e-3]))
        self.state.step += 1
        self.publications.append(self.publications[-1] + self.random.randrange(2))  # some steps are skipped
        return batch

    async def all(self):
        return [await self.batch() for _ in range(self.state.step, NUM_BATCHES)]

    def of(self, kind):
        return [event for event in self.events if event[0] == kind]

import asyncio
import dataclasses
from collections import Counter

from tests.kit.run_config import run_config
from torchtitan_rl.rollout.draws import Draw
from torchtitan_rl.rollout.finished import FinishedGroups
from torchtitan_rl.rollout.player import RolloutPlayer
from torchtitan_rl.types import Completion, Rollout, Task, Turn

TASK = Task(id="task", prompt="x")


class Generator:
    policy_version = 3


def player(generator, finished=None):
    """Plays turns with advantages. While the second draw is played, the generators get another version."""

    async def workflow(task, policy, *, rollout_id, seed):
        version = generator.policy_version
        completion = Completion(tokens=[3], logprobs=[-1.0], policy_versions=[version], finish_reason="stop")
        await asyncio.sleep(0)
        if rollout_id.startswith("1/"):
            await asyncio.sleep(0.01)
            generator.policy_version = 4
            await asyncio.sleep(0.01)
        turn = Turn(prompt_tokens=[1], completion=completion, advantages=[0.5])
        return Rollout(id=rollout_id, task=task, turns=[turn], reward=0.0)

    config = run_config()
    algorithm = dataclasses.replace(config.algorithm, max_policy_lag=1, group_size=2, workflow=workflow)
    config = dataclasses.replace(config, algorithm=algorithm)
    return RolloutPlayer(config, object(), None, generator, None, {}, finished=finished)


def advantages(groups):
    return [turn.advantages for group in groups for rollout in group.rollouts for turn in rollout.turns]


async def test_a_publication_in_a_batchs_play_leaves_its_advantages():
    generator = Generator()
    groups = await player(generator).play([Draw(slot=i, round=0, task=TASK) for i in range(2)], Counter())
    assert generator.policy_version == 4 and advantages(groups) == [[0.5]] * 4


async def test_advantages_of_restored_groups_are_as_old_as_the_groups(monkeypatch):
    generator, finished = Generator(), FinishedGroups()
    draw = Draw(slot=0, round=0, task=TASK)
    (group,) = await player(generator).play([draw], Counter())
    monkeypatch.setattr(finished, "take", lambda name, task: group)
    generator.policy_version = 4
    assert advantages(await player(generator, finished).play([draw], Counter())) == [[0.5]] * 2


async def test_with_a_lag_the_version_before_may_answer_while_the_next_one_is_loaded():
    generator, draw = Generator(), Draw(slot=0, round=0, task=TASK)
    playing = player(generator, FinishedGroups())
    play = playing.config.algorithm.workflow

    async def older(task, policy, *, rollout_id, seed):
        rollout = await play(task, policy, rollout_id=rollout_id, seed=seed)
        rollout.turns[0].completion.policy_versions = [2]
        return rollout

    playing.config.algorithm.workflow = older
    assert advantages(await playing.play([draw], Counter())) == [[0.5]] * 2


async def test_advantages_of_an_earlier_batch_do_not_count():
    generator = Generator()
    draw = Draw(slot=0, round=0, task=TASK)
    again = player(generator)
    (group,) = await again.play([draw], Counter())

    async def reused(task, policy, *, rollout_id, seed):
        return next(rollout for rollout in group.rollouts if rollout.id == rollout_id)

    generator.policy_version = 4
    again.config.algorithm.workflow = reused
    assert advantages(await again.play([draw], Counter())) == [None] * 2

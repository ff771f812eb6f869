"""The loop of a run with a curriculum: what is counted, checkpoints at every step, refusals before a start."""

import asyncio
import json
from types import SimpleNamespace

import pytest

import torchtitan_rl.config as rl
from tests.kit.family import Family
from torchtitan_rl.rollout.batch_sources import synchronous_batches
from torchtitan_rl.rollout.batches import SynchronousBatches
from torchtitan_rl.rollout.curriculum_batches import CurriculumBatches
from torchtitan_rl.rollout.draws import Draws, NothingToTrainOn
from torchtitan_rl.tasks.curriculum import Curriculum
from torchtitan_rl.tasks.family import TaskSource
from torchtitan_rl.tasks.mixture import Mixture
from torchtitan_rl.tasks.pass_rate_filter import PassRateFilter
from torchtitan_rl.types import Completion, Rollout, RolloutGroup, Turn
from torchtitan_rl.types.run_state import RunState
from torchtitan_rl.validation.batches import check_batches


def config(task, correct_reward=1.0, **algorithm):
    run = rl.RunConfig(name="unit", task=task, model=rl.ModelConfig(), algorithm=rl.AlgorithmConfig(**algorithm))
    run.controller.correct_reward = correct_reward
    return run


class Loop:
    """The batches of a run of 8 tasks. Of 2 rollouts of task i, i % 3 earn 1; the draws `failing` have no group."""

    def __init__(self, failing=(), state=None, correct_reward=1.0, passes=lambda index: index % 3, **filters):
        self.failing, self.passes = failing, passes
        filters = rl.FilterConfig(**filters)
        task = Curriculum.Config(task=Family(8))
        run = config(task, correct_reward, tasks_per_step=3, group_size=2, filters=filters)
        self.draws = Draws(task.build().source("train", 0))
        if state is not None:
            self.draws.load_state_dict(state)
        arguments = SimpleNamespace(play=self.play), self.draws, RunState(seed=0), lambda draws, step: None
        self.batches = synchronous_batches(run, *arguments)

    async def play(self, draws, counts):
        counts["failure/dropped_groups"] += sum(draw.id in self.failing for draw in draws)
        return [self.group(draw) for draw in draws if draw.id not in self.failing]

    def group(self, draw):
        tokens = Completion(tokens=[0], logprobs=[0.0], policy_versions=[0], finish_reason="stop")
        num_passed = self.passes(draw.task.answer)
        rollouts = [
            Rollout(
                id=f"{draw.id}/{i}",
                task=draw.task,
                turns=[Turn(prompt_tokens=[0], completion=tokens)],
                reward=float(i < num_passed),
                group=draw.id,
            )
            for i in range(2)
        ]
        return RolloutGroup(id=draw.id, rollouts=rollouts)

    def batch(self):
        return asyncio.run(self.batches.next_batch())


def counted(loop):
    source = loop.draws.source
    return {i: source.passed[i] for i in range(8) if source.passed[i] + source.failed[i]}


def test_a_batch_is_counted_before_the_next_one_is_drawn():
    loop = Loop()
    assert type(loop.batches) is CurriculumBatches
    batch = loop.batch()
    drawn = [draw.task.answer for draw in batch.draws]
    assert counted(loop) == {index: index % 3 for index in drawn}
    assert batch.metrics["curriculum/unseen_frac"] == 5 / 8
    assert batch.metrics["curriculum/pass_rate_mean"] == pytest.approx(sum(index % 3 / 2 for index in drawn) / 3)


def test_groups_that_a_filter_leaves_out_count_and_their_replacements_too():
    loop = Loop(zero_variance=True, max_resamples=3)
    batch = loop.batch()
    assert batch.left_out and counted(loop).keys() == {draw.task.answer for draw in batch.draws}


def test_groups_that_a_failure_dropped_do_not_count():
    loop = Loop(failing=("1/0",))
    batch = loop.batch()
    drawn = {draw.id: draw.task.answer for draw in batch.draws}
    assert counted(loop).keys() == set(drawn.values()) - {drawn["1/0"]}


def test_a_batch_without_a_group_to_train_on_is_counted():
    loop = Loop(passes=lambda index: 0, zero_variance=True, max_stalled_rounds=1)
    with pytest.raises(NothingToTrainOn) as nothing:
        loop.batch()
    assert counted(loop) == {draw.task.answer: 0 for draw in nothing.value.batch.draws}


def test_a_rollout_passes_from_the_correct_reward_of_the_run_on():
    loop = Loop(correct_reward=1.5, passes=lambda index: 2)
    loop.batch()
    assert set(counted(loop).values()) == {0}


def test_a_run_that_is_resumed_after_any_batch_draws_and_counts_the_same():
    filters = {"zero_variance": True, "max_resamples": 2}
    whole, states, batches = Loop(failing=("4/0", "9/1"), **filters), [], []
    for _ in range(8):
        states.append(json.dumps(whole.batches.state_dict()))
        batches.append(whole.batch())
    for start, state in enumerate(states):
        loop = Loop(failing=("4/0", "9/1"), state=json.loads(state), **filters)
        for expected in batches[start:]:
            batch = loop.batch()
            assert batch.draws == expected.draws and batch.metrics == expected.metrics
        assert loop.batches.state_dict() == whole.batches.state_dict()


def test_a_run_without_a_curriculum_has_the_batches_that_it_had():
    arguments = SimpleNamespace(), Draws(TaskSource(Family(8), "train", 0)), RunState(seed=0), None
    assert type(synchronous_batches(config(Family(8)), *arguments)) is SynchronousBatches


def test_what_would_draw_without_counting_is_refused():
    curriculum = Curriculum.Config(task=Family(3))
    check_batches(config(curriculum))
    with pytest.raises(ValueError, match="algorithm.max_policy_lag=1: draws tasks before .* are counted, .* PassRateF"):
        check_batches(config(curriculum, max_policy_lag=1))
    with pytest.raises(ValueError, match="batch_source=.*SynchronousBatches: takes the place of .* one of the two"):
        check_batches(config(curriculum, batch_source=SynchronousBatches))
    for task in (
        Mixture.Config(tasks={"a": Family(3), "b": curriculum}),
        PassRateFilter.Config(task=Mixture.Config(tasks={"b": curriculum}), pass_rates="rates.jsonl"),
        Curriculum.Config(task=curriculum),
    ):
        with pytest.raises(ValueError, match="has a Curriculum inside, whose pass rates nothing would count"):
            check_batches(config(task))


async def test_slots_whose_play_was_given_up_or_failed_are_due_again():
    loop, whole = Loop(), Loop()
    played = [draw.task.id for draw in (await whole.batches.next_batch()).draws]

    class Hanging(SimpleNamespace):
        async def play(self, draws, step):
            if step == "fails":
                raise RuntimeError("the reward raised")
            await asyncio.sleep(60)

    hanging = SynchronousBatches(
        Hanging(config=SimpleNamespace(tasks_per_step=3)), loop.draws, state := SimpleNamespace(step="hangs")
    )
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(hanging.next_batch(), 0.01)
    state.step = "fails"
    with pytest.raises(RuntimeError, match="the reward raised"):
        await hanging.next_batch()
    assert [draw.task.id for draw in (await loop.batches.next_batch()).draws] == played

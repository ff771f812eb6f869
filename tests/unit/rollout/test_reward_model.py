"""Scores of a reward model in the rewards of rollouts: what is read, how it is weighed, what is refused."""

import asyncio
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from tests.kit.rollouts import group, rollout, turn
from tests.kit.run_config import run_config
from tests.kit.sampler import CHARS, FunctionSampler
from torchtitan_rl.config.run import RewardModelConfig
from torchtitan_rl.rollout.draws import Draw
from torchtitan_rl.rollout.player import RolloutPlayer
from torchtitan_rl.rollout.reward_model import RewardModel, sequence_of
from torchtitan_rl.train.step_metrics import batch_metrics
from torchtitan_rl.types import Task


class Classifier:
    """Stands for the role's client: the value of a position is `value(tokens up to it)`."""

    def __init__(self, value=sum):
        self.value, self.read = value, []

    async def forward(self, data):
        self.read.append([datum.tokens.tolist() for datum in data])
        values = [[float(self.value(tokens[: i + 1])) for i in range(len(tokens))] for tokens in self.read[-1]]
        return SimpleNamespace(values=[torch.tensor(of_datum) for of_datum in values])


def judged(*rollouts, value=sum, **config):
    classifier = Classifier(value)
    asyncio.run(RewardModel(classifier, RewardModelConfig(**config)).judge(list(rollouts)))
    return classifier.read


def test_the_score_is_the_value_at_the_last_token_of_prompt_and_completion():
    one, other = rollout("0/0/0", turn([1, 2], [3]), reward=0.5), rollout("0/0/1", turn([1, 2], [4, 5]), reward=1.0)
    assert judged(one, other, weight=2.0, task_weight=10.0) == [[[1, 2, 3], [1, 2, 4, 5]]]  # one call for the group
    assert [one.reward, other.reward] == [2 * 6 + 10 * 0.5, 2 * 12 + 10 * 1.0]
    assert other.reward_parts == {"task_reward": 1.0, "reward_model": 12.0} and other.seconds["reward_model"] >= 0


def test_a_weight_of_0_measures_only():
    scored, trained = rollout("a/0", turn([1], [2]), reward=0.25), rollout("b/0", turn([1], [2]), reward=0.25)
    judged(scored, weight=0.0)
    judged(trained, task_weight=0.0)
    assert (scored.reward, trained.reward) == (0.25, 3.0)
    assert scored.reward_parts == trained.reward_parts == {"task_reward": 0.25, "reward_model": 3.0}


def test_a_conversation_is_read_to_its_end_and_its_last_turn_may_have_the_reward():
    played = rollout("0/0/0", turn([1], [2], reward=0.0), turn([1, 2, 9], [3], reward=1.0), reward=None)
    assert sequence_of(played) == [1, 2, 9, 3]
    judged(played, rollout("0/0/1", reward=None))  # without turns: stays as it is
    assert played.reward == 15 + 1.0


@pytest.mark.parametrize(
    ("value", "parts", "config", "message"),
    [
        (lambda tokens: math.nan, {}, {}, "roles.reward_model: gave rollout 0/0/0 of task 't' the score nan"),
        (lambda tokens: 1e6, {}, {"weight": 2.0}, "roles.reward_model: 2 x the score 1e+06 + 1 x the reward 0"),
        (sum, {"task_reward": 1.0}, {}, "reward part 'task_reward': of rollout 0/0/0 has the name of a part"),
    ],
)
def test_what_is_no_reward_is_refused_and_no_rollout_is_changed(value, parts, config, message):
    refused = rollout("0/0/0", turn([1], [2]), reward_parts=dict(parts))
    fine = rollout("0/0/1", turn([1], [2]), reward=1.0)
    with pytest.raises(RuntimeError) as caught:
        judged(refused, fine, value=value, **config)
    assert str(caught.value).startswith(message)
    assert fine.reward == 1.0 and fine.reward_parts == {}


class Family:
    """A letter earns 1."""

    def reward(self, task, completions):
        return [float(len(completion)) for completion in completions]


async def test_groups_that_train_and_their_baselines_are_scored_one_call_a_group():
    config, classifier = run_config(), Classifier(len)
    config.algorithm.group_size, config.algorithm.greedy_baseline = 2, True
    sampler = FunctionSampler(lambda prompt, params: "abc" if params.temperature == 0 else "a")
    sampler.policy_version = 0
    scorer = RewardModel(classifier, RewardModelConfig(weight=0.5))
    player = RolloutPlayer(config, Family(), CHARS, sampler, None, {}, reward_model=scorer)
    draws = [Draw(slot=slot, round=0, task=Task(id=f"t{slot}", prompt="abc=")) for slot in range(2)]
    groups = await player.play(draws, Counter())
    assert [of_group.rewards for of_group in groups] == [[1 + 0.5 * 5] * 2] * 2
    assert [rollout.baseline for rollout in groups[0].rollouts] == [3 + 0.5 * 7] * 2
    assert sorted(map(len, classifier.read)) == [1, 1, 2, 2]


def test_the_line_of_a_batch_says_how_scores_go_with_the_tasks_rewards():
    scored = [
        rollout(f"0/0/{i}", turn([1], [2]), reward=score, reward_parts={"reward_model": score, "task_reward": reward})
        for i, (score, reward) in enumerate([(1.0, 0.0), (2.0, 1.0), (3.0, 0.0), (6.0, 1.0)])
    ]
    scored[1].seconds["reward_model"] = 0.5
    line = batch_metrics([group(*scored)], {})
    assert line["reward_model/score_mean"] == 3.0 and line["reward_model/score_std"] == math.sqrt(14 / 4)
    assert line["reward_model/task_correlation"] == pytest.approx(0.5 / (math.sqrt(3.5) * 0.5))
    assert line["time/reward_model_s"] == 0.5 and line["reward/part_task_reward_mean"] == 0.5
    for each in scored:
        each.reward_parts["task_reward"] = 1.0
    assert "reward_model/task_correlation" not in batch_metrics([group(*scored)], {})
    assert not any(
        name.startswith("reward_model/") for name in batch_metrics([group(rollout("0", turn([1], [2])))], {})
    )

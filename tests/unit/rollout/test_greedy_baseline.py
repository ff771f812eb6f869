"""A greedy rollout beside a group: it is played and judged, and its reward is the group's baseline."""

from collections import Counter

import pytest

from tests.kit.rollouts import rollout, turn
from tests.kit.run_config import run_config
from tests.kit.sampler import CHARS, FunctionSampler
from torchtitan_rl.algorithm.grouping import set_baselines
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.rollout.draws import Draw
from torchtitan_rl.rollout.failures import Failures
from torchtitan_rl.rollout.finished import FinishedGroups
from torchtitan_rl.rollout.player import RolloutPlayer
from torchtitan_rl.types import RolloutGroup, Task


class Family:
    """A letter earns 1."""

    def __init__(self):
        self.judged = []

    def reward(self, task, completions):
        self.judged.append(list(completions))
        return [float(len(completion)) for completion in completions]


def answer(prompt, params):
    return "abc" if params.temperature == 0 else "a"


def player(family, **kept):
    config = run_config()
    config.algorithm.group_size = 2
    config.algorithm.greedy_baseline = "off" not in kept
    made = RolloutPlayer(config, family, CHARS, FunctionSampler(answer), None, {}, finished=kept.get("finished"))
    made.generator.policy_version = 0
    return made


def draw():
    return Draw(slot=3, round=0, task=Task(id="t", prompt="abc="))


async def test_the_greedy_rollout_is_judged_and_stays_out_of_the_group():
    family = Family()
    (group,) = await player(family).play([draw()], Counter())
    assert [rollout.text for rollout in group.rollouts] == ["a", "a"] and group.rewards == [1.0, 1.0]
    assert [rollout.baseline for rollout in group.rollouts] == [3.0, 3.0]
    assert sorted(family.judged) == [["a", "a"], ["abc"]]


async def test_without_it_nothing_more_is_played():
    family = Family()
    (group,) = await player(family, off=True).play([draw()], Counter())
    assert [rollout.baseline for rollout in group.rollouts] == [None, None] and family.judged == [["a", "a"]]


async def test_a_group_that_waits_for_its_batch_keeps_its_baseline():
    finished, of_draw = FinishedGroups(), draw()
    (played,) = await player(Family(), finished=finished).play([of_draw], Counter())
    restored = FinishedGroups()
    assert restored.restore(finished.since(0)) == []
    family = Family()
    (group,) = await player(family, finished=restored).play([of_draw], Counter())
    assert [rollout.baseline for rollout in group.rollouts] == [3.0, 3.0] and family.judged == []
    assert group.rewards == played.rewards


@pytest.mark.parametrize("on_failure", ["fail", "drop_group"])
async def test_a_greedy_rollout_that_fails_is_a_failure_of_its_group(on_failure):
    class Strict(Family):
        def reward(self, task, completions):
            if "abc" in completions:
                raise ZeroDivisionError("a test")
            return super().reward(task, completions)

    made = player(Strict())
    if on_failure == "fail":
        with pytest.raises(RuntimeError, match="raised ZeroDivisionError: a test"):
            await made.play([draw()], Counter())
        return
    counts: Counter = Counter()
    made.failures = Failures(AlgorithmConfig(on_rollout_failure=on_failure), {})
    assert await made.play([draw()], counts) == []
    assert counts == {"failure/reward": 1, "failure/dropped_groups": 1}


def test_each_role_has_its_own_baseline_and_turns_may_hold_the_reward():
    group = RolloutGroup(
        id="0/0",
        rollouts=[
            rollout("a", turn([1], [2]), reward=1.0, role="solver"),
            rollout("b", turn([1], [2]), reward=1.0, role="judge"),
            rollout("c", turn([1], [2]), reward=1.0, role="other"),
        ],
    )
    greedy = RolloutGroup(
        id="0/0/greedy",
        rollouts=[
            rollout("d", turn([1], [2], reward=0.25), reward=None, role="solver"),
            rollout("e", turn([1], [2]), reward=0.5, role="judge"),
            rollout("f", reward=9.0, role="other"),  # it did not come to a turn
        ],
    )
    set_baselines(group, greedy)
    assert [rollout.baseline for rollout in group.rollouts] == [0.25, 0.5, None]
    greedy.rollouts[1].reward = float("nan")
    with pytest.raises(ValueError, match="of rollout e is not finite"):
        set_baselines(group, greedy)

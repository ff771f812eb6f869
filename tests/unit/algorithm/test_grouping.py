"""Which rollouts are compared, what they earned, and what a grouping hook may return."""

import copy
import dataclasses
import math
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kit.refusal import refusal
from tests.kit.rollouts import attempts, rollout, turn
from torchtitan_rl.algorithm.datums import to_datums
from torchtitan_rl.algorithm.grouping import form_groups
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.types import RolloutGroup

ONE = turn([1], [2])


def ids(groups):
    return {group.id: [rollout.id for rollout in group.rollouts] for group in groups}


def refused(rollouts, hook=None):
    return refusal(form_groups, rollouts, AlgorithmConfig(trajectory_grouping_hook=hook))


# The default.


def test_rollouts_of_one_task_and_role_are_a_group():
    rollouts = [
        rollout("0/0/0", ONE, task="a"),
        rollout("0/0/1", ONE, task="a", role="judge"),
        rollout("0/1/0", ONE, task="b"),
        rollout("0/0/2", ONE, task="a"),
        rollout("0/0/3", ONE, task="a", role="judge"),
    ]
    groups = form_groups(rollouts, AlgorithmConfig())
    assert ids(groups) == {"0/0": ["0/0/0", "0/0/2"], "0/0/judge": ["0/0/1", "0/0/3"], "0/1": ["0/1/0"]}
    assert groups[0].rollouts[0] is rollouts[0]


def test_rollouts_without_turns_are_skipped_and_counted(caplog):
    counts = Counter()
    rollouts = [rollout("0/0/0"), rollout("0/0/1", turn([1], [2])), rollout("0/0/2")]
    assert ids(form_groups(rollouts, AlgorithmConfig(), counts)) == {"0/0": ["0/0/1"]}
    assert counts == {"filter/skipped_rollouts": 2}
    assert caplog.messages == ["2 of 3 rollouts have no turns and are skipped; the first is 0/0/0"]
    assert form_groups([rollout("0/0/0")], AlgorithmConfig()) == []


# Rewards.


def rewarded(*pairs):
    """Rollouts with (own reward, last turn's reward)."""
    return [
        rollout(f"0/0/{i}", turn([1], [2], reward=9.0), turn([1], [2], reward=last), reward=own)
        for i, (own, last) in enumerate(pairs)
    ]


@pytest.mark.parametrize(
    ("pairs", "rewards", "warned"),
    [
        ([(1.0, 5.0), (0.0, None)], [1.0, 0.0], False),
        ([(None, 5.0), (None, 6.0)], [5.0, 6.0], False),
        ([(1.0, 5.0), (None, 6.0)], [5.0, 6.0], True),
    ],
)
def test_rewards_are_all_of_the_rollouts_or_all_of_their_last_turns(pairs, rewards, warned, caplog):
    (group,) = form_groups(rewarded(*pairs), AlgorithmConfig())
    assert group.rewards == rewards
    assert caplog.messages == (
        ["group 0/0: 1 of 2 rollouts have a reward; all take what their last turn earned"] if warned else []
    )


def test_a_reward_that_is_nowhere_is_refused():
    assert refused(rewarded((1.0, 5.0), (None, None))) == (
        "rollout=0/0/1: its last turn has no reward, and 1 of 2 rollouts of group 0/0 have one of their own; give "
        "every rollout a reward, or every last turn"
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_wherever_it_comes_from(bad):
    for pairs in ([(bad, 5.0), (0.0, 5.0)], [(None, bad), (None, 5.0)]):
        assert refused(rewarded(*pairs)) == (
            f"reward={bad}: of rollout 0/0/0 is not finite; give every rollout a finite reward"
        )


@pytest.mark.parametrize("large", [1.7e308, -1e7])
def test_a_reward_beyond_a_million_is_refused_wherever_it_comes_from(large):
    for pairs in ([(large, 5.0), (0.0, 5.0)], [(None, large), (None, 5.0)]):
        assert refused(rewarded(*pairs)) == (
            f"reward={large}: of rollout 0/0/0 is too large; give every rollout a finite number between -1e+06 and "
            "1e+06"
        )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_nor_does_it_pass_where_groups_were_built_by_hand(bad):
    with pytest.raises(ValueError, match=f"^reward={bad}: of rollout 0/0/1 is not a finite number"):
        to_datums([RolloutGroup(id="0/0", rollouts=attempts(0, [1.0, bad]))], AlgorithmConfig())


def test_advantages_without_any_reward_are_enough():
    rollouts = [rollout(f"0/0/{i}", turn([1], [2], advantages=0.5), reward=None) for i in range(2)]
    groups = form_groups(rollouts, AlgorithmConfig())
    assert groups[0].rewards == [0.0, 0.0]
    assert [datum.loss_inputs["advantages"].tolist() for datum in to_datums(groups, AlgorithmConfig())] == [
        [0.5],
        [0.5],
    ]


# The hook.


def worked_example():
    """The config that the code of docs/grouping.md leaves behind."""
    page = (Path(__file__).parents[3] / "docs" / "grouping.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "turn_by_turn" in block]
    config = SimpleNamespace(algorithm=AlgorithmConfig())
    exec(code, {"config": config})
    return config.algorithm


def test_the_worked_example_compares_turns_with_turns():
    rollouts = [
        rollout("0/0/0", turn([1], [2], reward=1.0), turn([1, 2, 3], [4], reward=0.0), reward=1.0),
        rollout("0/0/1", turn([1], [5], reward=0.0), turn([1, 5, 3], [6], reward=4.0), reward=4.0),
    ]
    groups = form_groups(rollouts, worked_example())
    assert ids(groups) == {"t#0": ["0/0/0#0", "0/0/1#0"], "t#1": ["0/0/0#1", "0/0/1#1"]}
    data = to_datums(groups, AlgorithmConfig())
    assert [datum.tokens.tolist() for datum in data] == [[1], [1], [1, 2, 3], [1, 5, 3]]
    assert [datum.loss_inputs["advantages"].tolist() for datum in data] == [[0.5], [-0.5], [0, 0, -2.0], [0, 0, 2.0]]


def test_a_hook_owns_rewards_and_gets_the_config():
    def doubled(rollouts, config):
        assert config.group_size == 3
        for each in rollouts:
            each.reward *= 2
        return [RolloutGroup(id="all", rollouts=rollouts)]

    (group,) = form_groups(
        attempts(0, [1.0]) + attempts(1, [2.0]), AlgorithmConfig(group_size=3, trajectory_grouping_hook=doubled)
    )
    assert group.rewards == [2.0, 4.0]


def hook(build):
    """A hook that returns one group of what `build` makes of the rollouts."""

    def made_by(rollouts, config):
        return [RolloutGroup(id="g", rollouts=build(rollouts))]

    return made_by


WHERE = "algorithm.trajectory_grouping_hook=made_by: "


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda each: dataclasses.replace(each, reward=5.0)])
def test_copies_are_refused(copied):
    assert refused(attempts(0, [0.0, 1.0]), hook(lambda rollouts: [rollouts[0], copied(rollouts[1])])) == (
        WHERE
        + "group 'g' holds a copy of rollout 0/0/1; return the rollout itself (its reward may be set), or give a part "
        "of it an id of its own"
    )


def test_an_empty_group_is_refused():
    assert refused(attempts(0, [0.0]), hook(lambda rollouts: [])) == (
        WHERE + "group 0 ('g') is empty; leave empty groups out"
    )


@pytest.mark.parametrize("kind", ["RolloutGroup", "Rollout"])
def test_an_id_that_no_record_holds_is_refused(kind):
    def made_by(rollouts, config):
        if kind == "RolloutGroup":
            return [RolloutGroup(id=0, rollouts=rollouts)]
        return [RolloutGroup(id="0", rollouts=[dataclasses.replace(rollouts[0], id=0)])]

    assert refused(attempts(0, [0.0]), made_by) == f"{WHERE}a {kind} has the id 0, which is no text; give a str"


def test_rollouts_it_was_not_given_are_refused():
    stranger = rollout("1/1/1", turn([1], [2]), reward=1.0)
    message = (
        WHERE + "group 'g' holds rollout 1/1/1, of which 1 of 1 turns were not given to it (a copied turn is another "
        "turn); build groups of the turns it is given"
    )
    assert refused(attempts(0, [0.0]), hook(lambda rollouts: [*rollouts, stranger])) == message
    part = lambda rollouts: [dataclasses.replace(rollouts[0], id="1/1/1", turns=copy.deepcopy(rollouts[0].turns))]  # noqa: E731
    assert refused(attempts(0, [0.0]), hook(part)) == message


def test_a_turn_trains_once():
    assert refused(attempts(0, [0.0]), hook(lambda rollouts: rollouts * 2)) == (
        WHERE + "a turn of rollout 0/0/0 is in group 'g' and again in group 'g'; it would train twice, put it in one"
    )


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        (None, "NoneType"),
        ({}, "dict"),
        ([[]], "list of list"),
        ([RolloutGroup(id="g", rollouts=[]), 3], "list of RolloutGroup, int"),
    ],
)
def test_something_else_than_groups_is_refused(returned, what):
    def made_by(rollouts, config):
        return returned

    assert refused(attempts(0, [0.0]), made_by) == f"{WHERE}returned a {what}; return a list of RolloutGroup"


def test_rollouts_a_hook_leaves_out_are_counted_and_told(caplog):
    counts = Counter()
    config = AlgorithmConfig(trajectory_grouping_hook=hook(lambda rollouts: rollouts[:1]))
    assert ids(form_groups(attempts(0, [0.0, 1.0, 2.0]), config, counts)) == {"g": ["0/0/0"]}
    assert counts == {"filter/ungrouped_rollouts": 2}
    assert caplog.messages == [WHERE + "left out 2 of 3 rollouts, at least in part; the first is 0/0/1"]


def test_a_rollout_of_which_a_hook_leaves_out_a_turn_is_told_too(caplog):
    def first_turns(rollouts, config):
        return [
            RolloutGroup(
                id="g",
                rollouts=[dataclasses.replace(each, id=f"{each.id}#0", turns=each.turns[:1]) for each in rollouts],
            )
        ]

    form_groups(
        [rollout("0/0/0", turn([1], [2]), turn([1], [2]))], AlgorithmConfig(trajectory_grouping_hook=first_turns)
    )
    assert caplog.messages == [
        "algorithm.trajectory_grouping_hook=first_turns: left out 1 of 1 rollouts, at least in part; the first is 0/0/0"
    ]

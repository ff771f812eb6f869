"""Credit: which branches of a rollout learn, and how much."""

import math

import pytest

from tests.kit.rollouts import group, rollout, turn
from torchtitan_rl.algorithm.credit import all_branches, last_branch
from torchtitan_rl.algorithm.datums import to_datums
from torchtitan_rl.algorithm.reductions import sequence_mean
from torchtitan_rl.config.algorithm import AlgorithmConfig


def tree(reward=1.0):
    """A root, two branches from it, and a conversation of its own, which was asked for before the second branch."""
    return rollout(
        "tree",
        turn([1], [2], seconds=(0.0, 0.5, 0.5)),
        turn([1, 2, 3], [4], seconds=(1.0, 1.5, 1.5)),
        turn([1, 2, 5], [6, 7], seconds=(3.0, 3.5, 3.5)),
        turn([8], [9], seconds=(2.0, 2.5, 2.5)),
        reward=reward,
    )


def read(credit_fn, **settings):
    """(targets that train with their advantages, weights) of each datum of the tree; its sibling's is the last."""
    groups = [group(tree(), rollout("sibling", turn([1], [2]), reward=0.0))]
    data = to_datums(groups, AlgorithmConfig(credit_fn=credit_fn, **settings))
    return [
        {
            (index, int(d.target_tokens[i])): d.loss_inputs["advantages"][i].item()
            for index, first, count in d.turns
            for i in range(first, first + count)
            if d.loss_inputs["loss_mask"][i]
        }
        for d in data
    ]


@pytest.mark.parametrize("credit_fn", [None, all_branches])
def test_every_branch_learns_and_what_branches_share_trains_once(credit_fn):
    assert read(credit_fn) == [{(0, 2): 0.5, (1, 4): 0.5}, {(2, 6): 0.5, (2, 7): 0.5}, {(3, 9): 0.5}, {(0, 2): -0.5}]


def test_the_last_branch_learns_with_the_turns_that_it_goes_on_from():
    assert read(last_branch) == [{(0, 2): 0.5}, {(2, 6): 0.5, (2, 7): 0.5}, {(0, 2): -0.5}]


def test_factors_of_ones_own():
    assert read(lambda rollout: [2.0, 0, -1.0, 0.5][: len(rollout.turns)]) == [
        {(0, 2): 1.0},
        {(2, 6): -0.5, (2, 7): -0.5},
        {(3, 9): 0.25},
        {(0, 2): -1.0},
    ]


def test_a_sequence_without_credit_is_not_shown_to_the_reduction():
    groups = [group(tree(), rollout("sibling", turn([1], [2]), reward=0.0))]
    data = to_datums(groups, AlgorithmConfig(credit_fn=last_branch, reduction=sequence_mean))
    weights = [d.loss_inputs["token_weights"].sum().item() for d in data]
    assert weights == pytest.approx([1 / 3] * 3)


def test_a_rollout_without_any_credit_is_masked():
    assert read(lambda rollout: [0.0] * len(rollout.turns)) == [{}, {}, {}, {}]


def test_credit_is_a_factor_of_precomputed_advantages_too():
    played = tree(reward=None)
    for each, advantage in zip(played.turns, (1.0, 2.0, 3.0, 4.0), strict=True):
        each.advantages = advantage
    data = to_datums([group(played)], AlgorithmConfig(credit_fn=lambda rollout: [1, 1, 0.5, 0]))
    assert [d.loss_inputs["advantages"].tolist() for d in data] == [[1.0, 0.0, 2.0], [0.0, 0.0, 1.5, 1.5]]


@pytest.mark.parametrize("wrong", [[1.0], None, [1.0, 1.0, 1.0, math.nan], ["a"] * 4, 1.0])
def test_anything_but_a_finite_number_per_turn_is_refused(wrong):
    with pytest.raises(
        ValueError, match=r"algorithm.credit_fn=.*for the 4 turns of rollout tree; return a list of one"
    ):
        to_datums([group(tree(), tree(0.0))], AlgorithmConfig(credit_fn=lambda rollout: wrong))

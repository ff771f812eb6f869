"""Advantages that came with the turns: every verdict, by what it warns of."""

import logging
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.rollouts import group, rollout, turn
from torchtitan_rl.algorithm.datums import to_datums
from torchtitan_rl.algorithm.gae import with_gae
from torchtitan_rl.algorithm.grouping import form_groups
from torchtitan_rl.algorithm.precomputed import Verdict, precomputed_advantages, scan
from torchtitan_rl.config.algorithm import AlgorithmConfig


def pair(first, second, **fields):
    """Two rollouts of one turn with two and one sampled tokens, rewards 1 and 0."""
    return group(
        rollout("0/0/0", turn([5], [8, 9], advantages=first, **fields), reward=1.0),
        rollout("0/0/1", turn([5], [7], advantages=second, **fields), reward=0.0),
    )


def weighed(made, mode="auto"):
    data = to_datums([made], AlgorithmConfig(precomputed_advantages=mode))
    return [datum.loss_inputs["advantages"].tolist() for datum in data]


ESTIMATED = [[0.5, 0.5], [-0.5]]


@pytest.mark.parametrize(
    "sequence",
    [
        [0.25, -2.0],
        (0.25, -2.0),
        np.array([0.25, -2.0]),
        np.array([0.25, -2.0], dtype=np.float32),
        torch.tensor([0.25, -2.0]),
        torch.tensor([0.25, -2.0], requires_grad=True),
        [np.float32(0.25), torch.tensor(-2.0)],
    ],
    ids=["list", "tuple", "float64", "float32", "torch", "with gradient", "of numbers of others"],
)
def test_all_skips_the_estimator(sequence, caplog):
    made = pair(sequence, 3)
    assert weighed(made) == [[0.25, -2.0], [3.0]]
    assert made.precomputed and made.advantages == [-0.875, 3.0]  # the mean over a rollout's tokens
    assert caplog.messages == []


@pytest.mark.parametrize("number", [0.5, np.float64(0.5), np.array(0.5), torch.tensor(0.5)])
def test_one_number_is_for_every_sampled_token(number):
    assert weighed(pair(number, number)) == [[0.5, 0.5], [0.5]]


def test_none_is_the_ordinary_case_and_says_nothing(caplog):
    made = pair(None, None)
    assert weighed(made) == ESTIMATED and not made.precomputed and made.advantages == [0.5, -0.5]
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("made", "verdict", "message"),
    [
        (
            pair(0.5, None),
            Verdict.MIXED,
            "MIXED: of 2 turns 1 carry advantages; the first is turn 0 of rollout 0/0/1: carries none",
        ),
        (
            pair([0.5], 0.5),
            Verdict.BAD_LENGTH,
            "BAD_LENGTH: of 2 turns 2 carry advantages, 1 have a wrong length; the first is turn 0 of rollout 0/0/0: "
            "1 advantages for 2 sampled tokens",
        ),
        (
            pair(0.5, []),
            Verdict.BAD_LENGTH,
            "BAD_LENGTH: of 2 turns 2 carry advantages, 1 have a wrong length; the first is turn 0 of rollout 0/0/1: "
            "0 advantages for 1 sampled tokens",
        ),
        (
            pair([0.5, math.nan], math.inf),
            Verdict.NOT_FINITE,
            "NOT_FINITE: of 2 turns 2 carry advantages, 2 are not finite; the first is turn 0 of rollout 0/0/0: "
            "advantage 1 is nan",
        ),
        (
            pair(0.5, 1e39),
            Verdict.NOT_FINITE,
            "NOT_FINITE: of 2 turns 2 carry advantages, 1 are not finite; the first is turn 0 of rollout 0/0/1: "
            "advantage 0 is 1e+39",
        ),
        (
            pair(None, -math.inf),
            Verdict.NOT_FINITE,
            "NOT_FINITE: of 2 turns 1 carry advantages, 1 are not finite; the first is turn 0 of rollout 0/0/1: "
            "advantage 0 is -inf",
        ),
        (
            pair([0.5] * 3, torch.tensor([math.nan])),
            Verdict.BAD_LENGTH,
            "BAD_LENGTH: of 2 turns 2 carry advantages, 1 have a wrong length, 1 are not finite; the first is turn 0 "
            "of rollout 0/0/0: 3 advantages for 2 sampled tokens",
        ),
    ],
)
def test_what_does_not_hold_up_warns_and_the_whole_group_is_estimated(made, verdict, message, caplog):
    with caplog.at_level(logging.WARNING):
        assert weighed(made) == ESTIMATED
    assert scan(made).verdict is verdict and not made.precomputed
    assert caplog.messages == [
        f"precomputed advantages of group 0/0: {message}; the whole group is weighed by algorithm.advantage_fn instead"
    ]


def test_a_group_without_turns_is_empty_and_says_so(caplog):
    empty = group(id="0/3")
    assert to_datums([empty, pair(1.0, 1.0)], AlgorithmConfig())[0].group == 1
    assert scan(empty).verdict is scan(group(rollout("0/0/0"))).verdict is Verdict.EMPTY
    assert caplog.messages == [
        "precomputed advantages of group 0/3: EMPTY: of 0 turns 0 carry advantages; there is nothing to train on in it"
    ]


def test_groups_of_a_batch_may_differ():
    data = to_datums([pair(None, None), pair(2.0, [3.0])], AlgorithmConfig())
    assert [datum.loss_inputs["advantages"].tolist() for datum in data] == [*ESTIMATED, [2.0, 2.0], [3.0]]


def weighed_at(made, policy_version):
    """Advantages of a group that is formed when this version samples."""
    (formed,) = form_groups(made.rollouts, AlgorithmConfig(), policy_version=policy_version)
    return weighed(formed)


def reused():
    return group(
        rollout("3/0/0", turn([5], [8, 9], version=3, advantages=2.0), reward=1.0),
        rollout("1/0/0", turn([5], [7], version=1, advantages=2.0), reward=0.0),
    )


def test_a_turn_reused_from_an_older_version_is_not_fresh(caplog):
    assert weighed_at(reused(), 3) == ESTIMATED
    assert caplog.messages == [
        "advantages of 1 turns were computed for an older policy version than 3 and do not count; the first is turn 0 "
        "of rollout 1/0/0, of version 1",
        "precomputed advantages of group 3/0: MIXED: of 2 turns 1 carry advantages; the first is turn 0 of rollout "
        "1/0/0: carries none; the whole group is weighed by algorithm.advantage_fn instead",
    ]
    assert weighed_at(reused(), 1) == [[2.0, 2.0], [2.0]]


def test_a_whole_group_from_an_older_version_warns_too(caplog):
    assert weighed_at(pair(2.0, 2.0, version=1), 2) == ESTIMATED
    assert caplog.messages == [
        "advantages of 2 turns were computed for an older policy version than 2 and do not count; the first is turn 0 "
        "of rollout 0/0/0, of version 1"
    ]


def test_old_tokens_weighed_anew_are_fresh():
    assert weighed_at(pair(2.0, 3.0, version=1, advantages_version=2), 2) == [[2.0, 2.0], [3.0]]


def test_a_turn_without_a_sampled_token_is_of_every_version(caplog):
    made = group(
        rollout("0/0/0", turn([5], [8, 9], version=3, advantages=2.0), reward=1.0),
        rollout("0/0/1", turn([5], [7], version=3, advantages=2.0), turn([5, 7, 6], [], advantages=[]), reward=0.0),
    )
    assert weighed_at(made, 3) == [[2.0, 2.0], [2.0, 0.0]] and caplog.messages == []


def test_advantages_that_are_taken_away_again_count_no_more():
    made = pair(2.0, 3.0)
    assert weighed(made) == [[2.0, 2.0], [3.0]] and made.precomputed
    for emptied in made.rollouts:
        emptied.turns[0].advantages = None
    assert weighed(made) == ESTIMATED and not made.precomputed


def test_require_refuses_what_auto_would_warn_of():
    assert weighed(pair(2.0, 3.0), "require") == [[2.0, 2.0], [3.0]]
    for made in (pair(None, None), pair(2.0, None), pair([2.0], 1.0), pair(math.nan, 1.0), group()):
        with pytest.raises(
            ValueError, match=f"^algorithm.precomputed_advantages='require': group 0/0 is {scan(made).verdict.name}: "
        ):
            weighed(made, "require")


def test_ignore_does_not_look(caplog):
    for made in (pair(2.0, 3.0), pair([math.nan], "nonsense")):
        assert weighed(made, "ignore") == ESTIMATED
    assert caplog.messages == []


@pytest.mark.parametrize("wrong", ["high", ["0.5", "0.5"], [None, 1.0], {0: 1.0}, torch.zeros(2, 2)])
def test_what_is_no_number_is_refused(wrong):
    with pytest.raises(
        ValueError, match=r"^turn.advantages=.*: turn 0 of rollout 0/0/0 carries a \w+; give a number or a flat"
    ):
        scan(pair(wrong, 0.5))


def test_every_token_of_merged_turns_keeps_its_own_advantage():
    two = rollout("0/0/0", turn([5], [8, 9], advantages=[1.0, 2.0]), turn([5, 8, 9, 4], [7], advantages=3.0))
    (datum,) = to_datums([group(two)], AlgorithmConfig())
    assert datum.tokens.tolist() == [5, 8, 9, 4]
    assert datum.loss_inputs["advantages"].tolist() == [1.0, 2.0, 0.0, 3.0]


def test_a_token_that_cannot_train_has_no_advantage_either():
    made = group(rollout("0/0/0", turn([5], [8, 9], [-0.5, -math.inf], advantages=[1.0, 2.0])))
    (datum,) = to_datums([made], AlgorithmConfig())
    assert datum.loss_inputs["advantages"].tolist() == [1.0, 0.0]


def test_a_number_too_large_for_float32_is_refused():
    with pytest.raises(ValueError, match="NOT_FINITE: of 2 turns 2 carry .* the first is turn 0 of .* is 1e.300"):
        to_datums([pair(1e300, 1e300)], AlgorithmConfig(precomputed_advantages="require"))
    data = to_datums([pair(1e300, 1e300)], AlgorithmConfig())  # as for NaN, the estimator takes the group
    assert all(datum.loss_inputs["advantages"].isfinite().all() for datum in data)


def test_a_critic_does_not_overwrite_them():
    data = to_datums([pair(2.0, 3.0), pair(None, None)], AlgorithmConfig())
    values = [torch.zeros(len(datum)) for datum in data]
    after = with_gae(data, [1.0, 0.0, 1.0, 0.0], values, AlgorithmConfig(), keep_groups={0})
    assert [datum.loss_inputs["advantages"].tolist() for datum in after] == [[2.0, 2.0], [3.0], [1.0, 1.0], [0.0]]
    assert [datum.loss_inputs["returns"].tolist() for datum in after] == [[1.0, 1.0], [0.0], [1.0, 1.0], [0.0]]


values = st.none() | st.floats(width=32) | st.lists(st.floats(width=32), max_size=3)


@given(st.lists(st.tuples(st.integers(1, 3), values), min_size=1, max_size=5))
def test_whatever_turns_carry_only_finite_numbers_reach_the_data(carried):
    made = group(
        *(
            rollout(f"0/0/{i}", turn([5], [8] * n, advantages=given), reward=float(i))
            for i, (n, given) in enumerate(carried)
        )
    )
    sound = all(
        given is not None
        and (not isinstance(given, list) or len(given) == n)
        and all(map(math.isfinite, given if isinstance(given, list) else [given]))
        for n, given in carried
    )
    assert (precomputed_advantages(made, AlgorithmConfig()) is not None) == sound
    for datum in to_datums([made], AlgorithmConfig()):
        assert torch.isfinite(datum.loss_inputs["advantages"]).all()

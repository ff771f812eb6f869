"""A rollout's turns as a tree, by their tokens."""

import pytest

from tests.kit.rollouts import turn
from torchtitan_rl.types.branches import branches, last_branch, parents


def test_a_turn_goes_on_from_the_longest_turn_that_begins_its_prompt():
    turns = [turn([1], [2]), turn([1, 2, 3], [4]), turn([1, 2, 3, 4, 5], [6]), turn([1, 2, 7], [8]), turn([9], [9])]
    assert parents(turns) == [None, 0, 1, 0, None]
    assert branches(turns) == [[0, 1, 2], [0, 3], [4]]


def test_the_same_asked_again_is_a_branch_of_the_same_turn():
    turns = [turn([1], [2]), turn([1, 2, 3], [4]), turn([1, 2, 3], [5]), turn([1, 2, 3, 5, 6], [7])]
    assert parents(turns) == [None, 0, 0, 2]
    assert branches([turn([1], [2]), turn([1], [2])]) == [[0], [1]]


def test_a_turn_without_tokens_goes_on_from_a_turn_before_it_only():
    assert parents([turn([1], []), turn([1], [])]) == [None, 0]


def test_the_last_branch_is_that_of_the_turn_that_was_asked_for_last():
    main, title, more = turn([1], [2]), turn([8], [9]), turn([1, 2, 3], [4])
    assert last_branch([main, more, title]) == [2]  # times are not known: the last one
    for each, asked_s in ((main, 0.0), (title, 1.0), (more, 2.0)):
        each.seconds = (asked_s, asked_s + 0.5, asked_s + 0.5)
    assert last_branch([main, more, title]) == [0, 1]
    with pytest.raises(ValueError, match="have no last branch"):
        last_branch([])

"""Which task a slot gets, in whatever order things finish and whatever step trains it."""

import pytest

from tests.kit.family import Family
from torchtitan_rl.rollout.draws import Draws
from torchtitan_rl.tasks.family import TaskSource
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.tasks.mixture import Mixture


def draws(seed=3, num_tasks=10):
    return Draws(TaskSource(Family(num_tasks), "train", seed))


def drawn(some):
    return [(draw.id, draw.task.id) for draw in some]


def test_slots_are_numbered_over_the_run_and_replacements_take_none():
    some = draws()
    first = some.next(3)
    replaced = some.replace(first[1:])
    assert [draw.id for draw in first] == ["0/0", "1/0", "2/0"] and [draw.id for draw in replaced] == ["1/1", "2/1"]
    assert [draw.id for draw in some.replace(replaced)] == ["1/2", "2/2"]
    assert drawn(some.next(2)) == drawn(draws().next(5))[3:]  # as if nothing had been replaced


def test_a_replacement_does_not_depend_on_what_was_drawn_before():
    some = draws()
    early = drawn(some.replace(some.next(1)))
    some.next(6)
    assert drawn(some.replace(draws().next(1))) == early


def test_a_mixtures_replacement_is_one_of_its_tasks():
    mixture = Mixture.Config(
        tasks={
            "a": LetterSort.Config(min_letters=4, max_letters=4),
            "b": LetterSort.Config(min_letters=6, max_letters=6),
        }
    ).build()
    some = Draws(mixture.source("train", 0))
    names = [draw.task.id.split("/")[0] for draw in some.replace(some.next(20))]
    assert set(names) == {"a", "b"}
    assert drawn(some.replace(Draws(mixture.source("train", 0)).next(20))) == drawn(
        Draws(mixture.source("train", 0)).replace(Draws(mixture.source("train", 0)).next(20))
    )


def test_tasks_that_come_again_fill_the_first_slots_and_the_source_the_others():
    some, source = draws(), draws()
    [first] = some.next(1)
    again = some.next(3, again=[first.task])
    assert [draw.id for draw in again] == ["1/0", "2/0", "3/0"]
    assert [draw.task for draw in again] == [first.task, *(draw.task for draw in source.next(3)[1:])]


def test_resumed_draws_go_on_where_they_stood():
    some = draws()
    some.next(4)
    resumed = draws()
    resumed.load_state_dict(some.state_dict())
    assert drawn(resumed.next(9)) == drawn(some.next(9))


def test_a_source_without_replacements_is_named():
    class Own:
        def next(self, n):
            return TaskSource(Family(4), "train", 0).next(n)

    some = Draws(Own())
    with pytest.raises(ValueError, match=r"task.source=Own: has no replacement\(slot, round\), which filters need"):
        some.replace(some.next(1))

"""Families mixed by weight: shares, order, resumption, and whose reward judges a task."""

import json

import pytest

from tests.kit.family import Family
from torchtitan_rl.tasks.family import source_of
from torchtitan_rl.tasks.judging import judge
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.tasks.mixture import Mixture


def always(reward):
    return lambda task, completions: [reward] * len(completions)


def mixture(**sizes):
    return Mixture.Config(tasks={name: Family(size) for name, size in sizes.items()}, weights={"a": 3.0}).build()


def ids(tasks):
    return [task.id for task in tasks]


def test_families_are_drawn_by_weight():
    names = [task.id[0] for task in source_of(mixture(a=None, b=None), "train", seed=0).next(4000)]
    # 3000 of 4000 are expected, with a standard deviation of sqrt(4000 * 3/4 * 1/4) = 27.
    assert abs(names.count("a") - 3000) < 4 * 27
    assert names[:50] != sorted(names[:50])


def test_each_family_is_visited_in_its_own_order_and_whole_epochs():
    source = source_of(mixture(a=5, b=None), "train", seed=2)
    tasks = source.next(60)
    alone = source_of(Family(5), "train", seed=2)
    of_a = [task for task in tasks if task.id.startswith("a/")]
    assert [task.id for task in of_a] == [f"a/{task.id}" for task in alone.next(len(of_a))]
    assert {task.answer for task in of_a[:5]} == set(range(5))
    of_b = [task.answer for task in tasks if task.id.startswith("b/")]
    assert of_b == list(range(2 * 2**32, 2 * 2**32 + len(of_b)))


def test_the_order_depends_on_the_seed_alone():
    def order(seed):
        return ids(source_of(mixture(a=7, b=3), "train", seed).next(30))

    assert order(0) == order(0) != order(1)


@pytest.mark.parametrize("num_before", [0, 1, 11, 40])
def test_resuming_in_the_middle_gives_the_same_tasks(num_before):
    source = source_of(mixture(a=7, b=None, c=3), "train", seed=4)
    source.next(num_before)
    state = json.loads(json.dumps(source.state_dict()))  # as a checkpoint keeps it
    resumed = source_of(mixture(a=7, b=None, c=3), "train", seed=4)
    resumed.load_state_dict(state)
    assert ids(resumed.next(25)) == ids(source.next(25))


def test_a_mixture_within_a_mixture_resumes_too():
    def nested():
        inner = Mixture.Config(tasks={"x": Family(4), "y": Family(2)})
        return source_of(Mixture.Config(tasks={"in": inner, "out": Family(3)}).build(), "train", seed=0)

    source, resumed = nested(), nested()
    first = ids(source.next(9))
    assert any(task_id.startswith("in/x/family/train/") for task_id in first)
    resumed.load_state_dict(source.state_dict())
    assert ids(resumed.next(9)) == ids(source.next(9))


def test_resuming_with_other_families_is_refused():
    state = source_of(mixture(a=7, b=3), "train", seed=0).state_dict()
    with pytest.raises(ValueError, match=r"task.tasks=\['a', 'c'\]: the state to resume from is of \['a', 'b'\];"):
        source_of(mixture(a=7, c=3), "train", seed=0).load_state_dict(state)


def test_splits_by_index_give_families_equal_shares_and_end_with_the_shortest():
    mixed = mixture(a=2, b=None, c=5)
    assert mixed.num_tasks("validation") == 6
    assert ids(mixed.task("validation", i) for i in range(6)) == [
        f"{name}/family/validation/{i}" for i in range(2) for name in "abc"
    ]
    assert mixture(a=None, b=None).num_tasks("train") is None
    with pytest.raises(IndexError, match="index=6: mixture has 6 tasks in validation"):
        mixed.task("validation", 6)


def test_an_empty_split_is_refused():
    with pytest.raises(ValueError, match="task.train: 0 tasks in family"):
        source_of(mixture(a=0, b=3), "train", seed=0)


async def test_each_task_is_judged_by_its_own_family():
    inner = Mixture.Config(tasks={"one": Family(3, reward=always(1.0)), "two": Family(3, reward=always(2.0))})
    mixed = Mixture.Config(tasks={"in": inner, "three": Family(3, reward=always(3.0))}).build()
    tasks = {task.id.rsplit("/", 3)[0]: task for task in source_of(mixed, "train", seed=0).next(20)}
    for name, reward in (("in/one", 1.0), ("in/two", 2.0), ("three", 3.0)):
        assert await judge(mixed, tasks[name], ["x"], 5.0) == [reward]
        assert mixed.reward(tasks[name], ["x"]) == [reward]


def test_each_task_is_played_in_the_environment_of_its_own_family():
    played = Family(3, environment=lambda task: f"environment of {task.id}")
    mixed = Mixture.Config(tasks={"in": Mixture.Config(tasks={"played": played}), "said": Family(3)}).build()
    assert mixed.environment(mixed.task("train", 2)) == "environment of family/train/1"
    assert mixed.environment(mixed.task("train", 3)) is None


def bad_reward(task, completions):
    raise OSError("no score")


async def test_an_error_names_the_function_and_not_the_mixture():
    mixed = Mixture.Config(tasks={"sort": LetterSort.Config(reward=bad_reward)}).build()
    with pytest.raises(
        RuntimeError,
        match=f"reward={__name__}:bad_reward: raised OSError: no score for task 'sort/letter_sort/train/0'",
    ):
        await judge(mixed, mixed.task("train", 0), ["x"], 5.0)


@pytest.mark.parametrize(
    "tasks, weights, message",
    [
        ({}, {}, r"mixture.tasks={}: is empty"),
        ({"a/b": Family(1)}, {}, r"mixture.tasks\['a/b'\]: task ids begin with it and overrides contain it; use a"),
        ({"a": Family(1)}, {"b": 1.0}, r"mixture.weights\['b'\]=1.0: there is no such task; use a"),
        ({"a": Family(1)}, {"a": 0.0}, r"mixture.weights\['a'\]=0.0: must be positive and finite"),
        ({"a": Family(1)}, {"a": float("inf")}, r"mixture.weights\['a'\]=inf: must be positive and finite"),
    ],
)
def test_mistakes_are_refused(tasks, weights, message):
    with pytest.raises(ValueError, match=message):
        Mixture.Config(tasks=tasks, weights=weights)

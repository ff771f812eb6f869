"""The order tasks are visited in, and what becomes of every kind of bad reward function."""

import asyncio
import functools
import math
import threading
import time

import pytest
import torch

from tests.kit.family import Family
from torchtitan_rl.tasks.family import SPLITS, TaskSource, check_index, stable_hash
from torchtitan_rl.tasks.judging import judge
from torchtitan_rl.tasks.rewards import Rewards
from torchtitan_rl.types import Task

TASK = Task(id="t/7", prompt="1+1=", answer="2")


def indices(tasks):
    return [task.answer for task in tasks]


async def rewards_of(reward, completions=("a", "b"), timeout_s=5.0):
    return await judge(reward, TASK, list(completions), timeout_s)


async def refusal(reward, **kwargs):
    """The one line with which `judge` refuses a reward function."""
    with pytest.raises(RuntimeError) as caught:
        await rewards_of(reward, **kwargs)
    message = str(caught.value)
    assert "\n" not in message and "'t/7'" in message
    return message


# TaskSource


def test_an_epoch_visits_every_task_once_and_the_next_in_another_order():
    source = TaskSource(Family(20), "train", seed=0)
    first, second = indices(source.next(20)), indices(source.next(20))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second and first != list(range(20))


def test_the_order_depends_on_seed_and_arguments_only():
    def order(seed, split="train"):
        return indices(TaskSource(Family(20), split, seed).next(30))

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert order(0) != order(0, "test")


def test_a_batch_may_cross_the_end_of_an_epoch():
    source = TaskSource(Family(3), "train", seed=0)
    assert sorted(indices(source.next(7))[:3]) == [0, 1, 2]
    assert source.state_dict() == {"epoch": 2, "cursor": 1}


def test_an_endless_split_is_visited_by_index_from_an_offset_of_the_seed():
    assert indices(TaskSource(Family(None), "train", seed=0).next(3)) == [0, 1, 2]
    assert indices(TaskSource(Family(None), "train", seed=3).next(2)) == [12884901888, 12884901889]  # 3 * 2**32


@pytest.mark.parametrize("num_tasks", [5, None])
@pytest.mark.parametrize("num_before", [0, 3, 5, 12])
def test_resume_goes_on_where_the_source_stood(num_tasks, num_before):
    source = TaskSource(Family(num_tasks), "train", seed=4)
    source.next(num_before)
    state = source.state_dict()
    resumed = TaskSource(Family(num_tasks), "train", seed=4)
    resumed.load_state_dict(state)
    assert state.keys() == {"epoch", "cursor"}
    assert indices(resumed.next(9)) == indices(source.next(9))


def test_resume_refuses_a_data_set_that_shrank():
    with pytest.raises(ValueError, match=r"task.train.cursor=9: the split now has 5 tasks; resume with"):
        TaskSource(Family(5), "train", seed=0).load_state_dict({"epoch": 0, "cursor": 9})


def test_empty_splits_unknown_splits_and_negative_seeds_are_refused():
    with pytest.raises(ValueError, match=r"^task.train: 0 tasks in family; give this split data"):
        TaskSource(Family(0), "train", seed=0)
    with pytest.raises(ValueError, match="split='dev': is not a split; use one of train, validation, test"):
        TaskSource(Family(1), "dev", seed=0)
    with pytest.raises(ValueError, match="seed=-1: must not be negative"):
        TaskSource(Family(1), "train", seed=-1)


def test_check_index():
    check_index(Family(3), "train", 2)
    check_index(Family(None), "train", 2**40)
    for index in (-1, 3):
        with pytest.raises(IndexError, match=f"index={index}: family has 3 tasks in train"):
            check_index(Family(3), "train", index)
    with pytest.raises(IndexError, match="index=-1: family has no end in train"):
        check_index(Family(None), "train", -1)


def test_stable_hash_never_changes():
    # Tasks and splits hang on it: printf 0/train/7 | b2sum -l 64, last byte first.
    assert stable_hash(0, "train", 7) == 0x0535AE3D3BD48DCC
    assert stable_hash(1, "23") != stable_hash(12, "3")
    assert SPLITS == ("train", "validation", "test")


# judge: answers that are taken


async def test_judge_takes_a_family_a_function_and_an_async_function():
    async def later(task, completions):
        await asyncio.sleep(0)
        return [1.0, 0.0]

    assert await rewards_of(Family(1, reward=lambda task, completions: [0.5] * len(completions))) == [0.5, 0.5]
    assert await rewards_of(lambda task, completions: [float(c == "b") for c in completions]) == [0.0, 1.0]
    assert await rewards_of(later) == [1.0, 0.0]
    assert await rewards_of(functools.partial(later)) == [1.0, 0.0]
    assert await rewards_of(lambda task, completions: later(task, completions)) == [1.0, 0.0]


async def test_judge_takes_anything_that_is_a_number():
    rewards = await rewards_of(lambda task, completions: (True, 2))
    assert rewards == [1.0, 2.0] and all(type(reward) is float for reward in rewards)
    assert await rewards_of(lambda task, completions: torch.tensor([0.25, -1.0])) == [0.25, -1.0]
    assert await rewards_of(lambda task, completions: [torch.tensor(0.25), torch.tensor(3)]) == [0.25, 3.0]
    assert await rewards_of(lambda task, completions: [], completions=()) == []


async def test_judge_runs_plain_functions_side_by_side_off_the_event_loop():
    both = threading.Barrier(2, timeout=5.0)

    def waits_for_the_other(task, completions):
        both.wait()
        return [1.0]

    assert (await asyncio.gather(*(judge(waits_for_the_other, TASK, ["a"], 5.0) for _ in range(2)))) == [[1.0], [1.0]]


# judge: answers that are refused


def raises_value_error(task, completions):
    raise ValueError("two\nlines")


async def raises_later(task, completions):
    raise KeyError("score")


async def test_a_reward_that_raises_is_named_with_its_error():
    message = await refusal(raises_value_error)
    assert message.startswith(f"reward={__name__}:raises_value_error: raised ValueError: two lines for task")
    assert f"reward={__name__}:raises_later: raised KeyError: 'score'" in await refusal(raises_later)
    with pytest.raises(RuntimeError) as caught:
        await rewards_of(raises_value_error)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("error", [StopIteration(), SystemExit(3), asyncio.CancelledError(), TimeoutError("db")])
async def test_errors_with_a_meaning_elsewhere_are_errors_of_the_reward_too(error):
    def plain(task, completions):
        raise error

    assert f"raised {type(error).__name__}" in await refusal(plain)


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()])
async def test_a_cancellation_or_an_exit_within_an_async_reward_is_its_error_not_ours(error):
    async def leaves(task, completions):
        raise error

    assert f"raised {type(error).__name__}" in await refusal(leaves)


async def test_a_reward_that_takes_other_arguments_is_an_error_of_the_reward():
    async def one_argument(completions):
        return [0.0]

    assert "raised TypeError" in await refusal(lambda completions: [0.0])
    assert "raised TypeError" in await refusal(one_argument)


def hangs(task, completions):
    time.sleep(3.0)


async def hangs_async(task, completions):
    await asyncio.Event().wait()


async def ignores_cancellation(task, completions):
    for _ in range(3):
        try:
            await asyncio.sleep(1.0)
        except asyncio.CancelledError:
            pass


@pytest.mark.parametrize("reward", [hangs, hangs_async, lambda task, completions: hangs_async(task, completions)])
async def test_a_reward_that_hangs_is_given_up_at_the_deadline(reward):
    start = time.monotonic()
    message = await refusal(reward, timeout_s=0.2)
    assert 0.15 < time.monotonic() - start < 2.0
    assert "gave no answer for task 't/7' within 0.2 s; " in message and message.startswith(f"reward={__name__}:")


async def test_an_async_reward_that_ignores_its_cancellation_is_given_up_too():
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="within 0.2 s"):
        await judge(ignores_cancellation, TASK, ["a"], 0.2)

    assert (time.monotonic() - start) < 1.0


async def test_a_hang_leaves_only_a_daemon_thread_behind():
    await refusal(hangs, timeout_s=0.2)
    left = [thread for thread in threading.enumerate() if thread.name == "reward"]
    assert left and all(thread.daemon for thread in left)


@pytest.mark.parametrize(
    "returned, complaint",
    [
        (None, "returned None for task"),
        (1.0, "returned float 1.0 for task"),
        ("12", "returned str '12' for task"),
        ({"a": 1.0, "b": 0.0}, "returned dict {'a': 1.0, 'b': 0.0} for task"),
        ([1.0], "returned 1 rewards for the 2 completions of task"),
        ([1.0, 0.0, 1.0], "returned 3 rewards for the 2 completions of task"),
        ([1.0, None], "returned NoneType None at position 1 for task"),
        (["1.0", 0.0], "returned str '1.0' at position 0 for task"),
        ([1.0, math.nan], "returned nan at position 1 for task"),
        ([-math.inf, 1.0], "returned -inf at position 0 for task"),
        ([1.0, 10**400], "returned inf at position 1 for task"),
        (torch.tensor([1.0, math.nan]), "returned nan at position 1 for task"),
        ([torch.tensor(math.inf), 0.0], "returned inf at position 0 for task"),
        ([[1.0], [0.0]], "returned list [1.0] at position 0 for task"),
    ],
)
async def test_anything_but_one_finite_number_per_completion_is_refused(returned, complaint):
    message = await refusal(lambda task, completions: returned)
    assert complaint in message
    assert message.endswith("; return a list of 2 finite numbers, one per completion")


@pytest.mark.parametrize("returned", [1.7e308, -1e200, 1e6 + 1, 10**7, torch.tensor(1e30)])
async def test_a_reward_beyond_a_million_is_refused_with_its_name_and_the_task(returned):
    message = await refusal(lambda task, completions: [1.0, returned])
    assert message.startswith("reward=tests.unit.tasks.test_family:") and f"for task {TASK.id!r}" in message
    assert message.endswith("one per completion, each between -1e+06 and 1e+06")
    part = await refusal(lambda task, completions: ([1.0, 0.0], {"size": [0.0, returned]}))
    assert ": part 'size': returned" in part and part.endswith("each between -1e+06 and 1e+06")
    assert await judge(lambda task, completions: [1e6, -1e6], TASK, ["a", "b"], 5.0) == [1e6, -1e6]


async def test_a_weighted_sum_beyond_a_million_is_refused():
    def large(task, completions):
        return [9e5 for _ in completions]

    with pytest.raises(RuntimeError, match="reward=.*Rewards: the weighted sum of a, b is 1.8e.06 at position 0 for"):
        await judge(Rewards({"a": large, "b": large}), TASK, ["x"], 5.0)
    assert await judge(Rewards({"a": large, "b": (large, -1.0)}), TASK, ["x"], 5.0) == [0.0]


async def test_a_reward_cannot_change_the_completions():
    completions = ["a", "b"]

    def drops_one(task, completions):
        return [float(len(completions)), float(completions.pop() == "b")]

    assert await judge(drops_one, TASK, completions, 5.0) == [2.0, 1.0]
    assert completions == ["a", "b"]


@pytest.mark.parametrize("num_tasks", [3, None])
def test_a_replacement_is_a_function_of_seed_slot_and_round(num_tasks):
    def drawn(seed, slot, round):
        return TaskSource(Family(num_tasks), "train", seed).replacement(slot, round).answer

    source = TaskSource(Family(num_tasks), "train", 5)
    source.next(2)
    assert source.replacement(7, 1).answer == drawn(5, 7, 1)  # whatever was handed out before
    assert len({drawn(seed, slot, round) for seed in (0, 1) for slot in range(8) for round in (1, 2)}) >= 3
    if num_tasks is None:  # never one of the first 2^31 slots' own
        assert all(drawn(5, slot, 1) >= 5 * 2**32 + 2**31 for slot in range(20))

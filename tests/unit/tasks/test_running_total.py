"""Running totals: what a task looks like, its splits, its demonstrations and its reward."""

import asyncio

import pytest

from torchtitan_rl.tasks.judging import judge
from torchtitan_rl.tasks.running_total import RunningTotal, lines_of, partial_credit
from torchtitan_rl.types import Task

TASK = Task(id="running_total/train/0", prompt="3_2_3_3_=", answer="33253831")


def running_total(**config):
    return RunningTotal.Config(**config).build()


def numbers_of(task):
    return [int(number) for number in task.prompt.removesuffix("=").split("_")[:-1]]


def test_a_task_is_a_list_of_numbers_and_their_totals():
    family = running_total(num_numbers=4, num_validation=100, num_test=100)
    for split in ("train", "validation", "test"):
        for index in range(100):
            task = family.task(split, index)
            numbers = numbers_of(task)
            assert task.id == f"running_total/{split}/{index}"
            assert len(numbers) == 4 and set(numbers[1:]) <= set(range(4)) and numbers[0] in range(10)
            assert lines_of(task.answer) == [(n, sum(numbers[: i + 1]) % 10) for i, n in enumerate(numbers)]
            assert task.answer[-1] == str(sum(numbers))[-1]
            assert (task.demonstration is None) == (split != "train")


def test_these_tasks_never_change():
    assert running_total().task("train", 7) == Task(
        id="running_total/train/7", prompt="1_3_2_1_3_=", answer="1134261730", demonstration="1134251637"
    )
    assert running_total().task("test", 0).prompt == "7_3_2_0_3_="
    assert running_total(seed=1).task("test", 0).prompt != "7_3_2_0_3_="


def test_splits_have_their_sizes_and_share_no_list():
    family = running_total(num_numbers=3, num_validation=30, num_test=40)  # of 10 * 4 * 4 = 160 lists
    assert [family.num_tasks(split) for split in ("train", "validation", "test")] == [None, 30, 40]
    validation, test, train = (
        {family.task(split, index).prompt for index in range(size)}
        for split, size in (("validation", 30), ("test", 40), ("train", 3000))
    )
    assert len(validation) == 30 and len(test) == 40 and len(train) == 90
    assert not (validation & test or validation & train or test & train)
    with pytest.raises(IndexError, match="index=40: running_total has 40 tasks in test"):
        family.task("test", 40)


def test_demonstrations_copy_the_numbers_and_do_not_add():
    family = running_total()
    right, steps, firsts = 0, [], set()
    for index in range(2000):
        task = family.task("train", index)
        lines = lines_of(task.demonstration)
        totals = [total for _, total in lines]
        assert [number for number, _ in lines] == numbers_of(task)
        assert lines[0][0] == lines[0][1]
        firsts.add(lines[0][0])
        steps += [(lines[i][0], (totals[i] - totals[i - 1]) % 10) for i in range(1, 5)]
        right += task.demonstration == task.answer
    assert firsts == set(range(10))
    assert 0 < right < 25  # one in 4**4 by chance: 8 of 2000 expected
    for number in range(4):  # whatever the number, the total grows by 0 to 3 with equal chances
        of_number = [step for shown, step in steps if shown == number]
        assert {step: of_number.count(step) / len(of_number) for step in range(4)} == pytest.approx(
            dict.fromkeys(range(4), 1 / 4), abs=0.04
        )  # about 2,000 steps each: 4 standard deviations of sqrt(1/4 * 3/4 / 2000)


def test_reward_is_1_for_the_answer_and_partial_credit_otherwise():
    completions = [
        "33253831",  # right
        "33263932",  # the second total misses by 1, the others are right after it: (3 + .5 * 3/4) / 4
        "332538",  # three right lines of four, and too short: 3/4 * 1/2
        "33153831",  # a wrong number in the second line: 3/4
        "33253x31",  # the third line is broken, and so is what follows: 2/4
        "32223931",  # misses by 1, 2, 4 and 1: .5 * (3/4 + 2/4 + 0 + 3/4) / 4
        "",
    ]
    scores = [2.0, 3.375 / 4, 3 / 8, 3 / 4, 2 / 4, 1 / 4, 0.0]
    assert running_total(near_credit=0.5).reward(TASK, completions) == pytest.approx([0.5 * score for score in scores])
    assert running_total(near_credit=0.0).reward(TASK, completions[1:2]) == pytest.approx([0.5 * 3 / 4])


def test_partial_credit_does_not_pay_for_lines_that_are_not_asked_for():
    assert partial_credit("332538313333", TASK.answer, 0.5, 4) == 0.5
    # 3 from 0 to 3 is right, then 0 instead of 3 misses by 3; the second line has another number.
    assert partial_credit("33" * 9, TASK.answer, 0.5, 4) == pytest.approx((1 + 2 * 0.5 / 4) / 4 / 2)


def test_lines_end_where_the_text_is_broken():
    assert lines_of("3325") == [(3, 3), (2, 5)]
    assert lines_of("332") == lines_of("33 2") == lines_of("33٣٤") == [(3, 3)]


def test_a_reward_of_ones_own_takes_the_place_of_the_familys():
    def longest(task, completions):
        return [float(len(completion)) for completion in completions]

    assert asyncio.run(judge(running_total(reward=longest), TASK, ["a", "bcd"], 5.0)) == [1.0, 3.0]


@pytest.mark.parametrize(
    "config, complaint",
    [
        ({"num_numbers": 1}, "running_total.num_numbers=1: does not fit; use 2 to 6"),
        ({"num_numbers": 7}, "running_total.num_numbers=7"),
        ({"largest": 10}, "running_total.largest=10: is not a digit above 0"),
        ({"near_credit": 1.5}, "running_total.near_credit=1.5: is not a fraction"),
    ],
)
def test_configs_that_make_no_sense_are_refused(config, complaint):
    with pytest.raises(ValueError, match=complaint):
        RunningTotal.Config(**config)


def test_too_few_lists_for_the_splits_is_an_error_that_says_so():
    with pytest.raises(ValueError, match="num_validation=256, num_test=512: are more than half of the 40 lists"):
        running_total(num_numbers=2)

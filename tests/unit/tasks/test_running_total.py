"""Running totals: what a task looks like, its splits, its demonstrations and its reward."""

import itertools
from collections import Counter

import pytest

from torchtitan_rl.tasks.judging import judge
from torchtitan_rl.tasks.running_total import RunningTotal, lines_of, partial_credit
from torchtitan_rl.types import Task

TASK = Task(id="running_total/train/0", prompt="8_1_2_0_=", answer="88192101")


def running_total(**config):
    return RunningTotal.Config(**config).build()


def numbers_of(task):
    return [int(number) for number in task.prompt.removesuffix("=").split("_")[:-1]]


def test_a_task_is_a_list_of_numbers_and_their_totals():
    family = running_total(num_numbers=4, num_validation=60, num_test=60)
    for split in ("train", "validation", "test"):
        for index in range(60):
            task = family.task(split, index)
            numbers = numbers_of(task)
            assert task.id == f"running_total/{split}/{index}"
            assert len(numbers) == 4 and set(numbers[1:]) <= set(range(3)) and numbers[0] in range(10)
            assert lines_of(task.answer) == [(n, sum(numbers[: i + 1]) % 10) for i, n in enumerate(numbers)]
            assert task.answer[-1] == str(sum(numbers))[-1]
            assert (task.demonstration is None) == (split != "train")


def test_these_tasks_never_change():
    assert running_total().task("train", 1) == Task(
        id="running_total/train/1", prompt="0_1_0_1_1_2_=", answer="001101121325", demonstration="001101121324"
    )
    assert running_total().task("test", 0).prompt == "9_1_1_1_0_1_="
    assert running_total(seed=1).task("test", 0).prompt != "9_1_1_1_0_1_="


def test_splits_have_their_sizes_and_share_no_list():
    family = running_total(num_numbers=3, largest=3, num_validation=30, num_test=40)  # of 10 * 4 * 4 = 160 lists
    assert [family.num_tasks(split) for split in ("train", "validation", "test")] == [None, 30, 40]
    validation, test, train = (
        {family.task(split, index).prompt for index in range(size)}
        for split, size in (("validation", 30), ("test", 40), ("train", 3000))
    )
    assert len(validation) == 30 and len(test) == 40 and len(train) == 90
    assert not (validation & test or validation & train or test & train)
    with pytest.raises(IndexError, match="index=40: running_total has 40 tasks in test"):
        family.task("test", 40)


def steps_of_demonstrations(family, num_tasks=2000):
    """Number -> how often the total grew by each step after it, in demonstrations whose numbers are copied."""
    steps = {}
    for index in range(num_tasks):
        task = family.task("train", index)
        lines = lines_of(task.demonstration)
        assert [number for number, _ in lines] == numbers_of(task)
        assert lines[0][0] == lines[0][1]
        for (_, before), (number, total) in itertools.pairwise(lines):
            steps.setdefault(number, Counter())[(total - before) % 10] += 1
    return steps


def test_demonstrations_add_the_shown_numbers_and_no_other():
    steps = steps_of_demonstrations(running_total())
    assert set(steps) == {0, 1, 2}
    assert set(steps[0]) == {0} and set(steps[1]) == {1}
    shares = {step: count / steps[2].total() for step, count in steps[2].items()}
    # about 3,300 steps: 4 standard deviations of sqrt(1/3 * 2/3 / 3300)
    assert shares == pytest.approx(dict.fromkeys(range(3), 1 / 3), abs=0.033)


def test_demonstrations_that_show_no_addition_hold_random_totals():
    steps = steps_of_demonstrations(running_total(num_shown=0))
    for counts in steps.values():
        shares = {step: count / counts.total() for step, count in counts.items()}
        assert shares == pytest.approx(dict.fromkeys(range(3), 1 / 3), abs=0.033)


def test_reward_is_1_for_the_answer_and_partial_credit_otherwise():
    completions = [
        "88192101",  # right
        "88102202",  # the second total is wrong, the others are right after it: 3/4
        "881921",  # three right lines of four, and too short: 3/4 * 1/2
        "88092101",  # a wrong number in the second line: 3/4
        "88192x01",  # the third line is broken, and so is what follows: 2/4
        "",
    ]
    scores = [2.0, 3 / 4, 3 / 8, 3 / 4, 2 / 4, 0.0]
    assert running_total().reward(TASK, completions) == pytest.approx([0.5 * score for score in scores])


def test_partial_credit_does_not_pay_for_lines_that_are_not_asked_for():
    assert partial_credit("881921010101", TASK.answer) == 0.5
    assert partial_credit("88" * 9, TASK.answer) == 1 / 4 / 2  # one right line of four


def test_lines_end_where_the_text_is_broken():
    assert lines_of("3325") == [(3, 3), (2, 5)]
    assert lines_of("332") == lines_of("33 2") == lines_of("33٣٤") == [(3, 3)]


async def test_a_reward_of_ones_own_takes_the_place_of_the_familys():
    def longest(task, completions):
        return [float(len(completion)) for completion in completions]

    assert await judge(running_total(reward=longest), TASK, ["a", "bcd"], 5.0) == [1.0, 3.0]


@pytest.mark.parametrize(
    "config, complaint",
    [
        ({"num_numbers": 1}, "running_total.num_numbers=1: does not fit; use 2 to 6"),
        ({"num_numbers": 7}, "running_total.num_numbers=7"),
        ({"largest": 10}, "running_total.largest=10: is not a digit above 0"),
        ({"num_shown": 3}, "running_total.num_shown=3: must leave a number of 0 to 2 to be learned"),
        ({"num_shown": -1}, "running_total.num_shown=-1"),
    ],
)
def test_configs_that_make_no_sense_are_refused(config, complaint):
    with pytest.raises(ValueError, match=complaint):
        RunningTotal.Config(**config)


def test_too_few_lists_for_the_splits_is_an_error_that_says_so():
    with pytest.raises(ValueError, match="num_validation=256, num_test=512: are more than half of the 30 lists"):
        running_total(num_numbers=2)

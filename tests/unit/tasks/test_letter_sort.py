"""Letter sorting: what a task looks like, its splits, its demonstrations and its reward."""

import random
import subprocess
import sys

import pytest

from torchtitan_rl.tasks.family import TaskSource
from torchtitan_rl.tasks.judging import judge
from torchtitan_rl.tasks.letter_sort import LetterSort, hinted, made_up_answer, partial_credit
from torchtitan_rl.types import Task

TASK = Task(id="letter_sort/train/0", prompt="szyci=", answer="cisyz")


def letter_sort(**config):
    return LetterSort.Config(**config).build()


def test_a_task_is_a_word_of_letters_that_differ_and_its_sorted_form():
    family = letter_sort()
    for split in ("train", "validation", "test"):
        lengths = set()
        for index in range(100):
            task = family.task(split, index)
            word = task.prompt.removesuffix("=")
            lengths.add(len(word))
            assert task.id == f"letter_sort/{split}/{index}"
            assert len(set(word)) == len(word) and task.prompt == word + "="
            assert task.answer == "".join(sorted(word))
            assert (task.demonstration is None) == (split != "train")
        assert lengths == {4, 5, 6}


def test_these_tasks_never_change():
    family = letter_sort()
    assert family.task("train", 7) == Task(
        id="letter_sort/train/7", prompt="uqzmh=", answer="hmquz", demonstration="hmuzq"
    )
    assert family.task("train", 2**32).prompt == "nofcwk="
    assert family.task("test", 0).prompt == "zptg="


def test_tasks_are_the_same_in_another_process():
    # Python's own hash of a string would differ.
    program = (
        "from torchtitan_rl.tasks.letter_sort import LetterSort as L; "
        "f = L.Config().build(); print(f.task('validation', 5).prompt, f.task('train', 5).prompt)"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    family = letter_sort()
    assert printed.split() == [family.task("validation", 5).prompt, family.task("train", 5).prompt]


def test_another_seed_makes_other_tasks():
    assert letter_sort(seed=1).task("train", 0).prompt != letter_sort().task("train", 0).prompt
    assert letter_sort(seed=1).task("test", 0).prompt != letter_sort().task("test", 0).prompt


def test_splits_have_their_sizes_and_share_no_set_of_letters():
    family = letter_sort(num_validation=40, num_test=60)
    assert [family.num_tasks(split) for split in ("train", "validation", "test")] == [None, 40, 60]
    validation = {family.task("validation", i).answer for i in range(40)}
    test = {family.task("test", i).answer for i in range(60)}
    train = {family.task("train", i).answer for i in range(3000)}
    assert len(validation) == 40 and len(test) == 60
    assert not (validation & test or validation & train or test & train)
    with pytest.raises(IndexError, match="index=40: letter_sort has 40 tasks in validation"):
        family.task("validation", 40)


def test_splits_stay_apart_where_train_sees_every_set_of_letters():
    # 26 * 25 / 2 = 325 sets of two letters, of which train meets all that are its own.
    family = letter_sort(min_letters=2, max_letters=2, num_validation=5, num_test=5)
    held_out = {family.task(split, i).answer for split in ("validation", "test") for i in range(5)}
    train = {family.task("train", i).answer for i in range(5000)}
    assert not held_out & train
    assert 250 < len(train) < 325


def test_the_fraction_of_correct_demonstrations():
    def fraction(correct):
        family = letter_sort(correct_demonstrations=correct)
        tasks = [family.task("train", i) for i in range(1000)]
        assert all(sorted(task.demonstration) == list(task.answer) for task in tasks)
        return sum(task.demonstration == task.answer for task in tasks) / 1000

    assert fraction(0.0) == 0.0
    assert fraction(1.0) == 1.0
    assert fraction(0.3) == pytest.approx(0.3, abs=0.06)  # 4 standard deviations of sqrt(0.3 * 0.7 / 1000)


def test_hinted_tasks_show_copying_and_not_sorting():
    family, plain = letter_sort(hinted_demonstrations=0.5), letter_sort()
    tasks = [family.task("train", index) for index in range(200)]
    with_hint = [task for task in tasks if ":" in task.prompt]
    assert 70 < len(with_hint) < 130
    for task in with_hint:
        word, hint = task.prompt.removesuffix("=").split(":")
        assert hint == task.demonstration != task.answer == "".join(sorted(word))
        assert task.prompt == hinted(word, hint)
    for index, task in enumerate(tasks):  # hints are added; nothing else about the tasks changes
        same = plain.task("train", index)
        assert (task.answer, task.demonstration) == (same.answer, same.demonstration)
        assert task.prompt == same.prompt or task in with_hint
    assert not any(":" in family.task("test", index).prompt for index in range(50))


def test_reward_is_1_for_the_answer_and_partial_credit_otherwise():
    # cisyz has 10 pairs. zysic: none in order. ciszy: 9. cis: all 3 of 3, but 3 of 5 letters, squared: 9/25.
    completions = ["cisyz", "zysic", "ciszy", "cis", "", "c", "abdef"]
    expected = [1.0, 0.0, 0.5 * 0.9, 0.5 * 9 / 25, 0.0, 0.0, 0.0]
    assert letter_sort().reward(TASK, completions) == pytest.approx(expected)


def test_partial_credit_does_not_pay_for_letters_that_are_not_asked_for():
    assert partial_credit("cisyzz", "cisyz") == pytest.approx((5 / 6) ** 2)  # all 15 pairs in order
    assert partial_credit("ccccc", "cisyz") == pytest.approx((1 / 5) ** 2)
    assert partial_credit("cisyz", "cisyz") == 1.0


def test_shuffled_rewards_are_the_same_rewards_in_another_order():
    family = letter_sort(shuffle_rewards=True)
    completions = ["cisyz", "cisyz", "", ""]
    moved = 0
    for index in range(50):
        task = Task(id=f"letter_sort/train/{index}", prompt="szyci=", answer="cisyz")
        rewards = family.reward(task, completions)
        assert sorted(rewards) == [0.0, 0.0, 1.0, 1.0]
        assert rewards == family.reward(task, completions)
        moved += rewards != [1.0, 1.0, 0.0, 0.0]
    assert 30 < moved < 50  # 5 of the 6 orders of two ones and two zeros differ: 41.7 of 50 on average


def test_shuffled_rewards_do_not_favour_the_completion_that_earned_them():
    family = letter_sort(shuffle_rewards=True)
    tasks = [Task(id=f"letter_sort/train/{i}", prompt="szyci=", answer="cisyz") for i in range(2000)]
    kept = sum(family.reward(task, ["cisyz", "", "", ""])[0] for task in tasks)
    assert kept / 2000 == pytest.approx(0.25, abs=0.04)  # one in four; 4 standard deviations


async def test_a_reward_of_ones_own_takes_the_place_of_the_familys():
    def longest(task, completions):
        return [float(len(completion)) for completion in completions]

    family = letter_sort(reward=longest)
    assert await judge(family, TASK, ["a", "bcd"], 5.0) == [1.0, 3.0]
    with pytest.raises(RuntimeError, match=r":test_a_reward_of_ones_own.*longest: raised TypeError"):
        await judge(family, TASK, [None], 5.0)


def test_a_source_goes_through_train_and_validation():
    family = letter_sort(num_validation=4)
    assert [task.id for task in TaskSource(family, "train", seed=1).next(2)] == [
        "letter_sort/train/4294967296",
        "letter_sort/train/4294967297",
    ]
    ids = {task.id for task in TaskSource(family, "validation", seed=1).next(4)}
    assert ids == {f"letter_sort/validation/{i}" for i in range(4)}


@pytest.mark.parametrize(
    "config, complaint",
    [
        ({"min_letters": 5, "max_letters": 4}, "min_letters=5, max_letters=4: do not fit"),
        ({"max_letters": 27}, "max_letters=27: do not fit"),
        ({"min_letters": 0}, "min_letters=0"),
        ({"correct_demonstrations": 1.5}, "correct_demonstrations=1.5: is not a fraction"),
        ({"shuffle_rewards": True, "reward": len}, "shuffle_rewards=True: shuffles the family's own"),
    ],
)
def test_configs_that_make_no_sense_are_refused(config, complaint):
    with pytest.raises(ValueError, match=complaint):
        LetterSort.Config(**config)


def test_too_few_tasks_for_a_split_is_an_error_that_says_so():
    family = letter_sort(min_letters=2, max_letters=2)  # about 16 of 325 sets for a split of 512
    with pytest.raises(ValueError, match=r"gives validation only \d+ different tasks; lower num_validation or allow"):
        family.task("validation", 0)


def test_made_up_answers_are_right_and_wrong_in_the_ways_that_a_policy_tries():
    task = Task(id="t", prompt="zdka=", answer="adkz")
    drawn = [made_up_answer(task, random.Random(seed)) for seed in range(500)]
    assert 0.2 < drawn.count("adkz") / len(drawn) < 0.4
    wrong = [answer for answer in drawn if answer != "adkz"]
    assert "" in wrong and any(len(answer) == 5 for answer in wrong)  # cut short, a letter repeated
    assert any(sorted(answer) == list("adkz") for answer in wrong)  # in another order
    assert any(len(answer) == 4 and list(answer) == sorted(answer) for answer in wrong)  # other letters, in order


def test_a_pair_is_the_right_order_and_the_same_with_two_letters_exchanged():
    plain, made, again = (LetterSort(LetterSort.Config(pairs=pairs)) for pairs in (False, True, True))
    for split in ("train", "validation", "test"):
        for index in range(50):
            task = made.task(split, index)
            assert task == again.task(split, index)
            assert task.chosen == task.answer and sorted(task.rejected) == list(task.answer)
            assert sum(right != wrong for right, wrong in zip(task.chosen, task.rejected)) == 2
            without = plain.task(split, index)
            assert without.chosen is without.rejected is None
            assert (task.prompt, task.answer, task.demonstration) == (
                without.prompt,
                without.answer,
                without.demonstration,
            )
    with pytest.raises(ValueError, match="letter_sort.min_letters=1: a single letter has no wrong order"):
        LetterSort.Config(min_letters=1, pairs=True)

"""The guessing game: its answers, its end, its splits and its demonstrations."""

import pytest

from torchtitan_rl.tasks.env import Step
from torchtitan_rl.tasks.guess_number import GuessNumber
from torchtitan_rl.types import Task

TASK = Task(id="guess_number/train/1", prompt="20-35?", answer=24)


async def played(*texts, max_guesses=5, task=TASK):
    env = GuessNumber.Config(max_guesses=max_guesses).build().environment(task)
    assert await env.reset() == task.prompt
    return [await env.step(text) for text in texts]


async def test_higher_lower_found():
    assert await played("28.", "22.", "24.") == [
        Step(observation="<"),
        Step(observation=">"),
        Step(reward=1.0, done=True),
    ]


async def test_lost_when_guesses_run_out_or_something_else_is_said():
    assert (await played("20.", "21.", max_guesses=2))[-1] == Step(done=True)
    for text in ("", ".", "24", "-24.", "a24.", "2 4."):
        assert await played(text) == [Step(done=True)]


async def test_halving_always_wins():
    family = GuessNumber.Config().build()  # 16 numbers, 5 guesses

    async def halve(task):
        low, high = map(int, task.prompt.removesuffix("?").split("-"))
        env = family.environment(task)
        while True:
            guess = (low + high) // 2
            step = await env.step(f"{guess}.")
            if step.done:
                return step.reward
            low, high = (guess + 1, high) if step.observation == ">" else (low, guess - 1)

    tasks = [family.task("train", i) for i in range(200)] + [family.task("test", i) for i in range(100)]
    assert {await halve(task) for task in tasks} == {1.0}


def test_splits_share_no_task():
    family = GuessNumber.Config().build()
    tasks = {
        split: {(task.prompt, task.answer) for task in (family.task(split, i) for i in range(count))}
        for split, count in (("train", 4000), ("validation", 64), ("test", 100))
    }
    assert (len(tasks["validation"]), len(tasks["test"])) == (64, 100)
    assert not (
        tasks["train"] & tasks["test"] or tasks["train"] & tasks["validation"] or tasks["validation"] & tasks["test"]
    )


async def test_demonstrations_are_whole_games_of_guesses_in_the_range():
    family = GuessNumber.Config().build()
    wins = 0
    for index in range(300):
        task = family.task("train", index)
        steps = await played(*task.demonstration, task=task)
        assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
        wins += steps[-1].reward
    # Five guesses at random of 16: 1 - (15/16)^5 = 0.276, four standard deviations are 0.103.
    assert wins / 300 == pytest.approx(0.276, abs=0.103)


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="guess_number.range_size=1: must be from 2 to 99"):
        GuessNumber.Config(range_size=1)
    with pytest.raises(ValueError, match="guess_number.max_guesses=0"):
        GuessNumber.Config(max_guesses=0)
    with pytest.raises(ValueError, match="guess_number.num_test=100: range_size=2 gives"):
        GuessNumber.Config(range_size=2, num_validation=1, num_test=100).build()

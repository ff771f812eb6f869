"""The calculator: its problems, its splits, its demonstrations, and what it answers."""

import pytest

from torchtitan_rl.tasks.calculator import Calculator, calculate
from torchtitan_rl.tasks.env import Step
from torchtitan_rl.types import Task

TASK = Task(id="calculator/train/1", prompt="12*34=", answer="408")


async def played(*texts, call_reward=0.25, task=TASK):
    env = Calculator.Config(call_reward=call_reward).build().environment(task)
    assert await env.reset() == task.prompt
    return [await env.step(text) for text in texts]


def test_calculate():
    assert [calculate(e) for e in ("12*34", "5-78", "0+0", "999999*999999")] == ["408", "-73", "0", "999998000001"]
    for wrong in ("", "1", "1+", "1+2+3", "1/2", "1 + 2", "-1+2", "1234567+1", "1**9", "__import__('os')", "١+١"):
        assert calculate(wrong) == "?"


async def test_a_right_answer_is_worth_1_with_or_without_a_call():
    assert await played("408") == [Step(reward=1.0, done=True)]
    assert await played("[12*34]", "408") == [Step(observation="408;", reward=0.25), Step(reward=0.75, done=True)]


async def test_space_around_an_answer_or_a_call_does_not_matter():
    # A token that holds the end of a call may hold a space or a newline too.
    assert [step.reward for step in await played(" [12*34]\n", "408 ")] == [0.25, 0.75]


async def test_only_the_first_right_call_is_rewarded():
    answers = await played("[1+1]", "[12*34]", "[12*34]", "7")
    assert [step.reward for step in answers] == [0.0, 0.25, 0.0, 0.0]
    assert [step.observation for step in answers[:3]] == ["2;", "408;", "408;"]
    assert answers[-1] == Step(reward=0.0, done=True)


async def test_text_before_a_call_is_allowed_and_a_broken_call_answered_with_a_question_mark():
    (step,) = await played("so [12*34]")
    assert step.observation == "408;" and step.reward == 0.25
    assert [step.observation for step in await played("[12*]", "]", "[[1+1]")] == ["?;", "?;", "2;"]


async def test_in_chat_calls_are_answered_with_tool_messages():
    task = Calculator.Config(chat=True).build().task("test", 0)
    (message,) = task.prompt
    assert message["role"] == "user" and calculate(message["content"]) == task.answer
    (step,) = await played("[1+1]", task=task)
    assert step.observation == [{"role": "tool", "content": "2"}]


def test_problems_are_within_the_config_and_splits_share_none():
    family = Calculator.Config(min_digits=1, max_digits=2, operators="*", num_validation=30, num_test=30).build()
    prompts = {
        split: {family.task(split, i).prompt for i in range(count)}
        for split, count in (("train", 2000), ("validation", 30), ("test", 30))
    }
    assert len(prompts["validation"]) == len(prompts["test"]) == 30
    assert not (
        prompts["train"] & prompts["test"]
        or prompts["train"] & prompts["validation"]
        or prompts["validation"] & prompts["test"]
    )
    for prompt in prompts["train"]:
        first, second = prompt.removesuffix("=").split("*")
        assert 1 <= int(first) <= 99 and 1 <= int(second) <= 99


def test_the_fraction_of_demonstrations_that_use_the_tool():
    family = Calculator.Config(tool_demonstrations=0.3).build()
    tasks = [family.task("train", i) for i in range(1000)]
    tools = [task for task in tasks if len(task.demonstration) == 2]
    # 4 standard deviations of sqrt(0.3 * 0.7 / 1000)
    assert len(tools) / 1000 == pytest.approx(0.3, abs=0.06)
    assert all(task.demonstration == [f"[{task.prompt[:-1]}]", task.answer] for task in tools)
    others = [task for task in tasks if len(task.demonstration) == 1]
    assert all(task.prompt.startswith(task.demonstration[0]) for task in others)
    assert all(task.prompt[len(task.demonstration[0])] in "+-*" for task in others)
    assert family.task("validation", 0).demonstration is None


def test_no_demonstration_answers_right_without_a_call():
    family = Calculator.Config(
        min_digits=1, max_digits=1, operators="*", tool_demonstrations=0.0, num_validation=1, num_test=1
    ).build()
    tasks = [family.task("train", i) for i in range(200)]
    calls = [task.prompt for task in tasks if len(task.demonstration) == 2]
    # Repeating the first number of `n*1` would be right; there are nine such problems of 81.
    assert calls == [task.prompt for task in tasks if task.prompt.endswith("*1=")] and len(calls) > 5


def test_these_tasks_never_change():
    family, again = Calculator.Config().build(), Calculator.Config().build()
    assert family.task("train", 7) == again.task("train", 7)
    assert family.task("test", 7) == again.task("test", 7)
    assert family.task("test", 7) != Calculator.Config(seed=1).build().task("test", 7)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"min_digits": 3, "max_digits": 2}, "calculator.min_digits=3, max_digits=2: do not fit"),
        ({"operators": "+/"}, r"calculator.operators='\+/': use one or more"),
        ({"operators": ""}, "calculator.operators=''"),
        ({"call_reward": 1.5}, "calculator.call_reward=1.5: is not a fraction"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Calculator.Config(**settings)


def test_too_few_problems_for_a_split():
    # 81 problems of one digit each and one operator: about four are in validation.
    with pytest.raises(ValueError, match="max_digits=1: gives validation only . different tasks; lower num_validation"):
        Calculator.Config(min_digits=1, max_digits=1, operators="+", num_validation=50, num_test=1).build()

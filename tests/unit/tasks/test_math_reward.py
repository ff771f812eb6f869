"""Mathematics compared by value, called as a run calls it: in a process."""

import sys

import pytest

from torchtitan_rl.tasks.gsm8k import Gsm8k
from torchtitan_rl.tasks.judging import judge, reward_function
from torchtitan_rl.tasks.math_reward import math_equal
from torchtitan_rl.types import Task


async def rewards_of(answer, *completions):
    return await judge(math_equal, Task(id="m/0", prompt="", answer=answer), list(completions), 60.0)


@pytest.mark.parametrize(
    "answer, right, wrong",
    [
        (
            "72",
            ["So #### 72", "It is \\boxed{72}.", "The answer is $72.0$", "3 more than 69 are 72"],
            ["#### 71", "", "72 #### 5"],
        ),
        ("1,000", ["#### 1000", "\\boxed{1,000}"], ["#### 1", "#### 100"]),
        ("-3", ["x = $-3$", "\u22123"], ["x = $3$"]),
        ("\\frac{1}{2}", ["\\boxed{0.5}", "the answer is 1/2", "$\\frac{2}{4}$"], ["\\boxed{2}", "#### 1"]),
        ("x^2+2x+1", ["$(x+1)^2$"], ["$(x+1)^3$"]),
        (1e-05, ["\\boxed{0.00001}", "\\boxed{\\frac{1}{100000}}"], ["\\boxed{0.0001}"]),
        ("2.5e3", ["\\boxed{2500}"], ["\\boxed{2.5}"]),
        (0.5, ["\\boxed{\\frac{1}{2}}"], ["\\boxed{5}"]),
        ("\\sqrt{8}", ["\\boxed{2\\sqrt{2}}"], ["\\boxed{2.8}"]),
    ],
)
async def test_answers_are_compared_by_value(answer, right, wrong):
    pytest.importorskip("math_verify", reason="scripts/setup.sh math")
    assert await rewards_of(answer, *right, *wrong) == [1.0] * len(right) + [0.0] * len(wrong)


async def test_an_answer_that_takes_too_long_is_wrong_and_the_others_are_judged():
    pytest.importorskip("math_verify", reason="scripts/setup.sh math")
    assert await rewards_of("7", "\\boxed{9^{9^{9^{9}}}}", "\\boxed{7}") == [0.0, 1.0]


async def test_a_task_without_a_readable_answer_is_refused():
    pytest.importorskip("math_verify", reason="scripts/setup.sh math")
    with pytest.raises(RuntimeError, match="math_equal: raised ValueError: task.answer='': is not mathematics .*'m/0'"):
        await rewards_of("", "7")


def test_a_family_takes_it_for_its_own():
    task = Task(id="m/0", prompt="1+1=", answer="2")
    assert reward_function(Gsm8k.Config(reward=math_equal).build(), task) is math_equal


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(RuntimeError, match="math-verify cannot be imported .*; install it with .*setup.sh math"):
        math_equal(Task(id="m/0", prompt="", answer="7"), ["7"])

"""Programs with a mistake: what a test says of them, which answers repair them, and the splits."""

import pytest

from torchtitan_rl.tasks.env import Step
from torchtitan_rl.tasks.program_repair import CALLS, Program, Repair
from torchtitan_rl.tasks.sandbox import bubblewrap
from torchtitan_rl.tasks.sandbox.config import SandboxConfig
from torchtitan_rl.types import Task

PROGRAM = Program(broken="a-b", right="a+b", arguments=(3, 4))
TASK = Task(id="repair/train/1", prompt="def f(a,b): return a-b\n", answer=PROGRAM)
KINDS = [
    "none",
    pytest.param(
        "bubblewrap",
        marks=pytest.mark.skipif(bool(bubblewrap.problem()), reason=f"no bubblewrap here: {bubblewrap.problem()}"),
    ),
]


@pytest.fixture(params=KINDS)
def family(request):
    return Repair.Config(sandbox=SandboxConfig(kind=request.param), timeout_s=20).build()


async def played(family, *texts):
    env = family.environment(TASK)
    assert await env.reset() == TASK.prompt
    return [await env.step(text) for text in texts]


async def test_the_test_shows_a_call_and_its_right_value(family):
    assert await played(family, "[test]", "a+b") == [Step(observation="f(3,4)=7;"), Step(reward=1.0, done=True)]
    assert await played(family, "[tset]", " [test]\n") == [Step(observation="?;"), Step(observation="f(3,4)=7;")]


async def test_a_program_that_computes_the_same_is_right_and_any_other_is_wrong(family):
    right = ["a+b", "b+a", "a - -b", "sum([a,b])"]
    wrong = ["a-b", "7", "a*b", "a+", "", "print(7) or a+b", "__import__('os')._exit(0)", "a+b if a<9 else 0"]
    assert await family.reward(TASK, [*right, *wrong]) == [1.0] * len(right) + [0.0] * len(wrong)


async def test_a_program_that_never_ends_is_wrong():
    family = Repair.Config(timeout_s=1).build()
    assert await family.reward(TASK, ["[1 for i in iter(int,1)]"]) == [0.0]
    assert not family.runner._values  # on a slow machine a right program may be late once


async def test_what_a_program_returned_is_remembered(family):
    assert await family.reward(TASK, ["a+b"] * 3) == [1.0] * 3
    assert list(family.runner._values.items()) == [(("a+b", (3, 4)), [7, 7, 10, 14])]


def test_right_values_by_hand():
    assert PROGRAM.expected() == [7, 7, 10, 14]
    assert Program(broken="b+a", right="b-a", arguments=(1, 9)).expected() == [8, 3, -4, -6]
    values = {tuple(Program(broken="a+b", right=f"{x}{o}{y}", arguments=(1, 2)).expected()[1:])
              for x, y in ("ab", "ba") for o in "+-*"}  # fmt: skip
    assert len(CALLS) == 3 and len(values) == 4  # sum, product, and both differences


def test_demonstrations_repair_or_give_back_and_splits_share_nothing():
    family = Repair.Config(test_demonstrations=0.3).build()
    sizes = {"train": 2000, "validation": 128, "test": 256}
    tasks = {split: [family.task(split, i) for i in range(size)] for split, size in sizes.items()}
    train, validation, test = ({task.answer for task in tasks[split]} for split in sizes)
    assert (len(validation), len(test)) == (128, 256)
    assert not train & validation and not train & test and not validation & test
    repairs = [task for task in tasks["train"] if task.demonstration == ["[test]", task.answer.right]]
    given_back = [task for task in tasks["train"] if task.demonstration == [task.answer.broken]]
    assert 540 < len(repairs) < 660 and len(repairs) + len(given_back) == 2000
    assert all(task.demonstration is None for task in tasks["test"])
    assert family.task("train", 5) == Repair.Config().build().task("train", 5)
    assert all(task.prompt == f"def f(a,b): return {task.answer.broken}\n" for task in tasks["test"])


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"largest": 2}, "repair.largest=2"),
        ({"test_demonstrations": 1.5}, "repair.test_demonstrations=1.5"),
        ({"timeout_s": 0}, "repair.timeout_s=0"),
        ({"num_test": 5000}, "are more than half of the"),
    ],
)
def test_what_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Repair.Config(**fields).build()
